"""planning/counting/tapes.py: a plan whose graphs are replayed, against one that runs each graph node by node."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from dtmega.planning.counting import compiled
from dtmega.planning.counting.role import Role
from dtmega.planning.counting.tapes import Recording, Tape
from tests import ranks
from tests.planning import real_step
from tests.planning.test_counts import BERT, BF16, DROPOUT, LLAMA, PREFIX, SMALL, T5, TIMEOUT_S

GPU = torch.device("cuda", 0)
COMPILED = SMALL | {"model.n_layers": 2, "batch.global_batch_size": 4, "compile.enable": True}


# Name -> processes, keys.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "bloom, tp 2": (2, {"mesh.tp": 2, **DROPOUT, **BF16}),
    "llama, dp_shard 2": (2, {"mesh.dp_shard": 2, **LLAMA, **BF16}),
    "llama, pp 2": (2, {"mesh.pp": 2, **LLAMA}),
    "bloom, pp 2, tp 2, full recompute": (4, {"mesh.pp": 2, "mesh.tp": 2, "recompute.mode": "full", **DROPOUT}),
    "bloom, selective recompute": (1, {"recompute.mode": "selective", **DROPOUT, **BF16}),
    "bloom, cp 2 by gathers": (2, {"mesh.cp": 2, "mesh.cp_form": "gather", **DROPOUT}),
    "prefix-lm, pp 2, ZBV": (2, {"mesh.pp": 2, "pipeline.schedule": "ZBVZeroBubble", **PREFIX, **DROPOUT}),
    "bert, tp 2, no sequence parallel": (2, {"mesh.tp": 2, "mesh.sequence_parallel": False, **BERT, **DROPOUT}),
    "t5, dp_shard 2": (2, {"mesh.dp_shard": 2, **T5, **DROPOUT}),
}



def planned(keys: dict[str, Any], replays: bool) -> tuple[Role, int, int]:
    """The plan of this rank, and the numbers of graphs that were replayed and that ran node by node."""
    n_played = n_run = 0
    play, run = Tape.play, compiled._Run.boxed_run

    def counting_play(*args: Any) -> Any:
        nonlocal n_played
        n_played += 1
        return play(*args)

    def counting_run(*args: Any) -> Any:
        nonlocal n_run
        n_run += 1
        return run(*args)

    with (
        patch.object(Tape, "play", counting_play),
        patch.object(compiled._Run, "boxed_run", counting_run),
        patch.object(Recording, "finish", Recording.finish if replays else lambda *_: None),
    ):
        role = real_step.planned(real_step.nested(keys), GPU)
    return role, n_played, n_run


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_replayed_graph_does_what_the_graph_does_node_by_node(layout: str):
    n_ranks, keys = LAYOUTS[layout]
    keys = COMPILED | keys
    once = ranks.run(n_ranks, planned, keys, True, timeout_s=TIMEOUT_S)
    each_time = ranks.run(n_ranks, planned, keys, False, timeout_s=TIMEOUT_S)
    for (replayed, n_played, n_run), (run, none_played, n_all) in zip(once, each_time, strict=True):
        assert replayed.works == run.works
        assert replayed.spans == run.spans
        assert replayed.held == run.held
        assert none_played == 0
        assert n_played + n_run == n_all
        assert n_played > n_run
