"""Expert parallelism (GShard, arXiv:2006.16668): each rank holds some experts, and tokens travel to their experts.

Unlike tp ranks, the ranks of an ep group have different tokens. Each rank routes its own tokens and makes one row for
each pair (token, expert). The rows are sent to the ranks that hold the experts, and the results are sent back:

    forward    all-to-all of the rows, the products, all-to-all of the results
    backward   all-to-all of the results' gradients, the products, all-to-all of the rows' gradients

The number of rows for each rank depends on the data. The ranks therefore first exchange the number of rows for each
expert, and the host reads these numbers. A rank takes part in both exchanges even if it has no rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from dtmega.ops import host


def check_divisible(experts: nn.Module, ep: int) -> None:
    """Check that a module's experts, with parameters [E, ...], can be divided over ep ranks.

    Raises:
        ValueError: ep does not divide the number of experts.
    """
    n_experts = next(experts.parameters()).shape[0]
    if n_experts % ep:
        raise ValueError(
            f"ep={ep} does not divide n_experts={n_experts}: {n_experts} % {ep} = {n_experts % ep}, expected 0, "
            f"because a rank has whole experts ([mesh] ep, [model] n_experts)"
        )


def divide(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Keep only this rank's experts, as DTensors, and set the module's `exchange`. The ranks do not communicate.

    Args:
        experts: module whose parameters are stacked by expert, [E, ...]. tp may have sharded any dim except dim 0.
        mesh: mesh with the dims (ep,) or (ep, tp).
    """
    for name, parameter in list(experts.named_parameters(recurse=False)):
        by_tp: tuple[Placement, ...] = ()
        whole = parameter.detach()
        if mesh.ndim == 2:
            by_tp = parameter.placements if isinstance(parameter, DTensor) else (Replicate(),)
            whole = parameter.to_local() if isinstance(parameter, DTensor) else whole
        mine = whole.chunk(mesh.size(0))[mesh.get_local_rank(0)]
        cut = DTensor.from_local(
            mine.detach(),
            mesh,
            [Shard(0), *by_tp],
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        experts.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))
    experts.exchange = Exchange(mesh.get_group(0))  # pyright: ignore[reportArgumentType]


class Arrived(NamedTuple):
    """Rows that other ranks have sent to this rank's experts.

    Attributes:
        rows: rows from all ranks, ordered by sending rank and then by expert, [n, D].
        experts: index of each row's expert among this rank's experts, [n] int64.
        give_back: function that sends one result for each row, [n, D], back to the rank that sent the row. The
            function returns the results for the rows that this rank has sent, in the order of these rows, and zeros
            for rows without an expert.
    """

    rows: Tensor
    experts: Tensor
    give_back: Callable[[Tensor], Tensor]


class Exchange:
    """The exchange of rows among the ranks of an ep group.

    Args:
        group: process group of the ranks, in the order of their experts.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    # The sizes depend on the values of `n_rows`, so a compiled block has a graph break here.
    @torch.compiler.disable
    def __call__(self, rows: Tensor, n_rows: Tensor) -> Arrived:
        """Send each row to the rank that holds the row's expert.

        Args:
            rows: rows in the order of their experts, [N, D]. Rows without an expert come last and stay on this rank.
            n_rows: number of rows for each expert, [E] int64.
        """
        n_ranks = self._group.size()
        n_experts = len(n_rows) // n_ranks
        arriving = torch.empty_like(n_rows)
        dist.all_to_all_single(arriving, n_rows, group=self._group)
        by_rank = torch.stack([n_rows, arriving]).view(2, n_ranks, n_experts).sum(2)
        sent, received = host.read_sizes(by_rank, len(rows)).tolist()
        n_sent = sum(sent)
        here = _exchange(rows[:n_sent], sent, received, self._group)
        experts = torch.arange(n_experts, device=rows.device).repeat(n_ranks)
        experts = experts.repeat_interleave(arriving, output_size=sum(received))

        def give_back(results: Tensor) -> Tensor:
            back = _exchange(results, received, sent, self._group)
            return F.pad(back, (0, 0, 0, len(rows) - n_sent)) if n_sent < len(rows) else back

        return Arrived(here, experts, give_back)


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    return cast(Tensor, _Exchange.apply(rows, sent, received, group))


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows, [sum(sent), D] -> [sum(received), D]. Backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad_outputs[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send the next sent[r] rows to each rank r = 0, 1, ..., and receive received[r] rows from each rank r."""
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out
