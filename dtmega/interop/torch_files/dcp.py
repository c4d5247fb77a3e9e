"""Reads torch.distributed.checkpoint (DCP) folders made by other people, without running any code in the folders.

    .metadata           pickle: name -> dtype, shape and chunks; (name, offsets) -> file, first byte, length
    __RANK_N.distcp     items, one after another: tensor chunks (archives made by torch.save) and byte entries

DCP itself unpickles `.metadata` and byte entries, so opening a stranger's folder runs the stranger's code. This module
unpickles nothing (see inert.py), reads tensor data in place (see torch_save.py), and never opens byte entries. Every
size is compared with the files before memory is allocated. The format follows
`distributed/checkpoint/{metadata,filesystem}.py` in torch 2.13; the names that torch 2.0 to 2.2 used are supported too.
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
from dtmega.interop.torch_files.inert import PickledObject, decode, fields, kind_name, natural, naturals, of_type
from dtmega.interop.torch_files.torch_save import PICKLED_DTYPES, SavedTensor, find_tensor, read_bytes, regular_file

MAX_METADATA_BYTES = 1 << 30  # enough for 7 million chunks, at about 150 bytes per chunk
FILE_NAME = re.compile(r"__[0-9]{1,9}_[0-9]{1,9}\.distcp")

METADATA = "torch.distributed.checkpoint.metadata"
STORAGE_INFO = "torch.distributed.checkpoint.filesystem _StorageInfo"
OLD = "torch.distributed._shard.sharded_tensor.metadata"  # the module of TensorProperties before torch 2.3
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
    # megatron-core keeps the plans of its last save in the metadata.
    *(f"torch.distributed.checkpoint.planner {name}" for name in ("SavePlan", "WriteItem", "WriteItemType")),
    "torch.distributed.checkpoint.planner TensorWriteData",
    "builtins getattr",  # Python 3.11.2 (Debian 12) pickles Enum members as getattr calls, which are never run
}


class DCPFolder:
    """The tensors of a DCP folder, as a `Source`.

    Attributes:
        path: path of the folder.
        tensors: dtype and full shape of each tensor, keyed by tensor name.
        others: names of byte entries (numbers, strings, objects), which are listed but never opened.

    Raises:
        ValueError: the folder is not a DCP folder, is damaged, or is malicious. The message names the file and the
            fault. `read` raises this error too, for faults that only the data files reveal.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self.others: list[str] = []
        self._chunks: dict[str, list[_Chunk]] = {}
        self._checked: dict[_Item, SavedTensor] = {}  # opened chunks, whose checksums were correct
        file = self.path / ".metadata"
        with regular_file(file) as (fd, n_bytes):
            if n_bytes > MAX_METADATA_BYTES:
                raise ValueError(f"expected at most {MAX_METADATA_BYTES} bytes, got {n_bytes}")
            metadata = fields(decode(bytes(read_bytes(fd, 0, n_bytes)), NAMES), f"{METADATA} Metadata")
            items = _items(of_type(metadata.get("storage_data"), dict, "storage_data"))
            self._add_entries(of_type(metadata.get("state_dict_metadata"), dict, "state_dict_metadata"), items, n_bytes)
        self._check_files(sorted(items.values()))

    def _add_entries(self, entries: dict[Any, Any], items: _Items, n_bytes: int) -> None:
        """Add the tensors and the byte entries that the metadata lists.

        Args:
            entries: entries of the metadata, keyed by name.
            items: positions of all items in the folder.
            n_bytes: size of the metadata file, in bytes.
        """
        n_chunks = 0
        for name, entry in entries.items():
            if not of_type(name, str, "a name").isprintable():
                raise ValueError(f"expected printable names, got {name!a:.200}")
            if type(entry) is PickledObject and entry.name == f"{METADATA} BytesStorageMetadata":
                self.others.append(name)
                continue
            tensor = fields(entry, f"{METADATA} TensorStorageMetadata")
            n_chunks += len(of_type(tensor.get("chunks"), list, f"the chunks of '{name}'"))
            # A small pickle can store one long list of chunks under many names. Checking all lists would take forever.
            if n_chunks > n_bytes:
                raise ValueError(f"more chunks than the file has bytes ({n_bytes})")
            dtype, shape, self._chunks[name] = _tensor(name, tensor, items)
            self.tensors[name] = dtype, shape

    def _check_files(self, items: list[_Item]) -> None:
        """Check that each item is inside its file and that no two items overlap.

        The check ensures that all tensors together are no larger than the files, so a small folder cannot demand much
        memory.

        Args:
            items: positions of all items, sorted by file and first byte.

        Raises:
            ValueError: an item overlaps another item or ends beyond the end of its file.
        """
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
        """Read a part of a tensor into host memory. Only chunks that overlap the part are opened.

        Args:
            index: slices without steps, for the first dims or for all dims; the remaining dims are read whole. If
                None, the whole tensor is read.
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
            # The intersection of the requested part and the chunk, as a box in the tensor, in `out`, and in the chunk.
            in_tensor: list[tuple[int, int]] = []
            for start, stop, offset, size in zip(starts, stops, chunk.offsets, chunk.sizes, strict=True):
                in_tensor.append((max(start, offset), min(stop, offset + size)))
            if any(low >= high for low, high in in_tensor):
                continue
            in_out = tuple(
                slice(low - start, high - start) for (low, high), start in zip(in_tensor, starts, strict=True)
            )
            in_chunk = [(low - o, high - o) for (low, high), o in zip(in_tensor, chunk.offsets, strict=True)]
            out[in_out] = self._read_chunk(name, chunk, dtype, in_chunk)
        return out

    def _read_chunk(self, name: str, chunk: _Chunk, dtype: torch.dtype, part: list[tuple[int, int]]) -> Tensor:
        """Read a part of a chunk.

        Args:
            name: name of the tensor, for messages.
            part: range (start, stop) to read in each dim, counted from the chunk's first element.
        """
        file, start, length = chunk.item
        with regular_file(self.path / file, f"'{name}' at byte {start}: ") as (fd, _):
            if chunk.item not in self._checked:
                self._checked[chunk.item] = find_tensor(fd, start, length, dtype, chunk.sizes)
            return self._checked[chunk.item].read(fd, part)


class _Item(NamedTuple):
    """The byte range of one chunk's archive, or of one byte entry."""

    file: str
    start: int
    length: int


