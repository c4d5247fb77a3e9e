"""Translates the names and shapes of tensors between transformers models and saved directories.

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
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from dtmega.formats.rules import Directions, Heads, Rule, directions
from dtmega.formats.sources import Combined, Renamed, Source, Translated

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
