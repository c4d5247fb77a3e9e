"""Read files written by `torch.save`: decode the pickle as data, without running it, and read tensors when needed.

    file = SavedFile(path)
    file.value                          numbers, strings, lists and dicts; a `PickledObject` for any other object
    file.read(file.tensor(pickled))     one tensor, read immediately

There are two formats. Since torch 1.6, a file is an uncompressed zip that contains NAME/data.pkl and one NAME/data/KEY
per storage. An older file is a sequence of pickles (a magic number, a version, the machine, the value, the storage
keys), followed by the storages. Each storage consists of an 8-byte element count and the elements.

This module lists the classes that checkpoints from Megatron-LM, megatron-core and Megatron-DeepSpeed contain besides
tensors. A pickle that refers to any other class is refused. Source: `serialization.py` of torch 1.5 and 2.13.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Iterable
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtmega.interop.torch_files import torch_save
from dtmega.interop.torch_files.inert import PickledObject, decode, items_of, kind_name, of_type
from dtmega.interop.torch_files.torch_save import (
    SavedTensor,
    ZipEntry,
    read_bytes,
    records_of,
    regular_file,
    tensor_header,
)

# The names, arguments and random states of 500 ranks take about 5 MB. Decoding a pickle may need 70 times as much
# memory as the pickle itself.
MAX_PICKLE_BYTES = 1 << 24
ZIP = b"PK\3\4"
MAGIC = 0x1950A86A20F9469CFC6C
VERSION = 1001
LENGTH = struct.Struct("<q")  # number of elements of a storage in the older format

FROM_TYPE = "torch._tensor _rebuild_from_type_v2"  # (function, type, arguments, state): a tensor with attributes
PARAMETERS = ("torch._utils _rebuild_parameter", "torch._utils _rebuild_parameter_with_state")  # (tensor, ...)
NAMESPACE = "argparse Namespace"
# Enum classes that occur in a run's arguments: class -> stored number -> name of the member.
MEMBERS: dict[str, dict[Any, str]] = {
    "PositionEmbeddingType": {1: "rotary", 2: "absolute", 3: "alibi"},
    "ModelType": {1: "encoder_or_decoder", 2: "encoder_and_decoder"},
}
ENUMS = {
    *(f"megatron.enums {name}" for name in ("PositionEmbeddingType", "AttnMaskType", "AttnType", "LayerType")),
    *(f"megatron.model.enums {name}" for name in ("ModelType", "AttnMaskType", "AttnType", "LayerType")),
    *("megatron.core.enums ModelType", "megatron.core.transformer.enums AttnBackend"),
    *("megatron.core.transformer.enums AttnMaskType", "megatron.core.transformer.enums AttnType"),
}
# All classes and functions that a checkpoint's pickles may refer to.
NAMES = {
    *(*torch_save.NAMES, NAMESPACE, *ENUMS, FROM_TYPE, *PARAMETERS),
    *("torch Tensor", "torch.nn.parameter Parameter", "torch Size", "torch device"),
    *("numpy ndarray", "numpy dtype"),
    *(f"numpy.{core}.multiarray {name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    *(f"{builtins} {name}" for builtins in ("builtins", "__builtin__") for name in ("set", "getattr", "bytes")),
    "_codecs encode",  # called by protocol 2 pickles to make bytes
}


class Stored(NamedTuple):
    """The location of a tensor in a file.

    Attributes:
        storage: location of the tensor's storage in the file; several tensors may share a storage.
        elements: location and strides of the tensor's own elements in the file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    storage: ZipEntry
    elements: SavedTensor

    @property
    def extent(self) -> tuple[int, int]:
        """The range of bytes in the file from the tensor's first element to the end of its last element."""
        n = 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.elements.strides, strict=True))
        return self.elements.at, self.elements.at + n * self.dtype.itemsize


