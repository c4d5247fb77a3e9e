"""Reads one tensor from a torch.save archive without unpickling. The archive may start at any byte of a file.

torch.save writes a tensor as a zip archive without compression:

    archive/data.pkl   pickle: dtype, sizes, strides, and the name of the record with the elements
    archive/data/0     the elements
    archive/byteorder  "little"

The format follows `serialization.py` and `_utils.py` in torch 2.13. torch.load(weights_only=True) would not run any
code either, but it inflates compressed records (200 kB became 200 MB), ignores checksums, and always reads the whole
tensor.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtmega.files.regular import open_regular
from dtmega.interop.torch_files.inert import ORDERED, PickledObject, decode, natural, naturals, of_type

MAX_PICKLE_BYTES = 1 << 16  # torch writes about 180 bytes
READ_BYTES = 1 << 24
LOCAL_HEADER = struct.Struct("<4s22xHH")  # before each zip record: signature, then the lengths of name and extra field
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
    """A pickle's description of a tensor, without the tensor's elements.

    Attributes:
        dtype: dtype of the elements; None if the pickle names an unknown dtype.
        key: name of the storage that holds the elements.
        offset: number of elements in the storage before the tensor's first element.
        sizes: shape of the tensor.
        strides: distance between neighbours along each dim of the tensor, in elements of the storage.
    """

    dtype: torch.dtype | None
    key: str
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def needed_bytes(self, dtype: torch.dtype) -> int:
        """The number of bytes from the storage's start to the end of the last element of a non-empty tensor."""
        last = sum((n - 1) * stride for n, stride in zip(self.sizes, self.strides, strict=True))
        return (1 + self.offset + last) * dtype.itemsize


class SavedTensor(NamedTuple):
    """The position of a tensor's elements in a file.

    Attributes:
        at: byte position of the first element in the file.
        dtype: dtype of the elements.
        strides: distance between neighbours along each dim, in elements.
    """

    at: int
    dtype: torch.dtype
    strides: tuple[int, ...]

    def read(self, fd: int, part: list[tuple[int, int]]) -> Tensor:
        """Read a part of the tensor. All bytes between the part's first and last element are read.

        Args:
            fd: descriptor of the file.
            part: non-empty range (start, stop) to read in each dim.
        """
        first = sum(start * stride for (start, _), stride in zip(part, self.strides, strict=True))
        last = sum((stop - 1) * stride for (_, stop), stride in zip(part, self.strides, strict=True))
        n_bytes = (last + 1 - first) * self.dtype.itemsize
        data = torch.frombuffer(read_bytes(fd, self.at + first * self.dtype.itemsize, n_bytes), dtype=torch.uint8)
        sizes = [stop - start for start, stop in part]
        return data.view(self.dtype).as_strided(sizes, self.strides)


