"""Conversations in token files: what is read is what was written, and nothing else is read as a conversation."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtmega.data.indexed_files.conversations import Conversations, check_same_chat, sequence_sizes
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.indexed_files.writer import IndexedWriter

# Two conversations; the tokens in capitals bear loss.
TALKS = ["abCDeFg", "hIJ"]
ABOUT = {"tokenizer": "bytes", "fingerprint": "f", "eod_id": 256, "append_eod": False, "sentences": False}
CHAT = {"template": "t", "train_on": "assistant", "learned": 5, "refused": {}}


def write(prefix: Path, documents: list[list[str]], **changes: Any) -> IndexedDataset:
    """Documents of sequences of characters, with a record."""
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        for document in documents:
            writer.add([ord(c) for c in "".join(document)], [len(sequence) for sequence in document])
        about = ABOUT | {"documents": writer.n_documents, "tokens": writer.n_tokens, "chat": CHAT} | changes
        writer.about = json.dumps(about)
    return IndexedDataset(prefix)


def test_what_bears_loss_is_read_as_it_was_written(tmp_path, monkeypatch):
    monkeypatch.setattr("dtmega.data.indexed_files.conversations.CHUNK", 1)
    cut = []
    for talk in TALKS:
        ends = np.cumsum([0, *sequence_sizes(np.array([c.isupper() for c in talk]))])
        cut.append([talk[start:end] for start, end in pairwise(ends)])
    assert cut == [["ab", "CD", "e", "F", "g"], ["h", "IJ"]]
    talks = Conversations(write(tmp_path / "a", cut))
    for i, talk in enumerate(TALKS):
        tokens, learns = talks[i]
        assert "".join(map(chr, tokens)) == talk
        assert learns.tolist() == [c.isupper() for c in talk]
    assert (talks.lengths.tolist(), talks.first_learned.tolist(), len(talks)) == ([7, 3], [2, 1], 2)
    with pytest.raises(IndexError, match="conversation 2 of 2"):
        talks[2]


@pytest.mark.parametrize(
    ("documents", "changes", "message"),
    [
        ([["a", "B"]], {"chat": None}, "expected conversations, as dtmega tokenize --chat writes them, got other text"),
        ([["a", "B"]], {"tokens": 7}, "got no record of this .bin"),
        ([["a", "B"], ["c"]], {}, "expected at least 2 sequences .* got 1 in conversation 1"),
        ([["a", "B"], ["", "D"]], {}, "expected no empty sequence in conversations, got sequence 2"),
        ([["a", "B"], ["cdef", "G"]], {}, "expected 5 tokens that bear loss, as .*a.meta.json says, got 2"),
    ],
)
def test_what_is_not_a_conversation_is_not_read_as_one(tmp_path, documents, changes, message):
    dataset = write(tmp_path / "a", documents, **changes)
    with pytest.raises(ValueError, match=message):
        Conversations(dataset)


def test_sets_of_another_template_or_loss_are_refused_together(tmp_path):
    one = write(tmp_path / "one", [["a", "B"]])
    check_same_chat([one, write(tmp_path / "two", [["a", "BCD"]], chat=CHAT | {"learned": 3})])
    for key in ("template", "train_on"):
        with pytest.raises(ValueError, match=r"other.bin: expected conversations in template t with --train-on assist"):
            check_same_chat([one, write(tmp_path / "other", [["a", "B"]], chat=CHAT | {key: "last"})])
