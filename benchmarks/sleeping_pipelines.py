"""Simulated and measured steps of pipelines whose layers sleep: `python benchmarks/sleeping_pipelines.py [--rounds 5]`.

Four forked ranks run dtmega's own `Pipeline` over gloo. A layer sleeps SLEEP_S in forward, as long again for the
gradient of its input, and again for the gradient of its weight, so a rank is busy for a known time on any machine.

Two simulations stand beside the shortest of several measured steps (other processes can only lengthen a step). "Sleeps"
knows the schedule and how long layers sleep. "Durations" takes the median time of each stage's actions, as the ranks
took it: the sleep, and the Python and autograd around it. Both add the time of a small message between two ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtmega import config
from dtmega.data.objectives.sums import Sum, Tally
from dtmega.pipelining.pipeline import Pipeline
from dtmega.pipelining.stage import Stage
from dtmega.pipelining.table import SCHEDULES, Action, Table, make_table, named_table, sent_after, simulate, stages_in
from tests import ranks

RANKS, MICROBATCHES, WIDTH = 4, 8, 8
SLEEP_S = 0.05
UNEVEN = (1.0, 1.5, 2.0, 1.0)  # sleeps of the stages in uneven rows, in units of SLEEP_S
TIMEOUT_S = 1200.0
LIMIT = 0.03  # largest deviation of a simulated step that passes


class Measured(NamedTuple):
    """What one rank has measured.

    Attributes:
        steps_s: time of each step, from one barrier to the end of this rank's part.
        actions_s: (stage, kind) -> median time of the action.
        message_s: time of a small message between two ranks.
    """

    steps_s: list[float]
    actions_s: dict[tuple[int, str], float]
    message_s: float


class _SleepsInBackward(torch.autograd.Function):
    """The identity; its backward sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        time.sleep(ctx.seconds)
        return gradient, None


class SleepingStage(nn.Module):
    """One stage of the pipeline, with the interface that `stage.Stage` describes.

    Args:
        seconds: time of a forward, and of each of the two parts of backward.
        is_last: True for the last stage, which returns the loss.
    """

    def __init__(self, seconds: float, is_last: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.weight.register_hook(self._sleep)  # runs when the gradient of the weight is there
        self.seconds, self.is_last = seconds, is_last

    def forward(self, tokens: Tensor, h: Tensor | None = None) -> Mapping[str, Tensor]:
        self._sleep()
        x = tokens if h is None else h
        x = _SleepsInBackward.apply(x @ self.weight, self.seconds)
        return {"loss": x.sum()} if self.is_last else {"h": x}

    def _sleep(self, gradient: Tensor | None = None) -> None:
        time.sleep(self.seconds)


def slept_s(action: Action, factors: tuple[float, ...]) -> float:
    """How long the layers of an action sleep. torch leaves all of the first stage's split backward to its W."""
    of_first = {"I": 0, "W": 2}
    times = {"F": 1, "B": 2, "I": 1, "W": 1} | (of_first if action.stage == 0 else {})
    return SLEEP_S * factors[action.stage] * times[action.kind]


def on_a_rank(keys: dict[str, Any], factors: tuple[float, ...], rounds: int) -> Measured:
    """Run the pipeline for some rounds on this rank."""
    warnings.simplefilter("ignore")
    _before_other_processes()
    pipeline = config.Pipeline.model_validate(keys)
    table = make_table(pipeline, RANKS, MICROBATCHES)
    rank, n_stages = dist.get_rank(), len(factors)
    taken: dict[tuple[int, str], list[float]] = defaultdict(list)
    _time_actions(taken)
    modules = {}
    for stage in stages_in(table)[rank]:
        modules[stage] = SleepingStage(SLEEP_S * factors[stage], stage == n_stages - 1)
    boundary = {"h": torch.empty(1, WIDTH, device="meta").requires_grad_()}
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cpu")
    model = Pipeline(pipeline, modules, group, [boundary] * (n_stages - 1), device)
    microbatches = [{"tokens": torch.ones(1, WIDTH)} for _ in range(MICROBATCHES)]
    steps_s = []
    for _ in range(rounds + 1):
        if len(steps_s) == 1:  # the first step makes the connections between the ranks
            taken.clear()
        dist.barrier()
        started_s = time.perf_counter()
        model.step(microbatches, Tally([Sum("loss", "tokens")], device, {"tokens": 1.0}))
        steps_s.append(time.perf_counter() - started_s)
    medians = {key: statistics.median(each) for key, each in taken.items()}
    return Measured(steps_s[1:], medians, _message_s())


def _before_other_processes() -> None:
    """Let all threads of this process wake at once, however busy the machine is; only root may."""
    with contextlib.suppress(PermissionError):
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))


