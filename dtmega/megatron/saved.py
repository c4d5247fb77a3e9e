"""One file of `torch.save` as data: what its pickle says, and where its tensors' elements are. Nothing of it runs.

    file = SavedFile(path)
    file.value                          numbers, strings, lists, dicts; all else is a `PickledObject` (foreign/inert.py)
    file.read(file.tensor(made))        one tensor, read now

Two formats. A zip since torch 1.6, nothing in it compressed: NAME/data.pkl, NAME/data/KEY for each storage. Before,
pickles one after the other (a magic number, a version, the machine, the value, the storages' keys), then each storage:
its number of elements in 8 bytes, and these.

Format: `serialization.py` of torch 1.5 and 2.13. What a checkpoint of Megatron-LM, megatron-core or Megatron-DeepSpeed
has in it besides tensors is known; whatever else a pickle asks for is refused.
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

from dtmega.foreign import torch_save
from dtmega.foreign.inert import PickledObject, decode, items_of, kind_name, of_type
from dtmega.foreign.torch_save import SavedTensor, ZipEntry, read_bytes, records_of, regular_file, tensor_header

MAX_PICKLE_BYTES = 1 << 24  # names, arguments and generators of 500 ranks are some 5 MB; decoded it may take 70 x that
ZIP = b"PK\3\4"
MAGIC = 0x1950A86A20F9469CFC6C
VERSION = 1001
LENGTH = struct.Struct("<q")  # elements of a storage in the older format

FROM_TYPE = "torch._tensor _rebuild_from_type_v2"  # (function, type, arguments, state): a tensor with attributes
PARAMETERS = ("torch._utils _rebuild_parameter", "torch._utils _rebuild_parameter_with_state")  # (tensor, ...)
NAMESPACE = "argparse Namespace"
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
NAMES = {
    *(*torch_save.NAMES, NAMESPACE, *ENUMS, FROM_TYPE, *PARAMETERS),
    *("torch Tensor", "torch.nn.parameter Parameter", "torch Size", "torch device"),
    *("numpy ndarray", "numpy dtype"),
    *(f"numpy.{core}.multiarray {name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    *(f"{builtins} {name}" for builtins in ("builtins", "__builtin__") for name in ("set", "getattr", "bytes")),
    "_codecs encode",  # how protocol 2 writes bytes
}


class Stored(NamedTuple):
    """A tensor of a file.

    Attributes:
        storage: where the elements of all tensors that share it are.
        elements: where those of this one are in the file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    storage: ZipEntry
    elements: SavedTensor

    @property
    def extent(self) -> tuple[int, int]:
        """The bytes of the file from its first element to behind its last."""
        n = 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.elements.strides, strict=True))
        return self.elements.at, self.elements.at + n * self.dtype.itemsize


class SavedFile:
    """The contents of one file of torch.save.

    Attributes:
        value: what was saved; a tensor is a `PickledObject`, for `tensor`.
    """

    def __init__(self, path: Path, names: Collection[str] = frozenset()) -> None:
        """Open a file and decode its pickle; tensors are read later.

        Args:
            names: "module qualname" that the pickle may ask for, besides those of every checkpoint of Megatron's.

        Raises:
            ValueError: no such file, no file of torch.save, a damaged or a crafted one; with the path.
        """
        self.path = path
        self._checked: set[ZipEntry] = set()
        with regular_file(path) as (fd, n_bytes):
            read = _zip if bytes(read_bytes(fd, 0, min(4, n_bytes))) == ZIP else _older
            self.value, self._storages, self.n_pickle_bytes = read(fd, n_bytes, {*NAMES, *names})

    def tensor(self, made: Any) -> Stored:
        """The tensor that a part of `value` stands for: a plain one, a parameter, one with attributes.

        Raises:
            ValueError: it is none, one without elements, or its elements are not in the file; with the path.
        """
        try:
            return self._tensor(_plain_tensor(made))
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None

    def _tensor(self, made: Any) -> Stored:
        found = tensor_header(made)
        storage = self._storages.get(found.key)
        if found.dtype is None or storage is None:
            raise ValueError(f"expected a tensor of a known dtype with its storage, {found.key!a:.100}, in the file")
        if len(found.strides) != len(found.sizes) or 0 in found.sizes:
            raise ValueError(f"expected a tensor with elements, got sizes {found.sizes} and strides {found.strides}")
        # An element that counts many times makes much of a few bytes; torch saves no such parameters.
        needed = max(found.needed_bytes(found.dtype), math.prod(found.sizes) * found.dtype.itemsize)
        if needed > storage.n_bytes:
            raise ValueError(f"expected {needed} bytes of data for a tensor {found.sizes}, got {storage.n_bytes}")
        at = storage.at + found.offset * found.dtype.itemsize
        return Stored(found.dtype, found.sizes, storage, SavedTensor(at, found.dtype, found.strides))

    def read(self, tensor: Stored, part: list[tuple[int, int]] | None = None) -> Tensor:
        """Read a tensor, in host memory; the first of a storage only after the storage's checksum was compared.

        Args:
            part: from where to where in each dim, not empty; None: all.

        Raises:
            ValueError: damaged; with the path.
        """
        with regular_file(self.path) as (fd, _):
            if tensor.storage not in self._checked:
                tensor.storage.check(fd)
                self._checked.add(tensor.storage)
            return tensor.elements.read(fd, part or [(0, n) for n in tensor.shape])


