"""Weights from a directory of safetensors into a model cut on meta: each rank reads its part and nothing else.

with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
parallelize_hf(model, mesh)
print(load_hf(model, directory, "cuda"))     # Read(bytes=..., of=...)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dtmega.shards import boxes


class Read(NamedTuple):
    """What this rank read from the files, and what they hold for this model."""

    bytes: int
    of: int


class Folder:
    """The weights of a directory as a `checkpoint.Source`, by the names a model has for them. Nothing is read before.

    Attributes:
        tensors: name -> dtype in the file and shape; of tied parameters the first name.
        bytes_read: of tensors, by this object.
    """

    def __init__(self, directory: Path | str, model: Any) -> None:
        """Args:
            model: of `transformers`, before FSDP2 has replaced its class; may be on meta, or cut.

        Raises:
            ValueError: no such files, a parameter that is in none of them, one of another shape.
        """
        from safetensors import safe_open

        self.bytes_read, files = 0, tensor_files(Path(directory))
        keys = model_names(model, files)
        opened = {file: safe_open(file, framework="pt") for file in dict.fromkeys(files.values())}
        self._slices: dict[str, Any] = {}
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for parameter, known_as in aliases(model):
            found = (keys[n] for name in known_as for n in spellings(name, model.base_model_prefix) if n in keys)
            key = next(found, None)
            if key is None:
                raise ValueError(f"{directory} has no '{known_as[0]}' in its safetensors files")
            source = opened[files[key]].get_slice(key)
            if source.get_shape() != list(parameter.shape):
                raise ValueError(
                    f"'{key}' of {files[key]} is {source.get_shape()}, but by config.json {list(parameter.shape)}"
                )
            self._slices[known_as[0]] = source
            self.tensors[known_as[0]] = source[:0].dtype, tuple(source.get_shape())

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        """That part (None: all) of a tensor, in the file's dtype."""
        part: Tensor = self._slices[name][... if index is None else index]
        self.bytes_read += part.nbytes
        return part


@torch.no_grad()
def load_hf(model: Any, directory: Path | str, device: str | torch.device) -> Read:
    """Give a model on meta memory, and its parameters the values in the directory's `*.safetensors`.

    Args:
        model: of `transformers`, cut by `parallelize_hf` or not.
        device: where its parts shall be.

    Raises:
        ValueError: as `Folder`.
    """
    materialize(model, device)
    folder = Folder(directory, model)
    for parameter, (name, *_) in aliases(model):
        for box in boxes(parameter):
            box.part.copy_(folder.read(name, box.where))
    of = sum(math.prod(shape) * dtype.itemsize for dtype, shape in folder.tensors.values())
    return Read(folder.bytes_read, of)


@torch.no_grad()
def materialize(model: Any, device: str | torch.device) -> None:
    """Memory for a model on meta: ties stay, buffers that no file has get their values, parameters have none yet."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(parameter, []).append((module, name))
    model.to_empty(device=device)
    for (first, its_name), *others in owners.values():
        for module, name in others:
            module.register_parameter(name, first.get_parameter(its_name))
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # so that it is left alone
    for module in model.modules():
        module._is_hf_initialized = not list(module.buffers(recurse=False))
    model.initialize_weights()


def aliases(model: nn.Module) -> list[tuple[nn.Parameter, list[str]]]:
    """Each parameter once, with all names it has."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return list(names.items())


def model_names(model: Any, keys: Iterable[str]) -> dict[str, str]:
    """Name in the model -> key in the files, which transformers may have renamed since, or renames when it saves."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    # Not by the model's own class, which FSDP2 replaces; a rule for a class goes before one for the family.
    known = (get_checkpoint_conversion_mapping(c.__name__) for c in type(model).__mro__)
    rules = next((rule for rule in known if rule), None) or get_checkpoint_conversion_mapping(model.config.model_type)
    rules = [*(rules or ()), *(get_checkpoint_conversion_mapping("legacy") or ())]
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    found = {}
    for key in keys:
        name = key
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        found[name] = key
    return found


def spellings(name: str, prefix: str) -> list[str]:
    """A file of the base model has no prefix, one of a model with a head has."""
    return [name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"]


def tensor_files(directory: Path) -> dict[str, Path]:
    """Name of a tensor -> the file that has it."""
    from safetensors import safe_open

    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    found: dict[str, Path] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    if not found:
        raise ValueError(f"{directory} has no *.safetensors files, which save_pretrained writes; no other is read")
    return found
