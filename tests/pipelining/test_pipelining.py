"""pipelining/: the cut against brute force, schedules against closed forms, and trained stages against one process."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from dtmega import config, families
from dtmega.config.families.bert import BertKeys
from dtmega.config.families.bloom import BloomKeys
from dtmega.data.objectives.next_token import NEXT_TOKEN
from dtmega.data.objectives.sums import Tally
from dtmega.models.bloom import Bloom
from dtmega.ops import keyed, optim
from dtmega.ops.cost import Piece
from dtmega.pipelining import pipeline as pipeline_room
from dtmega.pipelining import tied as tied_room
from dtmega.pipelining.draw import draw, draw_schedule
from dtmega.pipelining.pipeline import Pipeline
from dtmega.pipelining.schedule import check_schedule
from dtmega.pipelining.split import Cost, balanced, pieces_of_stages, plan_stages, stages_of_ranks
from dtmega.pipelining.table import SCHEDULES, Action, csv_table, make_table, named_table, simulate, stages_in
from dtmega.pipelining.tied import Tied, shared
from tests import ranks

MODEL = BloomKeys(
    vocab_size=67, hidden_size=16, n_layers=8, n_heads=4, hidden_dropout=0.1, attention_dropout=0.1, init_std=0.2
)
PIECES = families.pieces(MODEL)
SEQ_LEN = 6
RAMP, RAMP_OF_FOUR = [4, 6], [8, 4]  # microbatches of each step; in the first one a V is filled


def settings(**sections: dict[str, Any]) -> config.Config:
    data = {"seq_len": SEQ_LEN}
    return config.Config(train=config.Train(steps=1), model=MODEL, data=config.Data(**data), **sections)


def layers_of_stages(model: BloomKeys, seq_len: int, n_stages: int) -> list[list[int]]:
    """The numbers of the layers of each stage, balanced."""
    stages = pieces_of_stages(families.pieces(model), seq_len, config.Pipeline(), n_stages)
    return [[int(name.removeprefix("layers.")) for name in stage if name not in ("embed", "head")] for stage in stages]


@pytest.mark.parametrize(("mask_prob", "in_the_first"), [(0.15, 2), (0.9, 4)])
def test_a_head_that_reads_labelled_tokens_only_is_as_long_as_their_share(mask_prob: float, in_the_first: int):
    """A layer's 12 D^2 weights meet all tokens, the head's V D + D^2 those with a label: all would be four layers."""
    model = BertKeys(vocab_size=4 * 12 * 64, hidden_size=64, n_layers=4, n_heads=4)
    asked = settings().model_copy(update={"model": model, "data": config.Data(seq_len=1, mask_prob=mask_prob)})
    first, second = plan_stages(asked, families.pieces(model), 2).pieces
    assert (len(first) - len(["embed"]), second[-1]) == (in_the_first, "head")


def pipeline(schedule: str, virtual_stages: int = 0, csv: str = "") -> config.Pipeline:
    return config.Pipeline.model_validate({"schedule": schedule, "virtual_stages": virtual_stages, "csv": csv})


# ---- the cut


def cuts(n_pieces: int, n_stages: int) -> list[list[range]]:
    """All of them."""
    inner = itertools.combinations(range(1, n_pieces), n_stages - 1)
    return [[range(i, j) for i, j in itertools.pairwise([0, *bounds, n_pieces])] for bounds in inner]


@pytest.mark.parametrize("n_stages", [1, 2, 3, 4, 7])
def test_no_cut_has_a_faster_slowest_stage_and_of_those_none_has_less_squared_memory(n_stages: int):
    generator = torch.Generator().manual_seed(n_stages)
    for _ in range(10):
        costs = [Cost(*torch.randint(0, 9, (2,), generator=generator).tolist()) for _ in range(7)]

        def slowest_and_memory(stages: list[range], costs: list[Cost] = costs) -> tuple[int, int]:
            flops = [sum(costs[i].flops for i in stage) for stage in stages]
            return max(flops), sum(sum(costs[i].parameters for i in stage) ** 2 for stage in stages)

        assert slowest_and_memory(balanced(costs, n_stages)) == min(map(slowest_and_memory, cuts(7, n_stages)))


def test_eight_layers_on_two_ranks_with_two_stages_each_are_megatrons():
    free, layer = Cost(0, 0), Cost(1, 1)
    stages = balanced([free, *[layer] * 8, free], 4)
    layers = [[i - 1 for i in stage if 1 <= i <= 8] for stage in stages]
    assert [[layers[s] for s in held] for held in stages_of_ranks("loop", 2, 2)] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_of_equally_good_cuts_earlier_stages_get_fewer_layers():
    assert [len(stage) for stage in balanced([Cost(1, 1)] * 8, 3)] == [2, 3, 3]


def test_the_first_and_the_last_stage_of_a_v_are_on_rank_0():
    assert stages_of_ranks("v", 4, 2) == [[0, 7], [1, 6], [2, 5], [3, 4]]


def test_the_head_of_bloom_176b_weighs_what_it_costs():
    model = BloomKeys(vocab_size=250880, hidden_size=14336, n_layers=70, n_heads=112)
    assert [len(stage) for stage in layers_of_stages(model, 2048, 12)] == [6] * 11 + [4]


def test_a_head_that_costs_many_layers_gets_a_stage_alone():
    model = BloomKeys(vocab_size=250880, hidden_size=1024, n_layers=24, n_heads=16)
    assert [len(stage) for stage in layers_of_stages(model, 2048, 8)] == [0, 4, 4, 4, 4, 4, 4, 0]


@pytest.mark.parametrize(
    ("n_layers", "words", "seq_len"),
    [
        (10, 6, 8),  # each end has half a layer's parameters
        (10, 24, 8),  # twice a layer's, and the head takes two layers' time
        (10, 24, 12 * 16),  # but one layer's, where attention is half of that
        (8, 24, 12 * 16),
        (8, 36, 24 * 16),
    ],
)
def test_no_cut_of_a_model_is_faster_and_of_those_as_fast_none_has_less_squared_memory(n_layers, words, seq_len):
    d, n_stages = 16, 4
    vocabulary = words * d
    model = BloomKeys(vocab_size=vocabulary, hidden_size=d, n_layers=n_layers, n_heads=4)
    layer_flops = 6 * 12 * d * d + 6 * seq_len * d
    flops = [0, *[layer_flops] * n_layers, 6 * vocabulary * d]
    end = vocabulary * d + 2 * d  # with a LayerNorm; the tied weight is on both
    parameters = [end, *[12 * d * d + 13 * d] * n_layers, end]

    def cost(stages: list[range]) -> tuple[int, int, list[int]]:
        slowest = max(sum(flops[i] for i in stage) for stage in stages)
        memory = sum(sum(parameters[i] for i in stage) ** 2 for stage in stages)
        return slowest, memory, [len(stage) for stage in stages]

    best = min(cuts(n_layers + 2, n_stages), key=cost)
    expected = [[i - 1 for i in stage if 1 <= i <= n_layers] for stage in best]
    assert layers_of_stages(model, seq_len, n_stages) == expected


def test_given_stages_are_taken():
    stages = [[], [0, 1, 2], [3, 4, 5, 6, 7], []]
    found = plan_stages(settings(pipeline={"schedule": "DualPipeV", "stages": stages}), PIECES, pp=2).pieces
    assert found == [["embed"], *([f"layers.{i}" for i in stage] for stage in stages[1:3]), ["head"]]


def test_given_stages_of_two_stacks_leave_the_ends_of_each_beside_its_layers():
    names = ["embed", "encoder.0", "encoder.1", "encoder.norm", "decoder.embed", "decoder.0", "decoder.1", "head"]
    pieces = [Piece(name, 1, 1, 1) for name in names]
    stages = pieces_of_stages(pieces, SEQ_LEN, config.Pipeline(stages=[[0], [1], [2, 3]]), 3)
    assert stages == [names[:2], names[2:5], names[5:]]
    pieces[4] = pieces[4]._replace(begins_decoder=True)
    stages = pieces_of_stages(pieces, SEQ_LEN, config.Pipeline(stages=[[0], [1], [2, 3]]), 3)
    assert stages == [names[:2], names[2:4], names[4:]]


def two_stacks() -> list[Piece]:
    """An encoder of three layers and a decoder of two, each layer of which costs as much as its number says."""
    layers = {f"encoder.{i}": cost for i, cost in enumerate((3, 1, 1))} | {"encoder_norm": 0, "decoder_embed": 0}
    layers |= {f"decoder.{i}": cost for i, cost in enumerate((1, 1))}
    every = {"embed": 0, **layers, "head": 1}
    return [Piece(name, 1, cost, 0, begins_decoder=name == "decoder_embed") for name, cost in every.items()]


def test_a_split_gives_encoder_and_decoder_stages_of_their_own_each_balanced_by_itself():
    names = [piece.name for piece in two_stacks()]
    for split, n_stages, bounds in ((1, 2, [5]), (2, 3, [2, 5]), (2, 4, [2, 5, 7]), (1, 3, [5, 7])):
        stages = pieces_of_stages(two_stacks(), SEQ_LEN, config.Pipeline(split=split), n_stages)
        assert stages == [names[i:j] for i, j in itertools.pairwise([0, *bounds, len(names)])]
    assert pieces_of_stages(two_stacks(), SEQ_LEN, config.Pipeline(), 2) == [names[:3], names[3:]]  # by cost


@pytest.mark.parametrize(
    ("keys", "n_stages", "message"),
    [
        ({"split": 3}, 3, r"split=3 leaves the decoder no stage: expected 1 to 2, as there are 3 stages"),
        ({"split": 4}, 5, r"4 stages cannot be cut from n_layers=3 layers: 4 > 3 \(.*\[pipeline\] split"),
        ({"split": 1}, 4, r"3 stages cannot be cut from n_decoder_layers=2 layers: 3 > 2"),
        ({}, 6, r"6 stages cannot be cut from n_layers \+ n_decoder_layers=3 \+ 2 layers: 6 > 5"),
        ({"stages": [[0, 1], [2, 3]]}, 2, r"layers 0 to 4 once, .*\[model\] n_layers \+ n_decoder_layers=3 \+ 2\)"),
        ({"split": 1, "stages": [[0, 1, 2], [3, 4]]}, 2, r"the listed stages decide .*expected split=0, got 1"),
    ],
    ids=str,
)
def test_a_split_that_is_none_is_refused_and_layers_are_counted_by_stack(keys, n_stages: int, message: str):
    with pytest.raises(ValueError, match=message):
        pieces_of_stages(two_stacks(), SEQ_LEN, config.Pipeline(**keys), n_stages)


def test_a_split_is_refused_for_a_model_of_one_stack():
    with pytest.raises(ValueError, match=r"split=1 is for a model that has a decoder behind an encoder: expected 0"):
        plan_stages(settings(pipeline={"split": 1}), PIECES, pp=2)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([[0, 1, 2, 3], [4, 5, 6, 7]], r"stages has 2 lists of layers, expected 4 = \[mesh\] pp x stages per rank"),
        ([[0, 1], [2, 3], [4, 5], [6]], r"each of the layers 0 to 7 once, in order .*n_layers=8.*\[6\]\]"),
        ([[0, 1], [3, 2], [4, 5], [6, 7]], "each of the layers 0 to 7 once, in order"),
        ([[0, 1, 2, 3], [], [4, 5], [6, 7]], "stage 1 is empty; only the first .* and the last .* may be"),
        ([[0, 1, 2, 3], [4, 5], [], [6, 7]], "stage 2 is empty; only the first .* and the last .* may be"),
        ([[0, 1], [2, 3], [4, 5], [6, 7, 7]], "each of the layers 0 to 7 once, in order"),
        ([], r"10 stages cannot be cut from n_layers=8 layers: 10 > 8 \(\[mesh\] pp x \[pipeline\] virtual_stages"),
    ],
)
def test_stages_that_are_no_cut_are_refused(stages: list[list[int]], message: str):
    wanted = {"schedule": "Interleaved1F1B", "stages": stages, "virtual_stages": 2 if stages else 5}
    with pytest.raises(ValueError, match=message):
        plan_stages(settings(pipeline=wanted), PIECES, pp=2)


def whole() -> Bloom:
    with torch.device("meta"):
        return families.of(MODEL).build(MODEL)


def test_stages_hold_each_parameter_once_under_its_own_name_but_the_tied_one_twice():
    names: Counter[str] = Counter()
    for held in pieces_of_stages(PIECES, SEQ_LEN, config.Pipeline(), 4):
        stage = copy.deepcopy(whole())
        stage.keep(held)
        names.update(stage.full_name(name) for name, _ in stage.named_parameters())
    assert names == Counter(name for name, _ in whole().named_parameters()) + Counter(["embed.weight"])


# ---- tables


@pytest.mark.parametrize(("pp", "n"), [(2, 2), (2, 8), (4, 8), (6, 18)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bubbles_are_the_closed_forms(schedule: str, pp: int, n: int):
    """Idle (p - 1)(F + B) of v m (F + B), Narayanan et al. 2021, section 2.2; (p - 1)(F + I - W), arXiv:2401.10241."""
    kind = SCHEDULES[schedule]
    per_rank = int(kind.per_rank[0])
    if kind.shape == "v":
        n = max(n, 2 * pp)  # with fewer, a V is not filled
    work, idle = per_rank * n * 3, (pp - 1) * (1 if kind.splits_backward else 3)
    assert simulate(named_table(schedule, pp, per_rank, n)).bubble == pytest.approx(idle / (work + idle))


def test_more_stages_per_rank_shrink_the_bubble_of_interleaving():
    assert simulate(named_table("Interleaved1F1B", 4, 5, 8)).bubble == pytest.approx(3 / (5 * 8 + 3))


def refused(cfg: config.Config, pp: int) -> str:
    try:
        check_schedule(cfg, PIECES, pp, data_size=1, compiled=False)
    except ValueError as error:
        return str(error)
    return ""


def torchs(schedule: str, pp: int, per_rank: int, n: int) -> Any:
    """The schedule as torch makes it, or None if it refuses."""
    stage: Any = SimpleNamespace(num_stages=pp * per_rank, group_size=pp, group_rank=0, submod=None)
    kind: Any = get_schedule_class(schedule)
    try:
        return kind(stage if issubclass(kind, PipelineScheduleSingle) else [stage] * per_rank, n)
    except ValueError:
        return None


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_named_table_is_complete_and_runs_at_all_sizes_that_torch_allows(schedule: str, tmp_path: Path):
    path = tmp_path / "schedule.csv"
    for pp, n in itertools.product((2, 3, 4), (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)):
        cfg = settings(pipeline={"schedule": schedule}, batch={"micro_batch_size": 1, "global_batch_size": n})
        theirs = torchs(schedule, pp, int(SCHEDULES[schedule].per_rank[0]), n)
        message = refused(cfg, pp)
        assert ("microbatches, but schedule" in message) == (message != "") == (theirs is None), (pp, n)
        if theirs is None:
            continue
        table = make_table(cfg.pipeline, pp, n)
        path.write_text("\n".join(",".join(map(str, row)) for row in table))
        assert csv_table(str(path), pp) == table  # all checks of a file, on torch's own tables
        if not isinstance(theirs, PipelineScheduleSingle):
            places = theirs.stage_index_to_group_rank
            held = [[stage for stage in sorted(places) if places[stage] == rank] for rank in range(pp)]
            assert plan_stages(cfg, PIECES, pp).ranks == stages_in(table) == held


@pytest.mark.parametrize(
    ("schedule", "default", "others"),
    [
        ("GPipe", 1, set()),
        ("1F1B", 1, set()),
        ("Interleaved1F1B", 2, {3, 4}),
        ("LoopedBFS", 2, {3, 4}),
        ("InterleavedZeroBubble", 2, {3, 4}),
        ("ZBVZeroBubble", 2, set()),
        ("DualPipeV", 2, set()),
    ],
)
def test_a_schedule_runs_its_numbers_of_stages_per_rank_and_no_others(schedule: str, default: int, others: set[int]):
    plain = plan_stages(settings(pipeline={"schedule": schedule}), PIECES, pp=2)
    assert [len(held) for held in plain.ranks] == [default] * 2
    for wanted in range(1, 5):
        cfg = settings(pipeline={"schedule": schedule, "virtual_stages": wanted})
        if wanted in {default, *others}:
            assert [len(held) for held in plan_stages(cfg, PIECES, pp=2).ranks] == [wanted] * 2
        else:
            with pytest.raises(ValueError, match=rf"virtual_stages={wanted}, but schedule '{schedule}' runs "):
                plan_stages(cfg, PIECES, pp=2)


def test_each_action_is_as_early_as_its_rank_and_its_inputs_allow():
    rows = [[(step.start, step.end, str(step.action)) for step in row] for row in simulate(THREE).rows]
    assert rows == THREE_TIMES


# 1F1B on two ranks with three microbatches, and when each of its actions starts and ends.
THREE = named_table("1F1B", 2, 1, 3)
THREE_TIMES = [
    [(0, 1, "0F0"), (1, 2, "0F1"), (4, 6, "0B0"), (6, 7, "0F2"), (7, 9, "0B1"), (10, 12, "0B2")],
    [(1, 2, "1F0"), (2, 4, "1B0"), (4, 5, "1F1"), (5, 7, "1B1"), (7, 8, "1F2"), (8, 10, "1B2")],
]


@pytest.mark.parametrize("pp", [2, 4])
def test_1f1b_keeps_at_most_pp_minus_rank_microbatches(pp: int):
    for rank, row in enumerate(named_table("1F1B", pp, 1, 10)):
        alive = itertools.accumulate(1 if action.kind == "F" else -1 for action in row)
        assert max(alive) == pp - rank


def test_actions_that_wait_for_each_other_are_refused():
    row = [Action(1, "F", 0), Action(0, "F", 0)]
    with pytest.raises(
        ValueError, match="schedule cannot run: rank 0 before 1F0, which wait for an action that comes later or never"
    ):
        simulate([row])


GOOD = ["0F0,0F1,,0B0,0B1", "1F0,1B0,1F1,1I1,1W1"]


def test_a_file_may_have_idle_cells_split_backwards_and_pairs_as_torch_writes_them(tmp_path: Path):
    path = tmp_path / "schedule.csv"
    path.write_text("\n".join([GOOD[0], "1F0,1B0, (1F1;1I1)OVERLAP_F_B,1W1"]))
    assert [[str(action) for action in row] for row in csv_table(str(path), pp=2)] == [
        ["0F0", "0F1", "0B0", "0B1"],
        ["1F0", "1B0", "1F1", "1I1", "1W1"],
    ]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([GOOD[0], "1F0,1X0"], r"row 2: '1X0' is not an action; expected one such as 0F3 or 1B0"),
        ([GOOD[0], "1F0,1B0 0F1"], r"row 2: '1B0 0F1' is not an action"),
        ([GOOD[0], ","], "has 2 rows, 1 of them with actions; expected 2"),
        (["1F0,1B0", "2F0,2B0"], r"stages 0, 1, ... must each be on one rank; the ranks have \[\[1\], \[2\]\]"),
        ([*GOOD, "2F0,2B0"], r"has 3 rows, 3 of them with actions; expected 2, one per rank \(\[mesh\] pp=2\)"),
        ([*GOOD, ","], "has 3 rows, 2 of them with actions; expected 2"),
        (["0F0,0B0", "0F1,0B1"], r"each be on one rank; the ranks have \[\[0\], \[0\]\]"),
        (["0F0,0B0", "2F0,2B0"], r"stages 0, 1, ... must each be on one rank; the ranks have \[\[0\], \[2\]\]"),
        ([GOOD[1], GOOD[0]], "stage 0 must be on the first rank and stage 1, the last, on the last or on the first"),
        ([GOOD[0], "1F0,1B0,1F1,1W1"], r"stage 1 must run microbatch 1 forward .* once; it has 'FW'"),
        (["0F0,0F1,0B0,0B1,0B0", GOOD[1]], "stage 0 must run microbatch 0 .* once; it has 'BBF'"),
        (
            [GOOD[0], "1F1,1B1,1F0,1B0"],
            r"last stage must run forwards in the order of the microbatches, it has \[1, 0\]",
        ),
        (["0F0,0B1,0F1,0B0", GOOD[1]], "cannot run: rank 0 before 0B1, rank 1 before 1F1"),
    ],
)
def test_files_that_are_no_schedule_are_refused(rows: list[str], message: str, tmp_path: Path):
    path = tmp_path / "schedule.csv"
    path.write_text("\n".join(rows))
    with pytest.raises(ValueError, match=message) as caught:
        csv_table(str(path), pp=2)
    assert "schedule.csv ([pipeline] csv)" in str(caught.value)


def test_the_last_stage_of_a_file_is_where_the_embedding_can_be_shared(tmp_path: Path):
    path = tmp_path / "schedule.csv"
    path.write_text("0F0,0B0\n2F0,2B0\n1F0,1B0")
    with pytest.raises(ValueError, match=r"stage 2, the last, on the last or on the first .* \[\[0\], \[2\], \[1\]\]"):
        csv_table(str(path), pp=3)


def test_a_file_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"cannot read the schedule nowhere.csv \(\[pipeline\] csv\): .*No such file"):
        csv_table("nowhere.csv", pp=2)


# ---- what cannot run is refused before anything is built


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"pipeline": {"schedule": "1F1B", "virtual_stages": 2}},
            r"virtual_stages=2, but schedule '1F1B' runs exactly 1 per rank \(\[pipeline\] virtual_stages, schedule\)",
        ),
        ({"pipeline": {"schedule": "ZBVZeroBubble", "virtual_stages": 3}}, "'ZBVZeroBubble' runs exactly 2 per rank"),
        ({"pipeline": {"schedule": "LoopedBFS", "virtual_stages": 1}}, "'LoopedBFS' runs at least 2 per rank"),
        (
            {"pipeline": {"schedule": "1F1B"}, "batch": {"micro_batch_size": 2, "global_batch_size": 12}},
            r"12 sequences / \(2 data ranks x micro_batch_size=2\) = 3 microbatches, but schedule '1F1B' needs one per "
            r"stage: 3 < pp=4 \(\[batch\] global_batch_size, rampup and micro_batch_size, \[mesh\] pp, \[pipeline\]",
        ),
        (
            {"pipeline": {"schedule": "DualPipeV"}, "batch": {"micro_batch_size": 1, "global_batch_size": 14}},
            "= 7 microbatches, but schedule 'DualPipeV' needs one per stage: 7 < 2 x pp = 8",
        ),
        (
            {"pipeline": {"schedule": "Interleaved1F1B"}, "batch": {"micro_batch_size": 1, "global_batch_size": 18}},
            r"needs equal rounds of about pp=4: 9 % \(9 // 4\) = 1, expected 0",
        ),
        (
            {
                "pipeline": {"schedule": "1F1B"},
                "batch": {"micro_batch_size": 1, "global_batch_size": 12, "rampup": [6, 2, 100]},
            },
            "6 sequences .* = 3 microbatches, but schedule '1F1B'",
        ),
        ({"pipeline": {"schedule": "ZBVZeroBubble"}, "compile": {"enable": True}}, r"\[compile\] enable = false"),
        ({"pipeline": {"schedule": "DualPipeV"}, "recompute": {"mode": "full"}}, r"\[recompute\] mode = 'none'"),
    ],
)
def test_what_a_schedule_cannot_run_is_refused(sections: dict[str, Any], message: str):
    cfg = settings(**({"batch": {"micro_batch_size": 1, "global_batch_size": 16}} | sections))
    with pytest.raises(ValueError, match=message):
        check_schedule(cfg, PIECES, pp=4, data_size=2, compiled=cfg.compile.enable is True)


def test_a_file_runs_its_own_number_of_microbatches_and_stages(tmp_path: Path):
    path = tmp_path / "schedule.csv"
    path.write_text("\n".join(GOOD))
    wanted = {"csv": str(path)}
    cfg = settings(pipeline=wanted, batch={"micro_batch_size": 1, "global_batch_size": 3})
    with pytest.raises(
        ValueError, match=r"= 3 microbatches, but schedule '.*schedule.csv' needs the 2 that the file has"
    ):
        check_schedule(cfg, PIECES, pp=2, data_size=1, compiled=False)
    with pytest.raises(ValueError, match=r"virtual_stages=2, but the ranks of .* have stages \[\[0\], \[1\]\]"):
        check_schedule(settings(pipeline=wanted | {"virtual_stages": 2}), PIECES, pp=2, data_size=1, compiled=False)
    path.write_text("0F0,2F0,2B0,0B0\n1F0,1B0")
    with pytest.raises(ValueError, match=r"virtual_stages=2, but the ranks of .* have stages \[\[0, 2\], \[1\]\]"):
        check_schedule(settings(pipeline=wanted | {"virtual_stages": 2}), PIECES, pp=2, data_size=1, compiled=False)


@pytest.mark.parametrize("cell", ["1B1", "1I1,1W1"])
def test_a_file_with_backwards_in_two_parts_is_refused_with_what_they_would_run_twice(tmp_path: Path, cell: str):
    path = tmp_path / "schedule.csv"
    path.write_text("\n".join([GOOD[0], f"1F0,1B0,1F1,{cell}"]))
    batch = {"micro_batch_size": 1, "global_batch_size": 2}
    split = contextlib.nullcontext() if "B" in cell else pytest.raises(ValueError, match="runs backward in two parts")
    with split:
        check_schedule(settings(pipeline={"csv": str(path)}, batch=batch), PIECES, pp=2, data_size=1, compiled=True)
    with split:
        recomputed = settings(pipeline={"csv": str(path)}, batch=batch, recompute={"mode": "selective"})
        check_schedule(recomputed, PIECES, pp=2, data_size=1, compiled=False)
    check_schedule(settings(pipeline={"csv": str(path)}, batch=batch), PIECES, pp=2, data_size=1, compiled=False)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_every_schedule_can_run_passes(schedule: str):
    cfg = settings(pipeline={"schedule": schedule}, batch={"micro_batch_size": 1, "global_batch_size": 32})
    check_schedule(cfg, PIECES, pp=4, data_size=2, compiled=False)


# ---- the picture


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_picture_has_a_row_per_rank_and_a_cell_per_action(schedule: str, tmp_path: Path):
    table = named_table(schedule, 4, int(SCHEDULES[schedule].per_rank[0]), 8)
    draw(table, str(tmp_path / "schedule.svg"), schedule)
    root = ElementTree.parse(tmp_path / "schedule.svg").getroot()
    classes = Counter(element.get("class") for element in root.iter())
    kinds = Counter(action.kind for row in table for action in row)
    assert {kind: classes[kind] for kind in kinds} == kinds
    assert classes["row"] == 4
    title = f"{schedule} · 4 ranks, {sum(map(len, stages_in(table)))} stages · 8 microbatches · bubble "
    assert any((element.text or "").startswith(title) for element in root.iter())


class Picture:
    """The content of a picture as a person reads it; times are read off the axis."""

    def __init__(self, path: Path) -> None:
        root = ElementTree.parse(path).getroot()
        width, height = (float(root.get(key, "")) for key in ("width", "height"))
        assert root.get("viewBox") == f"0 0 {width:g} {height:g}"
        for e in root.iter():
            assert 0 <= float(e.get("x", 0)) <= float(e.get("x", 0)) + float(e.get("width", 0)) <= width
            assert 0 <= float(e.get("y", 0)) <= float(e.get("y", 0)) + float(e.get("height", 0)) <= height
        self.texts = [e for e in root.iter() if e.tag.endswith("text")]
        ticks = [e for e in self.texts if (e.text or "").isdigit() and e.get("fill") == "#7a8591"]
        self.ticks = {int(e.text or ""): float(e.get("x", "")) for e in ticks}
        (zero, x0), (one, x1) = [*self.ticks.items()][:2]
        self._zero, self._unit = x0, (x1 - x0) / (one - zero)
        assert zero == 0
        rows = [e for e in root.iter() if e.get("class") == "row"]
        named = [e for e in self.texts if (e.text or "").startswith("rank ")]
        self.cells: list[tuple[int, int, int, str]] = []  # rank, start, end, action
        self.colours: dict[tuple[int, str, int], tuple[str, str]] = {}  # rank, kind, stage -> fill, ink
        for group in (e for e in root.iter() if e.tag.endswith("}g")):
            box, number, stage = group
            x, y, width = (float(box.get(key, "")) for key in ("x", "y", "width"))
            (row,) = (e for e in rows if 0 < y - float(e.get("y", "")) < float(e.get("height", "")))
            (name,) = (e for e in named if 0 < float(e.get("y", "")) - float(row.get("y", "")) < 40)
            rank, start, end = int((name.text or "").split()[1]), self.time(x - 0.5), self.time(x + width + 0.5)
            assert stage.text is not None
            kind = group.get("class", "")
            self.cells.append((rank, start, end, f"{stage.text[1:]}{kind}{number.text}"))
            self.colours[rank, kind, int(stage.text[1:])] = (box.get("fill", ""), number.get("fill", ""))

    def time(self, x: float) -> int:
        time = (x - self._zero) / self._unit
        assert time == pytest.approx(round(time))
        return round(time)


def test_the_picture_shows_each_action_in_its_rank_at_its_time(tmp_path: Path):
    draw(THREE, str(tmp_path / "schedule.svg"), "mine & yours")
    picture = Picture(tmp_path / "schedule.svg")
    expected = [(rank, *cell) for rank, row in enumerate(THREE_TIMES) for cell in row]
    assert sorted(picture.cells) == sorted(expected)
    assert list(picture.ticks) == [0, 5, 10]
    # Of 12 forwards' time each rank works 3 x (1 + 2).
    title = "mine & yours · 2 ranks, 2 stages · 3 microbatches · bubble 25.0 %"
    assert title in [e.text for e in picture.texts]
    kinds = {"forward", "backward", "backward, input part", "backward, weight part"}
    assert kinds & {e.text for e in picture.texts} == {"forward", "backward"}


def luminance(colour: str) -> float:
    """Relative, as WCAG 2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize(("schedule", "per_rank"), [("Interleaved1F1B", 4), ("ZBVZeroBubble", 2)])
