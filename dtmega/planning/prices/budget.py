"""The cost of a run: tokens per second, MFU, days, GPU-hours, energy and money for a number of tokens."""

from __future__ import annotations

from typing import NamedTuple

from dtmega.planning.prices.fabric import Fabric

JOULES_PER_KWH = 3.6e6


class Budget(NamedTuple):
    """The predicted cost of a run.

    Attributes:
        tokens_per_s: tokens per second of the whole cluster.
        tokens_per_s_per_gpu: tokens per second of one GPU.
        mfu: model FLOPs utilization (model FLOPs without recomputation / peak FLOPs), as in a run's metrics.
        days: duration of the run in days, without restarts, evaluations and checkpoints.
        gpu_hours: number of GPUs times the duration in hours.
        energy_kwh: energy of the GPUs at full power, without hosts, network and cooling.
        cost: price of the GPU-hours.
        currency: currency of the price.
        relative_error: mean relative error of the fabric's fitted efficiency on held-out figures; 0 without a fit.
    """

    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    days: float
    gpu_hours: float
    energy_kwh: float
    cost: float
    currency: str
    relative_error: float


def budget(
    step_time_s: float,
    tokens_per_step: int,
    flops_per_token: float,
    n_gpus: int,
    fabric: Fabric,
    dtype: str,
    tokens: float,
) -> Budget:
    """The cost of training on a number of tokens.

    Args:
        step_time_s: time of one step, in seconds.
        tokens_per_step: number of tokens in a global batch.
        flops_per_token: model FLOPs for one token (`cost.flops_per_token`).
        n_gpus: number of GPUs.
        fabric: fabric of the cluster.
        dtype: dtype of the matrix products ([precision] params).
        tokens: number of tokens to train on.

    Raises:
        ValueError: the fabric has no peak FLOP/s for the dtype, or a number is not positive.
    """
    given = {"step_time_s": step_time_s, "tokens_per_step": tokens_per_step, "n_gpus": n_gpus, "tokens": tokens}
    for name, value in given.items():
        if not value > 0:
            raise ValueError(f"{name}={value}, expected a positive number")
    if dtype not in fabric.gpu.peak_flops:
        known = ", ".join(fabric.gpu.peak_flops)
        raise ValueError(f"the fabric has no peak FLOP/s for {dtype}, expected one of {known} ([gpu] peak_flops)")
    tokens_per_s = tokens_per_step / step_time_s
    hours = tokens / tokens_per_s / 3600
    gpu_hours = n_gpus * hours
    return Budget(
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_gpu=tokens_per_s / n_gpus,
        mfu=tokens_per_s * flops_per_token / (n_gpus * fabric.gpu.peak_flops[dtype]),
        days=hours / 24,
        gpu_hours=gpu_hours,
        energy_kwh=gpu_hours * 3600 * fabric.gpu.power_w / JOULES_PER_KWH,
        cost=gpu_hours * fabric.gpu.price_per_hour,
        currency=fabric.gpu.currency,
        relative_error=fabric.gpu.held_out_error,
    )
