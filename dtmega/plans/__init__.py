"""Tensor parallelism as a table: pattern of names -> how that module is cut over the tp axis. Read apply.py first."""

from dtmega.plans.apply import apply_plan, check_plan, keep_gathered, shard_buffers, sum_partial_gradients
from dtmega.plans.hf import load_hf, parallelize_hf, plan_for, verify_plan

__all__ = [
    "apply_plan",
    "check_plan",
    "keep_gathered",
    "load_hf",
    "parallelize_hf",
    "plan_for",
    "shard_buffers",
    "sum_partial_gradients",
    "verify_plan",
]
