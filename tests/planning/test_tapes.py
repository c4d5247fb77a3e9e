"""planning/counting/tapes.py: a plan whose graphs are replayed, against one that runs each graph node by node."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional_collectives

from dtmega.planning.counting import compiled
from dtmega.planning.counting.ledger import Span
from dtmega.planning.counting.recording import Recording
from dtmega.planning.counting.role import Role, plan_role
from dtmega.planning.counting.tapes import Tape, kind_of
from dtmega.planning.work import Work
from dtmega.training.phases import COMPUTING
from tests import ranks
from tests.planning import real_step
from tests.planning.test_counts import BERT, BF16, DROPOUT, LLAMA, PREFIX, SMALL, T5, TIMEOUT_S
from tests.planning.test_recorder import recording

GPU = torch.device("cuda", 0)
WIDTH = 64
COMPILED = SMALL | {"model.n_layers": 2, "batch.global_batch_size": 4, "compile.enable": True}


# Name -> processes, keys.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "bloom, tp 2": (2, {"mesh.tp": 2, **DROPOUT, **BF16}),
    "llama, dp_shard 2": (2, {"mesh.dp_shard": 2, **LLAMA, **BF16}),
    "llama, pp 2": (2, {"mesh.pp": 2, **LLAMA}),
    "bloom, pp 2, tp 2, full recompute": (4, {"mesh.pp": 2, "mesh.tp": 2, "recompute.mode": "full", **DROPOUT}),
    "bloom, selective recompute": (1, {"recompute.mode": "selective", **DROPOUT, **BF16}),
    "bloom, cp 2 by gathers": (2, {"mesh.cp": 2, "mesh.cp_form": "gather", **DROPOUT}),
    "prefix-lm, pp 2, Interleaved1F1B": (
        2,
        {"mesh.pp": 2, "pipeline.schedule": "Interleaved1F1B", "model.n_layers": 4, **PREFIX, **DROPOUT},
    ),
    "bert, tp 2, no sequence parallel": (2, {"mesh.tp": 2, "mesh.sequence_parallel": False, **BERT, **DROPOUT}),
    "t5, dp_shard 2": (2, {"mesh.dp_shard": 2, **T5, **DROPOUT}),
}


class Block(nn.Module):
    """Two products of weights and the sum over ranks of what is between them, added to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(WIDTH, 4 * WIDTH, device=GPU))
        self.down = nn.Parameter(torch.empty(4 * WIDTH, WIDTH, device=GPU))

    def forward(self, x: Tensor) -> Tensor:
        everyone = dist.group.WORLD
        assert everyone is not None
        inner = nn.functional.gelu(x @ self.up)
        inner = functional_collectives.all_reduce(inner, "sum", everyone)
        return x + (inner * 2) @ self.down


@contextlib.contextmanager
def counting_runs(replays: bool) -> Iterator[list[int]]:
    """The numbers of graphs that ran node by node, and that were replayed, inside the `with` block."""
    n_graphs = [0, 0]
    run, play = compiled._Run.boxed_run, Tape.play

    def counting_run(*args: Any) -> Any:
        n_graphs[0] += 1
        return run(*args)

    def counting_play(*args: Any) -> Any:
        n_graphs[1] += 1
        return play(*args)

    with (
        patch.object(compiled._Run, "boxed_run", counting_run),
        patch.object(Tape, "play", counting_play),
        patch.object(Recording, "finish", Recording.finish if replays else lambda *_: None),
    ):
        yield n_graphs


def two_steps(replays: bool) -> tuple[list[tuple[list[Work], list[Span]]], list[int]]:
    """Works and spans of each of two steps of three compiled blocks, and the numbers of `counting_runs`."""
    steps: list[tuple[list[Work], list[Span]]] = []
    with recording() as recorder, counting_runs(replays) as n_graphs:
        stage = nn.Sequential(Block(), Block(), Block())
        blocks = [*stage]
        for block in blocks:
            block.compile()
        recorder.watch_blocks(stage, blocks)
        for _ in range(2):
            recorder.enter(COMPUTING)
            x = torch.empty(8 * WIDTH, WIDTH, device=GPU, requires_grad=True)
            recorder.begin()
            with recorder.range("forward", 0, 0):
                loss = stage(x).sum()
            with recorder.range("backward", 0, 0):
                loss.backward()
            recorder.enter("after")
            steps.append((recorder.works, recorder.ledger.spans))
    return steps, n_graphs


def test_replayed_blocks_do_what_they_do_node_by_node():
    replayed, n_replayed = two_steps(replays=True)
    run, n_run = two_steps(replays=False)
    assert replayed == run
    # Three blocks, forward and backward, in two steps.
    assert n_run == [12, 0]
    assert n_replayed == [2, 10]


def test_a_tape_is_for_arguments_that_share_storages_alike():
    x, y = torch.empty(4, 8), torch.empty(4, 8)
    kinds = [kind_of(args) for args in ((x, y), (x, x.view(4, 8)), (x, y.t()), (x, y[1:]), (x, y.double()), (x, 1))]
    assert len(set(kinds)) == len(kinds)
    assert kind_of((y, x)) == kinds[0]


def product_and_zeros_of_the_host(x: Tensor) -> tuple[Tensor, Tensor]:
    return x @ x, torch.zeros(3, device="cpu")


def test_a_graph_that_makes_a_tensor_on_the_host_runs_each_time():
    with recording() as recorder, counting_runs(replays=True) as n_graphs:
        function = torch.compile(product_and_zeros_of_the_host)
        x = torch.empty(WIDTH, WIDTH, device=GPU)
        works = []
        for _ in range(2):
            recorder.begin()
            function(x)
            works.append(recorder.works)
    assert works[0] == works[1]
    assert n_graphs == [2, 0]


def planned(keys: dict[str, Any], world_size: int, rank: int, replays: bool) -> tuple[Role, list[int]]:
    """The plan of a rank, and the numbers of `counting_runs`. A process can plan one rank, once."""
    dist.destroy_process_group()
    cfg, sizes = real_step.settled(real_step.nested(keys), world_size)
    with counting_runs(replays) as n_graphs:
        role = plan_role(cfg, sizes, rank, GPU, [real_step.n_microbatches(cfg, sizes)])
    return role, n_graphs


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plan_with_replays_is_the_plan_without(layout: str):
    n_ranks, keys = LAYOUTS[layout]
    for rank in sorted({0, n_ranks - 1}):
        ((replayed, (n_run, n_played)),) = ranks.run(
            1, planned, COMPILED | keys, n_ranks, rank, True, timeout_s=TIMEOUT_S
        )
        ((run, (n_all, _)),) = ranks.run(1, planned, COMPILED | keys, n_ranks, rank, False, timeout_s=TIMEOUT_S)
        assert replayed.works == run.works
        assert replayed.spans == run.spans
        assert replayed.held == run.held
        assert n_run + n_played == n_all
        assert n_played > 0
