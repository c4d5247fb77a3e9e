"""The part of a run that a step uses: a plan takes the real step without the rest (`planning/counting/role.py`)."""

from __future__ import annotations

from typing import Protocol

import torch

from dtmega.config import Config
from dtmega.mesh import World
from dtmega.ops.loss_scale import LossScale
from dtmega.ops.optim import Spikes
from dtmega.training.parallelize import ShardedModel


class Stepping(Protocol):
    """The attributes of a `Run` that `train_step` uses."""

    @property
    def cfg(self) -> Config: ...

    @property
    def world(self) -> World: ...

    @property
    def model(self) -> ShardedModel: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def spikes(self) -> Spikes: ...

    @property
    def phases(self) -> EnterPhase: ...

    @property
    def loss_scale(self) -> LossScale | None: ...


class EnterPhase(Protocol):
    """A receiver of the names of a step's phases."""

    def enter(self, name: str) -> None: ...