def test_later_stages_of_a_rank_are_darker_and_numbers_can_be_read_on_all(schedule, per_rank, tmp_path: Path):
    draw(named_table(schedule, 2, per_rank, 24), str(tmp_path / "schedule.svg"), schedule)
    picture = Picture(tmp_path / "schedule.svg")
    for rank, kind in {(rank, kind) for rank, kind, _ in picture.colours}:
        stages = sorted(stage for r, k, stage in picture.colours if (r, k) == (rank, kind))
        shades = [luminance(picture.colours[rank, kind, stage][0]) for stage in stages]
        assert len(shades) == per_rank
        assert shades == sorted(shades, reverse=True)
        assert shades[0] > 2 * shades[-1]
    for fill, ink in picture.colours.values():
        darker, lighter = sorted((luminance(fill), luminance(ink)))
        assert (lighter + 0.05) / (darker + 0.05) > 3, (fill, ink)
    assert 5 <= len(picture.ticks) <= 13


@pytest.mark.parametrize("name", ["GPipe", "schedule.csv"])
def test_the_configured_schedule_is_drawn_at_the_full_batch(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("schedule.csv").write_text("\n".join(GOOD))
    wanted = {"draw": "x.svg"} | ({"csv": name} if name.endswith("csv") else {"schedule": name})
    batch = {"micro_batch_size": 2, "global_batch_size": 24, "rampup": [12, 12, 100]}
    draw_schedule(settings(pipeline=wanted, batch=batch), pp=2, data_size=3)
    n = 2 if name.endswith("csv") else 24 // (3 * 2)
    start = f"{name} · 2 ranks, 2 stages · {n} microbatches · "
    assert [e for e in Picture(Path("x.svg")).texts if (e.text or "").startswith(start)]


def test_a_picture_that_cannot_be_written_is_refused():
    with pytest.raises(ValueError, match=r"cannot write the schedule to /nowhere/x.svg: .* \(\[pipeline\] draw\)"):
        draw(named_table("1F1B", 2, 1, 2), "/nowhere/x.svg", "1F1B")


# ---- training: every schedule, in groups of processes, against one


def microbatches(n: int, step: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    rows = []
    for i in range(n):
        ids = torch.randint(MODEL.vocab_size, (2, SEQ_LEN + 1), generator=generator)
        labels = ids[:, 1:].masked_fill(torch.rand(2, SEQ_LEN, generator=generator) < 0.2, -100)
        rows.append({"tokens": ids[:, :-1], "labels": labels, "sample_ids": torch.arange(2) + 2 * i + 100 * step})
    return rows


def n_tokens(batch: list[dict[str, Tensor]]) -> int:
    return sum(int((m["labels"] != -100).sum()) for m in batch)


@torch.no_grad()
def fill(model: Bloom) -> None:
    """Memory and initial values, keyed by full names."""
    model.to_empty(device="cpu")
    model.tie()
    for name, parameter in model.named_parameters():
        name = model.full_name(name)
        std = model.init_std(name)
        places = torch.arange(parameter.numel()).view(parameter.shape)
        value = keyed.normal(1, name, places) * std if std else torch.full(parameter.shape, float("norm.w" in name))
        parameter.copy_(distribute(value.float(), parameter))
    model.init_buffers(1)


def distribute(value: Tensor, like: Tensor) -> Tensor:
    return distribute_tensor(value, like.device_mesh, like.placements) if isinstance(like, DTensor) else value


RATE = 1e-2
EPS = 1e-3  # large: gradients of key biases are zero but for rounding, and Adam would make full steps of that


def one_process(counts: list[int], dp: int) -> dict[str, Any]:
    """The truth: losses before and in training, gradients of the first step."""
    model = whole()
    fill(model)
    optimizer, losses, gradients = torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPS), [], {}
    model.eval()
    with torch.no_grad():
        validation = sum(model(**m)["lm"].item() for m in microbatches(counts[0] * dp, 0))
    model.train()
    for step, count in enumerate(counts):
        batch = microbatches(count * dp, step)
        optimizer.zero_grad()
        total = 0.0
        for microbatch in batch:
            loss = model(**microbatch)["lm"]
            (loss / n_tokens(batch)).backward()
            total += loss.item()
        losses.append(total)
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return {"validation": validation, "losses": losses, "gradients": gradients}


class CountCollectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        for kind in ("allgather", "reduce_scatter"):
            self.seen[kind] += name.startswith("c10d::") and kind in name
        return func(*args, **(kwargs or {}))


CPU = torch.device("cpu")


def boundaries(n_stages: int) -> list[dict[str, Tensor]]:
    hidden = torch.empty(2, SEQ_LEN, MODEL.hidden_size, device="meta").requires_grad_()
    return [{"hidden": hidden}] * (n_stages - 1)


def train_stages(schedules: list[config.Pipeline], counts: list[int], dp: int) -> list[dict[str, Any]]:
    """Run each schedule on one rank of pp x dp; returns what `one_process` does, of this rank's stages."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // dp, dp), mesh_dim_names=("pp", "dp"))
    pp, pp_rank, dp_rank = mesh["pp"].size(), mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    # Every rank makes every group; the stages between hold no copy.
    first_and_last = [dist.new_group([d, (pp - 1) * dp + d]) for d in range(dp)][dp_rank]
    ends = first_and_last if pp_rank in (0, pp - 1) else None
    results = []
    for wanted in schedules:
        pieces, held = plan_stages(settings(pipeline=wanted), PIECES, pp)
        stages: dict[int, Bloom] = {}
        for number in held[pp_rank]:
            stage = copy.deepcopy(whole())
            stage.keep(pieces[number])
            if dp > 1:
                for module in (*stage.layers.values(), stage):
                    fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)
            fill(stage)
            stages[number] = stage
        last = len(pieces) - 1
        rank_of = {number: rank for rank, numbers in enumerate(held) for number in numbers}
        there = [[n for n in (0, last) if rank_of[n] == rank] for rank in sorted({rank_of[0], rank_of[last]})]
        names = {0: "embed.weight", last: "head.weight"}
        copies = {n: stages[n].get_parameter(name) for n, name in names.items() if n in stages}
        tied = [Tied("embed.weight", copies, there, ends if len(there) > 1 else None)] if copies else []
        runner = Pipeline(wanted, stages, mesh.get_group("pp"), boundaries(len(pieces)), CPU)
        named = [(stage.full_name(name), p) for stage in stages.values() for name, p in stage.named_parameters()]
        optimizer = optim.AdamW([p for _, p in named], lr=RATE, eps=EPS, fused=True)

        def mine(count: int, step: int) -> list[dict[str, Tensor]]:
            return microbatches(count * dp, step)[dp_rank * count : (dp_rank + 1) * count]

        for stage in stages.values():
            stage.eval()
        tally = Tally(NEXT_TOKEN.sums, CPU)
        runner.evaluate(mine(counts[0], 0), tally)
        result: dict[str, Any] = {"validation": tally.totals.item(), "losses": []}
        for stage in stages.values():
            stage.train()
        for step, count in enumerate(counts):
            optimizer.zero_grad()
            tally = Tally(NEXT_TOKEN.sums, CPU, {"tokens": n_tokens(microbatches(count * dp, step))})
            # A mode that sees every operation takes as long as a third of them, so it sees what is looked at.
            collectives = CountCollectives()
            with collectives if step == 0 and dp > 1 else contextlib.nullcontext():
                runner.step(mine(count, step), tally)
            result["losses"].append(tally.totals.item())
            for one in tied:
                one.sum_gradients()
            if step == 0:
                result["gradients"] = [(name, whole_gradient(p)) for name, p in named]
                groups = sum(len(stage.layers) + holds_more_than_layers(stage) for stage in stages.values())
                result["collectives"] = (dict(collectives.seen), groups)
            optimizer.step()
            assert all(one.equal() for one in tied)
        result["tied"] = [local(p).detach().clone() for one in tied for p in one.copies.values()]
        for one in tied:
            with torch.no_grad():
                local(next(iter(one.copies.values())))[0, 0] += pp_rank + 1.0
            result["equal when one has moved"] = one.equal()
        results.append(result)
    return results


def holds_more_than_layers(stage: Bloom) -> bool:
    """Then the root has an FSDP group of its own, beside those of the layers."""
    return any(not name.startswith("layers.") for name, _ in stage.named_parameters())


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad.clone()


ALL = {name: pipeline(name) for name in SCHEDULES}
LAYOUTS: dict[str, tuple[int, int, list[int], dict[str, config.Pipeline]]] = {  # pp, dp, microbatches, schedules
    "pp 2": (2, 1, RAMP, ALL | {"4 per rank": pipeline("Interleaved1F1B", 4)}),
    "pp 4": (4, 1, RAMP_OF_FOUR, {name: ALL[name] for name in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")}),
    "pp 2 x dp 2": (2, 2, [4, 4], ALL),
    "pp 2, file": (2, 1, [3, 3], {"csv": pipeline("1F1B", csv="schedule.csv")}),
}
# On data ranks one of each kind: several stages per rank, a V, and one that runs F and B at once. test_parity.py has
# one stage per rank there.
REPEATING = {("pp 2 x dp 2", name) for name in ("GPipe", "1F1B", "LoopedBFS", "InterleavedZeroBubble")}
REPEATING |= {("pp 4", "Interleaved1F1B")}
CASES = [
    pytest.param(layout, name, marks=pytest.mark.full if (layout, name) in REPEATING else ())
    for layout, (_, _, _, schedules) in LAYOUTS.items()
    for name in schedules
]


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], tuple[dict[str, Any], list[Any]]]:
    """Layout and schedule -> the truth, and what each rank returned; of those that tests of this session ask for."""
    path = tmp_path_factory.mktemp("csv") / "schedule.csv"
    path.write_text(all_weights_last(pp=2, n=3))
    asking = [item for item in request.session.items if item.path == request.path and "trained" in item.fixturenames]
    asked = {(item.callspec.params["layout"], item.callspec.params["schedule"]) for item in asking}
    found = {}
    for layout, (pp, dp, counts, schedules) in LAYOUTS.items():
        names = [name for name in schedules if (layout, name) in asked]
        if names:
            wanted = [pipeline("1F1B", csv=str(path)) if name == "csv" else schedules[name] for name in names]
            truth, results = one_process(counts, dp), ranks.run(pp * dp, train_stages, wanted, counts, dp)
            for i, name in enumerate(names):
                found[layout, name] = (truth, [result[i] for result in results])
    return found


def all_weights_last(pp: int, n: int) -> str:
    """A schedule that torch does not have: all forwards, all input parts, all weight parts; two stages per rank."""
    rows = []
    for rank in range(pp):
        down, up = [rank, rank + pp], [rank + pp, rank]
        cells = [f"{s}F{m}" for s in down for m in range(n)] + [""]
        cells += [f"{s}{kind}{m}" for kind in "IW" for s in up for m in range(n)]
        rows.append(",".join(cells))
    return "\n".join(rows)


def relative(x: float, truth: float) -> float:
    return abs(x - truth) / abs(truth)


@pytest.mark.parametrize(("layout", "schedule"), CASES)
def test_losses_of_two_steps_are_those_of_one_process(trained: Any, layout: str, schedule: str):
    truth, results = trained[layout, schedule]
    for step, loss in enumerate(truth["losses"]):
        assert relative(sum(result["losses"][step] for result in results), loss) < 1e-5


@pytest.mark.parametrize(("layout", "schedule"), CASES)
def test_the_evaluation_loss_is_that_of_one_process(trained: Any, layout: str, schedule: str):
    truth, results = trained[layout, schedule]
    assert relative(sum(result["validation"] for result in results), truth["validation"]) < 1e-5


@pytest.mark.parametrize(("layout", "schedule"), CASES)
def test_every_gradient_is_that_of_one_process(trained: Any, layout: str, schedule: str):
    truth, results = trained[layout, schedule]
    pairs = [pair for result in results for pair in result["gradients"]]
    assert {name for name, _ in pairs} == truth["gradients"].keys()
    for name, gradient in pairs:
        expected = truth["gradients"][name]
        assert (gradient - expected).abs().max() <= 1e-5 * expected.abs().max(), name


@pytest.mark.parametrize(("layout", "schedule"), CASES)
def test_both_copies_of_the_tied_weight_stay_equal_to_the_bit(trained: Any, layout: str, schedule: str):
    _, results = trained[layout, schedule]
    dp = LAYOUTS[layout][1]
    for dp_rank in range(dp):
        copies = [weight for result in results[dp_rank::dp] for weight in result["tied"]]
        assert len(copies) == 2
        assert torch.equal(*copies)
    assert not any(result.get("equal when one has moved") for result in results)


@pytest.mark.parametrize(("layout", "schedule"), [case for case in CASES if case.values[0] == "pp 2 x dp 2"])
def test_parameters_are_gathered_and_gradients_reduced_once_a_step(trained: Any, layout: str, schedule: str):
    _, results = trained[layout, schedule]
    for result in results:
        seen, groups = result["collectives"]
        assert seen == {"allgather": groups, "reduce_scatter": groups}


class Schedule:
    """A stand-in for torch's schedule that remembers what it is given."""

    built: ClassVar[list[Any]] = []  # stages, number of microbatches, are gradients scaled; or the file
    given: ClassVar[list[tuple[str, tuple[Tensor, ...], dict[str, Any]]]] = []

    def __init__(self, stages: list[Any], n: int, loss_fn: Any, scale_grads: bool) -> None:
        self.built.append(([stage.stage_index for stage in stages], n, scale_grads))

    def _load_csv(self, path: str) -> None:
        self.built.append(path)

    def step(self, *args: Tensor, **keywords: Any) -> None:
        self.given.append(("step", args, keywords))

    def eval(self, *args: Tensor, **keywords: Any) -> None:
        self.given.append(("eval", args, keywords))


@pytest.mark.parametrize("csv", ["", "schedule.csv"])
def test_torch_is_given_all_microbatches_in_order_and_a_new_schedule_for_another_use(monkeypatch, csv):
    monkeypatch.setattr(pipeline_room, "get_schedule_class", {"ZBVZeroBubble": Schedule}.get)
    monkeypatch.setattr(pipeline_room, "_PipelineScheduleRuntime", Schedule)
    monkeypatch.setattr(Schedule, "built", [])
    monkeypatch.setattr(Schedule, "given", [])
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        modules = {number: torch.nn.Identity() for number in (0, 3)}
        assert dist.group.WORLD is not None
        runner = Pipeline(pipeline("ZBVZeroBubble", csv=csv), modules, dist.group.WORLD, boundaries(4), CPU)
        for train, n in ((True, 4), (True, 4), (False, 4), (True, 4), (True, 2)):
            batch = microbatches(n, 1)
            run = runner.step if train else runner.evaluate
            run(batch, Tally(NEXT_TOKEN.sums, CPU))
            how, args, given = Schedule.given[-1]
            assert how == ("step" if train else "eval")
            assert args == ()
            assert given.pop("return_outputs") is False
            assert len(given.pop("target")) == 2 * n  # torch wants something to cut
            assert given.keys() == batch[0].keys()
            assert all(torch.equal(given[name], torch.cat([m[name] for m in batch])) for name in given)
    finally:
        dist.destroy_process_group()
    kinds = [([0, 3], n, False) for n in (4, 4, 4, 2)]
    assert Schedule.built == ([made for kind in kinds for made in (kind, csv)] if csv else kinds)


def first_messages(wanted: config.Pipeline) -> list[tuple[str, int]]:
    """(send or receive, peer) of the messages with which torch 2.11 starts this rank's stages."""
    group, held = dist.group.WORLD, plan_stages(settings(pipeline=wanted), PIECES, dist.get_world_size()).ranks
    assert group is not None
    modules = {number: torch.nn.Identity() for number in held[dist.get_rank()]}
    runner = Pipeline(wanted, modules, group, boundaries(sum(map(len, held))), CPU)
    schedule: Any = runner._build(4)
    return [(op.op.__name__, op.group_peer) for stage in schedule._stages for op in stage._get_init_p2p_neighbors_ops()]


def test_no_stage_of_a_v_sends_to_the_stage_beside_it_on_its_own_rank():
    """torch 2.11 sends such a message, which gloo refuses."""
    here, there = ranks.run(2, first_messages, ALL["ZBVZeroBubble"])
    assert sorted(here) == sorted([("isend", 1), ("irecv", 1)] * 2)
    assert sorted(there) == sorted([("isend", 0), ("irecv", 0)] * 2)


def test_what_several_stages_hold_is_found_under_its_first_name():
    model = whole()
    stages = [["embed", "layers.0"], ["layers.1"], ["layers.2"], ["head"]]
    assert shared(model, model.parts(), stages) == {"embed.weight": [0, 3]}
    # A parameter under one name in the module of another one, which several pieces need.
    norms = [model.layers[name].get_submodule("mlp_norm") for name in "01"]
    parts = {"a": norms[:1], "b": norms[:1], "c": [], "d": norms[1:]}
    found = shared(model, parts, [["a"], ["c"], ["b", "d"]])
    assert found == {f"layers.0.mlp_norm.{name}": [0, 2] for name in ("weight", "bias")}
    assert shared(model, parts, [["a", "b"], ["c", "d"]]) == {}


def copies_of(gradients: Tensor, places: list[list[int]]) -> tuple[list[Tensor], list[bool], list[bool]]:
    """The sums that this rank finds of a parameter on several stages, and which copies count and agree."""
    tied_room.GATHERED = 4
    mine = places[dist.get_rank()]
    copies = {number: torch.nn.Parameter(torch.zeros(3, 5)) for number in mine}
    tied = Tied("bias", copies, places, dist.group.WORLD)
    for number, parameter in copies.items():
        parameter.grad = gradients[number].clone()
    tied.sum_gradients()
    equal = [tied.equal()]
    with torch.no_grad():
        for number in range(len(gradients)):
            if number in copies:
                copies[number][1, 2] += 1
            equal.append(tied.equal())
    counted = [not any(p is duplicate for duplicate in tied.duplicates) for p in copies.values()]
    return [p.grad for p in copies.values() if p.grad is not None], counted, equal


@pytest.mark.parametrize("places", [[[0], [1], [2]], [[0, 2], [1]], [[1], [0, 2]]], ids=str)
def test_of_several_copies_all_get_the_sum_in_the_order_of_the_stages_wherever_these_are(places):
    generator = torch.Generator().manual_seed(1)
    gradients = torch.randn(3, 3, 5, generator=generator) * 10.0 ** torch.randint(-4, 4, (3, 3, 5), generator=generator)
    a, b, c = gradients
    truth = (a + b) + c
    assert not torch.equal(truth, a + (b + c))
    found = ranks.run(len(places), copies_of, gradients, places)
    assert all(torch.equal(total, truth) for totals, _, _ in found for total in totals)
    assert [counted for _, counted, _ in found] == [[number == 0 for number in numbers] for numbers in places]
    # Equal at first, not after one or two have moved, and again when all three have.
    assert [equal for _, _, equal in found] == [[True, False, False, True]] * len(places)


def test_a_v_needs_no_group_for_its_tied_weight():
    stages = {0: copy.deepcopy(whole()), 3: copy.deepcopy(whole())}
    stages[0].keep(["embed", "layers.0"])
    stages[3].keep(["layers.7", "head"])
    for stage in stages.values():
        fill(stage)
    embed, head = stages[0].get_parameter("embed.weight"), stages[3].get_parameter("head.weight")
    tied = Tied("embed.weight", {0: embed, 3: head}, [[0, 3]], group=None)
    embed.grad, head.grad = torch.ones_like(embed), 2 * torch.ones_like(head)
    tied.sum_gradients()
    assert [copy is head for copy in tied.duplicates] == [True]
    assert torch.equal(embed.grad, head.grad)
    assert embed.grad.unique().tolist() == [3.0]
    assert tied.equal()
    with torch.no_grad():
        head[0, 0] += 1
    assert not tied.equal()
