"""The stages of a pipeline: cut out of the whole model, run by a schedule, and tied where they share parameters."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from dtmega import config, families, rooms
from dtmega.mesh import World
from dtmega.models.model import Model
from dtmega.pipelining.pipeline import Pipeline
from dtmega.pipelining.split import Stages, plan_stages
from dtmega.pipelining.tied import copies_of_stages
from dtmega.training.sharded_model import ShardedModel


def cut(cfg: config.Config, whole: Model, pp: int) -> Stages:
    """Divide the pieces of the whole model into the stages of pp ranks. Raises the errors of `plan_stages`."""
    return plan_stages(cfg, families.of(cfg.model).pieces(whole), pp)


def split(cut: Stages, whole: Model, numbers: Sequence[int]) -> dict[int, Model]:
    """Copy the meta model once per stage index, and keep in each copy only the modules of its stage."""
    stages = {number: copy.deepcopy(whole) for number in numbers}
    for number, stage in stages.items():
        stage.keep(cut.pieces[number])
    return stages


def schedule(cfg: config.Config, model: ShardedModel, cut: Stages, whole: Model) -> None:
    """Give the model of this rank, whose stages are sharded already, the parameters it shares and its schedule.

    Every rank must call this function, because it makes process groups.
    """
    world = model.world
    model.tied = copies_of_stages(world, cut, whole, model.stages)
    sums: dict[int, Any] = {}
    if model.exact is not None:
        sums |= model.exact.of_stage
    elif model.sharded:
        sums |= {number: rooms.shard_sums().ShardSums(stage) for number, stage in model.stages.items()}
    boundaries = _boundaries(cfg, world, cut, whole)
    model.pipeline = Pipeline(cfg.pipeline, model.stages, world.groups["pp"], boundaries, world.device, sums)


def _boundaries(cfg: config.Config, world: World, cut: Stages, whole: Model) -> list[dict[str, Tensor]]:
    """For each stage except the last, make meta tensors shaped like the tensors that the stage passes on.

    A stage's tensors require gradients if any parameter of this stage, or of an earlier stage, is trained. Otherwise
    backward never reaches the tensors.
    """
    family, parts = families.of(cfg.model), whole.parts()
    trained = False
    boundaries = []
    for pieces in cut.pieces[:-1]:
        parameters: list[nn.Parameter] = []
        for piece in pieces:
            for module in parts[piece]:
                parameters += module.parameters(recurse=False)
        trained |= any(parameter.requires_grad for parameter in parameters)
        tensors = family.boundary(cfg, world.sizes, whole, pieces[-1])
        for tensor in tensors.values():
            tensor.requires_grad_(trained and tensor.is_floating_point())
        boundaries.append(tensors)
    return boundaries
