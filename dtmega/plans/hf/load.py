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
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dtmega.formats.sources import Renamed
from dtmega.formats.whole import aliases
from dtmega.hf.files import TensorFiles
from dtmega.hf.folder import Folder, keys_of
from dtmega.shards import boxes


class Read(NamedTuple):
    """What this rank read from the files, and what they hold for this model."""

    bytes: int
    of: int


TIED = 'config.json ties them; transformers un-ties such a model: set "tie_word_embeddings": false there'


def open_folder(directory: Path | str, model: Any) -> Folder:
    """The weights of a directory, by the names a model of `transformers` has for them: parameters and stored buffers.

    Parameters that are tied have to be stored with equal values. transformers un-ties them where they are not; here
    config.json has to say so, as it decides what is trained.

    Args:
        model: may be on meta, or cut.

    Raises:
        ValueError: what `TensorFiles` refuses; a parameter that is in none of the files, one of another shape or dtype;
            a tensor that the model has no place for.
    """
    files = TensorFiles(directory)
    keys = places(files, model)
    copies: dict[str, list[str]] = {}
    for parameter, known_as in aliases(model):
        copies[known_as[0]] = [name for name in known_as if name in keys]
        if not copies[known_as[0]]:
            raise ValueError(f"{directory} has no '{known_as[0]}' in its safetensors files")
        for name in copies[known_as[0]]:
            files.check_weight(keys[name], tuple(parameter.shape))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, buffer in model.state_dict().items():
        if name in keys and name not in parameters:
            files.check_shape(keys[name], tuple(buffer.shape))
            copies[name] = [name]
    return Folder(files, Renamed(files, keys), copies, TIED)


@torch.no_grad()
def load_hf(model: Any, directory: Path | str, device: str | torch.device) -> Read:
    """Give a model on meta memory, and its parameters the values in the directory's safetensors.

    Args:
        model: of `transformers`, cut by `parallelize_hf` or not.
        device: where its parts shall be.

    Raises:
        ValueError: as `open_folder`.
    """
    materialize(model, device)
    folder = open_folder(directory, model)
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

    def name_of(key: str) -> str | None:
        name, converted = rename_source_key(key, renamings, converters, prefix, names)
        if name not in names and key in names:
            name, converted = rename_source_key(key, [], [], prefix, names)
        if name not in names:
            return "" if ignored.search(name) else None
        if converted is not None:
            raise ValueError(
                f"{files.path} is whole, but in the form of the hub, which is not read yet: '{key}' is stored by "
                f"itself, and the model has '{name}', which transformers makes of such tensors (the experts of a "
                f"mixture, say, stored one by one). A directory that is read: AutoModelForCausalLM.from_pretrained(DIR)"
                f".save_pretrained(NEW, save_original_format=False)"
            )
        return name

    return keys_of(files, name_of, type(model).__name__)


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
