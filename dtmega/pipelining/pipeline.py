"""Run a rank's stages in the order of the torch pipeline schedule that [pipeline] names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# The runtime is private, but none of torch's public classes runs an arbitrary table.
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from dtmega import config
from dtmega.data.objectives.sums import Tally
from dtmega.pipelining.stage import Boundary, Stage
from dtmega.pipelining.sums import Sums


class Pipeline:
    """The pipeline stages of one rank, which train or evaluate on one list of microbatches at a time.

    All ranks of a pipeline get the same microbatches. Gradients are summed over microbatches without scaling
    (`scale_grads` is off), because the loss is already divided by global counts.

    Under FSDP, torch's stages gather weights once, before the first forward. The modules must therefore be wrapped with
    reshard_after_forward=False; the stages set all other FSDP switches themselves. With more than three stages per
    rank, torch keeps only three stages gathered at a time and gathers the other stages again. Gradients are
    reduced after the last backward (the last W, if backward runs in two parts) or, with `sums`, after each backward.

    *Memory:* torch keeps two receive buffers per microbatch, one for the activation and one for the gradient
    (pytorch#136380). With one hidden state and n microbatches, the buffers hold 2 n B S D elements.

    Args:
        pipeline: [pipeline] section of the configuration.
        stages: this rank's modules keyed by stage index, in ascending order; `stage.Stage` describes their interface.
        group: process group of the pp ranks.
        boundaries: one dict per stage except the last, with meta tensors for the tensors that the next stage receives.
        device: device on which this rank computes.
        sums: stage index -> `Sums` object that accumulates the gradients of each microbatch; {} if torch's stages do.
    """

    def __init__(
        self,
        pipeline: config.Pipeline,
        stages: Mapping[int, nn.Module],
        group: dist.ProcessGroup,
        boundaries: Sequence[Boundary],
        device: torch.device,
        sums: Mapping[int, Sums] | None = None,
    ) -> None:
        self.stages = dict(stages)
        self._sums = dict(sums or {})
        self._pipeline, self._group, self._device = pipeline, group, device
        self._boundaries: list[Boundary] = [{}, *boundaries, {}]
        self._tally = Tally((), device)
        self._built: tuple[tuple[int, bool], PipelineScheduleSingle | PipelineScheduleMulti] | None = None

    def step(self, microbatches: Sequence[Mapping[str, Tensor]], tally: Tally) -> None:
        """Run all microbatches forward and backward, accumulate gradients, and add the outputs to the tally."""
        self._run(microbatches, tally, training=True)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Mapping[str, Tensor]], tally: Tally) -> None:
        """Run forward only and add the modules' outputs (losses, counts) to the tally. The caller sets eval mode."""
        self._run(microbatches, tally, training=False)

    def _run(self, microbatches: Sequence[Mapping[str, Tensor]], tally: Tally, training: bool) -> None:
        schedule = self._schedule(len(microbatches), training)
        # torch expects a whole batch and splits every tensor [n B, ...] along dim 0 into n tensors [B, ...].
        rows: dict[str, Any] = {}
        for name in microbatches[0]:
            rows[name] = torch.cat([microbatch[name] for microbatch in microbatches])
        self._tally = tally
        run = schedule.step if training else schedule.eval
        # torch requires a target for the loss function. `_loss` ignores the target, since the last stage returns the
        # loss itself.
        run(target=next(iter(rows.values())), return_outputs=False, **rows)

    def _schedule(self, n_microbatches: int, training: bool) -> PipelineScheduleSingle | PipelineScheduleMulti:
        """Return torch's schedule, rebuilt if the number of microbatches or the mode (training or not) has changed.

        torch's stages set up their buffers for one mode. In older versions of torch, backward failed if stages were
        used for training after an evaluation (pytorch#162822). Newer versions set up the buffers again by themselves.
        """
        key = n_microbatches, training
        if self._built is None or self._built[0] != key:
            self._built = None  # frees the old buffers before new ones are allocated
            self._built = key, self._build(n_microbatches)
        return self._built[1]

    def _build(self, n_microbatches: int) -> PipelineScheduleSingle | PipelineScheduleMulti:
        stages = [self._stage(number, n_microbatches) for number in self.stages]
        if self._pipeline.csv:
            schedule = _PipelineScheduleRuntime(stages, n_microbatches, loss_fn=_loss, scale_grads=False)
            schedule._load_csv(self._pipeline.csv)
            return schedule
        kind: Any = get_schedule_class(self._pipeline.schedule)
        single = issubclass(kind, PipelineScheduleSingle)
        return kind(stages[0] if single else stages, n_microbatches, loss_fn=_loss, scale_grads=False)

    def _stage(self, number: int, n_microbatches: int) -> Stage:
        before, after = self._boundaries[number : number + 2]
        return Stage(
            self.stages[number],
            number,
            len(self._boundaries) - 1,
            self._device,
            self._group,
            before,
            after,
            self._take,
            n_microbatches,
            self._sums.get(number),
        )

    def _take(self, outputs: Mapping[str, Tensor]) -> list[tuple[Tensor, float]]:
        # Stages live longer than a tally, so they call this method, which uses the tally of the current step.
        return self._tally.add(outputs)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    """The loss function for torch's schedules. The output of the last stage is already the loss."""
    return output
