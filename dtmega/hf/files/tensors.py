"""The safetensors of a directory: which files count, and their tensors in parts. The one reader of the project.

The files are those that `from_pretrained` of transformers takes: model.safetensors if it is there, else the files that
model.safetensors.index.json names; no other is opened. Every tensor in them counts, whatever the index says of it, and
whoever asks for the tensors answers for each: none is ignored in silence.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtmega.strangers import check_not_a_pointer, dangling, download, read_object

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# What transformers' own distributed saving writes, and reads before anything else.
SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
GGUF = "*.gguf"
WEIGHTS = ("*.safetensors", *PICKLES, GGUF, "*.h5", "*.msgpack", "*.onnx")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # of weights
OTHERS = {
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}


class TensorFiles:
    """The tensors of a directory, by the names they have there. Headers are read at once, tensors when asked for.

    Attributes:
        tensors: name -> dtype and shape.
        file_of: name -> name of the file that has it.
        bytes_read: of tensors, by this object.
    """

    def __init__(self, directory: str | Path) -> None:
        """Find the files that count and read their headers.

        Raises:
            ValueError: no directory, no such files, one that is no safetensors file; an index that is none, that names
                files which are not beside it, or tensors that they do not have; a tensor twice, or of an unknown dtype.
        """
        from safetensors import SafetensorError, safe_open

        self.path, self.bytes_read = Path(directory), 0
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self.file_of: dict[str, str] = {}
        self._slices: dict[str, Any] = {}
        files, weight_map = weight_files(self.path)
        for file in files:
            try:
                with open(self.path / file, "rb") as raw:
                    check_not_a_pointer(raw.read(64), self.path / file)
                opened = safe_open(self.path / file, "pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{self.path / file} is no safetensors file: {error}") from None
            for name in sorted(opened.keys()):
                self._add(name, opened.get_slice(name), file)
        if lost := sorted(name for name, file in weight_map.items() if self.file_of.get(name) != file):
            raise ValueError(f"{self.path / weight_map[lost[0]]} has no '{lost[0]}', which {INDEX} says it has")

    def _add(self, name: str, part: Any, file: str) -> None:
        if not name.isprintable():
            raise ValueError(f"{self.path / file}: expected printable names, got {name!a:.200}")
        if name in self.file_of:
            raise ValueError(f"{self.path}: '{name}' is there twice, in {self.file_of[name]} and in {file}")
        dtype = (DTYPES | OTHERS).get(part.get_dtype())
        if dtype is None:
            raise ValueError(f"{self.path / file}: '{name}' is of an unknown dtype, {part.get_dtype()}")
        self._slices[name] = part
        self.file_of[name] = file
        self.tensors[name] = dtype, tuple(part.get_shape())

    def check_weight(self, name: str, expected: tuple[int, ...]) -> None:
        """Refuse a tensor that is not the weight of that shape.

        Raises:
            ValueError: the tensor is of another shape, or of a dtype that weights do not have, unless they are
                quantised.
        """
        dtype, _ = self.tensors[name]
        self.check_shape(name, expected)
        if dtype not in DTYPES.values():
            stored = next(key for key, value in OTHERS.items() if value is dtype)
            raise ValueError(
                f"{self.path / self.file_of[name]}: '{name}' is of dtype {stored}, expected one of {', '.join(DTYPES)}"
            )

    def check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        """Refuse a tensor of another shape.

        Raises:
            ValueError: the tensor is of another shape.
        """
        _, shape = self.tensors[name]
        if shape != expected:
            file = self.path / self.file_of[name]
            raise ValueError(f"'{name}' of {file} is {list(shape)}, but by config.json {list(expected)}")

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        """Read a part (None: all) of a tensor, in the file's dtype."""
        part: Tensor = self._slices[name][... if index is None else index]
        self.bytes_read += part.nbytes
        return part


def weight_files(directory: Path) -> tuple[list[str], dict[str, str]]:
    """The files that hold the weights, and which tensor the index says is where (no index: empty).

    Raises:
        ValueError: as `TensorFiles`.
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
        # The file itself may be a link out of the folder: hub caches are made of those, and there is no code in it.
        if not file.isprintable() or Path(file).name != file:
            raise ValueError(f"{directory / INDEX} names {file!r}; expected names of files beside it")
        if not (directory / file).is_file():
            raise ValueError(f"{directory} has no '{file}', which {INDEX} names{dangling(directory / file)}")
    return sorted(set(weight_map.values())), weight_map


def other_weights(directory: Path) -> str:
    """The end of a message about a folder without weights that are read: the files that are there, and what to do."""
    if found := sorted(path.name for path in directory.glob("*.safetensors")):
        return f", the names that transformers looks for; {found[0]} is not read"
    if found := sorted(path.name for pattern in PICKLES for path in directory.glob(pattern)):
        return (
            f", but {found[0]}: a pickle, which can run code; re-save it as safetensors, with "
            f"AutoModelForCausalLM.from_pretrained('{directory}').save_pretrained('{directory}')"
        )
    if found := sorted(path.name for path in directory.glob(GGUF)):
        return (
            f", but {found[0]}, which is for inference; download the model as safetensors, or make it of this with "
            f"AutoModelForCausalLM.from_pretrained('{directory}', gguf_file='{found[0]}').save_pretrained(...)"
        )
    if found := sorted(path.name for pattern in WEIGHTS for path in directory.glob(pattern)):
        return f", but {found[0]}, which is not read; re-save it as safetensors"
    return ""


def has_weights(directory: str | Path) -> bool:
    """Tell whether a directory has weights; pickles and strange names count, so that they are refused later."""
    return any(True for pattern in WEIGHTS for _ in Path(directory).glob(pattern))
