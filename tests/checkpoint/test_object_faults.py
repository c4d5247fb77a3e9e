"""Kills, failing requests and two writers at every request to an object store.

`make test` tries some points, `pytest -m full` and `python benchmarks/faults.py objects` try all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from tests import ranks
from tests.checkpoint import object_faults
from tests.checkpoint.object_faults import FAULTS, MODES, Crash, Point
from tests.object_server import Server
from tests.ranks import forks

pytest.importorskip("obstore", reason="obstore is not installed: pip install -e '.[s3]'")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_process_that_is_killed_around_its_publishing_leaves_the_old_checkpoint_or_the_new_one(object_store):
    crash = Crash(forks(), object_store, n_ranks=1, mode="sync")
    for when in object_faults.WHEN:
        crash.survives(Point(0, crash.publishes, when))


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_a_rank_that_is_killed_at_any_request_leaves_the_old_checkpoint_or_the_new_one(object_store, n_ranks, mode):
    crash = Crash(forks(), object_store, n_ranks, mode)
    # Each rank's upload begins, sends parts and ends.
    assert all(len(requests) > 4 for requests in crash.requests)
    for point in crash.points:
        crash.survives(point)


def some_in_full(quick: str) -> list[Any]:
    """All faults, of which `make test` meets one."""
    return [fault if fault == quick else pytest.param(fault, marks=pytest.mark.full) for fault in FAULTS]


@pytest.mark.parametrize("fault", some_in_full("cut"))
def test_one_request_of_a_save_that_fails_costs_no_checkpoint(object_store, fault):
    for number in range(object_faults.count_of_a_save(object_store)):
        object_faults.one_fault_in_a_save(object_store, number, fault)


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_a_store_that_fails_from_any_request_on_is_reported_in_time_and_a_whole_checkpoint_stays(object_store, fault):
    for number in range(object_faults.count_of_a_save(object_store)):
        object_faults.endless_fault_in_a_save(object_store, number, fault)


@pytest.mark.parametrize("fault", some_in_full("503"))
def test_one_request_of_a_load_that_fails_changes_nothing(object_store, fault):
    for number in range(object_faults.count_of_a_load(object_store)):
        object_faults.one_fault_in_a_load(object_store, number, fault)


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_a_store_that_fails_from_any_request_of_a_load_on_is_no_damage(object_store, fault):
    for number in range(object_faults.count_of_a_load(object_store)):
        object_faults.endless_fault_in_a_load(object_store, number, fault)


@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.full)])
def test_of_two_processes_that_save_a_step_at_the_same_time_one_saves_it_and_the_other_is_told(
    object_store: Server, tmp_path, rounds
):
    errors = ranks.run(2, object_faults.save_against, object_store.environment, str(tmp_path / "meeting"), rounds)
    assert [object_faults.told(object_store, errors, step) for step in range(1, rounds + 1)] == [True] * rounds
