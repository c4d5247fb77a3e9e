"""Muon, which orthogonalises momentum matrices by Newton-Schulz (Jordan et al. 2024; Liu et al., arXiv:2502.16982).

The formulas are the same as in `torch.optim.Muon`, except that Newton-Schulz runs in fp32. Gradients from different
layouts differ by rounding errors of 1e-7. Newton-Schulz in bfloat16 would amplify these errors to 1e-2 of the update;
in fp32, they stay below 1e-5.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtmega import config
from dtmega.ops.optim.owners import Owners
from dtmega.ops.shards import local

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
SMALLEST_NORM = 1e-7


class Cut(NamedTuple):
    """The matrices that make up a weight, side by side along one dim. Each matrix is orthogonalised separately.

    Attributes:
        dim: dim of the weight along which the matrices lie side by side.
        sizes: numbers of consecutive rows (or columns, by `dim`) that belong to the first matrix, the second, and so
            on; the pattern repeats along `dim`. () for a single matrix; (K, K, K) for rows [head, (q, k, v), K].
    """

    dim: int = 0
    sizes: tuple[int, ...] = ()

    def views(self, weight: Tensor) -> list[Tensor]:
        """Views of a weight's matrices. In each view, two dims [repeats of the pattern, size] replace `dim`."""
        sizes = self.sizes or (weight.shape[self.dim],)
        return list(weight.unflatten(self.dim, (-1, sum(sizes))).split(sizes, self.dim + 1))

    def shapes(self, shape: torch.Size) -> list[tuple[int, int]]:
        """The shapes of the matrices in a weight of the given shape."""
        length, other = shape[self.dim], shape[1 - self.dim]
        sizes = self.sizes or (length,)
        lengths = [length // sum(sizes) * size for size in sizes]
        return [(n, other) if self.dim == 0 else (other, n) for n in lengths]


class Matrices(NamedTuple):
    """The weights that Muon trains in the whole model, and the ranks with the same pipeline stages as this rank.

    Attributes:
        cuts: name of each weight -> matrices that the weight consists of.
        group: process group of the ranks with this rank's pipeline stages, in the order [dp_replicate, fsdp, tp].
        sizes: number of ranks along dp_replicate, fsdp and tp.
    """

    cuts: Mapping[str, Cut]
    group: dist.ProcessGroup
    sizes: tuple[int, int, int]


class Muon(torch.optim.Optimizer):
    """Muon for matrices, together with an optimizer for all other parameters.

    The momentum of a weight is sharded like the weight. In each step, the weight's owner gathers the whole momentum,
    orthogonalises the matrices in the momentum, and sends each rank its part of the result. Everything else is
    computed on local parts, by operations that round only once. The bits of an element therefore do not depend on the
    rank that holds the element.

    Args:
        groups: parameter groups of the weights, in torch's format.
        others: optimizer for all other parameters. Muon takes over this optimizer's groups and state.
        cuts: matrices that each weight consists of.
        matrices: ranks that hold the weights.
        optim: section [optim] of the run's configuration.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        others: torch.optim.Optimizer,
        cuts: Mapping[nn.Parameter, Cut],
        matrices: Matrices,
        optim: config.Optim,
    ) -> None:
        super().__init__(list(groups), {"lr": optim.lr, "weight_decay": optim.weight_decay})
        self._others, self._optim = others, optim
        self._weights: list[nn.Parameter] = []
        self._cuts: list[Cut] = []
        self._group_of: list[dict[str, Any]] = []
        for group in self.param_groups:
            for weight in group["params"]:
                self._weights.append(weight)
                self._cuts.append(cuts[weight])
                self._group_of.append(group)
        self.param_groups += [group for group in others.param_groups if group["params"]]
        others.state = self.state
        costs = []
        for weight, cut in zip(self._weights, self._cuts, strict=True):
            costs.append(sum(n_multiplications(shape) for shape in cut.shapes(weight.shape)))
        self._owners = Owners(self._weights, costs, matrices.group, matrices.sizes)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all parameters. Each parameter must have a gradient. All ranks of the group call this method together.

        Args:
            closure: unsupported argument; must be None.
        """
        assert closure is None
        self._others.step()
        updates = [self._averaged(weight) for weight in self._weights]
        self._owners.compute(updates, self._orthogonalize)
        for weight, group, update in zip(self._weights, self._group_of, updates, strict=True):
            local(weight).mul_(1 - group["lr"] * group["weight_decay"]).sub_(update)

    def _averaged(self, weight: nn.Parameter) -> Tensor:
        """Update the momentum. Return this rank's part of the Nesterov average of momentum and gradient."""
        assert weight.grad is not None
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        # Add two rounded products, because a fused multiply-add would round the last elements of a shard differently.
        buffer, momentum = local(state["momentum_buffer"]), self._optim.muon_momentum
        gradient = local(weight.grad) * (1 - momentum)
        buffer.mul_(momentum).add_(gradient)
        return torch.mul(buffer, momentum).add_(gradient)

    def _orthogonalize(self, i: int, whole: Tensor) -> None:
        """Turn the whole momentum of weight `i` into the weight's update, in place."""
        cut = self._cuts[i]
        for view in cut.views(whole):
            matrix = view.flatten(cut.dim, cut.dim + 1)
            rate = self._group_of[i]["lr"] * adjustment(self._optim.adjust_lr_fn, matrix.shape)
            view.copy_(orthogonalized(matrix).mul_(rate).view(view.shape))


def orthogonalized(matrix: Tensor) -> Tensor:
    """Run five steps of Newton-Schulz in fp32, which bring the singular values close to 1 (between about 0.7 and 1.2).

    Singular values below about 1e-3 of the matrix's norm remain below 0.7.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = (matrix.t() if is_tall else matrix).contiguous()
    # In fp32, a sum of many squares would have an error of 1e-5, which would depend on the number of threads.
    norm = torch.linalg.vector_norm(wide, dtype=torch.float64).clamp(min=SMALLEST_NORM)
    x = wide / norm.to(wide.dtype)
    for _ in range(STEPS):
        square = x @ x.t()
        polynomial = torch.addmm(square, square, square, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.t().contiguous() if is_tall else x


def adjustment(adjust_lr_fn: str, shape: torch.Size) -> float:
    """The factor that adjusts the learning rate to a matrix's shape.

    Args:
        adjust_lr_fn: name of the rule: "original" (Jordan et al. 2024), where the update's norm depends on the ratio of
            rows to columns, or "match_rms_adamw" (Liu et al., arXiv:2502.16982), where the update's elements are about
            as large as in AdamW (0.2).
        shape: numbers of rows and columns of the matrix.
    """
    rows, columns = shape
    if adjust_lr_fn == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def n_multiplications(shape: tuple[int, int]) -> int:
    """The number of multiplications in one step of Newton-Schulz."""
    small, large = sorted(shape)
    return small * small * (2 * large + small)
