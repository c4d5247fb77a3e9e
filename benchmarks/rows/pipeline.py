"""The share of a pipeline's step in which its ranks are not busy, beside the bubble of its schedule.

The layers of a tiny model sleep instead of computing: F forward, as long again for the gradient of their input, and
again for that of their weights. So a rank is busy for a known time on any machine, however few cores it has, and what
the step takes beyond it is waiting: for the bubble, for messages, for Python. All else is the trainer's own step.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.rows import ours
from benchmarks.rows.measure import Row, check_losses
from dtmega.pipelining.table import SCHEDULES, named_table, simulate
from tests import ranks

TIMEOUT_S = 1800.0
RANKS, MICROBATCHES, LAYERS = 2, 8, 8
SLEEP_S = 0.012
REACH = 1.03
KEYS: dict[str, Any] = {
    "model.hidden_size": 64,
    "model.n_layers": LAYERS,
    "model.n_heads": 2,
    "model.vocab_size": 512,
    "data.seq_len": 16,
    "data.tokenizer": "bytes",
    "batch.micro_batch_size": 1,
    "batch.global_batch_size": MICROBATCHES,
    "compile.enable": "false",
    "precision.params": "float32",
}
MEASURED = ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")


def schedules(quick: bool) -> list[Row]:
    """A step of 8 microbatches on two ranks, by each schedule."""
    rounds = 3 if quick else 9
    found = ranks.run(RANKS, _on_a_rank, rounds, timeout_s=TIMEOUT_S)
    (truth,) = ranks.run(1, _alone, timeout_s=TIMEOUT_S)
    rows = []
    for name in MEASURED:
        equal = f"fp32 {check_losses(found[0][name].loss, truth)} of one process"
        step_ms, busy_ms = shortest([rank[name].rounds for rank in found])
        per_rank = int(SCHEDULES[name].per_rank[0])
        bubble = simulate(named_table(name, RANKS, per_rank, MICROBATCHES)).bubble
        ideal_ms = busy_ms / (1 - bubble)
        equal += f"; {step_ms / busy_ms:.3f} of busy"
        peer = f"bubble ({1 / (1 - bubble):.3f} of busy)"
        rows.append(Row(f"pipeline of 2, {name}", peer, step_ms, ideal_ms, "ms", REACH, equal))
    return rows


class Round(NamedTuple):
    """The time of one step on one rank, and how much of it the rank was busy."""

    step_ms: float
    busy_ms: float


class Found(NamedTuple):
    """What one rank has seen of one schedule."""

    rounds: list[Round]
    loss: float


def shortest(ranks: Sequence[Sequence[Round]]) -> Round:
    """The round with the shortest step, by the slower rank: other processes can only lengthen a time of the clock."""
    rounds = [
        Round(max(rank.step_ms for rank in each), max(rank.busy_ms for rank in each))
        for each in zip(*ranks, strict=True)
    ]
    return min(rounds)


def _on_a_rank(rounds: int) -> dict[str, Found]:
    warnings.simplefilter("ignore")
    found = {}
    for name in MEASURED:
        with ExitStack() as closing:
            keys = KEYS | {"mesh.pp": RANKS, "pipeline.schedule": name}
            stepper = ours.Stepper(ours.begin("bloom.toml", keys, closing))
            loss = stepper().loss
            asleep = Asleep()
            for stage in stepper.run.model.stages.values():
                for block in stage.blocks():
                    asleep.instead_of(block)
            stepper()
            seen = []
            for _ in range(rounds):
                asleep.total_s, asleep.times = 0.0, 0
                cpu_s, started_s = time.process_time(), time.perf_counter()
                stepper()
                step_s = time.perf_counter() - started_s
                busy_s = asleep.total_s + time.process_time() - cpu_s
                assert asleep.times == MICROBATCHES * LAYERS // RANKS * 3, asleep.times
                seen.append(Round(1e3 * step_s, 1e3 * busy_s))
            found[name] = Found(seen, loss)
    return found


def _alone() -> float:
    warnings.simplefilter("ignore")
    with ExitStack() as closing:
        return ours.Stepper(ours.begin("bloom.toml", KEYS, closing))().loss


class Asleep:
    """Sleeps at the ends of blocks; `total_s` is how long, `times` how often."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self.times = 0
        self._heard: set[int] = set()

    def sleep(self) -> None:
        started_s = time.perf_counter()
        time.sleep(SLEEP_S)
        self.total_s += time.perf_counter() - started_s
        self.times += 1

    def instead_of(self, block: nn.Module) -> None:
        def forward(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            self.sleep()
            # One of its weights stands for all, as FSDP has gathered it: the hook runs when its gradient is there.
            weight = next(module.parameters())
            if weight.requires_grad and id(weight) not in self._heard:
                self._heard.add(id(weight))
                weight.register_hook(weights)
            return _SleepsInBackward.apply(output, self)

        def weights(gradient: Tensor) -> None:
            self.sleep()

        block.register_forward_hook(forward)


class _SleepsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, asleep: Asleep) -> Tensor:
        ctx.asleep = asleep
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.asleep.sleep()
        return gradient, None


BENCHMARKS = {"schedules": schedules}
