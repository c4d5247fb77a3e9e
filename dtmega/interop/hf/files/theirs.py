"""Reads weights for a transformers model from a saved directory, and translates names and shapes of tensors both ways.

transformers renames tensors when it loads or saves a directory. For some families, transformers' *converters* also
merge many stored tensors into one parameter: for example, the experts of a mixture are stored one by one. Converters
that only stack and concatenate become naming rules here (formats/rules.py), so a rank reads only the experts it holds.

Example, from the model's name to the file's name:

    model.layers.0.mlp.experts.gate_up_proj                 a parameter, [experts, 2 F, D]
    model.layers.0.mlp.experts.3.w1.weight                  a component of this parameter, [F, D]
    model.layers.0.block_sparse_moe.experts.3.w1.weight     the name of this component in the file
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from dtmega.checkpoint.sources import Source
from dtmega.interop.formats.rules import Assembly, Directions, Heads, Rule, directions
from dtmega.interop.formats.sources import Combined, Renamed, Translated
from dtmega.interop.hf.files.folder import Folder, keys_of
from dtmega.interop.hf.files.tensors import TensorFiles
from dtmega.models.ties import aliases

Shapes = Mapping[str, tuple[int, ...]]
# Steps (operation class, dim) of converters that make one parameter from several tensors [rows, ...]. STACKS only
# stacks the tensors; STACKS_JOINED concatenates several tensors into each entry of the stack.
STACKS = [("MergeModulelist", 0)]
STACKS_JOINED = [*STACKS, ("Concatenate", 1)]


def conversions(model: Any) -> list[Any]:
    """The renamings and converters that transformers applies when it loads a model of this model's class."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    # FSDP2 replaces a model's class, but transformers looks up conversions by class name.
    plain = next(c for c in type(model).__mro__ if not issubclass(c, FSDPModule))
    if plain is not type(model):
        with torch.device("meta"):
            model = plain(copy.deepcopy(model.config))
    return get_model_conversion_mapping(model)


def component_directions(conversions: Iterable[Any], shapes: Shapes) -> Directions:
    """Recipes for assembling parameters from the components in files, and components from parameters.

    Args:
        conversions: result of `conversions`.
        shapes: shape of each parameter of the model, keyed by parameter name.

    Raises:
        ValueError: a parameter's shape cannot be split into the expected components.
    """
    rules: list[Rule] = []
    for converter in conversions:
        if only_stacks(converter):
            rules += _rules(converter, shapes)
    return directions(rules, {str(rule.ours): shapes[str(rule.ours)] for rule in rules}, Heads(1, 1))


def only_stacks(conversion: Any) -> bool:
    """True if a conversion only stacks numbered tensors. Each entry of the stack may be a concatenation."""
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in getattr(conversion, "operations", ())]
    joined = steps == STACKS_JOINED and conversion.operations[1].num_shards_attribute is None
    if not (steps == STACKS or joined) or len(conversion.target_patterns) != 1:
        return False
    # Each stored name must be plain text around one `*`, which stands for the number.
    return all(re.fullmatch(r"[\w.]+\*[\w.]+", _unescaped(pattern)) for pattern in conversion.source_patterns)


def _unescaped(pattern: str) -> str:
    """Convert a pattern to the name that it matches. The pattern may escape dots, and is otherwise plain text."""
    return pattern.replace(r"\.", ".")


def _rules(converter: Any, names: Iterable[str]) -> Iterator[Rule]:
    """One rule for each parameter that a converter makes."""
    (target,) = converter.target_patterns
    for name in names:
        prefix, match, suffix = name.rpartition(target)
        if match and not suffix:
            components = [prefix + _unescaped(pattern).replace("*", "{}") for pattern in converter.source_patterns]
            yield Rule(name, tuple(components), "stack" if len(components) == 1 else "stack concat")


def saved_names(model: Any, components: Iterable[str]) -> dict[str, str]:
    """Map each component's name to the name under which `save_pretrained` stores the component."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightRenaming, apply_renamings

    # Repeat the steps that `revert_weight_conversion` takes for a model that was not loaded from a directory.
    changes = [c for c in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(c, PrefixChange)]
    renamings: list[Any] = [c.reverse_transform() for c in reversed(changes) if isinstance(c, WeightRenaming)]
    return {name: apply_renamings(name, renamings) for name in components}


def as_saved(source: Source, model: Any, tensors: Mapping[str, Tensor]) -> Source:
    """The model's tensors, named and divided as in a directory that `save_pretrained` writes.

    With these names, old transformers versions and other programs can read the tensors. If the family has a conversion
    that dtmega does not support, the tensors keep the model's own names, which transformers 5 reads for every family.

    Args:
        source: the parameters and stored buffers, each under one name.
        model: the whole model, on meta.
        tensors: the model's parameters and stored buffers, keyed by the source's names.
    """
    from transformers.core_model_loading import revert_weight_conversion

    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    components = component_directions(conversions(model), shapes)
    uncut = [name for name in shapes if name not in components.ours]

    # Let transformers' own code choose the names. A parameter that is not converted is the same object in the result,
    # so its saved name is found by object identity.
    saved_tensors = revert_weight_conversion(model, dict(tensors))
    saved_name_of = {id(tensor): name for name, tensor in saved_tensors.items()}
    names = saved_names(model, components.theirs)
    names |= {name: saved_name_of.get(id(tensors[name]), "") for name in uncut}

    # If our names and shapes differ from transformers' own, the family has a conversion that dtmega does not support.
    our_shapes = {names[name]: component.shape for name, component in components.theirs.items()}
    our_shapes |= {names[name]: shapes[name] for name in uncut}
    if our_shapes != {name: tuple(tensor.shape) for name, tensor in saved_tensors.items()}:
        return Renamed(source, {name: name for name in tensors})

    in_order: list[str] = []
    for name in tensors:
        parts = [run.tensor for run in components.ours[name].runs] if name in components.ours else [name]
        in_order += dict.fromkeys(parts)
    cut = Combined(Renamed(source, {name: name for name in uncut}), Translated(source, components.theirs))
    return Renamed(cut, {names[name]: name for name in in_order})


TIED = 'config.json ties them; transformers un-ties such a model: set "tie_word_embeddings": false there'


def open_weights(directory: Path | str, model: Any) -> Folder:
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
    components = component_directions(conversions(model), shapes)
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
            saved_name = saved_names(model, missing)[missing[0]]
            raise ValueError(f"{files.path} has no '{saved_name}' in its safetensors files")
        for part in parts:
            files.check_weight(keys[part], components.theirs[part].shape)
        assemblies[name] = assembly
    return Combined(Renamed(files, stored_whole), Translated(Renamed(files, keys), assemblies))


def tensor_keys(files: TensorFiles, model: Any, components: Directions) -> dict[str, str]:
    """Map tensor names and component names in the model to keys in the files.

    Keys are matched as in `from_pretrained`: after renaming, with or without the base model's prefix. Keys that
    transformers ignores for the model's class are left out.

    Raises:
        ValueError: the model has no tensor for a key, two keys belong to the same tensor, or transformers would convert
            a tensor in a way that is not supported here.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = conversions(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    stacking: set[str] = set()
    for converter in converters:
        if only_stacks(converter):
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
