"""AdamW with Megatron's decay groups, the learning rate as a pure function of progress, gradient norm and clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dtmega import config


def build_optimizer(model: nn.Module, optim: config.Optim) -> torch.optim.AdamW:
    """AdamW (arXiv:1711.05101); biases and LayerNorms are not decayed, embeddings are (Megatron `get_param_groups`)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        fused=True,
    )


def learning_rate(optim: config.Optim, progress: int, total: int) -> float:
    """The rate of the update that brings the run to `progress`.

    Megatron's curves (`optimizer_param_scheduler.py`), with one difference: progress counts the batch of the update
    itself, so that the first update already moves (Megatron's first one has rate 0).

    Args:
        progress: steps, samples or tokens ([optim] unit) consumed when this update is done; >= 1.
        total: the same for the whole run; where the decay ends if [optim] decay is 0.
    """
    peak, low = optim.lr, optim.min_lr
    end = optim.decay or max(total, optim.warmup)
    if progress <= optim.warmup:
        return peak * progress / optim.warmup
    if optim.schedule == "constant":
        return peak
    if optim.schedule == "inverse-sqrt":
        return max(low, peak * math.sqrt(max(optim.warmup, 1) / progress))
    if progress >= end:
        return low
    if optim.schedule == "wsd":
        tail = optim.wsd_decay or max(1, end // 10)
        return low + (peak - low) * min(1.0, (end - progress) / tail)
    done = (progress - optim.warmup) / (end - optim.warmup)
    weight = 1 - done if optim.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return low + (peak - low) * weight


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(parameters: Iterable[nn.Parameter], largest: float) -> Tensor:
    """The L2 norm over all gradients, each unique parameter once; scales them to at most `largest` (0 = only measure).

    Megatron's factor: largest / (norm + 1e-6) if that is below 1.
    """
    parameters = [p for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if largest > 0:
        nn.utils.clip_grads_with_norm_(parameters, largest, norm)
    return norm
