"""A `.bin/.idx` pair in an object store. The index is cached in a file on this node; tokens are read in byte ranges.

    pair = StoredPair.open("s3://bucket/data/mine")
    pair.map_index()                  # the bytes of the .idx, mapped from this node's cache
    tokens = pair.tokens(np.dtype("<u2"))
    tokens[1000:1256]                 # one request

To read many slices in one batch of requests, run the reading code twice:

    with planned() as plan:           # slices are recorded and contain zeros
        read_the_slices()
    with fetched(plan):               # one batch of requests; the slices come from this batch
        read_the_slices()
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtmega.data import cache_dir
from dtmega.data.indexed_files import MAX_RECORD_BYTES
from dtmega.data.indexed_files.shared_file import SharedFile
from dtmega.data.lost import DataLost
from dtmega.files.object_file import Changed, ObjectFile
from dtmega.files.object_requests import PARALLEL, PART_BYTES
from dtmega.files.outages import Unreachable, at_start

KEY = "[data] path"

# Slices that a thread has planned or fetched. The slices are thread-local, so that another thread can read ahead.
_here = threading.local()


class StoredPair(NamedTuple):
    """The objects of a data set, with the versions that they had when opened. Pickling keeps the versions.

    Attributes:
        idx, bin: object that holds the index, and object that holds the tokens.
        record: content of the `.meta.json`; None if the data set has no `.meta.json`.
    """

    idx: ObjectFile
    bin: ObjectFile
    record: bytes | None

    @classmethod
    def open(cls, prefix: str) -> StoredPair:
        """Open the objects PREFIX.idx, PREFIX.bin and PREFIX.meta.json.

        Raises:
            ValueError: the URL holds credentials, or the .idx or the .bin is missing.
            Unreachable: the store does not answer.
        """
        idx, tokens = (ObjectFile.open(f"{prefix}{suffix}", KEY) for suffix in (".idx", ".bin"))
        if idx is None or tokens is None:
            missing = ".idx" if idx is None else ".bin"
            raise ValueError(
                f"{prefix}{missing}: No such object ([data] path is the PREFIX of PREFIX.bin and PREFIX.idx, as dtmega "
                f"tokenize writes them)"
            )
        about = ObjectFile.open(f"{prefix}.meta.json", KEY)
        if about is None:
            return cls(idx, tokens, None)
        try:
            return cls(idx, tokens, bytes(about.read([(0, min(about.size, MAX_RECORD_BYTES + 1))])[0]))
        except (Changed, Unreachable) as error:
            raise at_start(error, f"cannot open {error} ({KEY})") from None

    @property
    def bytes_at_once(self) -> int:
        """Number of bytes that PARALLEL requests return."""
        return PARALLEL * PART_BYTES

    def object(self, suffix: str) -> ObjectFile:
        """The object with the suffix ".idx" or ".bin"."""
        return self.idx if suffix == ".idx" else self.bin

    def read(self, suffix: str, ranges: list[tuple[int, int]]) -> list[memoryview]:
        """Read byte ranges (start, stop) of .idx or .bin in one batch, while the data set is being opened.

        Raises:
            ValueError: the object has changed.
            Unreachable: the store does not answer.
        """
        try:
            return self.object(suffix).read(ranges)
        except (Changed, Unreachable) as error:
            raise at_start(error, f"cannot open {error} ({KEY})") from None

    @property
    def index_path(self) -> Path:
        """Path of this node's copy of the .idx; the copy ends with the digest that `SharedFile` appends."""
        return cache_dir() / f"index-{hashlib.sha256(self.idx.url.encode()).hexdigest()[:16]}.bin"

    @property
    def index_state(self) -> str:
        """URL, size and version of the .idx; any change may mean a new data set."""
        return f"{self.idx.url} {self.idx.size} {self.idx.version}"

    def load(self, load: Callable[[NDArray[np.uint8], int], None]) -> None:
        """Pass the bytes of the .idx and the size of the .bin to `load`, which checks them.

        Raises:
            ValueError: `load` has refused two downloads of the .idx; or one of the errors of `map_index`.
            Unreachable: the store does not answer.
        """
        index = self.map_index()
        try:
            load(index, self.bin.size)
        except ValueError:
            # A byte may have changed on its way into this node's cache, so the object is read once more.
            index = self.map_index(anew=True)
            try:
                load(index, self.bin.size)
            except ValueError as error:
                raise ValueError(f"{error} (downloaded twice, the last time to {self.index_path})") from None

    def tokens(self, dtype: np.dtype[Any]) -> StoredTokens:
        """The tokens of the .bin."""
        return StoredTokens(self.bin, dtype)

    def map_index(self, anew: bool = False) -> NDArray[np.uint8]:
        """The bytes of the .idx, mapped from this node's cache. One process per node downloads the .idx.

        Args:
            anew: whether to download the .idx although the cache has it.

        Raises:
            ValueError: the .idx has changed since it was opened, or the cache is not writable.
            Unreachable: the store does not answer.
        """

        def pieces() -> Iterator[NDArray[Any]]:
            for piece in self.idx.pieces():
                yield np.frombuffer(piece, np.uint8)

        path = self.index_path
        try:
            if anew:
                path.unlink(missing_ok=True)
            SharedFile(
                path, self.index_state, pieces, f"copying {self.idx.url}, {self.idx.size:,} bytes"
            ).read_or_make()
            if not self.idx.size:
                return np.zeros(0, np.uint8)
            return np.asarray(np.memmap(path, np.uint8, "r", shape=(self.idx.size,)))
        except OSError as error:
            raise at_start(error, f"cannot open {self.idx.url}: {error} ({KEY})") from None