def check_apart(path: Path, tensors: Iterable[Stored]) -> None:
    """Refuse tensors that share bytes.

    Raises:
        ValueError: two of the tensors of a file share bytes, so that together they could be larger than the file.
    """
    end = 0
    for start, stop in sorted(tensor.extent for tensor in tensors):
        if start < end:
            raise ValueError(f"{path}: two tensors share the bytes {start} to {end}, which Megatron's never do")
        end = stop


def entries(value: Any, what: str) -> dict[Any, Any]:
    """The items of a dict, of an OrderedDict, or of a Namespace.

    Raises:
        ValueError: it is none of these.
    """
    if type(value) is PickledObject and value.name == NAMESPACE:
        value = value.state
    return of_type(items_of(value), dict, what)


def plain(value: Any) -> Any:
    """A number, a string, None or a list of them as it is; an enum's member by name, a dtype by torch's; else None.

    A list may hold such lists.
    """
    if type(value) is PickledObject:
        kind = value.name.rpartition(" ")[2]
        if value.name in torch_save.PICKLED_DTYPES:
            return value.name.replace(" ", ".")
        member = value.args[-1] if value.name in ENUMS and value.args else None
        # Of Enums that pickle a member by its name: getattr(the class, name).
        if kind == "getattr" and value.args and len(value.args) == 2:
            member = value.args[1]
        return MEMBERS.get(kind, {}).get(member, member) if isinstance(member, int | str) else None
    if type(value) in (list, tuple):
        return [[*filter(_is_plain, item)] if type(item) in (list, tuple) else item for item in value if _is_item(item)]
    return value if _is_plain(value) else None


def _is_plain(value: Any) -> bool:
    return type(value) in (int, float, str, bool)


def _is_item(value: Any) -> bool:
    return _is_plain(value) or type(value) in (list, tuple)


def _plain_tensor(made: Any) -> Any:
    """The plain tensor under a parameter, or under one with attributes: at most one of each, around each other."""
    for _ in range(2):
        if type(made) is not PickledObject or not made.args:
            break
        if made.name in PARAMETERS:
            made = made.args[0]
        elif made.name == FROM_TYPE and len(made.args) == 4:
            function, _, args, _ = made.args
            if type(function) is not PickledObject or function.args is not None or type(args) is not tuple:
                raise ValueError(f"expected a tensor with attributes, got a call of {kind_name(function)}")
            made = PickledObject(function.name, args)
    return made


_Opened = tuple[Any, dict[str, ZipEntry], int]  # value, storage by key, bytes of the pickle


def _zip(fd: int, n_bytes: int, names: Collection[str]) -> _Opened:
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
    return value, {n.removeprefix(data): r for n, r in records.items() if n.startswith(data)}, pickle.n_bytes


def _older(fd: int, n_bytes: int, names: Collection[str]) -> _Opened:
    """Read the format of before torch 1.6."""
    stream = BytesIO(read_bytes(fd, 0, min(n_bytes, MAX_PICKLE_BYTES)))
    try:
        magic = decode(stream, ())
    except ValueError:
        magic = None
    if type(magic) is not int or magic != MAGIC:
        raise ValueError("expected a file of torch.save: a zip, or one that begins with its magic number")
    version = decode(stream, ())
    machine = entries(decode(stream, ()), "what the file says of its machine")
    if type(version) is not int or version != VERSION or machine.get("little_endian") is not True:
        raise ValueError(f"expected version {VERSION} of torch.save's older format, little-endian")
    value = decode(stream, names)
    kinds = _element_bytes(value)
    keys = of_type(decode(stream, ()), list, "the keys of the storages")
    at = stream.tell()
    pickle_bytes = at
    storages: dict[str, ZipEntry] = {}
    for key in keys:
        if of_type(key, str, "the key of a storage") not in kinds or key in storages:
            raise ValueError(f"expected the storages of the tensors, each once, got {key!a:.100}")
        (n,) = LENGTH.unpack(read_bytes(fd, at, LENGTH.size))
        length = n * kinds[key]
        at += LENGTH.size
        if n < 0 or at + length > n_bytes:
            raise ValueError(f"expected a storage of {n} elements at byte {at}, but the file ends at {n_bytes}")
        storages[key] = ZipEntry(at, length, 0)
        at += length
    return value, storages, pickle_bytes


def _element_bytes(value: Any) -> dict[str, int]:
    """Bytes of an element by the key of each storage that a value refers to; each part is looked at once.

    Raises:
        ValueError: a storage of an unknown type, or of two.
    """
    found: dict[str, int] = {}
    seen: set[int] = set()
    left = [value]
    while left:
        part = left.pop()
        if type(part) in (int, float, str, bool) or part is None or id(part) in seen:
            continue
        seen.add(id(part))
        if type(part) is not PickledObject:
            left += part.values() if type(part) is dict else part
            continue
        if part.name == "persistent id" and part.args is not None and len(part.args) == 6:
            _, kind, key, *_ = part.args
            dtype = torch_save.STORAGES.get(kind.name) if type(kind) is PickledObject else None
            if (
                dtype is None
                or found.setdefault(of_type(key, str, "the key of a storage"), dtype.itemsize) != dtype.itemsize
            ):
                raise ValueError(f"expected storages of one known type each, got {kind_name(kind)} for {key!a:.100}")
        left += [*(part.args or ()), part.items, part.state]
    return found
