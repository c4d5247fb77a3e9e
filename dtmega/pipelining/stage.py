"""A pipeline stage with the interface that torch's schedules expect.

Our modules take and return tensors by name, whereas torch's stages take and return tuples.

torch expects a loss only from the last stage. Here, any stage may contribute terms to the loss. The gradients of a
stage's terms enter the stage's backward together with the gradients of the stage's output tensors (as in Megatron's
`MoEAuxLossAutoScaler`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.pipelining import PipelineStage

from dtmega.ops import ranges
from dtmega.pipelining.sums import Gradients, Sums, backward_and_sum

Boundary = Mapping[str, Tensor]  # name of a tensor -> meta tensor with its shape, dtype and requires_grad


class Stage(PipelineStage):
    """torch's `PipelineStage`, for a module that takes and returns tensors by name.

    In a V-shaped schedule, two neighbouring stages may be on one rank. This class omits messages between two
    stages on one rank and, in evaluation, the gradients that torch would pass between these stages.

    Args:
        module: module of the stage, called as module(**rows of a microbatch, **tensors from the previous stage). The
            module returns the tensors for the next stage, and losses and counts for the tally, by name. An input tensor
            that the module does not return is passed to the next stage unchanged.
        number: index of the stage.
        n_stages: number of stages in the pipeline.
        device: device on which this rank computes.
        group: process group of the pp ranks.
        before: tensors that the stage receives; empty for the first stage.
        after: tensors that the stage passes to the next stage; empty for the last stage.
        take: function that takes the module's outputs and returns the terms of the loss, each with a factor
            (`Tally.add`).
        n_microbatches: number of microbatches in a step.
        sums: object that accumulates gradients, over data ranks too, after each microbatch; None if torch accumulates
            gradients and reduces them once per step.
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
        n_microbatches: int,
        sums: Sums | None = None,
    ) -> None:
        # Pass the shapes, because torch would otherwise run the model once and send pickles to determine the shapes.
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
        self._input_names, self._handed_on, self._take = list(before), dict(after), take
        # True if all earlier stages are frozen. Then no input needs a gradient, and backward has no input part.
        self._no_input_part = number > 0 and not any(meta.requires_grad for meta in before.values())
        self._sums, self._n_microbatches = sums, n_microbatches
        self._n_summed = 0  # number of this step's microbatches whose gradients `sums` has accumulated
        self._microbatch = 0  # index of the microbatch in backward

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with ranges.named("forward", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *carried: Tensor, **rows: Any) -> Tensor | tuple[Tensor, ...]:
        """Run a microbatch through the module.

        Returns:
            The tensors for the next stage. The last stage returns the loss instead: the sum of its terms of the loss,
            each multiplied by its factor.
        """
        inputs = dict(zip(self._input_names, carried, strict=True))
        outputs = self.submod(**rows, **inputs)
        in_loss = self._take(outputs)
        if self.is_last:
            zero = torch.zeros((), dtype=torch.float32, device=self.device)
            return sum(((total * factor).sum() for total, factor in in_loss), zero)
        handed_on = {name: outputs.get(name, inputs.get(name)) for name in self._handed_on}
        # torch starts this stage's backward from the tensors for the next stage, so the stage's terms of the loss are
        # attached to one of these tensors.
        if in_loss:
            carrier = next(name for name, meta in self._handed_on.items() if meta.requires_grad)
            totals, factors = zip(*in_loss, strict=True)
            handed_on[carrier] = _Seeded.apply(handed_on[carrier], factors, *totals)
        # torch detaches the tensors in place after sending them, which fails for views.
        return tuple(t.clone() if t._is_view() else t.contiguous() for t in handed_on.values())

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run a backward pass, which is never split if no input of the stage needs a gradient.

        torch's split backward has two passes. The first pass computes the gradients of inputs and collects the
        weights for the second pass. torch allows only the first stage to have no input gradients. In a stage after
        frozen stages, no input needs a gradient, so the two passes would compute no gradients for the weights.
        """
        self._microbatch = bwd_chunk_id
        whole = full_backward or self._no_input_part
        with ranges.named("backward" if full_backward else "backward-inputs", self.stage_index, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, whole, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if self._no_input_part:
            return
        self._microbatch = bwd_chunk_id
        with ranges.named("backward-weights", self.stage_index, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: Any, last_backward: bool = False) -> Gradients:
        """Run a whole backward, or its part for inputs or weights. `self._sums` accumulates the weights' gradients."""
        if self._sums is None or backward_type == "input":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        # torch never sets `last_backward` for an input part, even if `backward_one_chunk` runs it as a whole backward.
        self._n_summed += 1
        last = self._n_summed == self._n_microbatches
        return backward_and_sum(self._sums, self.submod, backward_type, bwd_kwargs, self._microbatch, last)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """End a step: let torch reduce the gradients over the data ranks, or let `sums` finish, if there is one."""
        if self._sums is None:
            return super().perform_reduce_grad(grad_scale_factor)
        # An evaluation has no gradients.
        assert self._n_summed == (self._n_microbatches if self.has_backward else 0)
        self._n_summed = 0
        return self._sums.finish()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """List the first messages between neighbouring stages, without messages from this rank to itself.

        torch 2.11 includes messages from a rank to itself, and gloo does not support such messages.
        """
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


class _Seeded(torch.autograd.Function):
    """Return a copy of `carrier`. In backward, also give each of the stage's loss terms (`totals`) its gradient."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, factors: tuple[float, ...], *totals: Tensor) -> Tensor:
        ctx.seeds = [torch.full_like(total, factor) for total, factor in zip(totals, factors, strict=True)]
        return carrier.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return *grad_outputs, None, *ctx.seeds
