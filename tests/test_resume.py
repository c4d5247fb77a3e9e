"""A run that is resumed goes on as if it had never been stopped: a ring through layouts. V is 131, see resumed.py.

All 49 pairs are in `benchmarks/resume.py`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from tests.layouts import DEBUG, debug_keys, family, write_data
from tests.resumed import LAYOUTS, RAMPING, Record, deviation, next_step, rest, train_all, whole


class Pair(NamedTuple):
    """Attributes:
    keys: of both runs.
    reader_keys: of the one that goes on.
    """

    writer: str
    reader: str
    keys: dict[str, Any]
    reader_keys: dict[str, Any]


# Fewer than in the benchmark: 2 of 4 samples are the 8 of the ramp, and the checkpoint is in the middle of it.
STEPS, CUT, RAMP = 3, 1, 2
SHORT = {
    "train.steps": STEPS,
    "eval.interval": 0,  # test_train.py resumes behind one
    "eval.sample_tokens": 0,
    "optim.warmup": 2,
    "batch.rampup": [4, 4, 4 * RAMP],
    "batch.micro_batch_size": 2,
    "checkpoint.interval": CUT,
    "model.n_layers": 2,
}
# ZBV has four stages.
BERT = {"model.name": "bert", "model.pad_vocab_to_multiple": 48, "model.n_layers": 4}
T5 = {"model.name": "t5", "model.n_decoder_layers": 1}
MUON = {"optim.name": "muon", "optim.adamw_lr": 3e-3}
ONES, SHARDED = {"batch.micro_batch_size": 1}, {"fsdp.accumulate": "sharded"}
# The other way to cut data repeats these, and BERT has the other schedule.
RING = [name for name in LAYOUTS if name not in ("pp 2, ZBV", "HSDP 2 x 2")]
SAME = {f"{name}, again": Pair(name, name, {}, {}) for name in ("dp 2", "pp 2 x tp 2", "cp 2")}
SAME |= {"bert, pp 2, ZBV, again": Pair("pp 2, ZBV", "pp 2, ZBV", BERT, {})}
OTHER = {f"{a} -> {b}": Pair(a, b, {}, {}) for a, b in pairwise([*RING, RING[0]])} | {
    # Also the bias of the vocabulary is padded here, and both heads go to another rank.
    "bert, V padded to 144, pp 2, ZBV -> tp 2": Pair("pp 2, ZBV", "tp 2", BERT, {}),
    # Three parameters that several stages hold, of which tp cuts each.
    "t5, pp 2, 1F1B -> tp 2": Pair("pp 2, 1F1B", "tp 2", T5, {}),
    "muon, dp 2 -> tp 2": Pair("dp 2", "tp 2", MUON, {}),
    # What a checkpoint holds does not depend on how gradients added up. Here each step has two microbatches or more.
    "dp 2, whole gradients -> sharded": Pair("dp 2", "dp 2", ONES, SHARDED),
    "dp 2, sharded gradients -> whole": Pair("dp 2", "dp 2", ONES | SHARDED, {"fsdp.accumulate": "whole"}),
    "dp 2 -> 1 with microbatches of 4": Pair("dp 2", "1", {}, {"batch.micro_batch_size": 4}),
}
PAIRS = SAME | OTHER
# The other way between whole and sharded sums says the same as this one, BERT's stages and the shards of data ranks as
# both at once, and every row of test_parity.py that microbatches change nothing.
FULL = {"dp 2, whole gradients -> sharded", "pp 2 x tp 2, again", "dp 2 -> 1 with microbatches of 4"}
CHAIN = ["cp 2", "cp 4", "tp 2"]


class Resumed(NamedTuple):
    """One pair.

    Attributes:
        samples: by rank and step, from CUT + 1 on.
    """

    record: Record
    truth: Record
    samples: list[list[list[int]]]


def rows(pairs: dict[str, Pair]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.full if name in FULL else ()) for name in pairs]


@pytest.fixture(scope="module")
def resumed(request, tmp_path_factory) -> dict[str, Resumed]:
    """Each writer of this session once, then each reader, all in one group of four processes."""
    items = [item for item in request.session.items if item.path == request.path and "resumed" in item.fixturenames]
    asked = {item.callspec.params["name"] for item in items}
    pairs = {name: pair for name, pair in PAIRS.items() if name in asked}
    folder = tmp_path_factory.mktemp("resume")
    data = write_data(folder)

    def keys(pair: Pair) -> dict[str, Any]:
        return debug_keys(RAMPING | SHORT | data[family(pair.keys)] | pair.keys)

    writers = {
        (p.writer, str(p.keys)): whole(p.writer, folder / f"{p.writer} {p.keys}", keys(p)) for p in pairs.values()
    }
    readers = {
        name: rest(p.reader, writers[p.writer, str(p.keys)].folder, folder / name, keys(p) | p.reader_keys)
        for name, p in pairs.items()
    }
    samples = dict(zip([*writers, *readers], train_all([*writers.values(), *readers.values()]), strict=True))
    truths = {key: Record(training.folder) for key, training in writers.items()}
    return {
        name: Resumed(Record(readers[name].folder), truths[p.writer, str(p.keys)], samples[name])
        for name, p in pairs.items()
    }


@pytest.mark.parametrize("name", rows(SAME))
def test_on_the_same_layout_every_later_number_and_every_weight_is_equal_to_the_bit(resumed, name):
    assert deviation(resumed[name].record, resumed[name].truth).same_bits


@pytest.mark.parametrize("name", rows(OTHER))
def test_on_another_layout_the_first_loss_is_the_same_and_the_rest_follows_within_the_rounding_of_fp32(resumed, name):
    found = deviation(resumed[name].record, resumed[name].truth)
    assert found.within_bounds(), found


@pytest.mark.parametrize("name", rows(PAIRS))
def test_the_next_sample_is_the_next_one_in_the_middle_of_the_ramp_and_none_comes_twice(resumed, name):
    sizes = [4 if step <= RAMP else 8 for step in range(1, STEPS + 1)]
    done = sum(sizes[:CUT])
    for i, size in enumerate(sizes[CUT:]):
        given = {sample for rank in resumed[name].samples for sample in rank[i]}
        assert given == set(range(done, done + size))
        done += size
        assert resumed[name].record.steps[CUT + i + 1]["tokens"] == done * DEBUG["data.seq_len"]


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        ({}, CHAIN),
        pytest.param({"model.name": "moe"}, ("dp_shard 2, ep 2", "1", "tp 2"), marks=pytest.mark.full),
        pytest.param({"model.name": "moe"}, ("1", "dp_shard 4, ep 2", "dp_shard 2, ep 2"), marks=pytest.mark.full),
    ],
)
def test_a_run_with_a_layout_for_each_step_has_the_numbers_of_one_process(tmp_path, model, layouts):
    keys = debug_keys(RAMPING | SHORT | model | write_data(tmp_path)["bloom"])
    assert len(layouts) == STEPS
    train_all([whole("1", tmp_path / "1", keys), *(next_step(layout, tmp_path / "chain", keys) for layout in layouts)])
    found = deviation(Record(tmp_path / "chain"), Record(tmp_path / "1"), first=1)
    assert found.within_bounds(), found
    assert max(found.loss, found.grad_norm) <= 1e-6, found
