"""Check that all ids in a file are inside a vocabulary. The file is scanned once, and its range of ids is cached."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os

import numpy as np

from dtmega.data import cache_dir
from dtmega.data.indexed_files.dataset import CHUNK, IndexedDataset
from dtmega.files.untrusted_json import read_object


def check_token_ids(dataset: IndexedDataset, vocab_size: int) -> None:
    """Check that every id of a data set is in [0, vocab_size).

    Raises:
        ValueError: an id is outside this range, or the tokens are not integers.
    """
    path = f"{dataset.prefix}.bin"
    if dataset.dtype.kind == "f":
        raise ValueError(f"{path}: expected token ids, got {dataset.dtype} (as {dataset.prefix}.idx says)")
    if dataset.n_tokens == 0:
        return
    low, high = _token_range(dataset, path)
    if low >= 0 and high < vocab_size:
        return
    # Find the first id outside the range, for the message.
    for start in range(0, dataset.n_tokens, CHUNK):
        ids = dataset.tokens[start : start + CHUNK].astype(np.int64)
        outside = (ids < 0) | (ids >= vocab_size)
        if outside.any():
            i = int(np.argmax(outside))
            sequence = dataset.sequence_of(start + i)
            raise ValueError(
                f"{path}: expected ids in [0, {vocab_size}), got {ids[i]} in sequence {sequence} (all ids: {low} to "
                f"{high}): the text was made with another tokenizer. Tokenize it with [data] tokenizer, or raise "
                f"[model] vocab_size, unless the model is read from a [model] path"
            )


def _token_range(dataset: IndexedDataset, path: str) -> tuple[int, int]:
    """The smallest and the largest id of a data set, cached in a file. The data set must have at least one token."""
    real, stat = os.path.realpath(path), os.stat(path)
    state = {"path": real, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "dtype": dataset.dtype.str}
    cache = cache_dir() / f"token-range-{hashlib.sha256(real.encode()).hexdigest()[:16]}.json"
    with contextlib.suppress(ValueError, TypeError, KeyError):
        cached = read_object(cache)
        if cached["state"] == state:
            return int(cached["low"]), int(cached["high"])
    lows: list[int] = []
    highs: list[int] = []
    for start in range(0, dataset.n_tokens, CHUNK):
        ids = dataset.tokens[start : start + CHUNK]
        lows.append(int(ids.min()))
        highs.append(int(ids.max()))
    low, high = min(lows), max(highs)
    # If the disk is full, nothing is cached, and the next run has to scan the file again.
    with contextlib.suppress(OSError):
        temp = cache.with_suffix(f".{os.getpid()}.tmp")
        temp.write_text(json.dumps({"state": state, "low": low, "high": high}))
        os.replace(temp, cache)
    return low, high
