"""planning/extrapolation.py: a step of many microbatches, extrapolated from two shorter ones and counted whole."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtmega.planning.counting.ledger import Span
from dtmega.planning.counting.role import PARAMETERS, Role, plan_role
from dtmega.planning.extrapolation import enough_microbatches, extrapolated, repeats
from dtmega.planning.plan import totals
from dtmega.planning.work import COMPUTE, Message, Work
from tests import ranks
from tests.planning import real_step
from tests.planning.test_counts import BERT, BF16, CPU, DROPOUT, GPT, LLAMA, PREFIX, SMALL, T5, TIMEOUT_S

GPU = torch.device("cuda", 0)
TINY = SMALL | {"model.n_layers": 1, "data.seq_len": 16, "batch.micro_batch_size": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "bloom": DROPOUT,
    "gpt": {**GPT, **DROPOUT},
    "llama": LLAMA,
    "bert": {**BERT, **DROPOUT},
    "t5": {**T5, **DROPOUT},
    "prefix-lm": {**PREFIX, **DROPOUT},
    "moe": {"model.name": "moe", "model.n_experts": 4, "model.n_kv_heads": 2},
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": BF16,
    "float16": {"precision.params": "float16", "precision.initial_loss_scale": 256.0},
}
# Name -> ranks, keys.
AXES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "dp_replicate": (2, {"mesh.dp_replicate": 2}),
    "dp_shard": (2, {"mesh.dp_shard": 2}),
    "cp": (2, {"mesh.cp": 2}),
    "tp": (2, {"mesh.tp": 2}),
    "pp": (2, {"mesh.pp": 2, "model.n_layers": 2}),
    "ep": (2, {"mesh.dp_shard": 2, "mesh.ep": 2}),
}
# Name -> ranks, keys, device: every axis once.
ALWAYS: dict[str, tuple[int, dict[str, Any], torch.device]] = {
    "dp_replicate": (2, {"mesh.dp_replicate": 2, **LLAMA, **BF16}, CPU),
    "dp_shard, cp, tp": (8, {"mesh.dp_shard": 2, "mesh.cp": 2, "mesh.tp": 2, **DROPOUT, **BF16}, GPU),
    "pp": (2, {**AXES["pp"][1], **LLAMA}, CPU),
    "ep": (2, {**AXES["ep"][1], **FAMILIES["moe"]}, GPU),
}
CASES = [case for case in itertools.product(FAMILIES, PRECISIONS, AXES) if case[2] != "ep" or case[0] == "moe"]
# Name -> ranks, keys.
SCHEDULES: dict[str, tuple[int, dict[str, Any]]] = {"1F1B, 4 ranks": (4, {"pipeline.schedule": "1F1B"})}
for _name in ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
    SCHEDULES[_name] = (2, {"pipeline.schedule": _name})


def check_extrapolations(keys: dict[str, Any], n_ranks: int, rank: int, device: torch.device, *numbers: int) -> None:
    """Compare a rank's extrapolated step with the counted one, for each number that the planner does not just count."""
    dist.destroy_process_group()
    n_data = keys.get("mesh.dp_replicate", 1) * keys.get("mesh.dp_shard", 1)
    cfg, sizes = real_step.settled(real_step.nested(keys | {"batch.global_batch_size": n_data * max(numbers)}), n_ranks)
    every = {n: enough_microbatches(cfg.pipeline, sizes["pp"], n, device) for n in numbers}
    runs = {n: run for n, run in every.items() if run.longer < n}
    assert runs
    all_numbers = {*numbers}.union(*((run.shorter, run.longer) for run in runs.values()))
    counted: dict[int, Role] = {}
    role: Role | None = plan_role(cfg, sizes, rank, device, sorted(all_numbers))
    while role is not None:
        counted[role.n_microbatches] = role
        role = role.shorter
    for n, run in runs.items():
        longer = counted[run.longer]._replace(shorter=counted[run.shorter])
        found = extrapolated(longer, n, run.pairs[rank // (n_ranks // sizes["pp"])])
        assert found.held == counted[n].held
        assert found.peak.peak_bytes == counted[n].peak.peak_bytes
        assert found.peak.at_peak == counted[n].peak.at_peak
        assert totals(found) == totals(counted[n])
        assert min(min(span.at_peak.values()) for span in found.spans) >= 0


def check_all_ranks(keys: dict[str, Any], n_ranks: int, device: torch.device, *numbers: int) -> None:
    """`check_extrapolations` of the first rank and, in a pipeline, of the last one, each in a process of its own."""
    for rank in {0, n_ranks - 1} if "mesh.pp" in keys else {0}:
        ranks.run(1, check_extrapolations, keys, n_ranks, rank, device, *numbers, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("axes", ALWAYS)
def test_a_step_of_many_microbatches_is_extrapolated_exactly_on_each_axis(axes: str):
    n_ranks, keys, device = ALWAYS[axes]
    check_all_ranks(TINY | keys, n_ranks, device, 6)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_5_9_and_33_microbatches_are_extrapolated_exactly(case: tuple[str, str, str]):
    family, precision, axis = case
    n_ranks, keys = AXES[axis]
    # Each family, precision and axis has cases on both devices.
    device = (GPU, CPU)[([*FAMILIES].index(family) + [*PRECISIONS].index(precision) + [*AXES].index(axis)) % 2]
    check_all_ranks(TINY | FAMILIES[family] | PRECISIONS[precision] | keys, n_ranks, device, 5, 9, 33)


@pytest.mark.full
@pytest.mark.parametrize("device", [GPU, CPU])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_schedule_is_extrapolated_exactly(schedule: str, device: torch.device):
    n_ranks, keys = SCHEDULES[schedule]
    check_all_ranks(TINY | DROPOUT | {"mesh.pp": n_ranks, "model.n_layers": 4} | keys, n_ranks, device, 12)


def test_the_middle_microbatch_stands_for_those_that_were_not_run_and_once_a_step_stays_once():
    """Of 16 microbatches 4 were run, after 3: a kernel of each microbatch and a message of the step, in the last."""
    steps = []
    for n in (3, 4):
        kernels = [Work(f"0{kind}{m}", COMPUTE, "mm", flops=1) for kind in "FB" for m in range(n)]
        gather = Work("0F0", "dp", "gather", message=Message("all-gather", "dp", 2, 8))
        sends = [Work("forward+backward", "pp", "send", message=Message("send", "pp", 2, 8, peer=1))] * n
        scatter = Work(f"0B{n - 1}", "dp", "scatter", message=Message("send", "dp", 2, 9, peer=1))
        steps.append([*kernels, gather, *sends, scatter, Work("optimizer", COMPUTE, "mm", flops=1)])
    shorter = Role(0, 3, {}, [], steps[0])
    role = extrapolated(Role(0, 4, {}, [], steps[1], shorter), 16, {})
    assert repeats(role) == [1, 1, 13, 1] * 2 + [1] + [4] * 4 + [1, 1]
    assert repeats(shorter) == [1] * len(steps[0])


def test_a_span_grows_by_what_each_microbatch_adds():
    spans = []
    for n in (3, 4):
        at_peak = {PARAMETERS: 100, "rows": 10 * n}
        spans.append([Span("between steps", 100 + 10 * n, at_peak, 100 + 7 * n)])
    shorter = Role(0, 3, {PARAMETERS: 100, "left": 33}, spans[0], [])
    role = extrapolated(Role(0, 4, {PARAMETERS: 100, "left": 44}, spans[1], [], shorter), 16, {})
    assert role.spans == [Span("between steps", 260, {PARAMETERS: 100, "rows": 160}, 212)]
    assert role.held == {PARAMETERS: 100, "left": 176}


@pytest.mark.parametrize(("device", "least"), [(GPU, 4), (CPU, 8)])
def test_over_gloo_the_shorter_steps_of_1f1b_end_its_first_microbatches(device: torch.device, least: int):
    cfg, _ = real_step.settled(real_step.nested(SMALL | {"mesh.pp": 4}), 4)
    assert enough_microbatches(cfg.pipeline, 4, 20, device).longer >= least
