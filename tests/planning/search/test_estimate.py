"""planning/estimate.py and what it is made of: against tables of schedules, published formulas, and counted plans."""

from __future__ import annotations

import shlex

import pytest
import torch

from dtmega import config, families, mesh
from dtmega.pipelining.schedule import broken_rule
from dtmega.pipelining.table import SCHEDULES, make_table, simulate
from dtmega.planning.extrapolation import in_flight
from dtmega.planning.plan import plan_job, time_step
from dtmega.planning.prices import fabric, formulas
from dtmega.planning.search import duration
from dtmega.planning.search.estimate import MARGIN, Estimator
from dtmega.planning.search.layout import Layout
from dtmega.planning.search.places import Places, in_flight_of
from dtmega.training import checks

A100 = fabric.load("a100-ib")
PLAIN = Layout(1, 1, 1, 1, 1, 1, True, "auto", "whole", "1F1B", 0, "none", "auto")
SCHEDULES_AND_STAGES = [
    (name, virtual) for name, kind in SCHEDULES.items() for virtual in {"1": [1], "2": [2], "2+": [2, 3]}[kind.per_rank]
]


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES_AND_STAGES)
def test_microbatches_in_flight_and_the_bubble_are_those_of_the_schedules_table(schedule: str, virtual: int):
    """A rank waits for what is left of the time of the others' actions: 1 F and 2 B, or I and W, on each stage."""
    for pp in (2, 4):
        for n in (pp, 2 * pp, 2 * pp + 2, 3 * pp, 4 * pp):
            pipeline = config.Pipeline.model_validate({"schedule": schedule, "virtual_stages": virtual})
            if broken_rule(pipeline, pp, n):
                continue
            table = make_table(pipeline, pp, n)
            numbers = [in_flight_of(schedule, pp, virtual, n, place) for place in range(pp)]
            pairs = list(zip(numbers, in_flight(table), strict=True))
            assert all(number >= counted for number, counted in pairs)
            if n == pp:
                continue  # too few microbatches for a steady state
            assert all(number == counted for number, counted in pairs)
            if n % pp and "Interleaved" in schedule:
                continue  # rounds of more microbatches than ranks wait for a little less
            timeline = simulate(table)
            waited = max(row[-1].end for row in timeline.rows) - 3 * n * virtual
            layout = PLAIN._replace(pp=pp, schedule=schedule, virtual_stages=virtual)
            assert waited == pytest.approx(3 * virtual * Places(bloom(), []).bubble(layout, n))


def bloom(arguments: str = "") -> config.Config:
    return families.resolve(config.load(["--config", "bloom-176b.toml", *shlex.split(arguments)]))


def test_a_layer_keeps_what_korthikantis_table_says_without_the_masks_of_dropout():
    """34 s b h, of which 2 are masks of dropout outside of attention; one of 10 undivided bytes is a mask, too."""
    cfg = bloom("--model.attention_dropout 0 --batch.rampup []")
    estimator = Estimator(cfg, families.pieces(cfg.model), A100)
    s, h = cfg.data.seq_len, cfg.model.hidden_size
    for tp, cut in ((1, True), (8, False), (8, True)):
        layout = PLAIN._replace(dp_shard=384, tp=tp, micro_batch_size=2, sequence_parallel=cut)
        kept = estimator.estimate(layout).kept_bytes / cfg.model.n_layers
        published = formulas.activation_bytes_per_layer(s, 2, h, 0, tp, cut)
        masks = 2 * s * 2 * h / (tp if cut else 1)
        assert kept == pytest.approx(published - masks, rel=0.02)


def test_full_recomputation_keeps_the_layers_inputs():
    cfg = bloom("--batch.rampup []")
    estimator = Estimator(cfg, families.pieces(cfg.model), A100)
    layout = PLAIN._replace(pp=12, dp_shard=8, tp=4, micro_batch_size=2, mode="full")
    per_layer = formulas.activation_bytes_per_layer(2048, 2, 14336, 112, 4, True, "full")
    # The first rank has 12 microbatches in flight, each with the embedding's output and the inputs of 6 layers.
    assert estimator.estimate(layout).kept_bytes == pytest.approx(12 * (6 + 1) * per_layer, rel=0.01)


def test_states_are_those_of_zero():
    """FSDP that keeps gathered weights and whole gradients in 32 bits is ZeRO-1 with 2 more bytes of gradients."""
    cfg = bloom("--batch.rampup []")
    pieces = families.pieces(cfg.model)
    n = sum(piece.elements for piece in pieces)
    states = Estimator(cfg, pieces, A100).estimate(PLAIN._replace(dp_shard=8, reshard_after_forward=False)).states_bytes
    assert states == pytest.approx(formulas.zero_bytes(n, 8, 1) + 2 * n, rel=1e-3)


SEQ_LEN = 4096


def mixture(global_batch_size: int, of: fabric.Fabric) -> Estimator:
    """An estimator of 4 layers of a mixture in bfloat16. A token uses 8 of 128 experts, 2048 x 768 and 3 matrices."""
    words = f"--config qwen3-30b-a3b.toml --model.n_layers 4 --data.seq_len {SEQ_LEN} --batch.global_batch_size"
    words += f" {global_batch_size} --precision.params bfloat16"
    cfg = families.resolve(config.load(words.split()))
    return Estimator(cfg, families.pieces(cfg.model), of)


