"""One tensor as torch.save writes it, anywhere in a file, read in place and without unpickling.

    a zip, nothing in it compressed:  archive/data.pkl   pickle: dtype, sizes, strides, which record holds the data
                                      archive/data/0     the elements
                                      archive/byteorder  "little"

Format: `serialization.py` and `_utils.py` of torch 2.13. torch.load(weights_only=True) would run no code either, but it
inflates what is compressed (200 kB became 200 MB), does not look at checksums, and reads the whole of a tensor.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtmega.foreign.inert import ORDERED, PickledObject, decode, natural, naturals, of_type

MAX_PICKLE_BYTES = 1 << 16  # torch writes about 180
READ_BYTES = 1 << 24
LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a zip's record: signature, bytes of name and of extra field
_DTYPES = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu "
    "complex128 complex64 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
)
PICKLED_DTYPES: dict[str, torch.dtype] = {f"torch {name}": getattr(torch, name) for name in _DTYPES.split()}
STORAGES = {
    "torch DoubleStorage": torch.float64,
    "torch FloatStorage": torch.float32,
    "torch HalfStorage": torch.float16,
    "torch BFloat16Storage": torch.bfloat16,
    "torch LongStorage": torch.int64,
    "torch IntStorage": torch.int32,
    "torch ShortStorage": torch.int16,
    "torch CharStorage": torch.int8,
    "torch ByteStorage": torch.uint8,
    "torch BoolStorage": torch.bool,
    "torch ComplexDoubleStorage": torch.complex128,
    "torch ComplexFloatStorage": torch.complex64,
}
V2, V3 = "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3"
NAMES = {V2, V3, ORDERED, "persistent id", "torch.storage UntypedStorage", *STORAGES, *PICKLED_DTYPES}


class TensorHeader(NamedTuple):
    """A tensor as a pickle describes it; its elements are elsewhere.

    Attributes:
        dtype: None: none that is known.
        key: of the storage.
        offset, strides: in elements of the storage.
    """

    dtype: torch.dtype | None
    key: str
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def needed_bytes(self, dtype: torch.dtype) -> int:
        """Bytes from the storage's first to the last of the tensor, of which no size is 0."""
        last = sum((n - 1) * stride for n, stride in zip(self.sizes, self.strides, strict=True))
        return (1 + self.offset + last) * dtype.itemsize


class SavedTensor(NamedTuple):
    """The place of a tensor's elements.

    Attributes:
        at: byte of the file at which the first element is.
        strides: in elements.
    """

    at: int
    dtype: torch.dtype
    strides: tuple[int, ...]

    def read(self, fd: int, part: list[tuple[int, int]]) -> Tensor:
        """The part from `start` to `stop` in each dim, not empty; only bytes from its first to its last element."""
        first = sum(start * stride for (start, _), stride in zip(part, self.strides, strict=True))
        last = sum((stop - 1) * stride for (_, stop), stride in zip(part, self.strides, strict=True))
        n_bytes = (last + 1 - first) * self.dtype.itemsize
        data = torch.frombuffer(read_bytes(fd, self.at + first * self.dtype.itemsize, n_bytes), dtype=torch.uint8)
        return data.view(self.dtype).as_strided([stop - start for start, stop in part], self.strides)


