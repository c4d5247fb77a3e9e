"""The record of how a text was tokenised: PREFIX.meta.json, which `tokenize` writes next to PREFIX.bin.

    {"tokenizer": "gpt2", "fingerprint": "2d1c9a…", "eod_id": 50256, "append_eod": true, "documents": 9, "tokens": 700}

Without the record, training on token ids from the wrong vocabulary would raise no error if the ids are small enough.
Megatron writes no such record.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from dtmega.config import Data
from dtmega.data.indexed_files.dataset import IndexedDataset, IndexedWriter
from dtmega.data.tokenizers.tokenizer import Tokenizer
from dtmega.files.untrusted_json import read_object

MAX_BYTES = 1 << 16
LONGEST_SENTENCE = 512  # tokens; LONG_SENTENCE_LEN in Megatron's `helpers.cpp`


class Record(BaseModel):
    """The content of a PREFIX.meta.json: how a text was tokenised.

    Attributes:
        tokenizer: the tokenizer's spec, for people to read.
        fingerprint, eod_id: the tokenizer's fingerprint and end-of-document id, see `Tokenizer`.
        append_eod: whether each document ends with `eod_id`.
        sentences: whether each sequence is a sentence, and a document has any number of sentences; if not, each
            sequence is a whole document.
        documents, tokens: numbers of documents and tokens in the `.bin`, which show whether the record belongs to
            this `.bin`.
    """

    model_config = ConfigDict(extra="ignore", strict=True)
    tokenizer: str
    fingerprint: str
    eod_id: int
    append_eod: bool
    sentences: bool
    documents: int
    tokens: int


def text_of(tokenizer: Tokenizer, writer: IndexedWriter, *, append_eod: bool = False, sentences: bool = False) -> str:
    """The content of PREFIX.meta.json, for a writer that already has all documents."""
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
    """Check that a data set was made with this tokenizer. Returns False if there is no record to check.

    Raises:
        ValueError: the record is damaged or names another tokenizer, or the documents lack end-of-document ids that
            a key of `[data]` needs.
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
    """Check that a text is split into sentences if sentences are expected, and is not split if documents are expected.

    A text without a record counts as split into sentences if it has more sequences than documents. If documents are
    expected, a text without a record is always accepted, because files that Megatron has merged also have more
    sequences than documents.

    Args:
        dataset: the text.
        expected: whether the objective reads sentences.

    Raises:
        ValueError: the text is split although documents are expected, or the reverse; the message names the option of
            `tokenize` to change.
    """
    record = record_of(dataset)
    n_documents = len(dataset.document_index) - 1
    is_split = len(dataset) > n_documents if record is None else record.sentences
    if expected and not is_split:
        raise ValueError(
            f"{dataset.prefix}.bin is not split into sentences, which a BERT reads in pairs: expected more sequences "
            f"than documents, got {len(dataset)} of {n_documents}: tokenize the text with python -m dtmega tokenize "
            f"--split-sentences ([data] path, [model] name)"
        )
    if record is not None and is_split and not expected:
        raise ValueError(
            f"{dataset.prefix}.bin is split into sentences, and lacks the end-of-document ids that a model of the next "
            f"token needs: tokenize the text without --split-sentences ([data] path, [model] name)"
        )


def record_of(dataset: IndexedDataset) -> Record | None:
    """The record of a data set; None if there is no record, or if it belongs to another `.bin`.

    Raises:
        ValueError: the record is damaged.
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
    # Somebody may have replaced the .bin and left the record of the old .bin in place.
    belongs = (record.documents, record.tokens) == (len(dataset.document_index) - 1, dataset.n_tokens)
    return record if belongs else None


def unrecorded(prefixes: list[str], tokenizer: Tokenizer) -> str:
    """A line for the user about data sets without a record, which are assumed to be made with `tokenizer`."""
    more = f" and {len(prefixes) - 1} more" if len(prefixes) > 1 else ""
    return (
        f"{prefixes[0]}.bin{more}: no record of the tokenizer (Megatron writes none), taken to be in '{tokenizer.name}'"
    )
