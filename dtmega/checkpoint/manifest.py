"""The description of a checkpoint, `manifest.json`: written last and verified before anything else is read.

    {"content": {"format": 2, "step": 100, "state": {...}, "files": {name: bytes}, "block_bytes": 16384,
                 "tensors": {...}}, "xxh3": "..."}

Tensors are raw little-endian bytes in `data-00000.bin`, ... (in an object store, `data-00000-ATTEMPT.bin`). Each chunk
of a tensor has one digest per block, so a rank that needs only some rows reads and verifies little more than those
rows. A digest detects damage; it is not a signature. `parse` checks that each value has the right type, that each chunk
lies within its file, and that sizes are plausible, so a reader may rely on the sizes when allocating memory.

Checkpoints of format 1, in which all blocks have MOST_BLOCK_BYTES, can also be read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from dtmega.checkpoint.cover import cover
from dtmega.distributed import exit_codes
from dtmega.files.untrusted_json import parse_object

FORMAT = 2
FIRST_FORMAT = 1
NAME = "manifest.json"
LEAST_BLOCK_BYTES = 16 * 2**10
MOST_BLOCK_BYTES = 4 * 2**20
N_BLOCKS = 2**18  # larger checkpoints get larger blocks instead of more blocks, so that the digests take about 9 MB
MAX_BYTES = 2**30  # maximum size of a manifest; the manifest of BLOOM-176B has 20 MB, including the digests
MAX_DIMS = 16
MAX_COUNT = 2**60  # above any real size, and small enough for torch's 64-bit arithmetic
DATA_FILE = re.compile(r"data-\d{5}(-[0-9a-f]{32})?\.bin")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


class Damaged(ValueError):
    """Raised if a checkpoint's content differs from the saved content. The message names the file, entry and reason.

    An older checkpoint of the run may be intact.
    """

    exit_code = exit_codes.DAMAGED


class OtherFormat(ValueError):
    """Raised if a checkpoint is intact but has another dtmega version's format."""


@dataclass(frozen=True)
class StoredChunk:
    """A slice of a tensor (a "box"), and the location of its bytes.

    Attributes:
        offsets: position of the box within the tensor, one number per dim.
        sizes: size of the box, one number per dim.
        file: name of the data file that holds the box's elements, row by row.
        start: offset of these elements in the file, in bytes.
        digests: xxh3-128 digests in hex, one for each block; the last block may be shorter.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    digests: tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """A whole tensor, stored as chunks that together hold each element exactly once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint, except for the bytes of its tensors.

    Attributes:
        step: number of the optimizer step after which the checkpoint was saved.
        state: JSON object from the program that saved the checkpoint; for a training run, the content of `state.State`.
        files: name of each data file -> size in bytes.
        tensors: name of each tensor in the checkpoint, such as `model/NAME` -> entry of the tensor.
        block_bytes: size in bytes of a block; each block has its own digest.
    """

    step: int
    state: dict[str, Any]
    files: dict[str, int]
    tensors: dict[str, Entry]
    block_bytes: int


def digest(data: Any) -> str:
    """The xxh3-128 digest of bytes, in hex."""
    return xxhash.xxh3_128_hexdigest(data)


def block_bytes_for(n_bytes: int) -> int:
    """The smallest block size for which tensors of `n_bytes` in total have N_BLOCKS blocks or fewer.

    The size is at most MOST_BLOCK_BYTES. A rank that reads some rows of a chunk reads whole blocks. If more ranks load
    a checkpoint than saved it, a block may contain rows of two ranks, and both ranks read the block. Blocks must
    therefore be small compared with a rank's shard of a matrix.
    """
    size = LEAST_BLOCK_BYTES
    while size < MOST_BLOCK_BYTES and size * N_BLOCKS < n_bytes:
        size *= 2
    return size


def block_digests(data: memoryview, block_bytes: int) -> tuple[str, ...]:
    """The digests of contiguous bytes, one per block."""
    # A checkpoint has hundreds of thousands of blocks, so the loop calls nothing but xxhash.
    return tuple([xxhash.xxh3_128_hexdigest(data[i : i + block_bytes]) for i in range(0, len(data), block_bytes)])


def dump(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`: the content, followed by the content's digest."""
    tensors = {}
    for name, entry in manifest.tensors.items():
        tensors[name] = {
            "dtype": str(entry.dtype).removeprefix("torch."),
            "shape": entry.shape,
            "chunks": [[c.offsets, c.sizes, c.file, c.start, c.digests] for c in entry.chunks],
        }
    content = {
        "format": FORMAT,
        "step": manifest.step,
        "state": manifest.state,
        "files": manifest.files,
        "block_bytes": manifest.block_bytes,
        "tensors": tensors,
    }
    # NaN is refused: JSON has no NaN, and strict readers in other languages must be able to read the file.
    body = b'{"content":' + json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    return body + _tail(body)


def _tail(body: bytes) -> bytes:
    return b',"xxh3":"' + digest(body).encode() + b'"}\n'


