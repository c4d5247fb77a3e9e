"""The model families that can be trained. All other code asks `of(cfg.model)`, and never names a family.

    of(cfg.model).build(cfg.model)    the model that a [model] section describes
    register(record)                  add a family of your own, before its configuration is read

Each family has a record, in a file of its own that is opened when its name is asked for. docs/adding-a-model.md tells
how to write one.

    family.py      `Family`: what training asks of a record
    built_in.py    the base of the records, for models and plans that are written for dtmega
    bloom.py ...   the records; that of name = "hf" is `interop/hf/record.py`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtmega import config, rooms
from dtmega.data.objectives import known
from dtmega.data.objectives.objective import Objective
from dtmega.families.family import Family
from dtmega.models import trainable
from dtmega.models.model import Model
from dtmega.ops.cost import Piece

# [model] name -> function that opens the family's record.
BUILT_IN: dict[str, Callable[[], Family]] = {
    "bloom": lambda: rooms.bloom().RECORD,
    "gpt": lambda: rooms.gpt().RECORD,
    "llama": lambda: rooms.llama().RECORD,
    "moe": lambda: rooms.moe().RECORD,
    "bert": lambda: rooms.bert().RECORD,
    "t5": lambda: rooms.t5().RECORD,
    "hf": lambda: rooms.transformers().RECORD,
}
_registered: dict[str, Family] = {}


def register(record: Family) -> None:
    """Add a family from outside of dtmega, which [model] name can name from here on.

    Args:
        record: record of the family, whose `keys` is the class of its [model] section.

    Raises:
        ValueError: `keys` has no name, or the name of another family.
    """
    config.register_family(record.keys)
    _registered[record.keys.model_fields["name"].default] = record


def names() -> tuple[str, ...]:
    """The values of [model] name."""
    return (*BUILT_IN, *_registered)


def named(name: str) -> Family:
    """The record of a family, by its [model] name."""
    return _registered[name] if name in _registered else BUILT_IN[name]()


def of(model: config.Model) -> Family:
    """The family that a [model] section belongs to."""
    return named(model.name)


def resolve(cfg: config.Config) -> config.Config:
    """Complete the configuration with values that the model's family provides, such as the sizes of an `hf` model.

    Raises:
        ValueError: the configuration has keys that the family ignores or cannot honour.
    """
    return of(cfg.model).resolve(cfg)


def objective(cfg: config.Config) -> Objective:
    """The training objective of a run.

    Raises:
        ValueError: the family does not have the objective that [data] objective names.
    """
    objectives = of(cfg.model).objectives
    if cfg.data.objective not in objectives:
        raise ValueError(
            f"a model of name = '{cfg.model.name}' is not trained with objective = '{cfg.data.objective}': expected "
            f"{' or '.join(objectives)} ([data] objective, [model] name)"
        )
    return of(cfg.model).complete(cfg.model, known.objective(objectives[cfg.data.objective]))


def sample_options(cfg: config.Config) -> dict[str, Any]:
    """The options of `Show.text` that depend on how the run was trained, keyed by option name.

    Raises:
        ValueError: the family does not have the run's objective.
    """
    options = {key: getattr(cfg.data, key) for key in of(cfg.model).show.reads}
    if objective(cfg).prompt_is_prefix:
        options["prompt_is_prefix"] = True
    return options


def build(cfg: config.Config) -> Model:
    """Build the whole model on the default device, which may be meta. Parameter values are not initialised yet.

    Raises:
        ValueError: [train] freeze or [lora] targets does not fit the model.
    """
    whole = of(cfg.model).build(cfg.model)
    if cfg.train.freeze:
        trainable.freeze(whole, cfg.train.freeze)
    if cfg.lora.rank:
        rooms.lora().attach(whole, cfg.lora)
    return whole


def elements(cfg: config.Config) -> trainable.Elements:
    """Count the trained elements and the frozen elements in the whole model's parameters."""
    with torch.device("meta"):
        return trainable.elements(build(cfg).parameters())


def pieces(model: config.Model) -> list[Piece]:
    """The whole model's pieces (embedding, layers, head), in pipeline order, each with its costs."""
    family = of(model)
    with torch.device("meta"):
        whole = family.build(model)
    return family.pieces(whole)


def pieces_of_run(cfg: config.Config) -> list[Piece]:
    """The pieces of a run's model, like `pieces`, but with the costs of adapters and of frozen weights."""
    with torch.device("meta"):
        whole = build(cfg)
    return of(cfg.model).pieces(whole)


def shapes(model: config.Model) -> dict[str, tuple[int, ...]]:
    """The shapes of the whole model's tensors, keyed by checkpoint name. A tied tensor is listed only once."""
    with torch.device("meta"):
        built = of(model).build(model)
    return {built.full_name(name): tuple(tensor.shape) for name, tensor in built.stored_tensors()}


def stored_buffers(model: config.Model) -> frozenset[str]:
    """The names of the whole model's stored buffers.

    Training does not change the values of these buffers, and conversion does not change their dtype.
    """
    with torch.device("meta"):
        built = of(model).build(model)
    return frozenset(built.full_name(name) for name, _ in built.stored_buffers())
