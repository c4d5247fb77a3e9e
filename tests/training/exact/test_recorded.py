"""digests.jsonl as `dtmega replay` reads it: who computed a microbatch, and what is said about a difference."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dtmega import mesh
from dtmega.training.exact import recorded
from dtmega.training.exact.record import NAME, StepDigests
from dtmega.training.exact.recorded import Comparison

LAYOUT = {"pp": 2, "dp_replicate": 2, "dp_shard": 3, "cp": 1, "tp": 2}
HOSTS = [f"node-{rank // 8}" for rank in range(24)]
ONE: dict[str, int] = dict.fromkeys(mesh.AXES, 1)


def start(step: int, layout: dict[str, int], hosts: list[str]) -> dict[str, Any]:
    return {"step": step, "layout": layout, "hosts": hosts}


def step(number: int, n: int = 12) -> dict[str, Any]:
    """The line of a step whose microbatches have the digests -1 to -n."""
    return {"step": number, "update": f"{number:016x}", "microbatches": [f"{2**64 - i - 1:016x}" for i in range(n)]}


def digests(number: int, n: int = 12, differing: tuple[int, ...] = ()) -> StepDigests:
    return StepDigests(number, tuple(5 if i in differing else -i - 1 for i in range(n)))


def written(folder: Path, *lines: dict[str, Any] | str) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / NAME).write_text("\n".join(texts) + "\n")
    return folder


def test_a_microbatch_was_computed_by_the_ranks_whose_data_rank_has_it():
    origin = recorded.Start(step=1, layout=LAYOUT, hosts=HOSTS)
    for microbatch in range(12):
        data_rank = microbatch // 2
        expected = [rank for rank in range(24) if mesh.data_coordinate(LAYOUT, rank) == (data_rank, 6)]
        assert origin.ranks_of(microbatch, 12) == expected
        assert len(expected) == 4


def test_the_first_difference_is_named_with_the_ranks_and_hosts_of_the_start_that_took_the_step(tmp_path: Path):
    folder = written(tmp_path, start(1, ONE, ["alone"]), step(1), step(2), start(3, LAYOUT, HOSTS), step(3))
    found = recorded.read(folder)
    assert found.difference(1, digests(1)) == found.difference(3, digests(3)) == ""
    assert found.difference(2, digests(2, differing=(4,))) == (
        "step 2, microbatch 5 of 12: its gradients differ from the run's, which rank 0 on alone computed"
    )
    assert found.difference(3, digests(3, differing=(4, 5))) == (
        "step 3, microbatch 5 of 12: its gradients differ from the run's, which ranks 4, 5 on node-0, ranks 16, 17 on "
        "node-2 computed; 2 of the step's microbatches differ"
    )
    assert found.difference(3, digests(4)) == (
        "step 3: all microbatches' gradients are equal, and the weights after the update differ"
    )


def test_a_comparison_keeps_the_first_difference_and_counts_the_steps_that_have_digests(tmp_path: Path):
    comparison = Comparison(recorded.read(written(tmp_path, start(1, ONE, ["alone"]), step(1), step(3))))
    for number in (1, 2, 3):
        comparison.write(number, digests(number))
    assert comparison.difference == ""
    assert comparison.summary() == "equal in every bit: steps 1 to 3; no digests of 1 step between them"
    comparison.write(1, digests(9))
    comparison.write(3, digests(3, differing=(0,)))
    assert comparison.difference.startswith("step 1: all microbatches")


DAMAGED: dict[str, dict[str, Any] | str] = {
    "half a line": json.dumps(step(2))[:40],
    "a digest that is no number": step(2) | {"update": "none"},
    "a digest that is too long": step(2) | {"microbatches": ["0" * 17]},
    "ranks without a host": start(2, LAYOUT, HOSTS[1:]),
    "an unknown axis": start(2, {**ONE, "ep": 1}, ["alone"]),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_line_is_skipped(name: str, tmp_path: Path):
    found = recorded.read(written(tmp_path, start(1, ONE, ["alone"]), step(1), DAMAGED[name]))
    assert found.steps == {1: digests(1)}
    assert [origin.hosts for origin in found.starts] == [["alone"]]


def test_a_run_that_has_no_digests_is_refused(tmp_path: Path):
    words = re.escape(f"expected the digests of its steps in {tmp_path / NAME}")
    with pytest.raises(ValueError, match=words):
        recorded.read(tmp_path)
    with pytest.raises(ValueError, match=words):
        recorded.read(written(tmp_path, start(1, ONE, ["alone"])))
