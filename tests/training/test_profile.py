"""profile.py and phases.py: the trace of a run, read by a parser of its own, and what starts and ends a profile."""

from __future__ import annotations

import errno
import functools
import gzip
import itertools
import json
import mmap
import os
import re
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from dtmega import train
from dtmega.config import keys as sections
from dtmega.training.device_peaks import PeakMemory
from dtmega.training.profile import Profiler, take_request
from dtmega.training.sharded_model import ShardedModel
from tests.layouts import DEBUG, PAIRS, write_text
from tests.resumed import Record, Training, train_all
from tests.test_faults import alone, replaced

STEPS = range(2, 4)  # the profiled ones
PHASES = ["data", "counts", "forward+backward", "reduce", "optimizer", "report"]
# As a user has them, with data workers on one layout.
AS_USED = {"log.tensorboard": True, "eval.sample_tokens": 2}
# An event of a trace takes as long to write as a hundred operations of this model, so the run does little else.
FEW_EVENTS = {"train.drift_interval": 0, "log.num_zeros": False, "log.params_norm": False}
KEYS = (
    DEBUG
    | AS_USED
    | FEW_EVENTS
    | {
        "model.n_layers": 2,
        "batch.global_batch_size": 4,
        "train.steps": 4,
        "eval.interval": 2,
        "checkpoint.interval": 3,
        "profile.steps": [STEPS[0], STEPS[-1]],
    }
)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp 2 x pp 2": (4, {"mesh.tp": 2, "mesh.pp": 2, "profile.ranks": [0, 1, 2, 3]} | PAIRS),
    "pp 2, ZBV": (
        2,
        {"mesh.pp": 2, "pipeline.schedule": "ZBVZeroBubble", "model.n_layers": 4, "profile.ranks": [0, 1]} | PAIRS,
    ),
    "dp_shard 2": (
        2,
        {"mesh.dp_shard": 2, "model.n_layers": 1, "profile.ranks": [1]}
        | {"profile.with_memory": True, "data.num_workers": 1},
    ),
}


class Span(NamedTuple):
    """A named range of a trace, in microseconds."""

    name: str
    start: float
    end: float

    def holds(self, other: Span) -> bool:
        return self.start <= other.start and other.end <= self.end


