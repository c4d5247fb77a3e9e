"""Mixtures of corpora under one name: how they are written, and what they are read as."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dtmega import config
from dtmega.config import mixtures
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.objectives.next_token import NEXT_TOKEN
from dtmega.data.sampling.blend import Blend
from dtmega.data.sampling.samples import Samples
from dtmega.data.text import open_text
from tests.data.sampling.test_samples import LENGTHS, read, write_corpus

KEYS = ["--config", "bloom.toml", "--data.tokenizer", "bytes", "--data.seq_len", "5", "--model.vocab_size", "512"]
KEYS += ["--data.split", "969,30,1", "--eval.steps", "1", "--batch.global_batch_size", "2"]


def get_split_by_range_(range_string: str, size: int) -> list[int]:
    """Megatron-DeepSpeed's `megatron/data/dataset_utils.py`, said again."""
    return [round(float(bound) * float(size)) for bound in range_string.split(":")]


@pytest.mark.parametrize("size", [1, 2, 5, 12, 13, 200, 999])
def test_the_ends_of_a_range_are_rounded_as_python_rounds(size):
    for bounds in ("0:0.95", "0.5:1", "0.125:0.375", "0.3333:0.6667"):
        (share,) = mixtures.parse(f"a: 1 {bounds} p").shares
        assert share.documents(size) == tuple(get_split_by_range_(bounds, size))


def test_both_forms_are_read():
    assert mixtures.parse("wiki=data/w:1") == ("wiki", ((1.0, 0.0, 1.0, "data/w:1"),))
    written = "train: 0.3 0:0.95 A,0.7  0.5:1   B"
    assert mixtures.parse(written) == ("train", ((0.3, 0.0, 0.95, "A"), (0.7, 0.5, 1.0, "B")))


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("train 1 0:1 A", "NAME: WEIGHT"),
        ("train:", "WEIGHT START:END PREFIX"),
        ("train: 1 A", "WEIGHT START:END PREFIX"),
        ("train: 1 0:1 A,", "WEIGHT START:END PREFIX"),
        ("train: 1 0:1:1 A", "WEIGHT START:END PREFIX"),
        ("train: x 0:1 A", "WEIGHT START:END PREFIX"),
        ("train: 0 0:1 A", "WEIGHT > 0"),
        ("train: nan 0:1 A", "WEIGHT > 0"),
        ("train: 1 0.5:0.5 A", "START < END"),
        ("train: 1 0:1.1 A", "END <= 1"),
    ],
)
def test_what_is_no_mixture_is_refused(written, message):
    with pytest.raises(ValueError, match=message):
        config.Data(train=written)


@pytest.mark.parametrize(
    "keys",
    [
        {"train": "a: 1 0:1 A", "path": "B"},
        {"train": "a: 1 0:1 A", "split": "8,1,1"},
        {"test": "a: 1 0:1 A"},
        {"train": "a: 1 0:1 A", "validation": ["train=B"]},
        {"validation": ["valid=B"]},
    ],
)
def test_keys_that_would_not_be_read_and_names_that_are_taken_are_refused(keys):
    with pytest.raises(ValueError, match=r"would not be read|none of train"):
        config.Data(**keys)


def test_a_run_reads_the_parts_of_its_mixtures_at_their_weights(tmp_path):
    one, two = write_corpus(tmp_path), write_corpus(tmp_path, LENGTHS * 2, "two")
    sets = [f"valid: 1 0.5:1 {one}", f"both: 1 0:0.5 {one}, 3 0.25:0.5 {two}"]
    flags = ["--data.train", f"mine: 1 0:0.5 {one}, 2 0:0.25 {two}", "--data.validation", json.dumps(sets)]
    opened = open_text(config.load([*KEYS, *flags, "--data.test", f"t={two}"]), NEXT_TOKEN)

    def part(prefix, documents, name, corpus=0):
        return Samples(IndexedDataset(prefix), documents, 5, 1234, name, corpus)

    expected = {
        "train": Blend([part(one, (0, 6), "train"), part(two, (0, 6), "train", 1)], [1, 2]),
        "valid": part(one, (6, 12), "valid"),
        "both": Blend([part(one, (0, 6), "both"), part(two, (6, 12), "both", 1)], [1, 3]),
        "test": part(two, (0, 24), "test"),
    }
    assert set(opened.splits) == set(expected)
    assert opened.evaluated == ["valid", "both"]
    for name, samples in expected.items():
        np.testing.assert_array_equal(read(opened.samples(name), 40), read(samples, 40))


def test_weights_and_ranges_are_part_of_the_identity_and_where_the_files_are_is_not(tmp_path):
    here, there = write_corpus(tmp_path), write_corpus(tmp_path, LENGTHS, "there")

    def identity(written):
        return open_text(config.load([*KEYS, "--data.train", written]), NEXT_TOKEN).identity

    first = identity(f"a: 1 0:0.5 {here}, 1 0.5:1 {here}")
    assert identity(f"b: 1 0:0.5 {there}, 1 0.5:1 {here}") == first
    for other in (f"a: 1 0:0.5 {here}, 2 0.5:1 {here}", f"a: 1 0:0.5 {here}, 1 0.25:1 {here}"):
        after = identity(other)
        assert {key for key in first if first[key] != after[key]} == {"[data] train"}