def parse(raw: bytes, sizes: dict[str, int]) -> Manifest:
    """Parse the bytes of a `manifest.json` and check the result against the data files in the same folder.

    Args:
        raw: content of the file.
        sizes: size in bytes of each file in the folder.

    Raises:
        Damaged: `dump` did not write these bytes, a data file is missing or has a different size, or two chunks share
            bytes.
        OtherFormat: a different version of dtmega wrote the manifest.
    """
    # Digests have a fixed length, so `_tail` returns as many bytes for an empty body as for any other body.
    body = raw[: -len(_tail(b""))]
    if raw != body + _tail(body):
        raise Damaged(f"{NAME}: its digest does not match its content")
    try:
        content = parse_object(body[len(b'{"content":') :], NAME)
        if content["format"] not in (FIRST_FORMAT, FORMAT):
            raise OtherFormat(
                f"a checkpoint of format {content['format']!r:.40}; this dtmega reads {FIRST_FORMAT} and {FORMAT}"
            )
        manifest = Manifest(
            _count(content["step"]),
            _typed(content["state"], dict),
            {_file_name(name): _count(size) for name, size in _typed(content["files"], dict).items()},
            {_tensor_name(name): _entry(entry) for name, entry in _typed(content["tensors"], dict).items()},
            MOST_BLOCK_BYTES if content["format"] == FIRST_FORMAT else _block_bytes(content["block_bytes"]),
        )
        _check_places(manifest)
    except (OtherFormat, Damaged):
        raise
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, RecursionError) as error:
        raise Damaged(f"{NAME}: {type(error).__name__}: {error}") from None
    for name, size in manifest.files.items():
        if name not in sizes:
            raise Damaged(f"{name} is missing")
        if sizes[name] != size:
            raise Damaged(f"{name} has {sizes[name]} bytes, expected {size}")
    return manifest


def _entry(entry: dict[str, Any]) -> Entry:
    shape = _counts(entry["shape"])
    if math.prod(max(n, 1) for n in shape) >= MAX_COUNT:
        raise TypeError(f"expected a shape, got {list(shape)}")
    chunks = tuple(
        StoredChunk(_counts(offsets), _counts(sizes), _file_name(file), _count(start), tuple(_typed(digests, list)))
        for offsets, sizes, file, start, digests in entry["chunks"]
    )
    return Entry(DTYPES[entry["dtype"]], shape, chunks)


def _check_places(manifest: Manifest) -> None:
    """Check that the chunks cover each tensor exactly once, and that no two chunks share bytes.

    Raises:
        Damaged: a chunk lies outside its tensor or its file, the chunks of a tensor leave a gap or overlap, or two
            chunks share bytes.
    """
    used: dict[str, list[tuple[int, int]]] = {name: [] for name in manifest.files}
    for name, entry in manifest.tensors.items():
        for chunk in entry.chunks:
            n_bytes = math.prod(chunk.sizes) * entry.dtype.itemsize
            n_blocks = -(-n_bytes // manifest.block_bytes)
            if not _fits(chunk, entry.shape) or chunk.file not in used or len(chunk.digests) != n_blocks:
                raise Damaged(
                    f"{NAME}: '{name}' has a chunk {chunk.offsets} + {chunk.sizes} that does not fit {entry.shape}"
                )
            used[chunk.file].append((chunk.start, chunk.start + n_bytes))
        boxes = [(chunk.offsets, chunk.sizes) for chunk in entry.chunks if 0 not in chunk.sizes]
        if 0 not in entry.shape and not cover(entry.shape, boxes):
            raise Damaged(f"{NAME}: the chunks of '{name}' do not make {list(entry.shape)}")

    for file, ranges in used.items():
        end = 0
        for start, stop in sorted(ranges):
            if start < end:
                raise Damaged(f"{NAME}: two entries share bytes {start} to {end} of {file}")
            end = stop
        if end > manifest.files[file]:
            raise Damaged(f"{NAME}: an entry ends at byte {end} of {file}, which has {manifest.files[file]}")


def _fits(chunk: StoredChunk, shape: Sequence[int]) -> bool:
    """Return True if a chunk lies within a tensor of this shape."""
    if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
        return False
    ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
    return all(end <= n for end, n in zip(ends, shape, strict=True))


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {str(value)[:40]!r}")
    return value


def _count(value: Any) -> int:
    if not 0 <= _typed(value, int) < MAX_COUNT:
        raise TypeError(f"expected a count, got {value}")
    return value


def _block_bytes(value: Any) -> int:
    if not 0 < _count(value) <= MOST_BLOCK_BYTES:
        raise TypeError(f"expected the size of a block, got {value}")
    return value


def _counts(values: Any) -> tuple[int, ...]:
    if len(_typed(values, list)) > MAX_DIMS:
        raise TypeError(f"expected at most {MAX_DIMS} dims, got {len(values)}")
    return tuple(_count(value) for value in values)


def _tensor_name(value: Any) -> str:
    if not _typed(value, str).isprintable():
        raise TypeError(f"expected a printable name, got {value!a:.200}")
    return value


def _file_name(value: Any) -> str:
    if not DATA_FILE.fullmatch(_typed(value, str)):
        raise TypeError(f"expected a name like data-00000.bin, got {value[:40]!r}")
    return value
