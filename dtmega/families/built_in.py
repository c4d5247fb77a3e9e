"""The record of a family whose model and plan are written for dtmega: the base of all records of this folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dtmega import config, rooms
from dtmega.data.objectives.objective import Objective
from dtmega.families.family import check_units, hidden_state
from dtmega.mesh import World
from dtmega.models import count
from dtmega.models.lengths import attends_by_heads, check_lengths, lengths_of
from dtmega.models.model import Model
from dtmega.models.show import CONTINUATION, Show
from dtmega.ops.cost import Piece

if TYPE_CHECKING:
    from dtmega.plans.styles import Plan

DECODER: Mapping[str, str] = MappingProxyType(
    {"auto": "next-token", "prefix-lm": "prefix-lm", "conversations": "conversations"}
)


@dataclass(frozen=True)
class BuiltIn:
    """A family by its model and its plan. `Family` documents all methods and the remaining attributes.

    Attributes:
        model: class of the model, called with the [model] section.
        plan: function that makes the plan, called with the [model] section and [mesh] sequence_parallel if tp > 1.
        completed: function that implements the method `complete`.
    """

    model: Callable[[Any], Model]
    plan: Callable[[Any, bool], Plan]
    keys: type[config.Model] = config.Model
    libraries: tuple[str, ...] = ()
    directory: bool = False
    objectives: Mapping[str, str] = field(default_factory=lambda: DECODER)
    show: Show = CONTINUATION
    exact: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    completed: Callable[[Any, Objective], Objective] = lambda model, objective: objective

    def resolve(self, cfg: config.Config) -> config.Config:
        return cfg

    def digest(self, model: config.Model) -> str:
        return ""

    def reread_directory(self, model: config.Model, trained: str) -> config.Model:
        return model

    def has_weights(self, model: config.Model) -> bool:
        return bool(model.init_from)

    def notes(self, model: config.Model) -> list[str]:
        if not model.init_from:
            return []
        config_json = rooms.config_json()
        is_theirs = Path(model.init_from, config_json.NAME).exists()
        code = config_json.own_code(model.init_from) if is_theirs else ""
        return [code] if code else []

    def build(self, model: config.Model) -> Model:
        return self.model(model)

    def clone(self, cfg: config.Config, tp: int) -> tuple[config.Config, Model]:
        model = rooms.lora_proof().small_section(cfg.model, tp)  # pyright: ignore[reportArgumentType]
        return cfg.model_copy(update={"model": model}), self.build(model)

    def complete(self, model: config.Model, objective: Objective) -> Objective:
        return self.completed(model, objective)

    def pieces(self, whole: Model) -> list[Piece]:
        return count.pieces(whole)

    def check(self, cfg: config.Config, sizes: Mapping[str, int]) -> None:
        with torch.device("meta"):
            whole = self.build(cfg.model)
        lengths = lengths_of(cfg, whole)
        check_units(cfg, whole)
        for key, length in lengths.items():
            if whole.longest is not None and length > whole.longest:
                raise ValueError(
                    f"{key}={length} is more than the {whole.longest} positions of the model "
                    f"([data] {key}, [model] max_position_embeddings)"
                )
        tp, pp = sizes["tp"], sizes["pp"]
        if tp > 1:
            rooms.plans().check_plan(whole, self._plan(cfg), tp)
        if whole.one_backward and pp > 1 and rooms.schedule().splits_backward(cfg, pp):
            raise ValueError(
                f"backward cannot run in two parts, as {whole.one_backward}: torch would give wrong gradients "
                f"([pipeline] schedule, [model] name)"
            )
        check_lengths(cfg, whole, lengths, sizes)
        self.attends_by_heads(cfg, sizes)

    def attends_by_heads(self, cfg: config.Config, sizes: Mapping[str, int]) -> bool:
        n_heads = cfg.model.n_heads
        return attends_by_heads(cfg, n_heads, getattr(cfg.model, "kv_heads", n_heads), sizes)

    def cut(self, cfg: config.Config, stage: Model, world: World) -> list[str]:
        return rooms.plans().apply_plan(stage, world.tp, self._plan(cfg)) if world.tp.size() > 1 else []

    def allocate(self, cfg: config.Config, stage: Model, world: World, device: torch.device) -> None:
        stage.to_empty(device=device)
        # `to_empty` has given separate memory to each module that shares a tied parameter.
        stage.tie()
        # Fill the buffers before sharding, because slopes and ids depend on global head and channel numbers.
        stage.init_buffers(cfg.run.seed)
        if world.tp.size() > 1:
            rooms.plans().shard_buffers(stage, world.tp, self._plan(cfg))

    def boundary(self, cfg: config.Config, sizes: Mapping[str, int], whole: Model, after: str) -> dict[str, Tensor]:
        # A rank passes on only its slice of the sequence, which is sharded over cp and, with sequence parallelism, tp.
        parts = sizes["cp"] * (sizes["tp"] if cfg.mesh.sequence_parallel else 1)
        return {name: hidden_state(cfg, parts, key) for name, key in whole.handed_on(after).items()}

    def _plan(self, cfg: config.Config) -> Plan:
        return self.plan(cfg.model, cfg.mesh.sequence_parallel)
