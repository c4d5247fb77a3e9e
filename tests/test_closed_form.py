"""benchmarks/closed_form.py and benchmarks/published.py against the papers' formulas and the sources' counts."""

from __future__ import annotations

import statistics
from collections import defaultdict

import pytest

from benchmarks import closed_form, published
from benchmarks.closed_form import Run
from dtmega.planning.prices import fabric as fabrics

FIGURES, SOURCES = published.read()
LOADED = {name: fabrics.load(name) for name in published.GPU_KINDS}
GPT = Run(
    layers=12,
    hidden=1024,
    heads=16,
    kv_heads=16,
    feed_forward=4096,
    vocab=51200,
    seq_len=2048,
    gated=False,
    n_gpus=64,
    tp=2,
    pp=4,
    virtual=1,
    micro_batch=2,
    global_batch=128,
    recompute=1.0,
    recompute_attention=False,
    sequence_parallel=False,
    data="after",
)
IDEAL = fabrics.parse(
    {
        "gpu": {"name": "x", "memory_bytes": 1, "memory_bytes_per_s": 1e12, "peak_flops": {"bfloat16": 1e14}},
        "node": {"ranks": 8, "bytes_per_s": 1e11},
        "network": {"bytes_per_s": 1e10},
    },
    "ideal.toml",
)


def test_products_take_the_flops_of_narayanans_equation_without_its_attention():
    """96 B s l h^2 (1 + V / (16 l h)), arXiv:2104.04473, equation 3; its head is not recomputed."""
    b, s, layers, h, v = 128, 2048, 12, 1024, 51200
    flops = 96 * b * s * layers * h**2 * (1 + v / (16 * layers * h))
    parts = closed_form.step(GPT, IDEAL)
    assert parts.products_s == pytest.approx(flops / 64 / 1e14)
    causal = 96 * b * s * layers * h**2 * s / (6 * h) / 2
    assert parts.attention_s == pytest.approx(causal / 64 / 1e14)


def test_partial_sums_of_tensor_parallelism_take_two_all_reduces_a_pass():
    """Forward, backward, recomputation: 6 all-reduces of 2 s b h bytes a layer; 3 layers, 8 microbatches."""
    parts = closed_form.step(GPT, IDEAL)
    assert parts.tp_s == pytest.approx(8 * 3 * 6 * (2 * 2048 * 2 * 1024) * 2 * (1 / 2) / 1e11)


def test_the_bubble_is_p_minus_1_microbatches_over_v():
    one, four = (closed_form.step(GPT._replace(virtual=v), IDEAL) for v in (1, 4))
    busy_s = one.products_s + one.attention_s + one.tp_s
    busy_s += 2 * (10 + 24 / 2) * 4 * 12 * 1024 / 4 * 8 * 4096 / 1e12  # traffic between products
    assert one.bubble_s == pytest.approx(3 / 8 * busy_s)
    assert four.bubble_s == pytest.approx(one.bubble_s / 4)


def test_fsdp_exposes_what_a_microbatch_does_not_cover():
    run = GPT._replace(tp=1, pp=1, n_gpus=8, data="fsdp", recompute=0.0)
    covered = closed_form.step(run, IDEAL)
    assert covered.data_s == 0
    slow = IDEAL.model_copy(update={"node": IDEAL.node.model_copy(update={"bytes_per_s": 1e7})})
    exposed = closed_form.step(run, slow)
    weights = 12 * 12 * 1024**2 + 2 * 51200 * 1024
    moved_s = 8 * (2 * 2 + 4) * weights * 7 / 8 / 1e7
    busy_s = covered.products_s + covered.attention_s + 2 * 34 * 3 * 12 * 1024 * 8 * 4096 / 1e12
    assert exposed.data_s == pytest.approx(moved_s - busy_s)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("mpt-760m", 760470528),
        ("mpt-1b", 1315950592),
        ("mpt-3b", 2651837440),
        ("mpt-7b", 6658859008),
        ("mpt-13b", 12853954560),
        ("mpt-30b", 29975214080),
        ("mpt-70b", 64862437376),
        ("llama-3-8b", 8030261248),
        ("bloom-176b", 176247271424),
    ],
)
def test_sizes_of_the_models_give_the_parameters_that_their_sources_state(model: str, parameters: int):
    run = next(figure.run for figure in FIGURES if figure.model == model)
    embeddings = (2 if model.startswith("llama") else 1) * run.vocab * run.hidden
    assert run.layers * run.layer_parameters + embeddings == pytest.approx(parameters, rel=5e-3)


def test_every_figure_has_an_address_and_a_layout_that_divides():
    for figure in FIGURES:
        run = figure.run
        assert SOURCES[figure.source]
        assert run.n_gpus == run.data_ranks * run.tp * run.pp
        assert run.n_microbatches >= 1


@pytest.mark.parametrize("kind", ["H100", "A100"])
def test_shipped_efficiencies_and_their_errors_are_those_of_the_fit(kind: str):
    rows = [figure for figure in FIGURES if published.GPU_KINDS[figure.fabric] == kind]
    errors = defaultdict(list)
    for source in {row.source for row in rows}:
        without = published.fit([row for row in rows if row.source != source], LOADED)
        for row in rows:
            if row.source == source:
                predicted = published.predicted(row, LOADED, without)
                errors[source].append(abs(predicted / row.tokens_per_s_per_gpu - 1))
    held_out = statistics.mean(statistics.mean(each) for each in errors.values())
    efficiency = published.fit(rows, LOADED)
    for name, fabric in LOADED.items():
        if published.GPU_KINDS[name] == kind:
            assert fabric.gpu.efficiency == pytest.approx(efficiency, abs=6e-4)
            assert fabric.gpu.held_out_error == pytest.approx(held_out, abs=6e-4)


def test_gradients_are_reduced_over_ranks_a_tensor_parallel_group_apart():
    """With tp 8 in nodes of 8, each data group has one rank in each node and crosses by one network card."""
    run = GPT._replace(tp=8, pp=1, n_gpus=32)
    weights = (12 * 12 * 1024**2 + 2 * 51200 * 1024) / 8
    assert closed_form.step(run, IDEAL).data_s == pytest.approx(2 * 3 / 4 * 2 * weights / 1e10, rel=1e-6)