class SavedFile:
    """The contents of one file written by torch.save.

    Attributes:
        value: saved value, in which each tensor is a `PickledObject`; `tensor` converts such an object to a `Stored`.
        n_pickle_bytes: size of the pickles, in bytes.
    """

    def __init__(self, path: Path, names: Collection[str] = frozenset()) -> None:
        """Open a file and decode its pickle, without reading the tensors yet.

        Args:
            names: classes and functions that the pickle may refer to besides NAMES, each as "module qualname".

        Raises:
            ValueError: the file does not exist, was not written by torch.save, or is damaged or malicious. The message
                names the path.
        """
        self.path = path
        self._checked: set[ZipEntry] = set()
        with regular_file(path) as (fd, n_bytes):
            is_zip = bytes(read_bytes(fd, 0, min(4, n_bytes))) == ZIP
            read = _read_zip if is_zip else _read_older
            self.value, self._storages, self.n_pickle_bytes = read(fd, n_bytes, {*NAMES, *names})

    def tensor(self, pickled: Any) -> Stored:
        """Locate the data of a pickled tensor: a plain tensor, a tensor with attributes, or a parameter.

        Raises:
            ValueError: `pickled` is not a tensor, has no elements, or has elements outside the file. The message
                names the path.
        """
        try:
            return self._tensor(_plain_tensor(pickled))
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None

    def _tensor(self, pickled: Any) -> Stored:
        header = tensor_header(pickled)
        dtype, sizes, strides = header.dtype, header.sizes, header.strides
        storage = self._storages.get(header.key)
        if dtype is None or storage is None:
            raise ValueError(f"expected a tensor of a known dtype with its storage, {header.key!a:.100}, in the file")
        if len(strides) != len(sizes) or 0 in sizes:
            raise ValueError(f"expected a tensor with elements, got sizes {sizes} and strides {strides}")
        # With a stride of 0, a few bytes could describe a tensor of any size. torch never saves parameters this way, so
        # the storage must have room for every element.
        needed = max(header.needed_bytes(dtype), math.prod(sizes) * dtype.itemsize)
        if needed > storage.n_bytes:
            raise ValueError(f"expected {needed} bytes of data for a tensor {sizes}, got {storage.n_bytes}")
        at = storage.at + header.offset * dtype.itemsize
        return Stored(dtype, sizes, storage, SavedTensor(at, dtype, strides))

    def read(self, tensor: Stored, part: list[tuple[int, int]] | None = None) -> Tensor:
        """Read a tensor into host memory. The first read from a storage verifies the storage's checksum.

        Args:
            part: non-empty range (start, stop) to read in each dim; None if the whole tensor is to be read.

        Raises:
            ValueError: the file is damaged. The message names the path.
        """
        with regular_file(self.path) as (fd, _):
            if tensor.storage not in self._checked:
                tensor.storage.check(fd)
                self._checked.add(tensor.storage)
            return tensor.elements.read(fd, part or [(0, n) for n in tensor.shape])


def check_apart(path: Path, tensors: Iterable[Stored]) -> None:
    """Refuse a file whose tensors share bytes, because such tensors could be many times larger than the file.

    Raises:
        ValueError: two tensors share bytes.
    """
    end = 0
    for start, stop in sorted(tensor.extent for tensor in tensors):
        if start < end:
            raise ValueError(f"{path}: two tensors share the bytes {start} to {end}, which Megatron's never do")
        end = stop


def entries(value: Any, what: str) -> dict[Any, Any]:
    """The items of a pickled dict, OrderedDict or argparse.Namespace.

    Args:
        what: description of the value, for messages.

    Raises:
        ValueError: the value has any other type.
    """
    if type(value) is PickledObject and value.name == NAMESPACE:
        value = value.state
    return of_type(items_of(value), dict, what)


def plain(value: Any) -> Any:
    """Convert a run's argument to a number, a string, a bool, or a list of such values; None for anything else.

    An enum member becomes the member's name, and a dtype becomes torch's name for the dtype. A list may contain lists,
    but these inner lists may not contain lists. Items of other types are left out of a list.
    """
    if type(value) is PickledObject:
        return _plain_object(value)
    if type(value) not in (list, tuple):
        return value if _is_plain(value) else None
    items: list[Any] = []
    for item in value:
        if type(item) in (list, tuple):
            items.append([*filter(_is_plain, item)])
        elif _is_plain(item):
            items.append(item)
    return items


def _plain_object(value: PickledObject) -> int | str | None:
    """The name of a pickled dtype or enum member (a member's number if its name is unknown); None for other objects."""
    if value.name in torch_save.PICKLED_DTYPES:
        return value.name.replace(" ", ".")
    kind = value.name.rpartition(" ")[2]
    member = value.args[-1] if value.name in ENUMS and value.args else None
    # Some enum members are pickled as a call of `getattr` with the enum class and the member's name.
    if kind == "getattr" and value.args and len(value.args) == 2:
        member = value.args[1]
    return MEMBERS.get(kind, {}).get(member, member) if isinstance(member, int | str) else None


def _is_plain(value: Any) -> bool:
    return type(value) in (int, float, str, bool)


