"""Check that all ids in a file are inside a vocabulary, using the range of ids in the file's record.

If there is no record, or if the record has no range, the whole file is scanned once, and the range is cached.

The record is as trustworthy as the `.bin` itself: one writer makes both files, keeps track of all ids, and publishes
both files together. Anyone who can change one of the files can change both. A record from a different `.bin`
with equal counts would let through ids that the model cannot embed. So the ids in some blocks of the `.bin` are checked
against the range. A user who doubts a record can delete the record; the whole file is then scanned.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

import numpy as np

from dtmega.data import cache_dir
from dtmega.data.indexed_files.dataset import CHUNK, IndexedDataset
from dtmega.data.indexed_files.record import record_of
from dtmega.files import console
from dtmega.files.lock import Lock
from dtmega.files.untrusted_json import read_object

BLOCK_TOKENS, N_BLOCKS = 2**15, 64  # size and number of the blocks checked against the record


def check_token_ids(dataset: IndexedDataset, vocab_size: int) -> None:
    """Check that every id of a data set is in [0, vocab_size).

    Raises:
        ValueError: an id is outside this range, the tokens are not integers, or the range of ids in the data set's
            .meta.json is wrong.
    """
    path = f"{dataset.prefix}.bin"
    if dataset.dtype.kind == "f":
        raise ValueError(f"{path}: expected token ids, got {dataset.dtype} (as {dataset.prefix}.idx says)")
    if dataset.n_tokens == 0:
        return
    made = record_of(dataset)
    if made is not None and made.min_id is not None and made.max_id is not None:
        low, high = made.min_id, made.max_id
        _check_sample(dataset, low, high)
    else:
        low, high = _token_range(dataset, path)
    if low >= 0 and high < vocab_size:
        return
    # Find the first id outside the range, for the message.
    n_at_once = _n_at_once(dataset)
    for start in range(0, dataset.n_tokens, n_at_once):
        ids = dataset.tokens[start : start + n_at_once].astype(np.int64)
        outside = (ids < 0) | (ids >= vocab_size)
        if outside.any():
            i = int(np.argmax(outside))
            sequence = dataset.sequence_of(start + i)
            raise ValueError(
                f"{path}: expected ids in [0, {vocab_size}), got {ids[i]} in sequence {sequence} (all ids: {low} to "
                f"{high}): the text was made with another tokenizer. Tokenize it with [data] tokenizer, or raise "
                f"[model] vocab_size, unless the model is read from a [model] path"
            )


def _check_sample(dataset: IndexedDataset, low: int, high: int) -> None:
    """Check some blocks of a data set: all their ids must be in the range that the record names.

    Raises:
        ValueError: an id is outside [low, high].
    """
    last_start = max(0, dataset.n_tokens - BLOCK_TOKENS)
    starts = sorted({last_start * i // (N_BLOCKS - 1) for i in range(N_BLOCKS)})
    blocks = dataset.read([(start, start + BLOCK_TOKENS) for start in starts])
    for start, ids in zip(starts, blocks, strict=True):
        outside = (ids < low) | (ids > high)
        if outside.any():
            i = int(np.argmax(outside))
            raise ValueError(
                f"{dataset.prefix}.meta.json: expected ids from {low} to {high} (min_id, max_id), got {ids[i]} in "
                f"sequence {dataset.sequence_of(start + i)}: this is the record of another .bin; tokenize the text "
                f"again, or remove the file if you know the tokenizer"
            )


def _token_range(dataset: IndexedDataset, path: str) -> tuple[int, int]:
    """The smallest and the largest id of a data set, cached in a file. The data set must have at least one token."""
    if dataset.stored is None:
        real, stat = os.path.realpath(path), os.stat(path)
        state = {"path": real, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "dtype": dataset.dtype.str}
    else:
        file = dataset.stored.bin
        real, state = path, {"path": path, "size": file.size, "version": file.version, "dtype": dataset.dtype.str}
    cache = cache_dir() / f"token-range-{hashlib.sha256(real.encode()).hexdigest()[:16]}.json"
    if dataset.stored is None:
        return _cached(cache, state) or _scanned(dataset, cache, state)
    with Lock(Path(f"{cache}.lock")):  # only one process per node reads a data set from an object store
        found = _cached(cache, state)
        if found is None:
            console.say(
                f"dtmega: reading all {dataset.n_tokens:,} tokens of {path} once, because its .meta.json does not say "
                f"their smallest and largest id"
            )
            found = _scanned(dataset, cache, state)
        return found


def _cached(cache: Path, state: dict[str, object]) -> tuple[int, int] | None:
    """The cached range; None if the cache has no range for this state of the data set."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        cached = read_object(cache)
        if cached["state"] == state:
            return int(cached["low"]), int(cached["high"])
    return None


def _n_at_once(dataset: IndexedDataset) -> int:
    """Number of ids that a scan holds in memory; for an object store, as many ids as parallel requests return."""
    return CHUNK if dataset.stored is None else dataset.stored.bytes_at_once // dataset.dtype.itemsize


def _scanned(dataset: IndexedDataset, cache: Path, state: dict[str, object]) -> tuple[int, int]:
    """Scan all ids for their range, write the range into the cache, and return the range."""
    n_at_once = _n_at_once(dataset)
    lows: list[int] = []
    highs: list[int] = []
    for start in range(0, dataset.n_tokens, n_at_once):
        ids = dataset.tokens[start : start + n_at_once]
        lows.append(int(ids.min()))
        highs.append(int(ids.max()))
    low, high = min(lows), max(highs)
    # If the disk is full, nothing is cached, and the next run has to scan the file again.
    with contextlib.suppress(OSError):
        temp = cache.with_suffix(f".{os.getpid()}.tmp")
        temp.write_text(json.dumps({"state": state, "low": low, "high": high}))
        os.replace(temp, cache)
    return low, high
