"""Tensor parallelism as a table: pattern of names -> how that module is cut over the tp axis. Read apply.py first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtmega.plans.apply import apply_plan, check_plan, keep_gathered, shard_buffers, sum_partial_gradients

if TYPE_CHECKING:
    from dtmega.hf import load_hf, parallelize_hf, plan_for, verify_plan

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


def __getattr__(name: str) -> Any:
    """A name of the wing for models of transformers, whose plans are made of ours: users find it here too."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dtmega import hf

    return getattr(hf, name)
