"""Other people's torch.distributed.checkpoint (DCP) folders, read without running anything that is in them.

    .metadata           pickle: name -> dtype, shape and chunks; (name, offsets) -> file, first byte, length
    __RANK_N.distcp     items one after the other; the item of a tensor's chunk is an archive made by torch.save

DCP itself unpickles `.metadata` and byte entries, so a stranger's folder runs the stranger's code. Here nothing is
unpickled (inert.py), the data of a tensor are read in place (torch_save.py), and byte entries are never opened. Every
size is held against the files before memory is taken for it. Format: `distributed/checkpoint/{metadata,filesystem}.py`
of torch 2.13; the names that torch 2.0 to 2.2 used are known too.
"""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtmega.checkpoint.cover import cover
from dtmega.foreign.inert import PickledObject, decode, fields, kind_name, natural, naturals, of_type
from dtmega.foreign.torch_save import PICKLED_DTYPES, SavedTensor, find_tensor, read_bytes, regular_file

MAX_METADATA_BYTES = 1 << 30  # about 150 bytes a chunk: 7 million chunks
FILE_NAME = re.compile(r"__[0-9]{1,9}_[0-9]{1,9}\.distcp")

METADATA = "torch.distributed.checkpoint.metadata"
STORAGE_INFO = "torch.distributed.checkpoint.filesystem _StorageInfo"
OLD = "torch.distributed._shard.sharded_tensor.metadata"  # of TensorProperties, before torch 2.3
PROPERTIES = (f"{METADATA} TensorProperties", f"{OLD} TensorProperties")
_CLASSES = (
    "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata MetadataIndex StorageMeta "
    "_MEM_FORMAT_ENCODING"
)
NAMES = {
    *(f"{METADATA} {name}" for name in _CLASSES.split()),
    *(*PROPERTIES, STORAGE_INFO, f"{OLD} MEM_FORMAT_ENCODING"),
    *("torch Size", "torch.serialization _get_layout", *PICKLED_DTYPES),
    *("pathlib PosixPath", "pathlib WindowsPath", "pathlib._local PosixPath", "pathlib._local WindowsPath"),
    # Of megatron-core, which keeps the plans of its last save there.
    *(f"torch.distributed.checkpoint.planner {name}" for name in ("SavePlan", "WriteItem", "WriteItemType")),
    "torch.distributed.checkpoint.planner TensorWriteData",
    "builtins getattr",  # how Python 3.11.2, Debian 12's, pickles a member of an Enum; inert like every name
}


class DCPFolder:
    """The tensors of a DCP folder: a `Source`.

    Attributes:
        tensors: name -> dtype and whole shape.
        others: names of byte entries (numbers, strings, objects): listed, never opened.

    Raises:
        ValueError: not a DCP folder, a damaged or a malicious one: names the file and what is wrong with it. `read`
            raises it too, for what only the data files say.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self.others: list[str] = []
        self._chunks: dict[str, list[_Chunk]] = {}
        self._found: dict[_Item, SavedTensor] = {}  # what was looked at, and its checksum compared
        file = self.path / ".metadata"
        with regular_file(file) as (fd, n_bytes):
            if n_bytes > MAX_METADATA_BYTES:
                raise ValueError(f"expected at most {MAX_METADATA_BYTES} bytes, got {n_bytes}")
            metadata = fields(decode(bytes(read_bytes(fd, 0, n_bytes)), NAMES), f"{METADATA} Metadata")
            items = _items(of_type(metadata.get("storage_data"), dict, "storage_data"))
            self._add_entries(of_type(metadata.get("state_dict_metadata"), dict, "state_dict_metadata"), items, n_bytes)
        self._check_files(sorted(items.values()))

    def _add_entries(self, entries: dict[Any, Any], items: _Items, n_bytes: int) -> None:
        n_chunks = 0
        for name, entry in entries.items():
            if not of_type(name, str, "a name").isprintable():
                raise ValueError(f"expected printable names, got {name!a:.200}")
            if type(entry) is PickledObject and entry.name == f"{METADATA} BytesStorageMetadata":
                self.others.append(name)
                continue
            there = fields(entry, f"{METADATA} TensorStorageMetadata")
            n_chunks += len(of_type(there.get("chunks"), list, f"the chunks of '{name}'"))
            if n_chunks > n_bytes:  # one list under many names would be work without end
                raise ValueError(f"more chunks than the file has bytes ({n_bytes})")
            dtype, shape, self._chunks[name] = _tensor(name, there, items)
            self.tensors[name] = dtype, shape

    def _check_files(self, items: list[_Item]) -> None:
        """Each item is inside its file and no two overlap: all tensors together are no larger than the files."""
        for file, group in itertools.groupby(items, key=lambda item: item.file):
            with regular_file(self.path / file) as (_, n_bytes):
                end = 0
                for item in group:
                    if item.start < end or item.start + item.length > n_bytes:
                        raise ValueError(
                            f"expected an item between byte {end}, where the one before it ends, and {n_bytes}, where "
                            f"the file ends, got {item.start} to {item.start + item.length}"
                        )
                    end = item.start + item.length

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        """Read a part (None: all) of a tensor, in host memory. Only chunks that hold some of it are opened.

        Args:
            index: a slice without step per dim; dims that are not given are whole.
        """
        if name not in self.tensors:
            raise ValueError(f"{self.path} has no tensor '{name}'")
        dtype, shape = self.tensors[name]
        index = index or ()
        assert len(index) <= len(shape)
        assert all(s.step in (None, 1) for s in index)
        index += (slice(None),) * (len(shape) - len(index))
        starts = [s.indices(n)[0] for s, n in zip(index, shape, strict=True)]
        stops = [max(s.indices(n)[1], start) for s, n, start in zip(index, shape, starts, strict=True)]
        out = torch.empty([stop - start for start, stop in zip(starts, stops, strict=True)], dtype=dtype)
        for chunk in self._chunks[name]:
            dims = list(zip(starts, stops, chunk.offsets, chunk.sizes, strict=True))
            common = [(max(start, o), min(stop, o + n)) for start, stop, o, n in dims]
            if all(low < high for low, high in common):
                here = tuple(
                    slice(low - start, high - start) for (low, high), start in zip(common, starts, strict=True)
                )
                there = [(low - o, high - o) for (low, high), o in zip(common, chunk.offsets, strict=True)]
                out[here] = self._read_chunk(name, chunk, dtype, there)
        return out

    def _read_chunk(self, name: str, chunk: _Chunk, dtype: torch.dtype, part: list[tuple[int, int]]) -> Tensor:
        file, start, length = chunk.item
        with regular_file(self.path / file, f"'{name}' at byte {start}: ") as (fd, _):
            if chunk.item not in self._found:
                self._found[chunk.item] = find_tensor(fd, start, length, dtype, chunk.sizes)
            return self._found[chunk.item].read(fd, part)


class _Item(NamedTuple):
    """The place of a chunk's archive, or of a byte entry."""

    file: str
    start: int
    length: int


