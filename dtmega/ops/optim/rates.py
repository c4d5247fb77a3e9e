"""The learning rate and weight decay of each update, according to Megatron's schedules."""

from __future__ import annotations

import math

import torch

from dtmega import config


def learning_rate(optim: config.Optim, progress: int, total: int) -> float:
    """The learning rate of an update, given the run's progress including this update.

    The curves are Megatron's (`optimizer_param_scheduler.py`), with one difference: progress includes the batch of the
    update itself, so that the first update already has an effect (Megatron's first update has rate 0).

    Args:
        progress: number of steps, samples or tokens ([optim] unit), including those of this update; at least 1.
        total: progress at the end of the run, where the decay ends if [optim] decay is 0.
    """
    peak, low = optim.lr, optim.min_lr
    end = optim.decay or total
    warmup = optim.warmup_until(total)
    if progress <= warmup:
        return peak * progress / warmup
    if optim.schedule == "constant":
        return peak
    if progress > end:
        return low
    if optim.schedule == "inverse-sqrt":
        return max(low, peak * math.sqrt(max(warmup, 1) / progress))
    if optim.schedule == "wsd":
        # If the tail began before the warm-up ended, the rate would jump; the configuration refuses such a tail.
        tail = optim.wsd_decay or min(max(1, end // 10), end - warmup)
        return low + (peak - low) * min(1.0, (end - progress) / tail)
    done = (progress - warmup) / (end - warmup)
    weight = 1 - done if optim.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return low + (peak - low) * weight


def rate_at(cfg: config.Config, steps: int, samples: int, end: config.RunEnd) -> float:
    """The learning rate of an update, given the run's steps and samples including this update.

    Args:
        cfg: configuration of the run.
        steps: number of steps done, including the step of this update.
        samples: number of samples consumed, including the samples of this update.
        end: end of the run in steps and samples, from `cfg.end`.
    """
    return learning_rate(cfg.optim, cfg.progress(steps, samples), cfg.progress(*end))


def notes_on_warmup(cfg: config.Config, end: config.RunEnd) -> list[str]:
    """A note for the user if the warm-up exceeds half of the run, so that the rate reaches [optim] lr late or never.

    Args:
        cfg: configuration of the run.
        end: end of the run in steps and samples, from `cfg.end`.
    """
    total = cfg.progress(*end)
    warmup = cfg.optim.warmup_until(total)
    if warmup <= total / 2:
        return []
    unit = cfg.optim.unit
    return [
        f"the learning rate rises for {min(warmup, total):,.0f} of the run's {total:,} {unit}: the warm-up is "
        f"{warmup:,.0f} {unit} long ([optim] warmup, or warmup_fraction = 0.1 for a tenth of any length)"
    ]


def weight_decay_at(cfg: config.Config, steps: int, samples: int, end: config.RunEnd) -> float:
    """The weight decay of an update, given the run's steps and samples including this update.

    The curves are Megatron's (`optimizer_param_scheduler.py`, get_wd) and end when training ends. As in
    `learning_rate`, progress includes the batch of the update itself.

    Args:
        cfg: configuration of the run.
        steps: number of steps done, including the step of this update.
        samples: number of samples consumed, including the samples of this update.
        end: end of the run in steps and samples, from `cfg.end`.
    """
    optim = cfg.optim
    if optim.weight_decay_schedule == "constant":
        return optim.weight_decay
    done = min(1.0, cfg.progress(steps, samples) / cfg.progress(*end))
    weight = done if optim.weight_decay_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * (1 - done)))
    return optim.start_weight_decay + weight * (optim.weight_decay - optim.start_weight_decay)


def set_rates(optimizer: torch.optim.Optimizer, rate: float, weight_decay: float) -> None:
    """Set the learning rate and weight decay of the groups that `build_optimizer` made.

    A group's learning rate is `rate` times the group's factor. A group's weight decay is `weight_decay`, or 0 if the
    group is not decayed.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_factor"]
        group["weight_decay"] = weight_decay * group["decays"]
