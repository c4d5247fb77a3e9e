"""A check that ids are those of a vocabulary. A file is read whole once, and what was found is remembered."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os

import numpy as np

from dtmega.data import cache_dir
from dtmega.data.indexed import CHUNK, IndexedDataset
from dtmega.strangers import read_object


def check_token_ids(dataset: IndexedDataset, vocab_size: int) -> None:
    """Check that every id is in [0, vocab_size). A file is read once; the cache directory remembers its range.

    Raises:
        ValueError: an id outside, or tokens that are no integers.
    """
    path = f"{dataset.prefix}.bin"
    if dataset.dtype.kind == "f":
        raise ValueError(f"{path}: expected token ids, got {dataset.dtype} (as {dataset.prefix}.idx says)")
    if dataset.n_tokens == 0:
        return
    low, high = _token_range(dataset, path)
    if low >= 0 and high < vocab_size:
        return
    for start in range(0, dataset.n_tokens, CHUNK):
        ids = dataset.tokens[start : start + CHUNK].astype(np.int64)
        outside = (ids < 0) | (ids >= vocab_size)
        if outside.any():
            i = int(np.argmax(outside))
            sequence = dataset.sequence_of(start + i)
            raise ValueError(
                f"{path}: expected ids in [0, {vocab_size}), got {ids[i]} in sequence {sequence} (all ids: {low} to "
                f"{high}): these are of another tokenizer. Tokenize the text with [data] tokenizer, or raise [model] "
                f"vocab_size, where it is not that of a [model] path"
            )


def _token_range(dataset: IndexedDataset, path: str) -> tuple[int, int]:
    """The smallest and the largest id of a data set that has tokens."""
    real, stat = os.path.realpath(path), os.stat(path)
    state = {"path": real, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "dtype": dataset.dtype.str}
    memory = cache_dir() / f"token-range-{hashlib.sha256(real.encode()).hexdigest()[:16]}.json"
    with contextlib.suppress(ValueError, TypeError, KeyError):
        known = read_object(memory)
        if known["state"] == state:
            return int(known["low"]), int(known["high"])
    chunks = (dataset.tokens[start : start + CHUNK] for start in range(0, dataset.n_tokens, CHUNK))
    lows, highs = zip(*((int(ids.min()), int(ids.max())) for ids in chunks), strict=True)
    low, high = min(lows), max(highs)
    with contextlib.suppress(OSError):  # a full disk costs the next run a scan, nothing else
        temp = memory.with_suffix(f".{os.getpid()}.tmp")
        temp.write_text(json.dumps({"state": state, "low": low, "high": high}))
        os.replace(temp, memory)
    return low, high