def find_tensor(fd: int, start: int, length: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> SavedTensor:
    """The tensor, of that dtype and those sizes (none of them 0), in the archive of `length` bytes at byte `start`.

    Raises:
        ValueError: damaged (the data's checksum included), or something else than such a tensor.
    """
    records = records_of(fd, start, length)
    if "archive/data.pkl" not in records or records["archive/data.pkl"].n_bytes > MAX_PICKLE_BYTES:
        raise ValueError(f"expected an archive of torch.save with data.pkl of at most {MAX_PICKLE_BYTES} bytes")
    if (order := records.get("archive/byteorder")) and order.n_bytes < 16 and order.read(fd) != b"little":
        raise ValueError("expected little-endian data")
    found = tensor_header(decode(records["archive/data.pkl"].read(fd), NAMES))
    if found.dtype != dtype or found.sizes != sizes or len(found.strides) != len(sizes):
        raise ValueError(
            f"expected {dtype} {sizes} as the metadata say, got {found.dtype} {found.sizes} with strides "
            f"{found.strides}"
        )
    data = records.get(f"archive/data/{found.key}")
    needed = found.needed_bytes(dtype)
    if data is None or data.n_bytes < needed:
        raise ValueError(f"expected {needed} bytes of data, got {data.n_bytes if data else 'none'}")
    data.check(fd)
    return SavedTensor(data.at + found.offset * dtype.itemsize, dtype, found.strides)


def tensor_header(made: Any) -> TensorHeader:
    """The tensor that torch's functions of the names V2 and V3 would make of these arguments.

    Raises:
        ValueError: it is something else.
    """
    if (
        type(made) is not PickledObject
        or made.name not in (V2, V3)
        or made.args is None
        or len(made.args) < 6 + (made.name == V3)
    ):
        raise ValueError("expected a plain tensor, got something else")
    storage, offset, sizes, strides = made.args[:4]
    if type(storage) is not PickledObject or storage.name != "persistent id" or storage.args is None:
        raise ValueError("expected a tensor with a storage")
    # The sixth is of the older format: None, or a view of another storage.
    if len(storage.args) not in (5, 6) or storage.args[5:] not in ((), (None,)):
        raise ValueError("expected a tensor with a storage")
    _, kind, key, *_ = storage.args
    named = made.args[6] if made.name == V3 else kind
    dtype = (PICKLED_DTYPES if made.name == V3 else STORAGES).get(named.name) if type(named) is PickledObject else None
    return TensorHeader(
        dtype,
        of_type(key, str, "the key of the storage"),
        natural(offset, "the storage offset"),
        naturals(sizes, "sizes"),
        naturals(strides, "strides"),
    )


class ZipEntry(NamedTuple):
    """The place of a record in a zip, and its checksum; 0 where torch was told not to compute it."""

    at: int
    n_bytes: int
    crc32: int

    def read(self, fd: int) -> bytes:
        self.check(fd)
        return bytes(read_bytes(fd, self.at, self.n_bytes))

    def check(self, fd: int) -> None:
        """Compare the checksum. Raises ValueError if the bytes are not those that were written."""
        crc32 = 0
        for at in range(self.at, self.at + self.n_bytes, READ_BYTES):
            crc32 = zlib.crc32(read_bytes(fd, at, min(READ_BYTES, self.at + self.n_bytes - at)), crc32)
        if self.crc32 not in (0, crc32):
            raise ValueError(f"damaged: the data at byte {self.at} have crc32 {crc32:08x}, expected {self.crc32:08x}")


def records_of(fd: int, start: int, length: int) -> dict[str, ZipEntry]:
    """Name -> record, of the zip of `length` bytes at byte `start`. Each lies within it, and none is compressed."""
    try:
        with zipfile.ZipFile(_Window(fd, start, length)) as archive:  # pyright: ignore[reportArgumentType]
            infos = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, struct.error) as error:
        raise ValueError(f"expected an archive of torch.save ({error})") from None
    records = {}
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
            raise ValueError(f"refused: {info.filename!a:.100} is compressed or encrypted, which torch.save never does")
        at = info.header_offset + LOCAL_HEADER.size
        if not LOCAL_HEADER.size <= at <= length:
            raise ValueError(f"{info.filename!a:.100} lies outside of the archive")
        signature, name, extra = LOCAL_HEADER.unpack(read_bytes(fd, start + info.header_offset, LOCAL_HEADER.size))
        at += name + extra
        if signature != b"PK\3\4" or at + info.file_size > length:
            raise ValueError(f"{info.filename!a:.100} lies outside of the archive")
        records[info.filename] = ZipEntry(start + at, info.file_size, info.CRC)
    return records


class _Window:
    """A file as `zipfile` needs one, of `length` bytes from byte `start` of another."""

    def __init__(self, fd: int, start: int, length: int) -> None:
        self.fd, self.start, self.length, self.at = fd, start, length, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.length}[whence]
        if at < 0:
            raise zipfile.BadZipFile("a position before the first byte")
        self.at = at
        return at

    def tell(self) -> int:
        return self.at

    def read(self, n: int = -1) -> bytes:
        left = max(0, self.length - self.at)
        n = left if n < 0 else min(n, left)
        data = read_bytes(self.fd, self.start + self.at, n)
        self.at += n
        return bytes(data)


@contextlib.contextmanager
def regular_file(path: Path, inside: str = "") -> Iterator[tuple[int, int]]:
    """Descriptor and bytes of a regular file; a link is not followed, a pipe not waited for.

    Raises:
        ValueError: no such file; and what is raised within, with the path and `inside` before it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        reason = "is a link, which is not followed" if path.is_symlink() else error.strerror
        raise ValueError(f"{path}: {reason}") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("expected a regular file")
        yield fd, status.st_size
    except ValueError as error:
        raise ValueError(f"{path}: {inside}{error}") from None
    finally:
        os.close(fd)


def read_bytes(fd: int, at: int, n: int) -> bytearray:
    """Read n bytes from byte `at`."""
    data = bytearray(n)
    left = memoryview(data)
    while left:
        got = os.preadv(fd, [left], at)
        if not got:
            raise ValueError(f"the file ends at byte {at}, {len(left)} bytes too early")
        left, at = left[got:], at + got
    return data
