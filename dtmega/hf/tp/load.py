"""Weights from a directory of safetensors into a model cut on meta: each rank reads its part and nothing else.

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
from dtmega.hf.files import theirs
from dtmega.hf.files.folder import Folder, keys_of
from dtmega.hf.files.tensors import TensorFiles
from dtmega.shards import boxes


class Read(NamedTuple):
    """The bytes that this rank read from the files, and those that they hold for this model."""

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
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    pieces = theirs.in_pieces(theirs.conversions(model), shapes)
    keys = places(files, model, pieces)
    weights = _joined(files, keys, pieces, model)
    copies: dict[str, list[str]] = {}
    for _, known_as in aliases(model):
        copies[known_as[0]] = [name for name in known_as if name in weights.tensors]
        if not copies[known_as[0]]:
            raise ValueError(f"{directory} has no '{known_as[0]}' in its safetensors files")
        for name in copies[known_as[0]]:
            if name in keys:
                files.check_weight(keys[name], shapes[name])
    for name, buffer in model.state_dict().items():
        if name in keys and name not in shapes:
            files.check_shape(keys[name], tuple(buffer.shape))
            copies[name] = [name]
    return Folder(files, weights, copies, TIED)


def _joined(files: TensorFiles, keys: Mapping[str, str], pieces: Directions, model: Any) -> Source:
    """The files' tensors by the model's names, each of which is stored by itself or in pieces.

    Args:
        keys: name of a tensor or of a piece -> key in the files.

    Raises:
        ValueError: pieces that are not all there, not of the right shape, or beside what they make.
    """
    stored = {name: key for name, key in keys.items() if name not in pieces.theirs}
    made: dict[str, Assembly] = {}
    for name, how in pieces.ours.items():
        its = list(dict.fromkeys(run.tensor for run in how.runs))
        there = [piece for piece in its if piece in keys]
        if not there:
            continue
        if name in keys:
            raise ValueError(f"{files.path}: '{keys[name]}' and '{keys[there[0]]}' are there, which is a piece of it")
        if lost := [piece for piece in its if piece not in keys]:
            called = theirs.saved_names(model, lost)[lost[0]]
            raise ValueError(f"{files.path} has no '{called}' in its safetensors files")
        for piece in its:
            files.check_weight(keys[piece], pieces.theirs[piece].shape)
        made[name] = how
    return Combined(Renamed(files, stored), Translated(Renamed(files, keys), made))


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
    """Give a model on meta memory: ties stay, buffers that no file has get their values, parameters have none yet."""
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


def places(files: TensorFiles, model: Any, pieces: Directions) -> dict[str, str]:
    """Name in the model, or of a piece -> key in the files, found as `from_pretrained` does: renamed, with or without
    the prefix of the base model. Keys that transformers leaves out for the model's class are left out.

    Raises:
        ValueError: keys that have no place in the model, two that have the same, one whose tensor transformers would
            convert in a way that is not understood here.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = theirs.conversions(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    stacking = {pattern for rule in converters if theirs.understood(rule) for pattern in rule.source_patterns}
    names, prefix = model.state_dict(), model.base_model_prefix
    ignored = ignored_keys(model)

    def name_of(key: str) -> str | None:
        name, converted = rename_source_key(key, renamings, converters, prefix, names)
        if name not in names and key in names:
            name, converted = rename_source_key(key, [], [], prefix, names)
        if name not in names:
            return "" if ignored.search(name) else None
        if converted in stacking:
            piece, _ = rename_source_key(key, renamings, [], prefix, pieces.theirs)
            return piece if piece in pieces.theirs else None
        if converted is not None:
            raise ValueError(
                f"{files.path} is whole, but in a form of the hub that is not read: '{key}' is stored by itself, and "
                f"the model has '{name}', which transformers makes of it. A directory that is read: "
                f"AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW, save_original_format=False)"
            )
        return name

    return keys_of(files, name_of, type(model).__name__)


def ignored_keys(model: Any) -> re.Pattern[str]:
    """Keys without a place that `from_pretrained` does not even warn of: `_adjust_missing_and_unexpected_keys`."""
    patterns: set[str] = set(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return re.compile("|".join(f"({pattern})" for pattern in patterns) or r"(?!)")
