"""The optimizer of a run: parameter groups as in Megatron, each with its own learning rate and weight decay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from dtmega import config, rooms
from dtmega.ops.optim.adam import Adam, AdamW

if TYPE_CHECKING:
    from dtmega.ops.optim.muon import Cut, Matrices

# Name of an optimizer -> names of the tensors that the optimizer keeps for each of its parameters.
MOMENTS = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "muon": ("momentum_buffer",),
}


class _Kind(NamedTuple):
    """The properties that all parameters of an optimizer's parameter group share.

    Attributes:
        is_matrix: whether the parameters are matrices; vectors (biases and norm weights) are not decayed.
        factor: factor of the group's learning rate.
        by_muon: whether Muon trains the parameters.
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
    `set_rates`. The group's `moments` are the names of the tensors that the optimizer keeps for each parameter. Frozen
    parameters are left out. A pipeline stage with only frozen parameters gets one empty group.

    Args:
        named: pairs of a parameter's name in the whole model and the parameter.
        optim: section [optim] of the run's configuration.
        exact: whether an element's update must not depend on which part of the tensor this rank holds.
        matrices: weights that Muon trains, and the ranks that hold these weights; None for all other optimizers. AdamW
            trains the parameters that Muon does not train.

    Raises:
        ValueError: the optimizer is Muon, but `matrices` is None.
    """
    if optim.name == "muon" and matrices is None:
        raise ValueError("name='muon' needs the model's matrices (build_optimizer(matrices=...), [optim] name)")
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
    return rooms.muon().Muon(of_muon, others, cuts, matrices, optim)


def _elementwise(groups: list[dict[str, Any]], optim: config.Optim, name: str, exact: bool) -> torch.optim.Optimizer:
    """Build an optimizer that updates each element independently.

    Args:
        groups: parameter groups.
        optim: section [optim] of the run's configuration.
        name: name of the optimizer.
        exact: argument of `build_optimizer`.
    """
    if name == "sgd":
        # SGD is not fused, because DTensor has no rule for the fused kernel (torch 2.13).
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, foreach=True)
    kind = AdamW if name == "adamw" else Adam
    # On a CPU, torch's fused kernel rounds the last elements of a shard differently from the rest (torch 2.13).
    how = {"foreach": True} if exact else {"fused": True}
    return kind(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, **how)


def check_factors(optim: config.Optim, names: Iterable[str]) -> None:
    """Check that each pattern of lr_factors matches a parameter of the whole model.

    Raises:
        ValueError: a pattern matches no parameter.
    """
    names = list(names)
    for pattern, _ in optim.factors:
        matching(names, pattern, "[optim] lr_factors")


def matching(names: Sequence[str], pattern: str, key: str) -> list[str]:
    """The names of the parameters that a pattern matches. In the pattern, `*` stands for any characters.

    Args:
        names: names of all parameters of the whole model.
        pattern: pattern to match.
        key: configuration key that contains the pattern.

    Raises:
        ValueError: the pattern matches no parameter.
    """
    found = [name for name in names if fnmatchcase(name, pattern)]
    if not found:
        raise ValueError(f"no parameter has a name like '{pattern}'; there are '{names[0]}' to '{names[-1]}' ({key})")
    return found