def _plain_tensor(pickled: Any) -> Any:
    """Remove up to two wrappers around a plain tensor; a wrapper is a parameter or a tensor with attributes."""
    for _ in range(2):
        if type(pickled) is not PickledObject or not pickled.args:
            break
        if pickled.name in PARAMETERS:
            pickled = pickled.args[0]
        elif pickled.name == FROM_TYPE and len(pickled.args) == 4:
            function, _, args, _ = pickled.args
            if type(function) is not PickledObject or function.args is not None or type(args) is not tuple:
                raise ValueError(f"expected a tensor with attributes, got a call of {kind_name(function)}")
            pickled = PickledObject(function.name, args)
    return pickled


_Decoded = tuple[Any, dict[str, ZipEntry], int]  # value, storages by key, size of the pickle in bytes


def _read_zip(fd: int, n_bytes: int, names: Collection[str]) -> _Decoded:
    """Decode a zip, the format that torch has used since 1.6.

    Args:
        names: classes and functions that the pickle may refer to.
    """
    records = records_of(fd, 0, n_bytes)
    pickles = [name for name in records if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise ValueError(f"expected an archive of torch.save with one data.pkl, got {len(pickles)}")
    folder = pickles[0].removesuffix("data.pkl")
    if (order := records.get(f"{folder}byteorder")) and order.n_bytes < 16 and order.read(fd) != b"little":
        raise ValueError("expected little-endian data")
    pickle = records[pickles[0]]
    if pickle.n_bytes > MAX_PICKLE_BYTES:
        raise ValueError(f"expected data.pkl of at most {MAX_PICKLE_BYTES} bytes, got {pickle.n_bytes}")
    value = decode(pickle.read(fd), names)
    data = f"{folder}data/"
    storages = {name.removeprefix(data): record for name, record in records.items() if name.startswith(data)}
    return value, storages, pickle.n_bytes


def _read_older(fd: int, n_bytes: int, names: Collection[str]) -> _Decoded:
    """Decode a sequence of pickles and storages, the format that torch used before 1.6.

    Args:
        names: classes and functions that the value's pickle may refer to.
    """
    stream = BytesIO(read_bytes(fd, 0, min(n_bytes, MAX_PICKLE_BYTES)))
    try:
        magic = decode(stream, ())
    except ValueError:
        magic = None
    if type(magic) is not int or magic != MAGIC:
        raise ValueError("expected a file of torch.save: a zip, or one that begins with its magic number")
    version = decode(stream, ())
    machine = entries(decode(stream, ()), "the description of the machine")
    if type(version) is not int or version != VERSION or machine.get("little_endian") is not True:
        raise ValueError(f"expected version {VERSION} of torch.save's older format, little-endian")
    value = decode(stream, names)
    element_bytes = _element_bytes(value)
    keys = of_type(decode(stream, ()), list, "the keys of the storages")
    at = stream.tell()
    pickle_bytes = at
    storages: dict[str, ZipEntry] = {}
    for key in keys:
        if of_type(key, str, "the key of a storage") not in element_bytes or key in storages:
            raise ValueError(f"expected the storages of the tensors, each once, got {key!a:.100}")
        (n,) = LENGTH.unpack(read_bytes(fd, at, LENGTH.size))
        length = n * element_bytes[key]
        at += LENGTH.size
        if n < 0 or at + length > n_bytes:
            raise ValueError(f"expected a storage of {n} elements at byte {at}, but the file ends at {n_bytes}")
        storages[key] = ZipEntry(at, length, 0)
        at += length
    return value, storages, pickle_bytes


def _element_bytes(value: Any) -> dict[str, int]:
    """The bytes per element of each storage that a value refers to, keyed by the storage's key.

    Raises:
        ValueError: a storage has an unknown type, or two types with different element sizes.
    """
    element_bytes: dict[str, int] = {}
    seen: set[int] = set()  # visit each object once, although a pickle may refer to it many times
    parts = [value]
    while parts:
        part = parts.pop()
        if type(part) in (int, float, str, bool) or part is None or id(part) in seen:
            continue
        seen.add(id(part))
        if type(part) is not PickledObject:
            parts += part.values() if type(part) is dict else part
            continue
        if part.name == "persistent id" and part.args is not None and len(part.args) == 6:
            _, kind, key, *_ = part.args
            dtype = torch_save.STORAGES.get(kind.name) if type(kind) is PickledObject else None
            size = 0 if dtype is None else dtype.itemsize
            if size == 0 or element_bytes.setdefault(of_type(key, str, "the key of a storage"), size) != size:
                raise ValueError(f"expected storages of one known type each, got {kind_name(kind)} for {key!a:.100}")
        parts += [*(part.args or ()), part.items, part.state]
    return element_bytes
