"""Claims about data/text.py: what a run that goes on must find unchanged."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from dtmega import config
from dtmega.data.indexed import IndexedWriter
from dtmega.data.text import fingerprint, open_text


def write(prefix: Path, last: int = 3, n: int = 40_000) -> str:
    prefix.parent.mkdir(exist_ok=True)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(10):
            writer.add([*range(3, 3 + n // 400)] * 40)
        writer.add([last] * 40)
    return str(prefix)


def test_the_fingerprint_is_of_the_data_and_not_of_its_place_or_name(tmp_path):
    here, there = write(tmp_path / "a" / "text"), write(tmp_path / "b" / "renamed")
    assert fingerprint(here) == fingerprint(there)


def test_the_fingerprint_sees_other_tokens_in_files_of_the_same_size(tmp_path):
    assert fingerprint(write(tmp_path / "a")) != fingerprint(write(tmp_path / "b", last=4))


def test_the_fingerprint_sees_a_longer_file(tmp_path):
    assert fingerprint(write(tmp_path / "a")) != fingerprint(write(tmp_path / "b", n=44_000))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.split", "90,5,5"),
        ("data.seq_len", "16"),
        ("data.eod_mask_loss", "true"),
        ("data.reset_attention_mask", "true"),
        ("run.seed", "7"),
    ],
)
def test_each_key_that_decides_which_tokens_come_is_part_of_the_identity(tmp_path, key, value):
    flags = ["--config", "bloom.toml", "--data.path", write(tmp_path / "text"), "--data.tokenizer", "bytes"]
    flags += ["--data.split", "8,1,1", "--data.seq_len", "32"]
    before, after = (open_text(config.load([*flags, *more])).identity for more in ([], [f"--{key}", value]))
    section, _, name = key.partition(".")
    assert {k for k in before if before[k] != after[k]} == {f"[{section}] {name}"}


def test_a_moved_corpus_has_the_same_identity(tmp_path):
    flags = ["--config", "bloom.toml", "--data.tokenizer", "bytes", "--data.split", "8,1,1", "--data.seq_len", "32"]
    flags += ["--data.path"]
    write(tmp_path / "a" / "text")
    before = open_text(config.load([*flags, str(tmp_path / "a" / "text")])).identity
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert open_text(config.load([*flags, str(tmp_path / "b" / "text")])).identity == before