def test_a_rank_gathers_its_own_experts_only():
    """Weights in 16 bits and whole gradients in 32 are there for a rank's experts; masters and moments are shards."""
    estimator = mixture(16, A100)
    all_experts, few = (PLAIN._replace(dp_shard=8, reshard_after_forward=False, ep=ep) for ep in (1, 4))
    saved = estimator.estimate(all_experts).states_bytes - estimator.estimate(few).states_bytes
    assert saved == pytest.approx((2 + 4) * (4 * 128 * 3 * 768 * 2048) * 3 / 4, rel=1e-6)


def test_experts_send_what_leaves_a_rank_four_times_and_six_times_if_recomputed():
    """The time of one more microbatch where links are so slow that nothing else counts: 3 of 4 rows leave a rank."""
    slow = A100.model_copy(update={"node": A100.node.model_copy(update={"bytes_per_s": 1.0})})
    estimators = mixture(16, slow), mixture(20, slow)
    for mode, times in (("none", 4), ("full", 6)):
        layout = PLAIN._replace(dp_shard=4, ep=4, mode=mode, reshard_after_forward=False)
        four, five = (estimator.estimate(layout).seconds for estimator in estimators)
        row_bytes = 2048 * 2
        assert five - four == pytest.approx(4 * times * SEQ_LEN * 8 * row_bytes * 3 / 4, rel=1e-4)


def test_a_boundary_goes_to_the_rank_after_all_data_cp_and_tp_ranks_of_its_stage(monkeypatch: pytest.MonkeyPatch):
    ends: set[tuple[int, int]] = set()

    def send_seconds(n_bytes: int, of: fabric.Fabric, sender: int, receiver: int) -> float:
        ends.add((sender, receiver))
        return 0.0

    monkeypatch.setattr(duration.pricing, "send_seconds", send_seconds)
    cfg = bloom("--batch.rampup [] --model.n_layers 4 --model.vocab_size 512")
    layout = PLAIN._replace(pp=2, dp_replicate=2, dp_shard=4, cp=2, tp=4, cp_form="gather")
    Estimator(cfg, families.pieces(cfg.model), A100).estimate(layout)
    assert ends == {tuple(mesh.group_lists(layout.sizes)["pp"][0][:2])}


def test_blooms_own_layout_takes_what_was_counted():
    """41.88 GiB on the first of 12 pipeline ranks, counted by `plan_job` on 2026-11-26."""
    cfg = bloom()
    layout = PLAIN._replace(pp=12, dp_shard=8, tp=4, micro_batch_size=2, mode="full")
    peak = Estimator(cfg, families.pieces(cfg.model), A100).estimate(layout).peak_bytes
    assert peak / 2**30 == pytest.approx(41.88, rel=0.1)


COUNTED = [
    "--config llama-2-7b.toml --model.n_layers 2 --mesh.dp_shard 4",
    "--config gpt2.toml --model.n_layers 2 --mesh.tp 2 --mesh.dp_replicate 2 --mesh.sequence_parallel false",
    "--config bloom-560m.toml --model.n_layers 4 --mesh.pp 2 --mesh.tp 2 --recompute.mode full --batch.rampup []",
    "--config llama-3.2-1b.toml --model.n_layers 4 --mesh.cp 2 --mesh.dp_shard 2 --recompute.mode selective",
    "--config qwen3-30b-a3b.toml --model.n_layers 2 --mesh.dp_shard 4 --mesh.ep 4",
]


@pytest.mark.full
@pytest.mark.parametrize("arguments", COUNTED)
def test_counts_stay_within_the_margin_of_the_estimate(arguments: str):
    """A search throws away only what exceeds the margin, so it never throws away what its counts would keep."""
    gpu = torch.device("cuda", 0)
    words = [*shlex.split(arguments), "--batch.micro_batch_size", "2", "--batch.global_batch_size", "16"]
    cfg = families.resolve(config.load(words))
    sizes = mesh.resolve(cfg.mesh, 4)
    checks.check(cfg, sizes, gpu)
    values = {key: getattr(section, key) for section in (cfg.mesh, cfg.batch, cfg.pipeline, cfg.recompute, cfg.fsdp)
              for key in type(section).model_fields if key in Layout._fields}  # fmt: skip
    layout = PLAIN._replace(**(values | sizes))
    estimate = Estimator(cfg, families.pieces(cfg.model), A100).estimate(layout)
    plan = plan_job(cfg, sizes, gpu)
    seconds = time_step(plan, A100).seconds
    print(
        f"{estimate.peak_bytes / plan.fullest.peak.peak_bytes:.3f} of bytes, {estimate.seconds / seconds:.3f} of time"
    )
    assert 1 / MARGIN < estimate.peak_bytes / plan.fullest.peak.peak_bytes < MARGIN
    assert 1 / 1.5 < estimate.seconds / seconds < 1.5
