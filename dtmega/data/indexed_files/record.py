"""The record of how a data set was tokenised: PREFIX.meta.json, which `tokenize` writes next to PREFIX.bin.

    {"tokenizer": "gpt2", "fingerprint": "2d1c9a…", "eod_id": 50256, "append_eod": true, "sentences": false,
     "documents": 9, "tokens": 700, "min_id": 0, "max_id": 50256}

A record for one part of a larger text has one more entry, which `merge` reads and drops:

    "part": {"number": 3, "of": 12, "input": "c1d2…", "settings": "9a0b…"}

A record for conversations (`conversations.py`) has one more entry:

    "chat": {"template": "83f0a1…", "train_on": "assistant", "end_ids": [0], "learned": 412, "refused": {},
             "notes": {}}

Without the record, training on token ids from the wrong vocabulary would raise no error if the ids were small enough.
Megatron writes no such record.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from dtmega.config import Data
from dtmega.data.indexed_files import MAX_RECORD_BYTES
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.tokenizers.tokenizer import Tokenizer
from dtmega.files.untrusted_json import parse_object, read_object

# Key in `State.identity`, which checkpoints store. The value lists the ids of tokens that end a learned turn.
END_IDS = "ids that end a turn"
LONGEST_SENTENCE = 512  # in tokens; LONG_SENTENCE_LEN in Megatron's `helpers.cpp`


class ChatRecord(BaseModel):
    """The entry `chat` of a record, which marks the documents as conversations.

    Attributes:
        template: digest of the chat template, 12 hex digits.
        train_on: turns that count in the loss: "all", "assistant" or "last".
        end_ids: ids of the tokens that end a learned turn; empty if all text is learned.
        learned: number of tokens that count in the loss.
        refused: number of refused conversations, keyed by cause; these conversations are not in the `.bin`.
        notes: number of conversations, keyed by how arguments of tool calls were read and by what the template left
            out.
    """

    model_config = ConfigDict(extra="ignore", strict=True)
    template: str
    train_on: str
    end_ids: list[int] = []
    learned: int
    refused: dict[str, int]
    notes: dict[str, int] = {}


class PartRecord(BaseModel):
    """The entry `part` of a record, which marks the data set as one part of a larger text.

    Attributes:
        number, of: index of the part, counted from 0, and total number of parts.
        input: digest of the whole text; equal for all parts of the text.
        settings: digest of the settings that turn the text into tokens; equal for all parts of the text.
    """

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)
    number: int
    of: int
    input: str
    settings: str


class Record(BaseModel):
    """The content of a PREFIX.meta.json: how a data set was tokenised.

    Attributes:
        tokenizer: the tokenizer's spec, for human readers.
        fingerprint, eod_id: the tokenizer's fingerprint and end-of-document id, see `Tokenizer`.
        append_eod: whether each document ends with `eod_id`.
        first_id: id of the tokenizer's own `bos_token`, with which each document begins; None if documents do not.
        sentences: whether each sequence is a sentence, and a document has any number of them. Otherwise, each sequence
            is a whole document.
        documents, tokens: numbers of documents and tokens in the `.bin`, which show whether the record belongs to
            this `.bin`.
        min_id, max_id: smallest and largest id in the `.bin`; None if the `.bin` has no tokens, or if an earlier
            version wrote the record.
        part: entry that marks the data set as one part of a larger text; None if the data set is the whole text.
        chat: description of the conversations; None if the documents are not conversations.
    """

    model_config = ConfigDict(extra="ignore", strict=True)
    tokenizer: str
    fingerprint: str
    eod_id: int
    append_eod: bool
    first_id: int | None = None
    sentences: bool
    documents: int
    tokens: int
    min_id: int | None = None
    max_id: int | None = None
    part: PartRecord | None = None
    chat: ChatRecord | None = None

    def text(self) -> str:
        """Return this record as the text of a PREFIX.meta.json file."""
        return f"{self.model_dump_json(exclude_none=True)}\n"


def check_tokenizer(dataset: IndexedDataset, data: Data, tokenizer: Tokenizer) -> bool:
    """Check that a data set was made with `tokenizer`. Returns False if there is no record to check.

    Raises:
        ValueError: the record is damaged or names another tokenizer, or the documents lack the end-of-document ids that
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


def check_conversations(dataset: IndexedDataset, expected: bool) -> None:
    """Check that a data set holds conversations if they are expected, and other text otherwise.

    Only the record shows the difference. Without a record, conversations look like documents of several sentences.

    Args:
        dataset: data set to check.
        expected: whether the objective reads conversations.

    Raises:
        ValueError: the documents are conversations although the objective reads other text, or the reverse.
    """
    record = record_of(dataset)
    is_chat = record is not None and record.chat is not None
    if expected and not is_chat:
        raise ValueError(
            f"{dataset.prefix}.bin: expected conversations, as dtmega tokenize --chat writes them, got "
            f"{'other text' if record else 'no record of this .bin'} ({dataset.prefix}.meta.json; [data] path, "
            f"[data] objective)"
        )
    if is_chat and not expected:
        raise ValueError(
            f"{dataset.prefix}.bin holds conversations, whose prompts bear no loss: expected [data] objective = "
            f'"conversations", or another [data] path'
        )


def check_sentences(dataset: IndexedDataset, expected: bool) -> None:
    """Check that a data set is split into sentences if sentences are expected, and into documents otherwise.

    Without a record, a data set counts as split into sentences if it has more sequences than documents. If documents
    are expected, a data set without a record is always accepted, because files that Megatron has merged also have
    more sequences than documents.

    Args:
        dataset: data set to check.
        expected: whether the objective reads sentences.

    Raises:
        ValueError: the data set is split into sentences although documents are expected, or the reverse; the message
            names the `tokenize` option to change.
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
    content = _content(dataset)
    if content is None:
        return None
    path = f"{dataset.prefix}.meta.json"
    try:
        record = Record.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path}: {key}: {first['msg']} (without this file, nothing is checked)") from None
    # Somebody may have replaced the .bin and left the record of the old .bin in place.
    belongs = (record.documents, record.tokens) == (len(dataset.document_index) - 1, dataset.n_tokens)
    return record if belongs else None


def _content(dataset: IndexedDataset) -> dict[str, Any] | None:
    """The object in a data set's PREFIX.meta.json; None if the file does not exist.

    Raises:
        ValueError: the file is too large or is not JSON.
    """
    path = Path(f"{dataset.prefix}.meta.json")
    if dataset.stored is None:
        return read_object(path, MAX_RECORD_BYTES) if path.exists() else None
    raw = dataset.stored.record
    if raw is not None and len(raw) > MAX_RECORD_BYTES:
        raise ValueError(f"cannot read {dataset.prefix}.meta.json: expected at most {MAX_RECORD_BYTES:,} bytes of JSON")
    return None if raw is None else parse_object(raw, f"{dataset.prefix}.meta.json")


def unrecorded(prefixes: list[str], tokenizer: Tokenizer) -> str:
    """A line for the user about data sets without a record: dtmega assumes that their ids come from `tokenizer`."""
    more = f" and {len(prefixes) - 1} more" if len(prefixes) > 1 else ""
    return (
        f"{prefixes[0]}.bin{more}: no record of the tokenizer (Megatron writes none), taken to be in '{tokenizer.name}'"
    )
