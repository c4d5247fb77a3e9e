"""ranges.py: what a named range costs where nobody looks, and what a profile shows of it."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from dtmega.ops import ranges
from tests.operations import Operations


def test_a_range_runs_no_operator_without_a_profile():
    with Operations() as operations, ranges.named("forward", 1, 3):
        pass
    assert operations.counts == {}


def test_a_range_has_the_names_of_its_stage_and_microbatch_in_a_profile():
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
        with ranges.named("forward", 1, 3), ranges.named("inner"):
            torch.ones(2)
        with ranges.named("step", stage=0):
            pass
    names = [event.key for event in recorded.key_averages() if event.is_user_annotation]
    assert sorted(names) == ["forward s1 m3", "inner", "step s0"]
