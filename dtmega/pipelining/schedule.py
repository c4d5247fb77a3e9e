"""This rank's stages and the order in which their microbatches run: torch's pipeline schedules, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

# `_PipelineScheduleRuntime` runs any table; nothing public does.
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from dtmega import config
from dtmega.cost import Piece
from dtmega.pipelining.split import plan_stages
from dtmega.pipelining.table import SCHEDULES, csv_table, microbatches_in


def check(cfg: config.Config, pieces: Sequence[Piece], pp: int, data_size: int, compiled: bool) -> None:
    """Can the configured schedule run on pp > 1 ranks? Before anything is built.

    Args:
        pieces: of the whole model.
        data_size: how many data ranks share the global batch.
        compiled: will blocks be compiled?

    Raises:
        ValueError: a number of stages or microbatches (at any size of the ramp-up) that the schedule cannot run, a cut
            that is none, or a backward in two parts with compiled or recomputed blocks.
    """
    plan_stages(cfg, pieces, pp)
    name = f"schedule '{cfg.pipeline.csv or cfg.pipeline.schedule}'"
    batch = cfg.batch
    for size in batch.sizes:
        n_microbatches = size // (data_size * batch.micro_batch_size)
        if broken := broken_rule(cfg.pipeline, pp, n_microbatches):
            raise ValueError(
                f"{size} sequences / ({data_size} data ranks x micro_batch_size={batch.micro_batch_size}) = "
                f"{n_microbatches} microbatches, but {name} needs {broken} ([batch] global_batch_size, rampup and "
                f"micro_batch_size, [mesh] pp, [pipeline] schedule)"
            )
    splits = splits_backward(cfg, pp)
    # Both gave exact gradients when tried; the second backward costs more than the bubbles that it fills.
    if splits and compiled:
        raise ValueError(
            f"{name} runs backward in two parts, but that of a compiled block is one piece and would run twice "
            f"([compile] enable = false, or [pipeline] schedule)"
        )
    if splits and cfg.recompute.mode != "none":
        raise ValueError(
            f"{name} runs backward in two parts, and each would recompute a block, the second once for every weight "
            f"([recompute] mode = 'none', or [pipeline] schedule)"
        )


def splits_backward(cfg: config.Config, pp: int) -> bool:
    """Does backward run in two parts, first for inputs, later for weights?"""
    if pp == 1:
        return False
    if cfg.pipeline.csv:
        return any(action.kind in "IW" for row in csv_table(cfg.pipeline.csv, pp) for action in row)
    return SCHEDULES[cfg.pipeline.schedule].splits_backward


def broken_rule(pipeline: config.Pipeline, pp: int, n: int) -> str:
    """What the schedule needs and n microbatches are not; '' if all is well. From the classes' own checks in torch."""
    if pipeline.csv:
        written = microbatches_in(csv_table(pipeline.csv, pp))
        return "" if n == written else f"the {written} that are written there"
    if pipeline.schedule == "1F1B" and n < pp:
        return f"one per stage: {n} < pp={pp}"
    if pipeline.schedule == "DualPipeV" and n < 2 * pp:
        return f"one per stage: {n} < 2 x pp = {2 * pp}"
    rounds = max(1, n // pp)
    if pipeline.schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and n % rounds:
        return f"equal rounds of about pp={pp}: {n} % ({n} // {pp}) = {n % rounds}, expected 0"
    return ""


class Pipeline:
    """A rank's stages, trained and evaluated on a list of microbatches at a time.

    All ranks of a pipeline get the same microbatches. Gradients add up over them unscaled (`scale_grads` is off). Under
    FSDP torch's stages gather once, before the first forward, and reduce once, after the last backward (W, if split),
    if the modules were wrapped with reshard_after_forward=False; they set every other switch themselves. With more than
    three stages per rank torch keeps three gathered and gathers the others again.

    torch keeps two receive buffers, activation and gradient, for every microbatch (pytorch#136380): 2 n B S D elements.

    Args:
        pipeline: which schedule.
        stages: this rank's modules by stage number, ascending. Called as module(x, labels=..., sample_ids=..., ...),
            the first with tokens [B, S], the others with the hidden state, they return the hidden state, the last one
            the fp32 scalar sum of token losses.
        n_stages: of the whole pipeline.
        group: the pp group.
        hidden: an empty tensor, on meta, shaped as what one stage hands to the next: [B, S, D], S / tp if the sequence
            is cut, in the dtype of the forward.
        device: where this rank computes.
    """

    def __init__(
        self,
        pipeline: config.Pipeline,
        stages: Mapping[int, nn.Module],
        n_stages: int,
        group: dist.ProcessGroup,
        hidden: Tensor,
        device: torch.device,
    ) -> None:
        self.stages = dict(stages)
        self.holds_first, self.holds_last = 0 in stages, n_stages - 1 in stages
        self._pipeline, self._n_stages, self._group = pipeline, n_stages, group
        self._hidden, self._device = hidden, device
        self._scale = torch.ones((), dtype=torch.float32, device=device)
        self._losses: list[Tensor] = []
        self._built: tuple[tuple[int, bool], PipelineScheduleSingle | PipelineScheduleMulti] | None = None

    def step(self, microbatches: Sequence[Mapping[str, Tensor]], scale: float) -> Tensor:
        """Forward and backward of all microbatches; gradients are those of `scale` x the sum of token losses.

        Returns:
            fp64 scalar, the unscaled sum of token losses where the last stage is, 0 elsewhere: the sum over the
            pipeline's ranks is the loss.
        """
        self._scale.fill_(scale)
        return self._run(microbatches, training=True)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """The same sum, forward only. The caller has set eval mode."""
        return self._run(microbatches, training=False)

    def _run(self, microbatches: Sequence[Mapping[str, Tensor]], training: bool) -> Tensor:
        schedule = self._schedule(microbatches, training)
        # torch takes whole batches, and chunks every tensor along dim 0: [n B, ...] -> n times [B, ...].
        batch: dict[str, Any] = {name: torch.cat([m[name] for m in microbatches]) for name in microbatches[0]}
        tokens = batch.pop("tokens")
        self._losses.clear()
        run = schedule.step if training else schedule.eval
        run(*([tokens] if self.holds_first else []), target=batch["labels"], return_outputs=False, **batch)
        assert len(self._losses) == (len(microbatches) if self.holds_last else 0)
        return sum(self._losses, torch.zeros((), dtype=torch.float64, device=self._device))

    def _loss(self, total: Tensor, labels: Tensor) -> Tensor:
        """The last stage has already summed the losses of its tokens; torch passes the labels all the same."""
        self._losses.append(total.detach())
        return total * self._scale

    def _schedule(
        self, microbatches: Sequence[Mapping[str, Tensor]], training: bool
    ) -> PipelineScheduleSingle | PipelineScheduleMulti:
        """Built anew when the number of microbatches changes (ramp-up), or training to evaluation and back.

        torch's stages set up their buffers for one use; reused for training after evaluation, they failed in backward
        (pytorch#162822) or, since that was repaired, set up everything again.
        """
        use = len(microbatches), training
        if self._built is None or self._built[0] != use:
            self._built = None  # frees the old buffers first
            self._built = (
                use,
                self._build(len(microbatches), torch.empty_like(microbatches[0]["tokens"], device="meta")),
            )
        return self._built[1]

    def _build(self, n_microbatches: int, tokens: Tensor) -> PipelineScheduleSingle | PipelineScheduleMulti:
        stages = [self._stage(number, tokens) for number in self.stages]
        if self._pipeline.csv:
            schedule = _PipelineScheduleRuntime(stages, n_microbatches, loss_fn=self._loss, scale_grads=False)
            schedule._load_csv(self._pipeline.csv)
            return schedule
        kind: Any = get_schedule_class(self._pipeline.schedule)
        single = issubclass(kind, PipelineScheduleSingle)
        return kind(stages[0] if single else stages, n_microbatches, loss_fn=self._loss, scale_grads=False)

    def _stage(self, number: int, tokens: Tensor) -> Stage:
        """Shapes are given, so that torch does not run the model once more, and send pickles, to find them out."""
        hidden = self._hidden.detach().requires_grad_()
        loss = torch.empty((), dtype=torch.float32, device="meta").requires_grad_()
        return Stage(
            self.stages[number],
            number,
            self._n_stages,
            self._device,
            input_args=tokens if number == 0 else hidden,
            output_args=loss if number == self._n_stages - 1 else hidden,
            group=self._group,
        )


class Stage(PipelineStage):
    """torch's stage, where two neighbours may be on one rank (V shapes): they have no message to exchange.

    In evaluation there is no gradient to hand over either.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """The first messages of torch 2.11, which sends them to a neighbour on its own rank, too: gloo fails there."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)
