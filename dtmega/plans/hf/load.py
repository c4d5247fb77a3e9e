"""Weights from a directory of safetensors into a model cut on meta: each rank reads its part and nothing else.

with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
parallelize_hf(model, mesh)
print(load_hf(model, directory, "cuda"))     # Read(bytes=..., of=...)
"""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dtmega.hf.files import TensorFiles
from dtmega.shards import boxes


class Read(NamedTuple):
    """What this rank read from the files, and what they hold for this model."""

    bytes: int
    of: int


class Folder:
    """The weights of a directory as a `checkpoint.Source`, by the names a model has for them.

    Attributes:
        tensors: name -> dtype in the file and shape, of parameters and stored buffers; of tied parameters the first
            name.
        bytes_read: of tensors, by this object.
    """

    def __init__(self, directory: Path | str, model: Any) -> None:
        """Args:
            model: of `transformers`; may be on meta, or cut.

        Raises:
            ValueError: what `TensorFiles` refuses; a parameter that is in none of the files, one of another shape or
                dtype; a tensor that the model has no place for.
        """
        self._files = TensorFiles(directory)
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._keys: dict[str, list[str]] = {}  # name -> keys in the files, several where tied ones are all stored
        keys = places(self._files, model)
        for parameter, known_as in aliases(model):
            found = [keys[name] for name in known_as if name in keys]
            if not found:
                raise ValueError(f"{directory} has no '{known_as[0]}' in its safetensors files")
            for key in found:
                self._files.check_weight(key)
            self._add(known_as[0], parameter, found)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name, buffer in model.state_dict().items():
            if name in keys and name not in parameters:
                self._add(name, buffer, [keys[name]])

    def _add(self, name: str, tensor: Tensor, keys: list[str]) -> None:
        for key in keys:
            _, shape = self._files.tensors[key]
            if shape != tuple(tensor.shape):
                file = self._files.path / self._files.file_of[key]
                raise ValueError(f"'{key}' of {file} is {list(shape)}, but by config.json {list(tensor.shape)}")
        self._keys[name] = keys
        self.tensors[name] = self._files.tensors[keys[0]]

    @property
    def bytes_read(self) -> int:
        return self._files.bytes_read

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        """That part (None: all) of a tensor, in the file's dtype.

        Raises:
            ValueError: parameters that the model ties are stored with other values in that part. transformers un-ties
                them then; here config.json has to say so, as it decides what is trained.
        """
        first, *others = self._keys[name]
        part = self._files.read(first, index)
        for other in others:
            second = self._files.read(other, index)
            dtype = torch.promote_types(part.dtype, second.dtype)
            if not torch.equal(part.to(dtype), second.to(dtype)):
                raise ValueError(
                    f"{self._files.path}: '{first}' and '{other}' are stored with different values, but config.json "
                    f'ties them; transformers un-ties such a model: set "tie_word_embeddings": false there'
                )
        return part


@torch.no_grad()
def load_hf(model: Any, directory: Path | str, device: str | torch.device) -> Read:
    """Give a model on meta memory, and its parameters the values in the directory's safetensors.

    Args:
        model: of `transformers`, cut by `parallelize_hf` or not.
        device: where its parts shall be.

    Raises:
        ValueError: as `Folder`.
    """
    materialize(model, device)
    folder = Folder(directory, model)
    stored_buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in folder.tensors]
    for name, tensor in [*((names[0], parameter) for parameter, names in aliases(model)), *stored_buffers]:
        for box in boxes(tensor):
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


def places(files: TensorFiles, model: Any) -> dict[str, str]:
    """Name in the model -> key in the files, found as `from_pretrained` does: renamed, with or without the prefix of
    the base model. Keys that transformers leaves out for the model's class are left out.

    Raises:
        ValueError: keys that have no place in the model, two that have the same, one whose tensor transformers would
            convert.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = conversions(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    names, prefix = model.state_dict(), model.base_model_prefix
    ignored = ignored_keys(model)
    found: dict[str, str] = {}
    unknown: list[str] = []
    for key in files.tensors:
        name, converted = rename_source_key(key, renamings, converters, prefix, names)
        if name not in names and key in names:
            name, converted = rename_source_key(key, [], [], prefix, names)
        if name not in names:
            if not ignored.search(name):
                unknown.append(key)
        elif converted is not None:
            raise ValueError(
                f"{files.path} is whole, but in the form of the hub, which is not read yet: '{key}' is stored by "
                f"itself, and the model has '{name}', which transformers makes of such tensors (the experts of a "
                f"mixture, say, stored one by one). A directory that is read: AutoModelForCausalLM.from_pretrained(DIR)"
                f".save_pretrained(NEW, save_original_format=False)"
            )
        elif name in found:
            raise ValueError(f"{files.path}: '{found[name]}' and '{key}' are there; expected one tensor for {name}")
        else:
            found[name] = key
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise ValueError(
            f"{files.path} is of another model than its config.json says: {type(model).__name__} has no place for "
            f"{', '.join(unknown[:3])}{more}"
        )
    return found


def conversions(model: Any) -> list[Any]:
    """The names that transformers changes, and the tensors it converts, when it loads a model of this class."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    plain = next(c for c in type(model).__mro__ if not issubclass(c, FSDPModule))
    if plain is not type(model):
        # FSDP2 has given the model another class, and rules go by its name.
        with torch.device("meta"):
            model = plain(copy.deepcopy(model.config))
    return get_model_conversion_mapping(model)


def ignored_keys(model: Any) -> re.Pattern[str]:
    """Keys without a place that `from_pretrained` does not even warn of: `_adjust_missing_and_unexpected_keys`."""
    patterns: set[str] = set(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return re.compile("|".join(f"({pattern})" for pattern in patterns) or r"(?!)")