def spans(path: Path) -> list[Span]:
    """The named ranges of a Chrome trace, in the order of their beginnings, without those of torch itself."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    found = []
    for event in events:
        ours = re.match(
            r"step \d|data$|counts$|reduce$|optimizer$|report$|evaluation$|checkpoint$", str(event.get("name"))
        )
        of_stage = re.match(r"(forward|backward)[a-z+-]*( s\d+ m\d+)?$", str(event.get("name")))
        if event.get("cat") == "user_annotation" and (ours or of_stage):
            found.append(Span(event["name"], event["ts"], event["ts"] + event["dur"]))
    return sorted(found, key=lambda span: (span.start, -span.end))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """The run directory of a profiled run on each layout."""
    text = write_text(tmp_path_factory.mktemp("text"))
    folders = {name: tmp_path_factory.mktemp("run") for name in LAYOUTS}
    train_all([Training(n, KEYS | text | more, folders[name]) for name, (n, more) in LAYOUTS.items()])
    return folders


def traces(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "profiles").glob("*.json.gz"))


def test_a_file_system_that_fails_for_a_moment_asks_for_no_profile(tmp_path, monkeypatch):
    def fails(*args: object, **keywords: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    (tmp_path / "profile-now").touch()
    monkeypatch.setattr(os, "stat", fails)
    run: Any = SimpleNamespace(world=SimpleNamespace(rank=0))
    assert not train.sees(run, tmp_path / "profile-now")


def test_each_chosen_rank_and_no_other_leaves_one_trace(runs: dict[str, Path]):
    for name, folder in runs.items():
        expected = [f"step-00000002-rank-{rank:05d}.json.gz" for rank in LAYOUTS[name][1]["profile.ranks"]]
        assert [path.name for path in traces(folder)] == expected


def test_the_phases_of_a_step_follow_each_other_within_it_and_fill_it_but_for_3_percent(runs: dict[str, Path]):
    for folder in runs.values():
        for path in traces(folder):
            found = spans(path)
            steps = [span for span in found if span.name.startswith("step ")]
            assert [span.name for span in steps] == [f"step {number}" for number in STEPS]
            filled = 0.0
            for step in steps:
                inside = [span for span in found if step.holds(span) and " " not in span.name]
                assert [span.name for span in inside][: len(PHASES)] == PHASES
                assert all(before.end <= after.start for before, after in itertools.pairwise(inside))
                filled += sum(span.end - span.start for span in inside)
            assert filled == pytest.approx(sum(step.end - step.start for step in steps), rel=0.03)


def test_evaluation_and_checkpoint_are_ranges_of_the_step_that_they_follow(runs: dict[str, Path]):
    for folder in runs.values():
        for path in traces(folder):
            found = spans(path)
            after = {}
            for step in (span for span in found if span.name.startswith("step ")):
                after[step.name] = {span.name for span in found if step.holds(span)} & {"evaluation", "checkpoint"}
            assert after == {"step 2": {"evaluation"}, "step 3": {"checkpoint"}}


@pytest.mark.parametrize(
    ("layout", "stages", "n_microbatches", "backward"),
    [
        ("tp 2 x pp 2", [[0], [0], [1], [1]], 2, ["backward"]),
        ("pp 2, ZBV", [[0, 3], [1, 2]], 2, ["backward-inputs", "backward-weights"]),
        ("dp_shard 2", [[], [0]], 2, ["backward"]),
    ],
)
def test_a_trace_has_forward_and_backward_of_each_stage_and_microbatch_of_its_rank(
    runs: dict[str, Path], layout: str, stages: list[list[int]], n_microbatches: int, backward: list[str]
):
    for path in traces(runs[layout]):
        rank = int(path.name[-13:-8])
        found = spans(path)
        computing = [span for span in found if span.name == "forward+backward"]
        assert len(computing) == len(STEPS)
        for phase in computing:
            inside = [span for span in found if phase.holds(span) and span != phase]
            kinds = ["forward", *backward]
            expected = [f"{kind} s{s} m{m}" for kind in kinds for s in stages[rank] for m in range(n_microbatches)]
            if layout == "pp 2, ZBV":
                # Its stages run backward in one piece where nothing would be gained by two.
                names = {re.sub("^backward-(inputs|weights)", "backward", span.name) for span in inside}
                assert names == {re.sub("^backward-(inputs|weights)", "backward", name) for name in expected}
            else:
                assert sorted(span.name for span in inside) == sorted(expected)
            by_name = {span.name: span for span in inside}
            for name, span in by_name.items():
                if name.startswith("backward "):
                    assert by_name[name.removeprefix("back").replace("ward", "forward", 1)].end <= span.start


def test_the_times_of_the_phases_in_the_record_add_up_to_the_time_of_the_step(runs: dict[str, Path]):
    parts = ("data_s", "forward_backward_s", "reduce_s", "optimizer_s", "other_s")
    for folder in runs.values():
        for line in Record(folder).steps.values():
            assert sum(line[key] for key in parts) == pytest.approx(line["step_time_s"])
            assert line["forward_backward_s"] > 0


def test_the_summary_has_the_phases_of_the_trace_and_the_largest_operators(runs: dict[str, Path]):
    path = traces(runs["tp 2 x pp 2"])[0]
    summary = json.loads(path.with_name(path.name.replace(".json.gz", ".summary.json")).read_text())
    assert (summary["rank"], summary["steps"], summary["trace"]) == (0, [2, 3], path.name)
    of_trace: dict[str, float] = {}
    for span in spans(path):
        if " " not in span.name:
            of_trace[span.name] = of_trace.get(span.name, 0.0) + (span.end - span.start) / 1e6
    phases = {phase["name"]: phase["seconds"] for phase in summary["phases"]}
    assert [*phases] == [*PHASES, "evaluation", "checkpoint"]
    assert phases == pytest.approx(of_trace, rel=0.1, abs=0.05)
    assert sum(phases.values()) == pytest.approx(summary["seconds"], rel=0.03)
    operators = [operator["self_s"] for operator in summary["operators"]]
    assert operators == sorted(operators, reverse=True)
    assert len(operators) == 20


def test_with_memory_each_phase_has_a_peak_that_the_process_has_reached(runs: dict[str, Path]):
    (path,) = (runs["dp_shard 2"] / "profiles").glob("*.summary.json")
    for phase in json.loads(path.read_text())["phases"]:
        assert 50 * 2**20 < phase["peak_bytes"] < 8 * 2**30


def test_a_peak_is_that_of_the_phase_and_the_one_since_the_start_is_not_lost(tmp_path: Path):
    device, said = torch.device("cpu"), list[str]()
    peak = PeakMemory(device)
    cfg = sections.Profile(steps=[1, 1], with_memory=True)
    (tmp_path / "profiles").write_text("a file in the place of the folder")
    profiler = Profiler(cfg, tmp_path, 0, device, peak, said.append)
    # Not the peak since the start: tests before this one may have used more memory and freed it.
    resident_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    profiler.switch(1)
    window = profiler._window
    assert window is not None
    # From the kernel, because an allocator may have kept freed memory, or may keep this.
    large = mmap.mmap(-1, 256 * 2**20)
    for page in range(0, len(large), mmap.PAGESIZE):
        large[page] = 1
    profiler.end_of_phase("large")
    large.close()
    profiler.end_of_phase("small")
    profiler.end_of_phase("small")
    peaks = window._peaks_bytes
    assert peaks["large"] > resident_bytes + 100 * 2**20
    large_bytes = peaks["large"]
    profiler.end_of_phase("later")
    assert (window._peaks_bytes["later"] or 0) < large_bytes - 200 * 2**20
    assert peak.since_start_bytes() >= large_bytes
    profiler.close(1)
    assert said
    assert said[0].startswith("WARNING: no profile of step 1: ")


def test_a_request_is_taken_once_renamed_and_its_number_is_bounded(tmp_path: Path):
    def request(text: str) -> int:
        (tmp_path / "profile-now").write_text(text)
        return take_request(tmp_path / "profile-now", 7)

    assert take_request(tmp_path / "profile-now", 6) == 0
    assert request("") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["profile-taken-00000007"]
    assert take_request(tmp_path / "profile-now", 8) == 0
    assert [request(text) for text in ("3\n", "0", "-4", "x", "9999", "9" * 30)] == [3, 1, 1, 1, 100, 100]


def test_a_file_that_appears_during_a_run_starts_a_profile_of_the_next_steps(tmp_path, monkeypatch, capsys):
    honest, steps = ShardedModel.forward_backward, []

    def forward_backward(self: ShardedModel, *args: Any) -> Any:
        steps.append(len(steps) + 1)
        if steps[-1] == 2:
            (tmp_path / "run" / "profile-now").write_text("2")
        return honest(self, *args)

    monkeypatch.setattr(ShardedModel, "forward_backward", forward_backward)
    short = {"train.steps": 6, "model.n_layers": 1, "eval.interval": 0, "data.num_workers": 0}
    assert alone(KEYS | write_text(tmp_path) | short | {"profile.steps": []}, tmp_path / "run") == 0
    (path,) = traces(tmp_path / "run")
    assert path.name == "step-00000003-rank-00000.json.gz"
    assert [span.name for span in spans(path) if span.name.startswith("step")] == ["step 3", "step 4"]
    assert (tmp_path / "run" / "profile-taken-00000002").exists()
    assert f"profile of steps 3 to 4: {path}" in capsys.readouterr().err


def test_a_profile_at_the_end_of_a_run_is_written_and_one_that_began_before_a_resume_begins_there(tmp_path):
    keys = KEYS | write_text(tmp_path) | {"model.n_layers": 1, "eval.interval": 0, "data.num_workers": 0}
    keys |= {"profile.steps": [2, 9], "train.steps": 5}
    assert alone(keys | {"train.exit_interval": 3}, tmp_path / "run") == 0
    assert alone(keys, tmp_path / "run") == 0
    first, second = traces(tmp_path / "run")
    assert [span.name for span in spans(first) if span.name.startswith("step")] == ["step 2", "step 3"]
    assert [span.name for span in spans(second) if span.name.startswith("step")] == ["step 4", "step 5"]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("profile.ranks", [1], "ranks=[1]: expected ranks below 1, the number of processes ([profile] ranks)"),
        ("profile.memory_history", True, "memory_history = true records the allocations of a GPU"),
        ("profile.steps", [3, 2], "[profile] steps is [first, last] with 1 <= first <= last, got [3, 2]"),
        ("profile.steps", [6, 7], "steps=[6, 7] begins after the last step, 4 ([profile] steps"),
    ],
)
def test_a_profile_that_cannot_be_is_refused_with_its_key(tmp_path, capsys, key: str, value: Any, words: str):
    assert alone(KEYS | write_text(tmp_path) | {key: value}, tmp_path / "run") == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def ask_in_step_2(run_dir: Path) -> AbstractContextManager[None]:
    """A file appears in the run directory while rank 0 computes the second step."""
    honest, steps = ShardedModel.forward_backward, []

    def forward_backward(self: ShardedModel, *args: Any) -> Any:
        steps.append(None)
        if len(steps) == 2 and dist.get_rank() == 0:
            (run_dir / "profile-now").touch()
        return honest(self, *args)

    return replaced(ShardedModel, "forward_backward", forward_backward)


def test_a_request_that_rank_0_sees_is_taken_by_every_profiled_rank(tmp_path):
    keys = KEYS | write_text(tmp_path) | {"mesh.dp_shard": 2, "profile.steps": [], "profile.ranks": [1]}
    train_all([Training(2, keys, tmp_path / "run", functools.partial(ask_in_step_2, tmp_path / "run"))])
    assert [path.name for path in traces(tmp_path / "run")] == ["step-00000003-rank-00001.json.gz"]
