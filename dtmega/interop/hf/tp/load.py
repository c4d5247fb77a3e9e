"""Loads weights from safetensors into a model that was sharded on meta. Each rank reads only its own shards.

with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
parallelize_hf(model, mesh)
print(load_hf(model, directory, "cuda"))     # Read(bytes=..., of=...)
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from dtmega.formats.rules import Assembly, Directions
from dtmega.formats.sources import Combined, Renamed, Source, Translated
from dtmega.formats.whole import aliases
from dtmega.interop.hf.files import theirs
from dtmega.interop.hf.files.folder import Folder, keys_of
from dtmega.interop.hf.files.tensors import TensorFiles
from dtmega.ops.shards import boxes


class Read(NamedTuple):
    """The share of the stored weights that this rank has read.

    Attributes:
        bytes: number of bytes that this rank read.
        of: number of bytes that the files hold for this model.
    """

    bytes: int
    of: int


TIED = 'config.json ties them; transformers un-ties such a model: set "tie_word_embeddings": false there'


def open_folder(directory: Path | str, model: Any) -> Folder:
    """Open a directory's parameters and stored buffers under the names that a `transformers` model uses.

    Tied parameters must be stored with equal values. If the stored values differ, transformers unties the parameters.
    dtmega raises an error instead, because config.json alone decides which parameters are tied in training.

    Args:
        directory: directory with the safetensors.
        model: the model, which may be on meta and may be sharded.

    Raises:
        ValueError: `TensorFiles` refuses the files; a parameter is missing from the files, or is stored with a
            different shape or dtype; the model has no parameter or buffer for a stored tensor.
    """
    files = TensorFiles(directory)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    components = theirs.component_directions(theirs.conversions(model), shapes)
    keys = tensor_keys(files, model, components)
    weights = _assembled(files, keys, components, model)
    copies: dict[str, list[str]] = {}
    for _, known_as in aliases(model):
        copies[known_as[0]] = [name for name in known_as if name in weights.tensors]
        if not copies[known_as[0]]:
            raise ValueError(f"{directory} has no '{known_as[0]}' in its safetensors files")
        for name in copies[known_as[0]]:
            # An assembled parameter has no key of its own; `_assembled` has already checked the parameter's components.
            if name in keys:
                files.check_weight(keys[name], shapes[name])
    for name, buffer in model.state_dict().items():
        if name in keys and name not in shapes:
            files.check_shape(keys[name], tuple(buffer.shape))
            copies[name] = [name]
    return Folder(files, weights, copies, TIED)


def _assembled(files: TensorFiles, keys: Mapping[str, str], components: Directions, model: Any) -> Source:
    """The stored tensors under the model's names. A tensor may be stored as several components, e.g. one per expert.

    Args:
        files: safetensors files of one directory.
        keys: map from each tensor's or component's name in the model to a key in the files.
        components: recipes for assembling parameters from stored components.
        model: the model, which determines the stored names of components.

    Raises:
        ValueError: some components of a parameter are missing or have a different shape, or the parameter is stored
            whole as well.
    """
    stored_whole = {name: key for name, key in keys.items() if name not in components.theirs}
    assemblies: dict[str, Assembly] = {}
    for name, assembly in components.ours.items():
        parts = list(dict.fromkeys(run.tensor for run in assembly.runs))
        stored_parts = [part for part in parts if part in keys]
        if not stored_parts:
            continue
        if name in keys:
            first_key = keys[stored_parts[0]]
            raise ValueError(f"{files.path}: '{keys[name]}' is stored whole and in parts, such as '{first_key}'")
        if missing := [part for part in parts if part not in keys]:
            saved_name = theirs.saved_names(model, missing)[missing[0]]
            raise ValueError(f"{files.path} has no '{saved_name}' in its safetensors files")
        for part in parts:
            files.check_weight(keys[part], components.theirs[part].shape)
        assemblies[name] = assembly
    return Combined(Renamed(files, stored_whole), Translated(Renamed(files, keys), assemblies))


@torch.no_grad()
def load_hf(model: Any, directory: Path | str, device: str | torch.device) -> Read:
    """Allocate a model that is on meta, then load its parameters from the directory's safetensors.

    Each rank reads only its own shards.

    Args:
        model: `transformers` model, unsharded or sharded by `parallelize_hf`.
        directory: directory with the safetensors.
        device: device for this rank's parameters and buffers.

    Returns:
        The number of bytes that this rank has read, and the number of bytes that the files hold for the model.

    Raises:
        ValueError: `open_folder` refuses the directory.
    """
    materialize(model, device)
    folder = open_folder(directory, model)
    parameters = [(names[0], parameter) for parameter, names in aliases(model)]
    stored_buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in folder.tensors]
    for name, tensor in [*parameters, *stored_buffers]:
        for box in boxes(tensor):
            box.part.copy_(folder.read(name, box.where))
    n_bytes = sum(math.prod(shape) * dtype.itemsize for dtype, shape in folder.tensors.values())
    return Read(folder.bytes_read, n_bytes)


@torch.no_grad()
def materialize(model: Any, device: str | torch.device) -> None:
    """Allocate a model that is on meta, then compute the buffers that no file holds.

    Ties are kept. Parameters get memory but no values.
    """
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(parameter, []).append((module, name))
    # `to_empty` gives each module that holds a tied parameter a parameter of its own, so restore the ties.
    model.to_empty(device=device)
    for (first, first_name), *others in owners.values():
        for module, name in others:
            module.register_parameter(name, first.get_parameter(first_name))
    # transformers does not initialise modules or parameters whose flag `_is_hf_initialized` is True. Set the flag on
    # every parameter, and on every module without buffers: `initialize_weights` then draws nothing and computes only
    # buffers.
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    for module in model.modules():
        module._is_hf_initialized = not list(module.buffers(recurse=False))
    model.initialize_weights()


def tensor_keys(files: TensorFiles, model: Any, components: Directions) -> dict[str, str]:
    """Map tensor names and component names in the model to keys in the files.

    Keys are matched as in `from_pretrained`: after renaming, with or without the base model's prefix. Keys that
    transformers ignores for the model's class are left out.

    Raises:
        ValueError: the model has no tensor for a key, two keys belong to the same tensor, or transformers would convert
            a tensor in a way that is not supported here.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = theirs.conversions(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    stacking: set[str] = set()
    for converter in converters:
        if theirs.only_stacks(converter):
            stacking.update(converter.source_patterns)
    names, prefix = model.state_dict(), model.base_model_prefix
    ignored = ignored_keys(model)

    def name_of(key: str) -> str | None:
        name, converter_pattern = rename_source_key(key, renamings, converters, prefix, names)
        # Do not rename a tensor that is already stored under its name in the model.
        if name not in names and key in names:
            name, converter_pattern = rename_source_key(key, [], [], prefix, names)
        if name not in names:
            return "" if ignored.search(name) else None
        if converter_pattern in stacking:
            component, _ = rename_source_key(key, renamings, [], prefix, components.theirs)
            return component if component in components.theirs else None
        if converter_pattern is not None:
            raise ValueError(
                f"{files.path} is complete, but in a form that is not read here: '{key}' is stored by itself, and "
                f"transformers makes the model's '{name}' of it. To make a directory that is read: "
                f"AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW, save_original_format=False)"
            )
        return name

    return keys_of(files, name_of, type(model).__name__)


def ignored_keys(model: Any) -> re.Pattern[str]:
    """A pattern for the keys that `from_pretrained` silently ignores if the model has no tensors for them.

    Source: `PreTrainedModel._adjust_missing_and_unexpected_keys` in transformers.
    """
    patterns: set[str] = set(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    # `(?!)` matches nothing.
    return re.compile("|".join(f"({pattern})" for pattern in patterns) or r"(?!)")