class _Chunk(NamedTuple):
    """A non-empty box of a tensor, stored as one item."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: _Item


_Items = dict[tuple[str, "tuple[int, ...] | None"], _Item]  # key: name and offsets; a byte entry has None as offsets


def _items(storage_data: dict[Any, Any]) -> _Items:
    """Decode the positions of all items from the metadata's `storage_data`."""
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
        start = natural(info.get("offset"), f"the offset of {name!a:.200}")
        length = natural(info.get("length"), f"the length of {name!a:.200}")
        items[name, offsets] = _Item(file, start, length)
    return items


def _tensor(name: str, tensor: dict[str, Any], items: _Items) -> tuple[torch.dtype, tuple[int, ...], list[_Chunk]]:
    """The dtype, shape and chunks of a tensor. The chunks cover each element of the tensor exactly once.

    Args:
        tensor: fields of the tensor's TensorStorageMetadata.
        items: positions of all items in the folder.

    Raises:
        ValueError: the metadata is damaged or malicious.
    """
    dtype = _dtype(name, tensor.get("properties"))
    shape = naturals(tensor.get("size"), f"the size of '{name}'")
    # Leave sizes of 0 out of the product, because the strides of an empty tensor must be below 2^63 too.
    if math.prod(n for n in shape if n) * dtype.itemsize >= 1 << 63:
        raise ValueError(f"expected less than 2^63 bytes for '{name}' of shape {shape}")
    chunks = []
    for offsets, sizes in sorted(_boxes(name, shape, tensor["chunks"])):
        item, n_bytes = items.get((name, offsets)), math.prod(sizes) * dtype.itemsize
        if item is None or item.length <= n_bytes:
            raise ValueError(
                f"expected more than {n_bytes} bytes for the chunk {sizes} of '{name}' at {offsets}, its data in an "
                f"archive, got {item.length if item else 'no'} bytes (SerializationFormat.SAFETENSORS is not read here)"
            )
        chunks.append(_Chunk(offsets, sizes, item))
    if 0 not in shape:
        try:
            is_covered = cover(shape, [(chunk.offsets, chunk.sizes) for chunk in chunks])
        except ValueError as error:
            raise ValueError(f"'{name}': {error}") from None
        if not is_covered:
            raise ValueError(f"the chunks of '{name}' do not cover its shape {shape} exactly once")
    return dtype, shape, chunks


def _dtype(name: str, properties: Any) -> torch.dtype:
    """The dtype of the tensor `name`: the first field in the state of the tensor's TensorProperties."""
    if type(properties) is not PickledObject or properties.name not in PROPERTIES:
        raise ValueError(f"expected the properties of '{name}' to be TensorProperties, got {kind_name(properties)}")
    dtype, *_ = of_type(properties.state, tuple, f"the state of the properties of '{name}'") or (None,)
    dtype = PICKLED_DTYPES.get(dtype.name) if type(dtype) is PickledObject else None
    if dtype is None:
        raise ValueError(f"expected the first property of '{name}' to be a dtype")
    return dtype


def _boxes(name: str, shape: tuple[int, ...], chunks: list[Any]) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The offsets and sizes of all non-empty chunks of the tensor `name`."""
    boxes: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for chunk in chunks:
        box = fields(chunk, f"{METADATA} ChunkStorageMetadata")
        offsets = naturals(box.get("offsets"), f"offsets of a chunk of '{name}'")
        sizes = naturals(box.get("sizes"), f"sizes of a chunk of '{name}'")
        if not len(offsets) == len(sizes) == len(shape):
            raise ValueError(f"'{name}' of shape {shape} has a chunk {sizes} at {offsets}")
        # Leave out empty chunks: a rank that holds no elements of a tensor writes an empty chunk.
        if 0 not in sizes:
            boxes.add((offsets, sizes))
    return boxes
