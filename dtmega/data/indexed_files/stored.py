"""A `.bin/.idx` pair in an object store: the index in a file of this node, and tokens that are read by ranges.

    pair = StoredPair.open("s3://bucket/data/mine")
    pair.map_index()                  # the bytes of the .idx, mapped from this node's cache
    tokens = StoredTokens(pair.bin, np.dtype("<u2"))
    tokens[1000:1256]                 # one request

Whoever reads many slices asks for all of them first, and then reads them as if they were in memory:

    with planned() as plan:           # slices are noted, and contain zeros
        read_the_slices()
    with fetched(plan):               # one batch of requests; slices are those of the batch
        read_the_slices()
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtmega.data import cache_dir
from dtmega.data.indexed_files.shared_file import SharedFile
from dtmega.files.object_file import Changed, ObjectFile
from dtmega.files.object_requests import Unreachable

KEY = "[data] path"
MAX_RECORD_BYTES = 1 << 16

# The slices that this thread plans or has fetched; a thread that reads ahead does not disturb the others.
_here = threading.local()


class DataLost(OSError):
    """Tokens that a run needs could not be read from their object store.

    Attributes:
        is_temporary: whether the store did not answer, so that the same run may go on later; if not, the object is no
            longer the one with which the run began.
    """

    def __init__(self, reason: str, is_temporary: bool) -> None:
        super().__init__(reason)
        self.is_temporary = is_temporary

    def __reduce__(self) -> tuple[type[DataLost], tuple[str, bool]]:
        return DataLost, (str(self), self.is_temporary)


class StoredPair(NamedTuple):
    """The objects of a data set, as they were when it was opened; other processes get them by pickling.

    Attributes:
        idx, bin: the index and the tokens.
        record: content of the `.meta.json`; None if there is none.
    """

    idx: ObjectFile
    bin: ObjectFile
    record: bytes | None

    @classmethod
    def open(cls, prefix: str) -> StoredPair:
        """Open the objects PREFIX.idx, PREFIX.bin and PREFIX.meta.json.

        Raises:
            ValueError: the URL holds credentials, the store does not answer, or there is no .idx or .bin.
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
            raise ValueError(f"cannot open {error} ({KEY})") from None

    def object(self, suffix: str) -> ObjectFile:
        """The object with the suffix ".idx" or ".bin"."""
        return self.idx if suffix == ".idx" else self.bin

    def read(self, suffix: str, ranges: list[tuple[int, int]]) -> list[memoryview]:
        """Ranges (start, stop) of the bytes of .idx or .bin, read together while a data set is opened.

        Raises:
            ValueError: the store does not answer, or the object has changed.
        """
        try:
            return self.object(suffix).read(ranges)
        except (Changed, Unreachable) as error:
            raise ValueError(f"cannot open {error} ({KEY})") from None

    @property
    def index_path(self) -> Path:
        """The file of this node with the bytes of the .idx, and the digest that `SharedFile` writes after them."""
        return cache_dir() / f"index-{hashlib.sha256(self.idx.url.encode()).hexdigest()[:16]}.bin"

    @property
    def index_state(self) -> str:
        """Name, size and version of the .idx; any change means that the data set may have changed."""
        return f"{self.idx.url} {self.idx.size} {self.idx.version}"

    def map_index(self) -> NDArray[np.uint8]:
        """The bytes of the .idx, mapped from this node's cache. One process of a node downloads them.

        Raises:
            ValueError: the store does not answer, the .idx has changed since it was opened, or the cache is not
                writable.
        """

        def pieces() -> Iterator[NDArray[Any]]:
            for piece in self.idx.pieces():
                yield np.frombuffer(piece, np.uint8)

        path = self.index_path
        try:
            SharedFile(
                path, self.index_state, pieces, f"copying {self.idx.url}, {self.idx.size:,} bytes"
            ).read_or_make()
            if not self.idx.size:
                return np.zeros(0, np.uint8)
            return np.asarray(np.memmap(path, np.uint8, "r", shape=(self.idx.size,)))
        except OSError as error:
            raise ValueError(f"cannot open {self.idx.url}: {error} ({KEY})") from None


class StoredTokens:
    """The tokens of a .bin. A slice is an array, as a slice of a file's tokens is.

    Args:
        file: the .bin.
        dtype: dtype of its tokens.
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
        """The tokens of slices (start, stop), read together; the exceptions of `__getitem__`."""
        size = self._dtype.itemsize
        try:
            read = self._file.read([(start * size, stop * size) for start, stop in slices])
        except (Unreachable, Changed) as error:
            raise DataLost(f"cannot read tokens: {error} ({KEY})", isinstance(error, Unreachable)) from None
        return [np.frombuffer(piece, self._dtype) for piece in read]


Plan = dict[StoredTokens, list[tuple[int, int]]]


@contextmanager
def planned() -> Iterator[Plan]:
    """Note the slices that this thread reads in the `with` block; their tokens are zeros."""
    _here.plan = {}
    try:
        yield _here.plan
    finally:
        _here.plan = None


@contextmanager
def fetched(plan: Plan) -> Iterator[None]:
    """Read the slices of a plan in one batch; in the `with` block, this thread finds them in memory.

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
