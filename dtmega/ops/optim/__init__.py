"""Optimizers as in Megatron: parameter groups, learning rate and weight decay schedules, clipping, loss spikes.

`muon.py` is the optimizer Muon; `owners.py` brings it whole matrices.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtmega import config
from dtmega.ops.optim.muon import Cut as Cut
from dtmega.ops.optim.muon import Matrices as Matrices
from dtmega.ops.optim.muon import Muon
from dtmega.ops.shards import local


class _OnLocalParts(torch.optim.Adam):
    """Adam that gives its fused kernel this rank's part of each DTensor.

    Local parts do not change the result, because Adam updates each element independently of all other elements. With
    DTensors, torch would first compute placements for whole lists of tensors, which takes longer than a small step.
    """

    def _init_group(
        self,
        group: dict[str, Any],
        params_with_grad: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        state_steps: list[Tensor],
    ) -> bool:
        """Fill the lists as torch does, but with local parts instead of DTensors. The state still holds DTensors."""
        lists = (params_with_grad, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps)
        has_complex = super()._init_group(group, *lists)
        for parameter, gradient in zip(params_with_grad, grads, strict=True):
            assert getattr(parameter, "placements", None) == getattr(gradient, "placements", None)
        for tensors in lists:
            tensors[:] = [local(tensor) for tensor in tensors]
        return has_complex


class AdamW(_OnLocalParts, torch.optim.AdamW):
    """torch's AdamW on local parts."""


class Adam(_OnLocalParts, torch.optim.Adam):
    """torch's Adam on local parts."""


# The tensors that an optimizer keeps for each of its parameters.
MOMENTS = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "muon": ("momentum_buffer",),
}


class _Kind(NamedTuple):
    """The properties that all parameters of a group share.

    Attributes:
        is_matrix: whether the parameter is decayed; vectors are biases and norm weights.
        factor: factor on the learning rate.
        by_muon: whether Muon trains the parameter.
    """

    is_matrix: bool = True
    factor: float = 1.0
    by_muon: bool = False


def build_optimizer(
    named: Iterable[tuple[str, nn.Parameter]],
    optim: config.Optim,
    exact: bool = False,
    matrices: Matrices | None = None,
) -> torch.optim.Optimizer:
    """Build AdamW (arXiv:1711.05101), Adam with weight decay added to the gradient, SGD with momentum, or Muon.

    Biases and LayerNorms are not decayed, but embeddings are (Megatron's `get_param_groups`). All parameters of a group
    share one decay setting and one learning rate factor, which the group stores as `decays` and `lr_factor` for
    `set_rates`; `moments` names the tensors that the optimizer keeps for each of its parameters. Frozen parameters are
    left out. A pipeline stage with only frozen parameters gets one empty group.

    Args:
        named: (name, parameter) pairs; each name is the parameter's name in the whole model.
        optim: section [optim] of the run's configuration.
        exact: whether an element's update may not depend on the part of the tensor that this rank holds.
        matrices: the weights that Muon trains, and the ranks that hold them; for Muon only. AdamW trains all others.
    """
    groups: dict[_Kind, list[nn.Parameter]] = {}
    cuts: dict[nn.Parameter, Cut] = {}
    for name, parameter in named:
        if parameter.requires_grad:
            # The first matching pattern wins.
            factor = next((factor for pattern, factor in optim.factors if fnmatchcase(name, pattern)), 1.0)
            by_muon = matrices is not None and name in matrices.cuts
            if matrices is not None and by_muon:
                cuts[parameter] = matrices.cuts[name]
            elif optim.adamw_lr:
                factor *= optim.adamw_lr / optim.lr
            groups.setdefault(_Kind(parameter.ndim >= 2, factor, by_muon), []).append(parameter)
    name_of_others = "adamw" if optim.name == "muon" else optim.name
    of_muon: list[dict[str, Any]] = []
    of_others: list[dict[str, Any]] = []
    for kind, members in sorted(groups.items(), key=lambda group: not group[0].is_matrix) or [(_Kind(), [])]:
        group: dict[str, Any] = {"params": members, "decays": kind.is_matrix, "lr_factor": kind.factor}
        group["weight_decay"] = optim.weight_decay * kind.is_matrix
        group["moments"] = MOMENTS["muon" if kind.by_muon else name_of_others]
        (of_muon if kind.by_muon else of_others).append(group)
    others = _elementwise(of_others or [{"params": []}], optim, name_of_others, exact)
    if matrices is None or not of_muon:
        return others
    return Muon(of_muon, others, cuts, matrices, optim)


def _elementwise(groups: list[dict[str, Any]], optim: config.Optim, name: str, exact: bool) -> torch.optim.Optimizer:
    """An optimizer that updates each element by itself.

    Args:
        groups: parameter groups.
        optim: section [optim] of the run's configuration.
        name: name of the optimizer.
        exact: the argument of `build_optimizer`.
    """
    if name == "sgd":
        # SGD is not fused, because DTensor has no rule for the fused kernel (torch 2.13).
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, foreach=True)
    kind = AdamW if name == "adamw" else Adam
    # torch's fused kernel on a CPU rounds the last elements of a shard otherwise than those before them (torch 2.13).
    how = {"foreach": True} if exact else {"fused": True}
    return kind(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, **how)


def check_factors(optim: config.Optim, names: Iterable[str]) -> None:
    """Check that each pattern of lr_factors names a parameter of the whole model.

    Raises:
        ValueError: a pattern matches no parameter.
    """
    names = list(names)
    for pattern, _ in optim.factors:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"no parameter has a name like '{pattern}'; there are '{names[0]}' to '{names[-1]}' "
                f"([optim] lr_factors)"
            )


