"""Tensor parallelism as a table: pattern of module names -> style that shards these modules. Read apply.py first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtmega.plans.apply import apply_plan, check_plan, keep_gathered, shard_buffers, sum_partial_gradients

if TYPE_CHECKING:
    from dtmega.interop.hf import load_hf, parallelize_hf, plan_for, verify_plan

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
    """Import a name of `dtmega.interop.hf` on first use.

    Users can import the public names of `hf` from `plans` too. But `hf` imports `plans`, because the plans for
    transformers models use the styles in `plans`. So `plans` must not import `hf` before a name of `hf` is used.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dtmega.interop import hf

    return getattr(hf, name)
