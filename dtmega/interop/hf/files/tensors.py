"""Reads tensors, whole or in part, from a directory's safetensors files. No other module reads safetensors.

This module reads the files that transformers' `from_pretrained` reads: model.safetensors if the file exists, otherwise
the files that model.safetensors.index.json names. No other file is opened. Every tensor in the files counts, even if
the index does not list the tensor. Callers must use or refuse each tensor, so that no tensor is silently ignored.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtmega.files.regular import open_regular
from dtmega.files.untrusted_json import check_not_a_pointer, dangling, download, read_object

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Files from a distributed save by transformers; `from_pretrained` prefers these files to all others.
SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
GGUF = "*.gguf"
WEIGHTS = ("*.safetensors", *PICKLES, GGUF, "*.h5", "*.msgpack", "*.onnx")
# DTYPES holds the dtypes that weights may have; OTHERS holds the remaining safetensors dtypes.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
OTHERS = {
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}


class TensorFiles:
    """The tensors of a directory, keyed by their names in the files.

    The constructor reads only the headers of the files; a tensor is read when `read` is called.

    Attributes:
        path: path of the directory.
        tensors: dtype and shape of each tensor, keyed by tensor name.
        file_of: name of the file that holds each tensor, keyed by tensor name.
        bytes_read: number of tensor bytes that this object has read.
    """

    def __init__(self, directory: str | Path) -> None:
        """Choose the directory's files and read their headers.

        Raises:
            ValueError: the directory or its weights are missing; a file is not safetensors; the index is malformed,
                names a file that does not exist, or assigns a tensor to a file without that tensor; a tensor occurs
                twice or has an unknown dtype.
        """
        from safetensors import SafetensorError, safe_open

        self.path, self.bytes_read = Path(directory), 0
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self.file_of: dict[str, str] = {}
        self._slices: dict[str, Any] = {}
        files, weight_map = weight_files(self.path)
        for file in files:
            try:
                with open_regular(self.path / file) as raw:
                    check_not_a_pointer(raw.read(64), self.path / file)
                safetensors_file = safe_open(self.path / file, "pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{self.path / file} is not a safetensors file: {error}") from None
            for name in sorted(safetensors_file.keys()):
                self._add(name, safetensors_file.get_slice(name), file)
        if missing := sorted(name for name, file in weight_map.items() if self.file_of.get(name) != file):
            raise ValueError(f"{self.path / weight_map[missing[0]]} has no '{missing[0]}', which {INDEX} says it has")

    def _add(self, name: str, part: Any, file: str) -> None:
        if not name.isprintable():
            raise ValueError(f"{self.path / file}: expected printable names, got {name!a:.200}")
        if name in self.file_of:
            raise ValueError(f"{self.path}: '{name}' occurs twice, in {self.file_of[name]} and in {file}")
        dtype = (DTYPES | OTHERS).get(part.get_dtype())
        if dtype is None:
            raise ValueError(f"{self.path / file}: '{name}' is of an unknown dtype, {part.get_dtype()}")
        self._slices[name] = part
        self.file_of[name] = file
        self.tensors[name] = dtype, tuple(part.get_shape())

    def check_weight(self, name: str, expected: tuple[int, ...]) -> None:
        """Raise an error if a tensor cannot be a weight of the expected shape.

        Raises:
            ValueError: the tensor has a different shape, or a dtype that only quantised weights have.
        """
        dtype, _ = self.tensors[name]
        self.check_shape(name, expected)
        if dtype not in DTYPES.values():
            stored = next(key for key, value in OTHERS.items() if value is dtype)
            raise ValueError(
                f"{self.path / self.file_of[name]}: '{name}' is of dtype {stored}, expected one of {', '.join(DTYPES)}"
            )

    def check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        """Raise an error if a tensor does not have the expected shape.

        Raises:
            ValueError: the shapes differ.
        """
        _, shape = self.tensors[name]
        if shape != expected:
            file = self.path / self.file_of[name]
            raise ValueError(f"'{name}' of {file} is {list(shape)}, but config.json gives {list(expected)}")

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        """Read a tensor, or only the slice `index` of the tensor, in the file's dtype."""
        part: Tensor = self._slices[name][... if index is None else index]
        self.bytes_read += part.nbytes
        return part


def weight_files(directory: Path) -> tuple[list[str], dict[str, str]]:
    """Choose the files that hold the weights.

    Returns:
        File names, and the index's map from tensor names to file names. The map is empty if there is no index.

    Raises:
        ValueError: the directory or its weights are missing, the index is malformed or names files that do not exist,
            or the directory holds a distributed save.
    """
    if not directory.is_dir():
        raise ValueError(
            f"{directory} is not a folder; expected one with config.json and {SINGLE}{download(str(directory))}"
        )
    if shards := sorted(path.name for path in directory.glob("shard-*") if SHARD.fullmatch(path.name)):
        raise ValueError(
            f"{directory} holds {shards[0]}, of a distributed save of transformers, which it reads before all others; "
            f"expected {SINGLE} or {INDEX} alone"
        )
    if link := dangling(directory / SINGLE):
        raise ValueError(f"{directory / SINGLE} cannot be read{link}")
    if (directory / SINGLE).is_file():
        return [SINGLE], {}
    if not (directory / INDEX).is_file():
        raise ValueError(f"{directory} holds neither {SINGLE} nor {INDEX}{other_weights(directory)}")
    weight_map = read_object(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{directory / INDEX}: expected a 'weight_map' of tensors to files")
    for file in weight_map.values():
        if not isinstance(file, str):
            raise ValueError(f"{directory / INDEX}: expected a 'weight_map' of tensors to files")
        # Links to files outside the directory are allowed: the hub's cache uses links, and safetensors hold no code.
        if not file.isprintable() or Path(file).name != file:
            raise ValueError(f"{directory / INDEX} names {file!r}; expected names of files beside it")
        if not (directory / file).is_file():
            raise ValueError(f"{directory} has no '{file}', which {INDEX} names{dangling(directory / file)}")
    return sorted(set(weight_map.values())), weight_map


def other_weights(directory: Path) -> str:
    """Suffix for a message about missing weights; the suffix names a file that was found and suggests a remedy."""

    def first(*patterns: str) -> str | None:
        names: list[str] = []
        for pattern in patterns:
            names += [path.name for path in directory.glob(pattern)]
        return min(names, default=None)

    if file := first("*.safetensors"):
        return f", the names that transformers looks for; {file} is not read"
    if file := first(*PICKLES):
        return (
            f", but {file}: a pickle, which can run code; re-save it as safetensors, with "
            f"AutoModelForCausalLM.from_pretrained('{directory}').save_pretrained('{directory}')"
        )
    if file := first(GGUF):
        return (
            f", but {file}, which is for inference; download the model as safetensors, or convert it with "
            f"AutoModelForCausalLM.from_pretrained('{directory}', gguf_file='{file}').save_pretrained(...)"
        )
    if file := first(*WEIGHTS):
        return f", but {file}, which is not read; re-save it as safetensors"
    return ""


def has_weights(directory: str | Path) -> bool:
    """True if a directory has weights of any kind, even pickles or unusually named files, which are refused later."""
    return any(any(Path(directory).glob(pattern)) for pattern in WEIGHTS)