def _time_actions(taken: dict[tuple[int, str], list[float]]) -> None:
    """Record the time of each action of this process's stages by (stage, kind)."""
    forward, backward, weights = (
        Stage.forward_one_chunk,
        Stage.backward_one_chunk,
        Stage.backward_weight_one_chunk,
    )

    def timed(method: Any, kind_of: Any) -> Any:
        def call(self: Stage, *args: Any, **kwargs: Any) -> Any:
            started_s = time.perf_counter()
            result = method(self, *args, **kwargs)
            taken[self.stage_index, kind_of(kwargs)].append(time.perf_counter() - started_s)
            return result

        return call

    Stage.forward_one_chunk = timed(forward, lambda kwargs: "F")
    Stage.backward_one_chunk = timed(backward, lambda kwargs: "B" if kwargs.get("full_backward", True) else "I")
    Stage.backward_weight_one_chunk = timed(weights, lambda kwargs: "W")


def _message_s() -> float:
    """The median time of a small message to another rank, half of the way there and back."""
    rank = dist.get_rank()
    peer, tensor = rank ^ 1, torch.ones(1, WIDTH)
    seconds = []
    for _ in range(20):
        started_s = time.perf_counter()
        if rank < peer:
            dist.send(tensor, peer)
            dist.recv(tensor, peer)
        else:
            dist.recv(tensor, peer)
            dist.send(tensor, peer)
        seconds.append((time.perf_counter() - started_s) / 2)
    return statistics.median(seconds)


def delayed_weights() -> Table:
    """A schedule without a name: 1F1B with a split backward, in which rank r keeps r microbatches' W for later."""
    table = []
    for rank, row in enumerate(named_table("1F1B", RANKS, 1, MICROBATCHES)):
        split = []
        for action in row:
            split.append(action._replace(kind="I") if action.kind == "B" else action)
            if action.kind == "B" and action.microbatch >= rank:
                split.append(Action(rank, "W", action.microbatch - rank))
        split += [Action(rank, "W", m) for m in range(MICROBATCHES - rank, MICROBATCHES)]
        table.append(split)
    return table


def row(name: str, keys: dict[str, Any], factors: tuple[float, ...], rounds: int) -> tuple[str, float]:
    """One line of the table, and the deviation of the simulation with the ranks' own durations."""
    found = ranks.run(RANKS, on_a_rank, keys, factors, rounds, timeout_s=TIMEOUT_S)
    step_s = min(max(each) for each in zip(*(rank.steps_s for rank in found), strict=True))
    durations: dict[tuple[int, str], float] = {}
    for rank in found:
        durations |= rank.actions_s
    message_s = statistics.median(rank.message_s for rank in found)
    pipeline = config.Pipeline.model_validate(keys)
    table = make_table(pipeline, RANKS, MICROBATCHES)
    later = sent_after(pipeline, RANKS, MICROBATCHES)

    def simulated_s(duration: Any) -> float:
        timeline = simulate(table, duration=duration, transfer=lambda *_: message_s, later=later)
        return max(timed[-1].end for timed in timeline.rows)

    sleeps_s = simulated_s(lambda action: slept_s(action, factors))
    durations_s = simulated_s(lambda action: durations[action.stage, action.kind])
    deviations = [each / step_s - 1 for each in (sleeps_s, durations_s)]
    cells = [name, f"{1e3 * step_s:,.0f}"]
    for simulated, deviation in zip((sleeps_s, durations_s), deviations, strict=True):
        cells += [f"{1e3 * simulated:,.0f}", f"{100 * deviation:+.1f} %"]
    return f"| {' | '.join(cells)} | {1e3 * message_s:.2f} |", deviations[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="a word of the rows' names")
    options = parser.parse_args()
    cases: list[tuple[str, dict[str, Any], tuple[float, ...]]] = []
    for schedule, kind in SCHEDULES.items():
        n_stages = RANKS * int(kind.per_rank[0])
        cases.append((schedule, {"schedule": schedule}, (1.0,) * n_stages))
        cases.append((f"{schedule}, uneven", {"schedule": schedule}, UNEVEN * (n_stages // len(UNEVEN))))
    print("| schedule | measured ms | by sleeps ms | off | by durations ms | off | message ms |")
    print("| --- |" + " ---: |" * 6)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "delayed.csv")
        path.write_text("\n".join(",".join(map(str, actions)) for actions in delayed_weights()))
        cases.append(("from a file", {"csv": str(path)}, (1.0,) * RANKS))
        cases.append(("from a file, uneven", {"csv": str(path)}, UNEVEN))
        worst = 0.0
        for name, keys, factors in cases:
            if options.only in name:
                line, deviation = row(name, keys, factors, options.rounds)
                print(line, flush=True)
                worst = max(worst, abs(deviation))
    print(f"\nLargest deviation by durations: {100 * worst:.1f} %, limit {100 * LIMIT:.0f} %.")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
