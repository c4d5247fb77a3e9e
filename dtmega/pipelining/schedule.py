"""This rank's stages and the order in which their microbatches run: torch's pipeline schedules, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtmega import config
from dtmega.data.objectives.sums import Tally
from dtmega.ops.cost import Piece
from dtmega.pipelining.split import plan_stages
from dtmega.pipelining.table import SCHEDULES, csv_table, microbatches_in

if TYPE_CHECKING:  # torch.distributed.pipelining imports the compiler, half a second that only a pipeline is to cost
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

    from dtmega.pipelining.stage import Boundary, Stage


def check_schedule(cfg: config.Config, pieces: Sequence[Piece], pp: int, data_size: int, compiled: bool) -> None:
    """Refuse a schedule that cannot run on pp > 1 ranks, before anything is built.

    Args:
        pieces: of the whole model.
        data_size: how many data ranks share the global batch.
        compiled: blocks will be compiled.

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
    """Tell whether backward runs in two parts, first for inputs, later for weights."""
    if pp == 1:
        return False
    if cfg.pipeline.csv:
        return any(action.kind in "IW" for row in csv_table(cfg.pipeline.csv, pp) for action in row)
    return SCHEDULES[cfg.pipeline.schedule].splits_backward


def broken_rule(pipeline: config.Pipeline, pp: int, n: int) -> str:
    """The rule of the schedule that n microbatches break, or ''. From the classes' own checks in torch."""
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

    torch keeps two receive buffers, activation and gradient, for every microbatch (pytorch#136380): of a hidden state
    2 n B S D elements.

    Args:
        pipeline: the schedule and its settings.
        stages: this rank's modules by stage number, ascending; how they are called, `stage.Stage` says.
        group: the pp group.
        boundaries: what each stage but the last hands on, on meta.
        device: where this rank computes.
    """

    def __init__(
        self,
        pipeline: config.Pipeline,
        stages: Mapping[int, nn.Module],
        group: dist.ProcessGroup,
        boundaries: Sequence[Boundary],
        device: torch.device,
    ) -> None:
        self.stages = dict(stages)
        self._pipeline, self._group, self._device = pipeline, group, device
        self._boundaries: list[Boundary] = [{}, *boundaries, {}]
        self._tally = Tally((), device)
        self._built: tuple[tuple[int, bool], PipelineScheduleSingle | PipelineScheduleMulti] | None = None

    def step(self, microbatches: Sequence[Mapping[str, Tensor]], tally: Tally) -> None:
        """Forward and backward of all microbatches; gradients are those of the loss that the tally's counts make."""
        self._run(microbatches, tally, training=True)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Mapping[str, Tensor]], tally: Tally) -> None:
        """Run forward only; the caller has set eval mode."""
        self._run(microbatches, tally, training=False)

    def _run(self, microbatches: Sequence[Mapping[str, Tensor]], tally: Tally, training: bool) -> None:
        schedule = self._schedule(len(microbatches), training)
        # torch takes whole batches, and chunks every tensor along dim 0: [n B, ...] -> n times [B, ...].
        rows: dict[str, Any] = {name: torch.cat([m[name] for m in microbatches]) for name in microbatches[0]}
        self._tally = tally
        run = schedule.step if training else schedule.eval
        # The last stage has made the loss: of the target torch only wants that it is there.
        run(target=next(iter(rows.values())), return_outputs=False, **rows)

    def _schedule(self, n_microbatches: int, training: bool) -> PipelineScheduleSingle | PipelineScheduleMulti:
        """torch's schedule, built anew when the number of microbatches changes, or training to evaluation and back.

        torch's stages set up their buffers for one use; reused for training after evaluation, they failed in backward
        (pytorch#162822) or, since that was repaired, set up everything again.
        """
        use = n_microbatches, training
        if self._built is None or self._built[0] != use:
            self._built = None  # frees the old buffers first
            self._built = use, self._build(n_microbatches)
        return self._built[1]

    def _build(self, n_microbatches: int) -> PipelineScheduleSingle | PipelineScheduleMulti:
        # `_PipelineScheduleRuntime` runs any table; nothing public does.
        from torch.distributed.pipelining.schedules import (
            PipelineScheduleSingle,
            _PipelineScheduleRuntime,
            get_schedule_class,
        )

        stages = [self._stage(number) for number in self.stages]
        if self._pipeline.csv:
            schedule = _PipelineScheduleRuntime(stages, n_microbatches, loss_fn=_loss, scale_grads=False)
            schedule._load_csv(self._pipeline.csv)
            return schedule
        kind: Any = get_schedule_class(self._pipeline.schedule)
        single = issubclass(kind, PipelineScheduleSingle)
        return kind(stages[0] if single else stages, n_microbatches, loss_fn=_loss, scale_grads=False)

    def _stage(self, number: int) -> Stage:
        from dtmega.pipelining.stage import Stage

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
        )

    def _take(self, found: Mapping[str, Tensor]) -> list[tuple[Tensor, float]]:
        return self._tally.add(found)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return output
