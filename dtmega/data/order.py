"""The order of documents in an epoch. A long one is made once per node, in a file that every process there maps.

    order = document_order(dataset, documents=(0, 20_000_000), stream="1234/train/0", epoch=0)

With 20 million documents an order is 240 MB. The file holds `starts`, `documents` and a digest of them and of what they
were made from; a file that is damaged, or of data that have changed, is made again. It stands in the cache directory,
where anything may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from filelock import FileLock
from numpy.typing import NDArray

from dtmega.data import cache_dir
from dtmega.data.indexed import CHUNK, IndexedDataset

LONG = 1 << 20  # documents from which on an order is worth a file: below, it is at most 12 MB and made in 0.1 s
DIGEST_BYTES = 16


class Order(NamedTuple):
    """The documents of one epoch.

    Attributes:
        documents: [n] in the order of the stream, counted from the part's first.
        starts: [n + 1] tokens of the epoch before each document, then all of them.
    """

    documents: NDArray[Any]
    starts: NDArray[np.int64]


def permutation(n: int, key: str) -> NDArray[Any]:
    """The numbers 0 to n - 1 in an order that is a function of (n, key); 4 bytes each as long as they fit."""
    numbers = np.arange(n, dtype=_number_dtype(n))
    seed = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=16).digest(), "<u4")
    # RandomState, because NEP 19 froze its stream forever; a Generator may change with numpy's version.
    np.random.RandomState(seed).shuffle(numbers)
    return numbers


def _number_dtype(n: int) -> np.dtype[Any]:
    return np.dtype(np.uint32 if n <= 2**32 else np.int64)


def document_order(dataset: IndexedDataset, documents: tuple[int, int], stream: str, epoch: int) -> Order:
    """The order of documents (start, stop) of the data set's document index, a function of (stream, epoch)."""
    n = documents[1] - documents[0]
    if n >= LONG:
        try:
            return _OrderFile(dataset, documents, stream, epoch).read_or_make()
        except (OSError, ValueError) as error:  # no cache directory, or no room in it
            why = f"{error}: the order of {n} documents is kept in the memory of this process ({12 * n / 1e6:.0f} MB)"
            print(f"dtmega: {why}", file=sys.stderr)
    order = permutation(n, f"{stream}/{epoch}/documents")
    return Order(order, np.concatenate([np.zeros(1, np.int64), *_starts(dataset, documents[0], order)]))


def _starts(dataset: IndexedDataset, first: int, order: NDArray[Any]) -> Iterator[NDArray[np.int64]]:
    """The end of each document, which is the start of the next one, in pieces."""
    n = len(order)
    # The file is read along, and only the lengths, in as few bytes as they need, are then looked up out of order.
    lengths = np.concatenate([_lengths(dataset, first + i, first + min(i + CHUNK, n)) for i in range(0, n, CHUNK)])
    end = 0
    for i in range(0, n, CHUNK):
        ends = end + np.cumsum(lengths[order[i : i + CHUNK]], dtype=np.int64)
        end = int(ends[-1])
        yield ends


def _lengths(dataset: IndexedDataset, start: int, stop: int) -> NDArray[Any]:
    """Tokens of the documents from start to stop, in the smallest dtype that holds them."""
    lengths = np.diff(dataset.first_token(np.arange(start, stop + 1)))
    return lengths.astype(np.min_scalar_type(lengths.max()))


class _OrderFile:
    """One order in the cache directory: int64 starts [n + 1], documents [n], digest."""

    def __init__(self, dataset: IndexedDataset, documents: tuple[int, int], stream: str, epoch: int) -> None:
        self.dataset, self.documents, self.stream, self.epoch = dataset, documents, stream, epoch
        self.n = documents[1] - documents[0]
        index = os.path.realpath(f"{dataset.prefix}.idx")
        self.name = hashlib.sha256(f"{index}/{documents}/{stream}".encode()).hexdigest()[:16]
        self.path = self._path(epoch)
        stat = os.stat(index)
        self.made_from = f"{index} {stat.st_size} {stat.st_mtime_ns} {documents} {stream}/{epoch}".encode()

    def _path(self, epoch: int) -> Path:
        return cache_dir() / f"order-{self.name}-{epoch}.bin"

    def read_or_make(self) -> Order:
        if not self._is_whole():
            with self._lock():
                if not self._is_whole():  # another process may have made it while this one waited
                    self._make()
        starts = np.memmap(self.path, np.int64, "r", shape=(self.n + 1,))
        documents = np.memmap(self.path, _number_dtype(self.n), "r", starts.nbytes, (self.n,))
        return Order(np.asarray(documents), np.asarray(starts))

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Spares the node the same work twice, no more: a file appears whole, by a rename."""
        lock = FileLock(f"{self.path}.lock")
        with contextlib.suppress(OSError, NotImplementedError):  # a file system without locks
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _is_whole(self) -> bool:
        # Read, not mapped: pages that a process has mapped and looked at count as its memory.
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            n_bytes = 8 * (self.n + 1) + _number_dtype(self.n).itemsize * self.n
            if os.fstat(file.fileno()).st_size != n_bytes + DIGEST_BYTES:
                return False
            digest = xxhash.xxh3_128(self.made_from)
            while n_bytes > 0:
                piece = file.read(min(n_bytes, 8 * CHUNK))
                digest.update(piece)
                n_bytes -= len(piece)
                if not piece:
                    return False
            return file.read() == digest.digest()
        return False

    def _make(self) -> None:
        print(f"dtmega: ordering {self.n} documents for epoch {self.epoch} in {self.path}", file=sys.stderr, flush=True)
        order = permutation(self.n, f"{self.stream}/{self.epoch}/documents")
        digest = xxhash.xxh3_128(self.made_from)
        temp = Path(f"{self.path}.{secrets.token_hex(4)}.tmp")
        try:
            with open(temp, "wb") as file:
                for piece in chain([np.zeros(1, np.int64)], _starts(self.dataset, self.documents[0], order), [order]):
                    digest.update(piece.data)
                    file.write(piece.data)
                file.write(digest.digest())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temp, self.path)
        finally:
            temp.unlink(missing_ok=True)
        self._remove_old()

    def _remove_old(self) -> None:
        """Delete what a killed process left behind, and epochs before the last one, which nobody needs who goes on."""
        for path in cache_dir().glob(f"order-{self.name}-*"):
            found = re.fullmatch(rf"order-{self.name}-(\d+)\.bin(\.lock|\.\w+\.tmp)?", path.name)
            if found and int(found[1]) < self.epoch - 1:
                with contextlib.suppress(OSError):
                    path.unlink()