class _Chunk(NamedTuple):
    """A box of a tensor; none of its sizes is 0."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: _Item


_Items = dict[tuple[str, "tuple[int, ...] | None"], _Item]  # by name and offsets; these are None for byte entries


def _items(storage_data: dict[Any, Any]) -> _Items:
    items: _Items = {}
    for key, value in storage_data.items():
        index, info = fields(key, f"{METADATA} MetadataIndex"), fields(value, STORAGE_INFO)
        name, file = of_type(index.get("fqn"), str, "fqn"), of_type(info.get("relative_path"), str, "relative_path")
        if not FILE_NAME.fullmatch(file):
            raise ValueError(f"expected the bare name of a data file, __RANK_N.distcp, got {file!a:.200}")
        if info.get("transform_descriptors"):
            raise ValueError(f"{name!a:.200} went through a stream transform (compression?), which is not read here")
        offsets = index.get("offset")
        offsets = None if offsets is None else naturals(offsets, f"the offsets of {name!a:.200}")
        if (name, offsets) in items:
            raise ValueError(f"two items for {name!a:.200} at {offsets}")
        start, length = (natural(info.get(field), f"the {field} of {name!a:.200}") for field in ("offset", "length"))
        items[name, offsets] = _Item(file, start, length)
    return items


def _tensor(name: str, there: dict[str, Any], items: _Items) -> tuple[torch.dtype, tuple[int, ...], list[_Chunk]]:
    """dtype, shape and chunks; the chunks cover each element of the tensor exactly once."""
    properties = there.get("properties")
    if type(properties) is not PickledObject or properties.name not in PROPERTIES:
        raise ValueError(f"expected the properties of '{name}' to be TensorProperties, got {kind_name(properties)}")
    dtype, *_ = of_type(properties.state, tuple, f"the state of the properties of '{name}'") or (None,)
    dtype = PICKLED_DTYPES.get(dtype.name) if type(dtype) is PickledObject else None
    if dtype is None:
        raise ValueError(f"expected the first property of '{name}' to be a dtype")
    shape = naturals(there.get("size"), f"the size of '{name}'")
    if math.prod(n for n in shape if n) * dtype.itemsize >= 1 << 63:  # an empty tensor's strides have to be numbers too
        raise ValueError(f"expected less than 2^63 bytes for '{name}' of shape {shape}")
    boxes: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for chunk in there["chunks"]:
        box = fields(chunk, f"{METADATA} ChunkStorageMetadata")
        offsets, sizes = (naturals(box.get(field), f"{field} of a chunk of '{name}'") for field in ("offsets", "sizes"))
        if not len(offsets) == len(sizes) == len(shape):
            raise ValueError(f"'{name}' of shape {shape} has a chunk {sizes} at {offsets}")
        if 0 not in sizes:  # ranks that hold nothing of a tensor write empty chunks
            boxes.add((offsets, sizes))
    chunks = []
    for offsets, sizes in sorted(boxes):
        item, n_bytes = items.get((name, offsets)), math.prod(sizes) * dtype.itemsize
        if item is None or item.length <= n_bytes:
            raise ValueError(
                f"expected more than {n_bytes} bytes for the chunk {sizes} of '{name}' at {offsets}, its data in an "
                f"archive, got {item.length if item else 'no'} bytes (SerializationFormat.SAFETENSORS is not read here)"
            )
        chunks.append(_Chunk(offsets, sizes, item))
    if 0 not in shape:
        try:
            whole = cover(shape, [(chunk.offsets, chunk.sizes) for chunk in chunks])
        except ValueError as error:
            raise ValueError(f"'{name}': {error}") from None
        if not whole:
            raise ValueError(f"the chunks of '{name}' do not cover its shape {shape} exactly once")
    return dtype, shape, chunks
