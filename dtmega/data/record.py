"""The record of how a text was tokenised: PREFIX.meta.json, which `tokenize` writes beside PREFIX.bin.

    {"tokenizer": "gpt2", "fingerprint": "2d1c9a…", "eod_id": 50256, "append_eod": true, "documents": 9, "tokens": 700}

Ids of one vocabulary that happen to fit into another train without any sign of trouble. Megatron writes no record.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from dtmega.config import Data
from dtmega.data.indexed import IndexedDataset, IndexedWriter
from dtmega.data.tokenizer import Tokenizer
from dtmega.strangers import read_object

MAX_BYTES = 1 << 16
LONGEST_SENTENCE = 512  # tokens, of a text in sentences: LONG_SENTENCE_LEN of Megatron's `helpers.cpp`


class Record(BaseModel):
    """The way in which a text was tokenised.

    Attributes:
        tokenizer: the spec, for people.
        fingerprint, eod_id: of that tokenizer, see `Tokenizer`.
        append_eod: each document ends with `eod_id`.
        sentences: each sequence is a sentence, of which a document has any number; else it is a document.
        documents, tokens: how many, which tells whether this record is of the `.bin` that it stands beside.
    """

    model_config = ConfigDict(extra="ignore", strict=True)
    tokenizer: str
    fingerprint: str
    eod_id: int
    append_eod: bool
    sentences: bool = False  # earlier versions wrote no such files, and did not say so
    documents: int
    tokens: int


def text_of(tokenizer: Tokenizer, writer: IndexedWriter, *, append_eod: bool = False, sentences: bool = False) -> str:
    """The content of PREFIX.meta.json, when all has been added."""
    record = Record(
        tokenizer=tokenizer.name,
        fingerprint=tokenizer.fingerprint,
        eod_id=tokenizer.eod_id,
        append_eod=append_eod,
        sentences=sentences,
        documents=writer.n_documents,
        tokens=writer.n_tokens,
    )
    return f"{record.model_dump_json()}\n"


def check_tokenizer(dataset: IndexedDataset, data: Data, tokenizer: Tokenizer) -> bool:
    """Tell whether there is a record of this data set that says it is in `tokenizer`.

    Raises:
        ValueError: the record says something else, has no end of documents where `[data]` needs one, or is damaged.
    """
    record = record_of(dataset)
    if record is None:
        return False
    if (record.fingerprint, record.eod_id) != (tokenizer.fingerprint, tokenizer.eod_id):
        raise ValueError(
            f"{dataset.prefix}.bin was made with tokenizer {record.tokenizer!r} (fingerprint {record.fingerprint!r}, "
            f"end of document {record.eod_id}), not with '{tokenizer.name}' ({tokenizer.fingerprint!r}, "
            f"{tokenizer.eod_id}): change [data] tokenizer, or tokenize the text again (if ids mean the same in both, "
            f"remove {dataset.prefix}.meta.json)"
        )
    needs_ends = [key for key in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask") if getattr(data, key)]
    if needs_ends and not record.append_eod:
        raise ValueError(
            f"{dataset.prefix}.bin has no end-of-document ids, which [data] {needs_ends[0]} looks for: tokenize the "
            f"text with --append-eod"
        )
    return True


def check_sentences(dataset: IndexedDataset, expected: bool) -> None:
    """Refuse sentences where documents are read, and documents where sentences are.

    Without a record a text is taken for sentences if it has more sequences than documents. Such a one is read as
    documents too: Megatron's merged files are so.

    Raises:
        ValueError: names the option that makes the other form.
    """
    record = record_of(dataset)
    n_documents = len(dataset.document_index) - 1
    found = len(dataset) > n_documents if record is None else record.sentences
    if expected and not found:
        raise ValueError(
            f"{dataset.prefix}.bin is not split into sentences, of which a BERT reads pairs: expected more sequences "
            f"than documents, got {len(dataset)} of {n_documents}: tokenize the text with python -m dtmega tokenize "
            f"--split-sentences ([data] path, [model] name)"
        )
    if record is not None and found and not expected:
        raise ValueError(
            f"{dataset.prefix}.bin is split into sentences, and has no ends of documents for a model that predicts the "
            f"next token: tokenize the text without --split-sentences ([data] path, [model] name)"
        )


def record_of(dataset: IndexedDataset) -> Record | None:
    """The record of a data set; None where there is none, or one of another `.bin`.

    Raises:
        ValueError: it is damaged.
    """
    path = Path(f"{dataset.prefix}.meta.json")
    if not path.exists():
        return None
    try:
        record = Record.model_validate(read_object(path, MAX_BYTES))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path}: {key}: {first['msg']} (without this file, nothing is checked)") from None
    is_its_own = (record.documents, record.tokens) == (len(dataset.document_index) - 1, dataset.n_tokens)
    return record if is_its_own else None


def unrecorded(prefixes: list[str], tokenizer: Tokenizer) -> str:
    """The line that names data sets which nothing says to be in `tokenizer`."""
    more = f" and {len(prefixes) - 1} more" if len(prefixes) > 1 else ""
    return (
        f"{prefixes[0]}.bin{more}: no record of the tokenizer (Megatron writes none), taken to be in '{tokenizer.name}'"
    )
