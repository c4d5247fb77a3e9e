"""Weights from a directory of safetensors into a model cut on meta: each rank reads its part and nothing else.

with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
parallelize_hf(model, mesh)
print(load_hf(model, directory, "cuda"))     # Read(bytes=..., of=...)
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard


class Read(NamedTuple):
    """What this rank read from the files, and what they hold for this model."""

    bytes: int
    of: int


class Range(NamedTuple):
    """Elements [start, start + size) of a dim of the whole tensor are at [at, at + size) of this rank's part."""

    start: int
    at: int
    size: int


@torch.no_grad()
def load_hf(model: Any, directory: Path | str, device: str | torch.device) -> Read:
    """Give a model on meta memory, and its parameters the values in the directory's `*.safetensors`.

    Args:
        model: of `transformers`, cut by `parallelize_hf` or not.
        device: where its parts shall be.

    Raises:
        ValueError: no such files, a parameter that is in none of them, one of another shape.
    """
    from safetensors import safe_open

    materialize(model, device)
    files = tensor_files(Path(directory))
    keys = model_names(model, files)
    read = total = 0
    for parameter, known_as in aliases(model):
        name = next((n for name in known_as for n in spellings(name, model.base_model_prefix) if n in keys), None)
        if name is None:
            raise ValueError(f"{directory} has no '{known_as[0]}' in its safetensors files")
        key = keys[name]
        with safe_open(files[key], framework="pt") as file:
            source = file.get_slice(key)
            if source.get_shape() != list(parameter.shape):
                raise ValueError(
                    f"'{key}' of {files[key]} is {source.get_shape()}, but by config.json {list(parameter.shape)}"
                )
            part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            for pieces in itertools.product(*ranges(parameter)):
                piece: Tensor = source[tuple(slice(r.start, r.start + r.size) for r in pieces)]
                part[tuple(slice(r.at, r.at + r.size) for r in pieces)].copy_(piece)
                read += piece.nbytes
            total += parameter.numel() * source[:0].itemsize
    return Read(read, total)


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
    for module in model.modules():
        if list(module.buffers(recurse=False)) and not list(module.parameters(recurse=False)):
            model._init_weights(module)


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
        raise ValueError(f"{directory} has no *.safetensors files")
    return found


def ranges(parameter: Tensor) -> list[list[Range]]:
    """For each dim, which elements of the whole this rank has, and where: of dims cut in parts, or twice, too."""
    if not isinstance(parameter, DTensor):
        return [[Range(0, 0, size)] for size in parameter.shape]
    return [_runs(_indices(parameter, dim)) for dim in range(parameter.ndim)]


def _indices(parameter: DTensor, dim: int) -> list[int]:
    """Numbers along `dim` of the elements this rank has: a vector that is cut as the parameter is along that dim."""
    cut: list[Placement] = []
    for placement in parameter.placements:
        if isinstance(placement, Shard) and placement.dim == dim:
            cut.append(Shard(0))
        elif isinstance(placement, _StridedShard) and placement.dim == dim:
            cut.append(_StridedShard(0, split_factor=placement.split_factor))
        else:
            cut.append(Replicate())
    numbers = torch.arange(parameter.shape[dim], device=parameter.device_mesh.device_type)
    return distribute_tensor(numbers, parameter.device_mesh, cut, src_data_rank=None).to_local().tolist()


def _runs(numbers: list[int]) -> list[Range]:
    found: list[Range] = []
    for at, number in enumerate(numbers):
        if found and number == found[-1].start + found[-1].size:
            found[-1] = found[-1]._replace(size=found[-1].size + 1)
        else:
            found.append(Range(number, at, 1))
    return found
