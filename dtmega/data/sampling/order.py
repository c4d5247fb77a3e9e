"""The order of documents in an epoch. Each node stores a long order once, in a file that its processes memory-map.

    order = document_order(dataset, documents=(0, 20_000_000), stream="1234/train/0", epoch=0)

The order of 20 million documents takes 240 MB. `indexed_files/shared_file.py` describes the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtmega.data import cache_dir
from dtmega.data.indexed_files.dataset import CHUNK, IndexedDataset
from dtmega.data.indexed_files.shared_file import SharedFile

LONG = 1 << 20  # orders of this many documents or more are kept in a file; shorter orders take at most 12 MB and 0.1 s


class Order(NamedTuple):
    """The order of the documents in one epoch.

    Attributes:
        documents: document indices in stream order, uint32 or int64 [n]; the first document of the range has
            index 0.
        starts: number of the epoch's tokens before each entry of `documents`, int64 [n + 1]; the last entry is the
            total number of tokens.
    """

    documents: NDArray[Any]
    starts: NDArray[np.int64]


def permutation(n: int, key: str) -> NDArray[Any]:
    """The numbers 0 to n - 1, in random order keyed by (n, key); uint32 [n], or int64 [n] if n is too large."""
    numbers = np.arange(n, dtype=_number_dtype(n))
    seed = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=16).digest(), "<u4")
    # NEP 19 guarantees that the stream of RandomState never changes; the stream of a Generator may change with numpy's
    # version.
    np.random.RandomState(seed).shuffle(numbers)
    return numbers


def _number_dtype(n: int) -> np.dtype[Any]:
    return np.dtype(np.uint32 if n <= 2**32 else np.int64)


def document_order(dataset: IndexedDataset, documents: tuple[int, int], stream: str, epoch: int) -> Order:
    """The order in which an epoch reads a range of a data set's documents; a function of (stream, epoch).

    Args:
        dataset: the data set.
        documents: range (start, stop) in the data set's document index.
        stream: name of the random stream.
        epoch: index of the epoch, from 0.
    """
    n = documents[1] - documents[0]
    if n >= LONG:
        try:
            return _from_file(dataset, documents, stream, epoch)
        except (OSError, ValueError) as error:  # no cache directory, or no room in it
            why = f"{error}: the order of {n} documents is kept in the memory of this process ({12 * n / 1e6:.0f} MB)"
            print(f"dtmega: {why}", file=sys.stderr)
    order = _shuffled(n, stream, epoch)
    return Order(order, np.concatenate([np.zeros(1, np.int64), *_starts(dataset, documents[0], order)]))


def _shuffled(n: int, stream: str, epoch: int) -> NDArray[Any]:
    return permutation(n, f"{stream}/{epoch}/documents")


def _starts(dataset: IndexedDataset, first: int, order: NDArray[Any]) -> Iterator[NDArray[np.int64]]:
    """Yield the start of each document after the first, then the last document's end, CHUNK entries at a time."""
    n = len(order)
    # The index is read from front to back. Only the lengths, kept in as few bytes as possible, are looked up in random
    # order.
    lengths = np.concatenate([_lengths(dataset, first + i, first + min(i + CHUNK, n)) for i in range(0, n, CHUNK)])
    end = 0
    for i in range(0, n, CHUNK):
        ends = end + np.cumsum(lengths[order[i : i + CHUNK]], dtype=np.int64)
        end = int(ends[-1])
        yield ends


def _lengths(dataset: IndexedDataset, start: int, stop: int) -> NDArray[Any]:
    """Number of tokens in each document from `start` to `stop - 1`, in the smallest dtype that fits these numbers."""
    lengths = np.diff(dataset.first_token(np.arange(start, stop + 1)))
    return lengths.astype(np.min_scalar_type(lengths.max()))


def _from_file(dataset: IndexedDataset, documents: tuple[int, int], stream: str, epoch: int) -> Order:
    """Memory-map the order from a file in the cache directory; create the file first if it is missing.

    The file holds `starts`, then `documents`.

    Raises:
        OSError, ValueError: no cache directory is writable, or the disk is full.
    """
    n = documents[1] - documents[0]
    name = hashlib.sha256(f"{dataset.index_path}/{documents}/{stream}".encode()).hexdigest()[:16]
    path = cache_dir() / f"order-{name}-{epoch}.bin"

    def pieces() -> Iterator[NDArray[Any]]:
        order = _shuffled(n, stream, epoch)
        yield np.zeros(1, np.int64)
        yield from _starts(dataset, documents[0], order)
        yield order

    made_from = f"{dataset.index_state} {documents} {stream}/{epoch}"
    if SharedFile(path, made_from, pieces, f"ordering {n} documents for epoch {epoch}").read_or_make():
        _remove_old(name, epoch)
    starts = np.memmap(path, np.int64, "r", shape=(n + 1,))
    numbers = np.memmap(path, _number_dtype(n), "r", starts.nbytes, (n,))
    return Order(np.asarray(numbers), np.asarray(starts))


def _remove_old(name: str, epoch: int) -> None:
    """Delete the files of epochs older than the previous epoch, because no later step reads these files.

    Temporary files and locks that killed processes left behind are deleted too.
    """
    for path in cache_dir().glob(f"order-{name}-*"):
        match = re.fullmatch(rf"order-{name}-(\d+)\.bin(\.lock|\.\w+\.tmp)?", path.name)
        if match and int(match[1]) < epoch - 1:
            with contextlib.suppress(OSError):
                path.unlink()