class StoredTokens:
    """The tokens of a .bin in an object store. A slice is an array, as for a memory-mapped file.

    Args:
        file: object that holds the .bin.
        dtype: dtype of the tokens.
    """

    def __init__(self, file: ObjectFile, dtype: np.dtype[Any]) -> None:
        self._file, self._dtype = file, dtype

    def __len__(self) -> int:
        return self._file.size // self._dtype.itemsize

    def __getitem__(self, part: slice) -> NDArray[Any]:
        """The tokens of a slice with step 1.

        Raises:
            DataLost: the store does not answer, or the object has changed.
        """
        start, stop, step = part.indices(len(self))
        assert step == 1
        where = start, max(start, stop)
        plan: Plan | None = getattr(_here, "plan", None)
        if plan is not None:
            plan.setdefault(self, []).append(where)
            return np.zeros(where[1] - start, self._dtype)
        held: dict[tuple[StoredTokens, tuple[int, int]], NDArray[Any]] = getattr(_here, "held", {})
        return held[self, where] if (self, where) in held else self.read([where])[0]

    def read(self, slices: list[tuple[int, int]]) -> list[NDArray[Any]]:
        """Read slices (start, stop) in one batch. Raises the exceptions that `__getitem__` raises."""
        size = self._dtype.itemsize
        try:
            read = self._file.read([(start * size, stop * size) for start, stop in slices])
        except (Unreachable, Changed) as error:
            raise DataLost(f"cannot read tokens: {error} ({KEY})", isinstance(error, Unreachable)) from None
        return [np.frombuffer(piece, self._dtype) for piece in read]


Plan = dict[StoredTokens, list[tuple[int, int]]]


@contextmanager
def planned() -> Iterator[Plan]:
    """Record the slices that this thread reads in the `with` block. The slices contain zeros instead of tokens."""
    _here.plan = {}
    try:
        yield _here.plan
    finally:
        _here.plan = None


@contextmanager
def fetched(plan: Plan) -> Iterator[None]:
    """Read the slices of a plan in one batch. In the `with` block, this thread reads these slices from memory.

    Raises:
        DataLost: the store does not answer, or an object has changed.
    """
    held: dict[tuple[StoredTokens, tuple[int, int]], NDArray[Any]] = {}
    for tokens, slices in plan.items():
        held |= zip(((tokens, where) for where in slices), tokens.read(slices), strict=True)
    _here.held = held
    try:
        yield
    finally:
        _here.held = {}
