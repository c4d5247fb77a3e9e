"""pace.py: a run that becomes slow says so once, and names the rank that makes the others wait."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dtmega.distributed import replica_check
from dtmega.training import pace
from dtmega.training.pace import Pace, slowest
from dtmega.training.phases import StepTimes
from dtmega.training.sharded_model import ShardedModel
from tests import ranks
from tests.layouts import DEBUG, write_text
from tests.resumed import Training, train_all
from tests.test_faults import replaced

CPU = torch.device("cpu")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replica_check, "gather_vectors", lambda mine, group: mine.view(1, -1))
    monkeypatch.setattr(pace, "dist", SimpleNamespace(group=SimpleNamespace(WORLD="everyone")))


def warnings(run: Pace, steps: list[tuple[int, float]], interval: int = 5) -> list[tuple[int, str]]:
    """The step and the text of each warning, for steps of so many seconds each."""
    found = []
    times = [step_s for n, step_s in steps for _ in range(n)]
    for step, step_s in enumerate(times, start=1):
        if text := run.after_step(100, StepTimes(step_s, {}, step_s), step % interval == 0):
            found.append((step, text))
    return found


@pytest.mark.usefixtures("alone")
def test_a_run_of_half_its_pace_says_so_once_at_the_next_line():
    ((step, text),) = warnings(Pace(20, CPU), [(12, 1.0), (60, 2.1)])
    assert step == 35
    assert text.startswith("WARNING: for 23 steps the run has made 48 tok/s, less than half of the 100 before")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("steps", [[(30, 1.0), (60, 1.9)], [(30, 1.0), (19, 9.0), (1, 1.0), (19, 9.0), (1, 1.0)]])
def test_less_or_shorter_slowness_is_not_worth_a_line(steps: list[tuple[int, float]]):
    assert warnings(Pace(20, CPU), steps) == []


@pytest.mark.usefixtures("alone")
def test_a_pace_of_0_steps_is_off():
    assert warnings(Pace(0, CPU), [(30, 1.0), (60, 9.0)]) == []


def test_the_slowest_rank_is_named_with_its_own_time_and_the_median_of_the_others():
    assert slowest([0.5, 0.4, 2.0, 0.6]).startswith("rank 2 is the slowest: 2 s of its own work in a step, 0.5 s in")


def test_no_rank_is_named_where_all_are_alike():
    assert slowest([0.5, 0.55, 0.5, 0.52]).startswith("no rank is slower than the others by itself: about 0.51 s")


def test_a_rank_is_named_from_a_fifth_above_the_median_of_the_others_on():
    assert slowest([5.0, 6.0, 5.0]).startswith("rank 1 is the slowest: 6 s")
    assert slowest([5.0, 5.99, 5.0]).startswith("no rank is slower")


def slow_rank_1() -> object:
    """From step 5 on rank 1 computes for several times as long as the steps before took, on a machine that is busy."""
    honest = ShardedModel.forward_backward
    times_s: list[float] = []

    def forward_backward(self: ShardedModel, *args: object) -> torch.Tensor:
        if len(times_s) >= 4 and dist.get_rank() == 1:
            end = time.thread_time() + max(0.3, 4 * max(times_s[1:4]))
            while time.thread_time() < end:
                pass
        began = time.perf_counter()
        totals = honest(self, *args)  # pyright: ignore[reportArgumentType]
        times_s.append(time.perf_counter() - began)
        return totals

    return replaced(ShardedModel, "forward_backward", forward_backward)


def test_a_rank_that_computes_longer_than_the_others_is_named_by_the_run(tmp_path):
    keys = DEBUG | write_text(tmp_path) | {"mesh.dp_shard": 2, "model.n_layers": 1, "eval.interval": 0}
    keys |= {"train.steps": 9, "log.slow_steps": 4, "log.interval": 1, "batch.micro_batch_size": 4}
    train_all([Training(2, keys, tmp_path / "run", slow_rank_1)])
    said = (tmp_path / "run" / "stdout-0").read_text()
    assert said.count("WARNING: for 4 steps the run has made") == 1
    assert "; rank 1 is the slowest: " in said


def exchanged() -> list[str]:
    """The last warning on each rank, where rank 1 has more work of its own."""
    paces = Pace(2, CPU)
    own_s = [0.1, 0.9][dist.get_rank()]
    texts = [paces.after_step(1, StepTimes(step_s, {}, own_s), True) for step_s in (1, 1, 1, 3, 3, 3)]
    return [text for text in texts if text]


def test_all_ranks_exchange_their_own_times_and_say_the_same():
    said = ranks.run(2, exchanged)
    assert said[0] == said[1]
    assert len(said[0]) == 1
    assert said[0][0].endswith(
        "rank 1 is the slowest: 0.9 s of its own work in a step, 0.1 s in the median of the others, which wait for it"
    )


@pytest.mark.usefixtures("alone")
def test_own_times_are_those_since_the_last_exchange(monkeypatch: pytest.MonkeyPatch):
    sent: list[float] = []
    monkeypatch.setattr(replica_check, "gather_vectors", lambda mine, group: sent.append(mine.item()) or mine)
    run = Pace(20, CPU)
    for own_s, exchange in ((1.0, False), (3.0, True), (10.0, False), (30.0, True)):
        run.after_step(1, StepTimes(1.0, {}, own_s), exchange)
    assert sent == [2.0, 20.0]
