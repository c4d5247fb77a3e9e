"""One stage as torch's schedules run it: tensors by name on our side, in order on torch's, and sums on the way.

torch's stages hand on tuples of tensors and know one loss, that of the last stage. Another stage may have sums of the
loss, too: their gradient enters backward with that of what it hands on (Megatron's `MoEAuxLossAutoScaler`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.pipelining import PipelineStage

Boundary = Mapping[str, Tensor]  # on meta: name -> the shape and dtype of a tensor, and whether it needs a gradient


class Stage(PipelineStage):
    """torch's stage around a module that takes and returns tensors by name.

    Two neighbours may be on one rank (V shapes): they have no message to exchange, and in evaluation no gradient to
    hand over.

    Args:
        module: called as module(**rows of a microbatch, **what the stage before hands on), it returns by name what it
            hands on and its sums. What it is given and does not return is handed on as it came.
        before, after: what it is given and what it hands on; nothing before the first and after the last stage.
        take: called with what the module returns, gives the sums in the loss with their factors (`Tally.add`).
    """

    def __init__(
        self,
        module: nn.Module,
        number: int,
        n_stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        before: Boundary,
        after: Boundary,
        take: Callable[[Mapping[str, Tensor]], list[tuple[Tensor, float]]],
    ) -> None:
        # Shapes are given, so that torch does not run the model once more, and send pickles, to find them out.
        loss = torch.empty((), dtype=torch.float32, device="meta").requires_grad_()
        super().__init__(
            module,
            number,
            n_stages,
            device,
            input_args=tuple(before.values()),
            output_args=tuple(after.values()) or loss,
            group=group,
        )
        self._given, self._handed_on, self._take = list(before), dict(after), take
        self._no_input_part = number > 0 and not any(meta.requires_grad for meta in before.values())

    def forward_maybe_with_nosync(self, *carried: Tensor, **rows: Any) -> Tensor | tuple[Tensor, ...]:
        """A microbatch through the module; what it hands on, of the last stage the weighted sum of its sums."""
        given = dict(zip(self._given, carried, strict=True))
        found = self.submod(**rows, **given)
        in_loss = self._take(found)
        if self.is_last:
            zero = torch.zeros((), dtype=torch.float32, device=self.device)
            return sum((total * factor for total, factor in in_loss), zero)
        handed_on = {name: found.get(name, given.get(name)) for name in self._handed_on}
        if in_loss:
            carrier = next(name for name, meta in self._handed_on.items() if meta.requires_grad)
            totals, factors = zip(*in_loss, strict=True)
            handed_on[carrier] = _Seeded.apply(handed_on[carrier], factors, *totals)
        # torch detaches in place what it has sent, which a view cannot be.
        return tuple(t.clone() if t._is_view() else t.contiguous() for t in handed_on.values())

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Backward in one piece where no input has a gradient: by the input part torch finds the weights of the other.

        It does so for the first stage only, and where the ones before are frozen would leave weights without gradient.
        """
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward or self._no_input_part, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if not self._no_input_part:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """The first messages of torch 2.11, which sends them to a neighbour on its own rank, too: gloo fails there."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


class _Seeded(torch.autograd.Function):
    """A tensor as it is, whose backward starts that of some scalars, too, each with its factor."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, factors: tuple[float, ...], *totals: Tensor) -> Tensor:
        ctx.seeds = [torch.full_like(total, factor) for total, factor in zip(totals, factors, strict=True)]
        return carrier.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return *grad_outputs, None, *ctx.seeds
