"""Rows of whole conversations: which conversations share a row, in which order, and what a row holds."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dtmega.config import Data
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.objectives.conversations import CONVERSATIONS, ConversationRows
from dtmega.data.objectives.rows import IGNORED
from dtmega.data.sampling import packs
from dtmega.data.sampling.packs import Packs, first_fit
from dtmega.data.text import Text
from dtmega.data.tokenizers.load import load_tokenizer
from tests.data.indexed_files.test_conversations import CHAT, write

S = 12
N = 40


def talks(n: int = N) -> list[list[str]]:
    """Conversations of 2 to S + 4 tokens, of which some are longer than a row; each begins with its own letter."""
    found: list[list[str]] = []
    for i in range(n):
        letter = chr(ord("a") + i)
        found.append([letter * (1 + i % 3), "X" * (1 + i * 7 % (S + 1)), "."][: 2 + i % 2])
    return found


@pytest.fixture
def dataset(tmp_path: Path) -> IndexedDataset:
    learned = sum(len(talk[1]) for talk in talks())
    return write(tmp_path / "a", talks(), chat=CHAT | {"learned": learned})


def packed(dataset: IndexedDataset, **keys: Any) -> Packs:
    data = Data(objective="conversations", seq_len=S, **keys)
    return Packs(dataset, (0, N), data, 1234, "train")


def words(samples: Packs, g: int) -> list[str]:
    return ["".join(map(chr, conversation.tokens)) for conversation in samples[g]]


def test_each_conversation_that_fits_is_in_one_row_of_each_epoch(dataset: IndexedDataset, monkeypatch):
    monkeypatch.setattr(packs, "WINDOW", 8)  # so that an epoch has more than two
    samples = packed(dataset)
    whole = ["".join(talk) for talk in talks()]
    fitting = Counter(talk for talk in whole if len(talk) <= S + 1)
    assert 0 < fitting.total() < N
    orders = []
    for epoch in range(3):
        rows = [words(samples, g) for g in range(samples.first_row(epoch), samples.first_row(epoch + 1))]
        assert Counter(talk for row in rows for talk in row) == fitting
        inputs = [sum(len(talk) - 1 for talk in row) for row in rows]
        assert 0 < min(inputs) <= max(inputs) <= S
        orders.append(rows)
    assert sorted(map(sorted, orders[0])) != sorted(map(sorted, orders[1]))  # rows are packed anew
    text = Text(CONVERSATIONS, Data(), load_tokenizer("bytes"), {"train": samples}, {}, [])
    assert text.samples_in(3) == sum(map(len, orders)) != 3 * samples.n_samples
    assert samples.n_tokens == sum(len(talk) for talk in fitting.elements())
    assert samples.n_samples == len(orders[0]) < fitting.total()
    share = sum(len(talk) - 1 for talk in fitting.elements()) / (len(orders[0]) * S)
    assert samples.note.startswith(f"train: {fitting.total()} conversations in {len(orders[0])} rows, {share:.0%} full")
    assert f"{N - fitting.total()} left out, longer than S + 1 = 13 tokens" in samples.note


def test_a_row_is_a_function_of_its_number_and_the_seed(dataset: IndexedDataset):
    samples = packed(dataset)
    later = samples.first_row(2) + 1
    expected = words(samples, later)
    fresh = pickle.loads(pickle.dumps(samples))
    assert words(fresh, later) == expected
    assert [words(fresh, g) for g in (0, later, 0)] == [words(samples, 0), expected, words(samples, 0)]
    data = Data(objective="conversations", seq_len=S)
    for other in (Packs(dataset, (0, N), data, 5, "train"), Packs(dataset, (0, N), data, 1234, "valid")):
        assert [words(other, g) for g in range(5)] != [words(samples, g) for g in range(5)]


def test_a_later_part_has_its_own_conversations(dataset: IndexedDataset):
    samples = Packs(dataset, (N - 7, N), Data(objective="conversations", seq_len=S), 1234, "valid")
    found = sorted(word for g in range(int(samples.n_samples)) for word in words(samples, g))
    assert found == sorted(t for t in map("".join, talks()[-7:]) if len(t) <= S + 1)


def test_without_packing_each_row_has_one_conversation(dataset: IndexedDataset):
    samples = packed(dataset, pack=False)
    rows = [words(samples, g) for g in range(int(samples.n_samples))]
    assert {len(row) for row in rows} == {1}
    assert sorted(row[0] for row in rows) == sorted(t for t in map("".join, talks()) if len(t) <= S + 1)


def test_what_is_too_long_is_cut_if_a_token_to_learn_is_left(tmp_path: Path):
    documents = [["a" * 5, "X" * 20], ["b" * 13, "Y"], ["c" * 12, "ZZ"], ["d", "W"]]
    dataset = write(tmp_path / "b", documents, chat=CHAT | {"learned": 24})
    data = Data(objective="conversations", seq_len=S, too_long="cut")
    samples = Packs(dataset, (0, 4), data, 1, "train")
    found = sorted(word for g in range(samples.n_samples) for word in words(samples, g))
    assert found == ["aaaaa" + 8 * "X", 12 * "c" + "Z", "dW"]
    assert "1 left out" in samples.note
    assert "2 cut to 13 tokens" in samples.note


def test_a_part_with_no_conversation_that_fits_is_refused(dataset: IndexedDataset):
    with pytest.raises(ValueError, match=r"expected a conversation for 'train' of at most 1 \+ 1 = 2 tokens, got none"):
        Packs(dataset, (1, 3), Data(objective="conversations", seq_len=1), 1, "train")


def test_an_item_goes_into_the_first_box_with_room():
    assert first_fit(np.array([5, 4, 3, 2, 6, 1, 1]), 8).tolist() == [0, 1, 0, 1, 2, 1, 1]


def test_a_label_is_the_next_token_of_the_same_conversation_if_that_bears_loss(dataset: IndexedDataset):
    samples = packed(dataset)
    data = Data(objective="conversations", seq_len=S)
    n = 4
    rows = ConversationRows(samples, data, padding_id=256)[range(n)]
    learned = 0
    for g in range(n):
        text, labels = rows["tokens"][g].tolist(), rows["labels"][g].tolist()
        positions, documents = rows["position_ids"][g].tolist(), rows["document_ids"][g].tolist()
        start = 0
        for number, word in enumerate(words(samples, g)):
            stop = start + len(word) - 1
            assert text[start:stop] == [ord(c) for c in word[:-1]]
            assert labels[start:stop] == [ord(c) if c == "X" else IGNORED for c in word[1:]]
            assert positions[start:stop] == list(range(stop - start))
            assert documents[start:stop] == [number] * (stop - start)
            learned += word.count("X")
            start = stop
        padding = S - start
        assert text[start:] == [256] * padding
        assert labels[start:] == [IGNORED] * padding
        assert positions[start:] == list(range(padding))
        assert documents[start:] == [len(words(samples, g))] * padding
    assert learned == int((rows["labels"] != IGNORED).sum())
    assert rows["sample_ids"].tolist() == list(range(n))
    assert {tensor.dtype for tensor in rows.values()} == {torch.int64}