def learning_rate(optim: config.Optim, progress: int, total: int) -> float:
    """The learning rate of the update that brings the run to `progress`.

    The curves are Megatron's (`optimizer_param_scheduler.py`), with one difference: progress includes the batch of the
    update itself, so that the first update already has an effect (Megatron's first update has rate 0).

    Args:
        progress: number of steps, samples or tokens ([optim] unit) consumed when this update is done; >= 1.
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
    """The learning rate of the update that brings the run to `steps` steps and `samples` samples.

    Args:
        cfg: the run's configuration.
        steps: number of steps done, including the step of this update.
        samples: number of samples consumed, including the samples of this update.
        end: end of the run in steps and samples, from `cfg.end`.
    """
    return learning_rate(cfg.optim, cfg.progress(steps, samples), cfg.progress(*end))


def notes_on_warmup(cfg: config.Config, end: config.RunEnd) -> list[str]:
    """A note for the user if the rate reaches [optim] lr late or never, because the warm-up exceeds half of the run.

    Args:
        cfg: the run's configuration.
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
    """The weight decay of the update that brings the run to `steps` steps and `samples` samples.

    The curves are Megatron's (`optimizer_param_scheduler.py`, get_wd) and end when training ends. As in
    `learning_rate`, progress includes the batch of the update itself.

    Args:
        cfg: the run's configuration.
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


class Spikes:
    """Detector of steps whose loss or gradient norm is far above recent values (OLMo-core's `SkipStepOptimizer`).

    Args:
        sigmas: number of standard deviations above the mean of the last WINDOW steps at which a step counts as a spike;
            0: no step counts as a spike.
        recent: (loss, gradient norm) pairs of the last steps, as checkpoints store them.
    """

    WINDOW = 128

    def __init__(self, sigmas: float, recent: Iterable[Sequence[float]] = ()) -> None:
        self.sigmas, self.recent = sigmas, deque(map(tuple, recent), maxlen=self.WINDOW)

    def is_spike(self, loss: float, grad_norm: float) -> bool:
        """True if a step is a spike compared with the recent steps. Afterwards the step itself counts as recent.

        The first WINDOW / 2 steps never count as spikes, because too few earlier steps exist.
        """
        is_spike = False
        if self.sigmas and len(self.recent) >= self.WINDOW // 2:
            losses, norms = zip(*self.recent, strict=True)
            for value, before in ((loss, losses), (grad_norm, norms)):
                is_spike |= value > statistics.fmean(before) + self.sigmas * statistics.pstdev(before)
        # A single non-finite value would make the means of the next WINDOW steps useless.
        if self.sigmas and math.isfinite(loss) and math.isfinite(grad_norm):
            self.recent.append((loss, grad_norm))
        return is_spike


def total_norm(tensors: list[Tensor], device: torch.device, group: dist.ProcessGroup) -> float:
    """The L2 norm over the local tensors of all ranks of `group`. Exactly one rank must pass each element."""
    return math.sqrt(_sum(squared_norm(tensors), device, group))


def squared_norm(tensors: list[Tensor]) -> Tensor:
    """The square of the L2 norm over this rank's tensors, an fp64 scalar on the tensors' device."""
    on_cpu = not tensors or tensors[0].device.type == "cpu"
    norm = _norm(tensors) if on_cpu else nn.utils.get_total_norm(tensors)
    return norm.to(torch.float64).square()


def _norm(tensors: list[Tensor], row: int = 4096) -> Tensor:
    """The L2 norm over tensors on a CPU, an fp64 scalar.

    On a CPU torch sums a tensor's squares in fp32. With half a million squares the sum is off by 5e-5, and the error
    differs between layouts. So the norms of short rows are computed first, and then the norm of those norms in fp64.
    """
    norms = [torch.zeros(1)]
    for tensor in tensors:
        flat = tensor.flatten()
        in_rows = flat.numel() // row * row
        norms.append(torch.linalg.vector_norm(flat[:in_rows].view(-1, row), dim=1))
        norms.append(torch.linalg.vector_norm(flat[in_rows:]).view(1))
    return torch.linalg.vector_norm(torch.cat(norms), dtype=torch.float64)


def count_zeros(tensors: list[Tensor], device: torch.device, group: dist.ProcessGroup) -> int:
    """The number of zeros in the local tensors of all ranks of `group`. Exactly one rank must pass each element."""
    zeros = torch.stack([(t == 0).sum() for t in tensors]).sum() if tensors else torch.zeros(())
    return int(_sum(zeros.to(torch.float64), device, group))


def _sum(value: Tensor, device: torch.device, group: dist.ProcessGroup) -> float:
    value = value.to(device)
    dist.all_reduce(value, group=group)
    return value.item()


def unscale(gradients: Sequence[Tensor], scale: float) -> None:
    """Divide local gradients by the loss scale, in place. If the scale is a power of 2, nothing is rounded."""
    _multiply(gradients, 1 / scale)


def clip_gradients(gradients: Sequence[Tensor], norm: float, largest: float) -> None:
    """Scale local gradients down in place, so that their norm over all ranks is at most `largest`.

    The factor is Megatron's (`optimizer/clip_grads.py`): largest / (norm + 1e-6), or 1 if this quotient is above 1.

    Args:
        gradients: this rank's parts of the gradients.
        norm: norm of the gradients over all ranks.
        largest: largest allowed norm; 0: no limit.
    """
    factor = largest / (norm + 1e-6)
    if 0 < factor < 1:
        _multiply(gradients, factor)


def _multiply(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply tensors in place. A GPU runs a few kernels for all tensors, not one kernel per tensor."""
    if tensors:
        torch._foreach_mul_(list(tensors), factor)  # pyright: ignore[reportPrivateImportUsage]