def find_tensor(fd: int, start: int, length: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> SavedTensor:
    """Find a tensor's elements in the archive at byte `start` of a file and verify the elements' checksum.

    Args:
        fd: descriptor of the file.
        start: first byte of the archive.
        length: number of bytes of the archive.
        dtype: expected dtype of the tensor.
        sizes: expected shape of the tensor; no size is 0.

    Raises:
        ValueError: the archive is damaged or holds anything but the expected tensor.
    """
    records = records_of(fd, start, length)
    if "archive/data.pkl" not in records or records["archive/data.pkl"].n_bytes > MAX_PICKLE_BYTES:
        raise ValueError(f"expected an archive of torch.save with data.pkl of at most {MAX_PICKLE_BYTES} bytes")
    if (order := records.get("archive/byteorder")) and order.n_bytes < 16 and order.read(fd) != b"little":
        raise ValueError("expected little-endian data")
    header = tensor_header(decode(records["archive/data.pkl"].read(fd), NAMES))
    if header.dtype != dtype or header.sizes != sizes or len(header.strides) != len(sizes):
        raise ValueError(
            f"expected {dtype} {sizes} as the metadata say, got {header.dtype} {header.sizes} with strides "
            f"{header.strides}"
        )
    data = records.get(f"archive/data/{header.key}")
    needed = header.needed_bytes(dtype)
    if data is None or data.n_bytes < needed:
        raise ValueError(f"expected {needed} bytes of data, got {data.n_bytes if data else 'none'}")
    data.check(fd)
    return SavedTensor(data.at + header.offset * dtype.itemsize, dtype, header.strides)


def tensor_header(made: Any) -> TensorHeader:
    """The header of the tensor that torch would make by a call of `_rebuild_tensor_v2` (V2) or `_v3` (V3).

    Args:
        made: decoded pickle, which should be a call to V2 or V3.

    Raises:
        ValueError: `made` is not a call to V2 or V3, or does not describe a tensor with a storage.
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
    # Only torch.save's older format has a sixth argument: None, or a view of another storage, which is refused.
    if len(storage.args) not in (5, 6) or storage.args[5:] not in ((), (None,)):
        raise ValueError("expected a tensor with a storage")
    _, kind, key, *_ = storage.args
    # V3 names the dtype in a separate argument; for V2, the storage's class implies the dtype.
    dtype_name, known_dtypes = (made.args[6], PICKLED_DTYPES) if made.name == V3 else (kind, STORAGES)
    dtype = known_dtypes.get(dtype_name.name) if type(dtype_name) is PickledObject else None
    return TensorHeader(
        dtype,
        of_type(key, str, "the key of the storage"),
        natural(offset, "the storage offset"),
        naturals(sizes, "sizes"),
        naturals(strides, "strides"),
    )


class ZipEntry(NamedTuple):
    """One record in a zip archive.

    Attributes:
        at: byte position of the record's content in the file.
        n_bytes: length of the content.
        crc32: checksum of the content; 0 if the file was saved without checksums.
    """

    at: int
    n_bytes: int
    crc32: int

    def read(self, fd: int) -> bytes:
        self.check(fd)
        return bytes(read_bytes(fd, self.at, self.n_bytes))

    def check(self, fd: int) -> None:
        """Compare the content with the checksum.

        Raises:
            ValueError: the content does not match the checksum.
        """
        crc32 = 0
        for at in range(self.at, self.at + self.n_bytes, READ_BYTES):
            crc32 = zlib.crc32(read_bytes(fd, at, min(READ_BYTES, self.at + self.n_bytes - at)), crc32)
        if self.crc32 not in (0, crc32):
            raise ValueError(f"damaged: the data at byte {self.at} have crc32 {crc32:08x}, expected {self.crc32:08x}")


def records_of(fd: int, start: int, length: int) -> dict[str, ZipEntry]:
    """List the records of a zip archive, keyed by name. The archive is the range of `length` bytes from byte `start`.

    Raises:
        ValueError: the bytes are not a zip archive, or a record is compressed, encrypted or not inside the archive.
    """
    try:
        with zipfile.ZipFile(_Window(fd, start, length)) as archive:  # pyright: ignore[reportArgumentType]
            infos = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, struct.error) as error:
        raise ValueError(f"expected an archive of torch.save ({error})") from None
    # zipfile gives only the position of each record's header. A name and an extra field follow the header; torch uses
    # the extra field as padding that aligns the content. Read the lengths of both fields from the header, because the
    # lengths in the zip's directory may differ.
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
    """A file object for `zipfile`: the `length` bytes of another file that begin at byte `start`."""

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
        remaining = max(0, self.length - self.at)
        n = remaining if n < 0 else min(n, remaining)
        data = read_bytes(self.fd, self.start + self.at, n)
        self.at += n
        return bytes(data)


@contextlib.contextmanager
def regular_file(path: Path, inside: str = "") -> Iterator[tuple[int, int]]:
    """Open a regular file. Yield the descriptor and the length of the file in bytes.

    Links are not followed, and a pipe raises an error instead of blocking.

    Args:
        path: path of the file.
        inside: position inside the file; error messages show the position after the path.

    Raises:
        ValueError: the path does not lead to a regular file. A ValueError from the body of the `with` block is raised
            again, with the path and `inside` in front of the message.
    """
    try:
        file = open_regular(path, follow=False)
    except OSError as error:
        reason = "is a link, which is not followed" if path.is_symlink() else error.strerror
        raise ValueError(f"{path}: {reason}") from None
    try:
        with file:
            yield file.fileno(), os.fstat(file.fileno()).st_size
    except ValueError as error:
        raise ValueError(f"{path}: {inside}{error}") from None


def read_bytes(fd: int, at: int, n: int) -> bytearray:
    """Read n bytes from byte `at`.

    Raises:
        ValueError: the file is too short.
    """
    data = bytearray(n)
    unread = memoryview(data)
    # The kernel may return fewer bytes than requested and returns at most 2 GiB at a time.
    while unread:
        got = os.preadv(fd, [unread], at)
        if not got:
            raise ValueError(f"the file ends at byte {at}, {len(unread)} bytes too early")
        unread, at = unread[got:], at + got
    return data
