"""Models of transformers, as their directories have them: other names, and some tensors in pieces.

transformers renames tensors when it loads a directory and when it saves one, and of some families it makes one
parameter of many tensors: the experts of a mixture are stored one by one, as its *converters* say. Those that only
stack and join are rules of names here (formats/rules.py), so that a rank reads the experts that it holds, no others.

Names, from the model's to the file's:

    model.layers.0.mlp.experts.gate_up_proj                 a parameter, [experts, 2 F, D]
    model.layers.0.mlp.experts.3.w1.weight                  a piece of it
    model.layers.0.block_sparse_moe.experts.3.w1.weight     the piece, as it is stored
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
# What a converter does to entries [rows, ...] to make one tensor of them, by name and dim.
STACKS = [("MergeModulelist", 0)]
STACKS_JOINED = [*STACKS, ("Concatenate", 1)]


def conversions(model: Any) -> list[Any]:
    """The names that transformers changes, and the tensors it converts, when it loads a model of this class."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    plain = next(c for c in type(model).__mro__ if not issubclass(c, FSDPModule))
    if plain is not type(model):
        # FSDP2 has given the model another class, and rules go by its name.
        with torch.device("meta"):
            model = plain(copy.deepcopy(model.config))
    return get_model_conversion_mapping(model)


def in_pieces(conversions: Iterable[Any], shapes: Shapes) -> Directions:
    """The parameters that files may hold in pieces, and the pieces.

    Args:
        conversions: what the function of this name gives.
        shapes: of all parameters of the model.

    Raises:
        ValueError: a shape that cannot be cut into such pieces.
    """
    rules = [rule for converter in conversions if understood(converter) for rule in _rules(converter, shapes)]
    return directions(rules, {str(rule.ours): shapes[str(rule.ours)] for rule in rules}, Heads(1, 1))


def understood(conversion: Any) -> bool:
    """Tell whether a conversion stacks numbered entries, perhaps joined from several, and does nothing else."""
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in getattr(conversion, "operations", ())]
    joined = steps == STACKS_JOINED and conversion.operations[1].num_shards_attribute is None
    if not (steps == STACKS or joined) or len(conversion.target_patterns) != 1:
        return False
    # A name, with one number in it.
    return all(re.fullmatch(r"[\w.]+\*[\w.]+", _plain(pattern)) for pattern in conversion.source_patterns)


def _plain(pattern: str) -> str:
    """A pattern whose only special characters are escaped, as a name."""
    return pattern.replace(r"\.", ".")


def _rules(converter: Any, names: Iterable[str]) -> Iterator[Rule]:
    """A rule for each parameter that a converter makes."""
    (target,) = converter.target_patterns
    for name in names:
        before, found, after = name.rpartition(target)
        if found and not after:
            pieces = [before + _plain(pattern).replace("*", "{}") for pattern in converter.source_patterns]
            yield Rule(name, tuple(pieces), "stack" if len(pieces) == 1 else "stack concat")


def saved_names(model: Any, pieces: Iterable[str]) -> dict[str, str]:
    """Piece -> the name that `save_pretrained` gives it."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightRenaming, apply_renamings

    # As `revert_weight_conversion` has it, for a model that was not loaded from a directory.
    changes = [c for c in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(c, PrefixChange)]
    renamings: list[Any] = [c.reverse_transform() for c in reversed(changes) if isinstance(c, WeightRenaming)]
    return {name: apply_renamings(name, renamings) for name in pieces}


def saved(source: Source, model: Any, tensors: Mapping[str, Tensor]) -> Source:
    """The tensors of a model as `save_pretrained` names and cuts them, which older versions and other programs read.

    Of a family whose conversions are not all understood here, the tensors by their own names: `from_pretrained` of
    transformers 5 reads those of every family.

    Args:
        source: has the parameters and stored buffers, each by one name.
        model: on meta, whole.
        tensors: likewise, by their names in the source.
    """
    from transformers.core_model_loading import revert_weight_conversion

    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    pieces = in_pieces(conversions(model), shapes)
    whole = [name for name in shapes if name not in pieces.ours]

    # What transformers itself would write: of a parameter that it leaves as it is, the very same tensor.
    written = revert_weight_conversion(model, dict(tensors))
    unchanged = {id(tensor): stored for stored, tensor in written.items()}
    names = saved_names(model, pieces.theirs)
    names |= {name: unchanged.get(id(tensors[name]), "") for name in whole}

    made = {names[name]: piece.shape for name, piece in pieces.theirs.items()}
    made |= {names[name]: shapes[name] for name in whole}
    if made != {stored: tuple(tensor.shape) for stored, tensor in written.items()}:
        return Renamed(source, {name: name for name in tensors})

    in_order: list[str] = []
    for name in tensors:
        its = [run.tensor for run in pieces.ours[name].runs] if name in pieces.ours else [name]
        in_order += dict.fromkeys(its)
    split = Combined(Renamed(source, {name: name for name in whole}), Translated(source, pieces.theirs))
    return Renamed(split, {names[name]: name for name in in_order})
