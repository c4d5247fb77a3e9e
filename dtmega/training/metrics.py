"""Report the steps of a run: print progress lines, and write to `metrics.jsonl`, TensorBoard and trackers.

    metrics = Metrics(config, pieces, device, world_size, end, start_step=step, write=rank == 0)
    metrics.step(step, loss, grad_norm, lr, samples=range(first, end), step_time_s=seconds)
    metrics.validation(step, val_loss)     # before the checkpoint of the same step, so that a resumed run has this line
    metrics.close()

`metrics.jsonl` is the record, with one JSON object per line. When a run resumes after a crash, it begins by removing
damaged lines, and the lines of steps that it will repeat. A number that JSON cannot hold (NaN, infinity) is null in the
record, and the key `reason` names this number.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from tensorboardX import SummaryWriter
from tqdm import tqdm

from dtmega import rooms
from dtmega.config import Config, RunEnd
from dtmega.files import atomic
from dtmega.files.console import counted
from dtmega.ops import cost
from dtmega.ops.cost import Piece
from dtmega.training import device_peaks
from dtmega.training.device_peaks import PeakMemory
from dtmega.training.records.lines import StepLines, keep_until

if TYPE_CHECKING:
    from dtmega.models.routing import Loads

Item = TypeVar("Item")


class Metrics:
    """Report the steps of a run. If `write` is False, every method does nothing.

    Args:
        config: configuration of the run.
        pieces: embedding, layers and head of the whole model, from which the FLOPs per token are computed.
        device: device on which this process computes. MFU assumes that all processes have the same kind of device.
        world_size: number of processes.
        end: configured end of the run (`config.end`).
        start_step: number of steps done before this start; 0 for a new run. If a killed attempt has left lines of
            later steps, the lines are removed from metrics.jsonl and hidden in TensorBoard. A new run starts with an
            empty metrics.jsonl and an empty TensorBoard.
        validates_first: whether the run begins with a validation, of `start_step`.
        write: whether this rank writes the reports; only one rank does so.
        loads: expert loads to write to expert_loads.jsonl; None if the model has no experts.

    Attributes:
        peak_memory: memory counter of this process, set on all ranks, even if `write` is False.
    """

    def __init__(
        self,
        config: Config,
        pieces: Sequence[Piece],
        device: torch.device,
        world_size: int,
        end: RunEnd,
        *,
        start_step: int = 0,
        validates_first: bool = False,
        write: bool = True,
        loads: Loads | None = None,
    ) -> None:
        self.write = write
        self.peak_memory = PeakMemory(device)
        if not write:
            return
        self._seq_len = config.data.seq_len
        self._interval = config.log.interval
        self._total_steps = end.steps
        self._world_size = world_size
        data = config.data
        self._flops_per_token = cost.flops_per_token(pieces, data.seq_len, data.mask_prob, data.decoder_length)
        self._peak_flops = world_size * device_peaks.reference_flops(device, config.precision.params)
        self._recent: deque[tuple[int, float]] = deque(maxlen=20)  # (tokens, seconds) of a step
        self._first: tuple[int, float] | None = None  # (number, end time) of the first step of this process

        self._run_dir = run_dir = Path(config.run.dir)
        atomic.make_folder(run_dir)
        path = run_dir / ("evaluation.jsonl" if config.eval.only else "metrics.jsonl")
        self._loads = None
        if not config.eval.only:
            keep_until(path, start_step, evaluates=validates_first or start_step >= self._total_steps)
            if loads is not None:
                self._loads = rooms.expert_loads().LoadsFile(run_dir, loads, start_step, self.message)
        self._file = StepLines(path, self.message)
        self._tensorboard = None
        if config.log.tensorboard and not config.eval.only:
            purge_step = start_step + 1 if start_step else 0
            # max_queue=0 means a queue without a limit. On a full disk the thread that empties the queue dies, and then
            # a limited queue would fill up and block the run. File names contain the time in whole seconds, so the
            # suffix distinguishes two starts within one second.
            try:
                self._tensorboard = SummaryWriter(
                    str(run_dir / "tensorboard"),
                    purge_step=purge_step,
                    max_queue=0,
                    flush_secs=10,
                    filename_suffix=f".{start_step}",
                )
            except OSError:
                self._file.close()
                raise
        self._newest = start_step
        self._trackers = None
        if config.log.trackers and not config.eval.only:
            self._trackers = rooms.trackers().Trackers(config, new=start_step == 0)
        self._bar = None
        if sys.stderr.isatty():
            layout = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{desc}"
            self._bar = tqdm(total=self._total_steps, initial=start_step, bar_format=layout, dynamic_ncols=True)

    def step(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        lr: float,
        *,
        samples: range,
        step_time_s: float,
        **more: float,
    ) -> None:
        """Report a training step.

        In the record, `tokens` is counted from the start of the run, `tokens_per_s` is the rate of all processes
        together, and `peak_memory_bytes` is the peak of this process alone.

        Args:
            step: step number.
            loss: loss of the step, averaged over the step's tokens.
            grad_norm: L2 norm of the gradient before clipping.
            lr: learning rate of the step.
            samples: global indices of the step's sequences.
            step_time_s: duration of the step, in seconds.
            more: further numbers for the record, keyed by name, such as `loss_scale` with float16.
        """
        if not self.write:
            return
        tokens = len(samples) * self._seq_len
        self._record(
            step,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=samples.stop * self._seq_len,
            tokens_per_s=tokens / step_time_s,
            mfu=tokens / step_time_s * self._flops_per_token / self._peak_flops,
            peak_memory_bytes=self.peak_memory.since_start_bytes(),
            step_time_s=step_time_s,
            **more,
        )
        if self._loads:
            self._loads.after_step(step)
        self._recent.append((tokens, step_time_s))
        self._first = self._first or (step, time.monotonic())
        speed, eta = f"{self._tokens_per_s():,.0f} tok/s", f"eta {tqdm.format_interval(self._eta_s(step))}"
        if self._bar:
            self._bar.set_description_str(f" | loss {loss:.4f} | {speed} | {eta}", refresh=False)
            self._bar.update(step - self._bar.n)
        elif self._interval and (step % self._interval == 0 or step == self._total_steps):
            scale = f"loss_scale {more['loss_scale']:.0f} | " if "loss_scale" in more else ""
            tflops = self._tokens_per_s() * self._flops_per_token / self._world_size / 1e12
            speed = f"{speed} | {tflops:.3g} TFLOP/s per device | {eta}"
            self._line(step, f"loss {loss:.4f} | grad_norm {grad_norm:.2f} | lr {lr:.1e} | {scale}{speed}")

    def skipped(self, step: int, loss: float, grad_norm: float, *, samples: range, **more: float) -> None:
        """Report a step that changed no weights, because the loss or the gradient norm was not finite or was a spike.

        The arguments are the same as for `step`. `reason` in the record names the number that was not finite.
        """
        if not self.write:
            return
        reason = self._record(
            step,
            loss=loss,
            grad_norm=grad_norm,
            tokens=samples.stop * self._seq_len,
            skipped=True,
            sample_ids=[samples.start, samples.stop],
            **more,
        )
        why = reason or f"spike: loss {loss:.4f}, grad_norm {grad_norm:.2f}"
        scale = f" | loss_scale {more['loss_scale']:.0f}" if "loss_scale" in more else ""
        self._line(step, f"skipped: {why} | samples {samples.start} to {samples.stop - 1}{scale}")

    def passed_over(self, step: int, reason: str, *, samples: range) -> None:
        """Report a step whose samples were read but not trained on.

        Args:
            step: step number.
            reason: configuration key that excludes these samples, such as "[train] skip_steps".
            samples: global indices of the step's sequences.
        """
        if not self.write:
            return
        ids = [samples.start, samples.stop]
        self._record(step, tokens=samples.stop * self._seq_len, skipped=True, reason=reason, sample_ids=ids)
        self._line(step, f"passed over: {reason} | samples {samples.start} to {samples.stop - 1}")

    def evaluating(self, batches: Iterable[Item], split: str, n: int) -> Iterable[Item]:
        """Iterate over the batches of an evaluation. On a terminal, show a second progress bar for these batches.

        Args:
            batches: batches to iterate over.
            split: name of the split, shown on the bar.
            n: number of batches.
        """
        if not self.write or not self._bar:
            return batches
        return tqdm(batches, desc=f"{split} loss", total=n, unit=" batches", leave=False, dynamic_ncols=True)

    def validation(self, step: int, loss: float, name: str = "", **more: float) -> None:
        """Report a validation loss.

        Args:
            step: number of steps done.
            loss: validation loss.
            name: name of the set in [data] validation; '' for the validation split.
            more: name -> mean, if the loss is a weighted sum of several means; otherwise empty.
        """
        self._evaluation(f"val_{name}" if name else "val", step, loss, more)

    def test(self, step: int, loss: float, **more: float) -> None:
        """Report the loss of the finished model on the test split. The arguments are the same as for `validation`."""
        self._evaluation("test", step, loss, more)

    def sample(self, step: int, text: str) -> None:
        """Print text that the model generated after `step` steps, and write the text to sample.json."""
        if not self.write:
            return
        self.message(f"a sample:\n{text}")
        try:
            with atomic.replaced(self._run_dir / "sample.json") as file:
                file.write(json.dumps({"step": step, "text": text}) + "\n")
        # A finished run must not fail because of its sample.
        except OSError as error:
            self.message(f"WARNING: sample.json cannot be written: {error}")

    def _evaluation(self, split: str, step: int, loss: float, more: Mapping[str, float]) -> None:
        if not self.write:
            return
        self._record(step, **{f"{split}_loss": loss}, **{f"{split}_{name}": mean for name, mean in more.items()})
        parts = [f"{name} {mean:.4f}" for name, mean in more.items()]
        # A perplexity exists only for a single loss per token, not for a weighted sum of several losses.
        self._line(step, " | ".join([f"{split} loss {loss:.4f}", *(parts or [f"ppl {perplexity(loss):.2f}"])]))

    def saved(self, step: int, checkpoint: int, stall_s: float, error: str, warning: str = "") -> None:
        """Report the end of a save.

        Args:
            step: number of steps done.
            checkpoint: number of the saved step, which may be below `step` because an asynchronous save ends later.
            stall_s: seconds for which the save paused training.
            error: reason why the save failed; '' if the save succeeded.
            warning: reason why a power cut may undo the checkpoint; '' if the checkpoint survives a power cut.
        """
        if not self.write:
            return
        failed = {"checkpoint_error": error} if error else {}
        self._record(step, checkpoint=checkpoint, checkpoint_stall_s=stall_s, **failed)
        if error:
            self._line(step, f"WARNING: no checkpoint of step {checkpoint}, the ones before stay: {error}")
        if warning:
            self._line(step, f"WARNING: a power cut may undo the checkpoint of step {checkpoint}: {warning}")

    def sync(self) -> None:
        """Flush the record to disk. Call this method before a save: a resumed run needs the lines of earlier steps."""
        if not self.write:
            return
        self._file.sync()
        if self._loads:
            self._loads.sync()

    def message(self, text: str) -> None:
        """Print a line on stdout, above the progress bar if there is one."""
        if self.write:
            tqdm.write(text)
            sys.stdout.flush()

    def close(self) -> None:
        if not self.write or self._file.closed:
            return
        if self._bar:
            self._bar.close()
        self._file.close()
        if self._loads:
            self._loads.close()
        if self._tensorboard:
            with contextlib.suppress(OSError):
                self._tensorboard.close()
        if self._trackers:
            self._trackers.close(self._newest >= self._total_steps)

    def abandon(self) -> None:
        """Close the trackers, before the watchdog ends this process. Any thread may call this method."""
        if self.write and self._trackers:
            self._trackers.abandon()

    def _record(self, step: int, **values: Any) -> str:
        """Write a line to metrics.jsonl, and send its numbers to TensorBoard and the trackers.

        Returns:
            A description of the numbers that JSON cannot hold, such as "loss is nan"; '' if all numbers are finite.
        """
        odd = {k: v for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
        reason = ", ".join(f"{k} is {v}" for k, v in odd.items())
        record = {"step": step} | values | dict.fromkeys(odd) | ({"reason": reason} if odd else {})
        self._file.write(record)
        self._newest = step
        numbers = {name: value for name, value in values.items() if name not in odd and type(value) in (int, float)}
        if self._tensorboard:
            for name, value in numbers.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._trackers:
            self._trackers.record(step, numbers)
        return reason

    def _line(self, step: int, text: str) -> None:
        self.message(f"step {step}/{self._total_steps} | {text}")

    def _tokens_per_s(self) -> float:
        return sum(tokens for tokens, _ in self._recent) / sum(seconds for _, seconds in self._recent)

    def _eta_s(self, step: int) -> float:
        """Estimate the seconds to the end of the run, from the mean time per step since this process's first step.

        The mean includes the time spent on evaluations and checkpoints.
        """
        assert self._first is not None
        first_step, ended = self._first
        per_step = (time.monotonic() - ended) / (step - first_step) if step > first_step else self._recent[-1][1]
        return per_step * (self._total_steps - step)


def describe_run(
    config: Config,
    pieces: Sequence[Piece],
    device: torch.device,
    world_size: int,
    n_tokens: int,
    epochs: float,
    step: int,
    end: RunEnd,
) -> str:
    """The first lines that a run prints: numbers that follow from the configuration.

    Args:
        config: configuration of the run.
        pieces: embedding, layers and head of the whole model.
        device: device on which this process computes.
        world_size: number of processes.
        n_tokens: number of tokens in the training split.
        epochs: number of passes over the training split in the whole run.
        step: number of steps done before this start.
        end: configured end of the run.
    """
    seq_len = config.data.seq_len
    tokens = end.samples * seq_len
    per_token = cost.flops_per_token(pieces, seq_len, config.data.mask_prob, config.data.decoder_length)
    return "\n".join(
        [
            f"{config.model.name}: {cost.n_parameters(pieces):,} parameters, "
            f"{per_token / 1e6:,.1f} MFLOP/token, "
            f"{config.precision.params} on {world_size} x {device.type}",
            f"data: {counted(n_tokens, 'training token')}; {counted(end.steps, 'step')} of "
            f"{config.batch.global_batch_size} x {seq_len} tokens = {counted(tokens, 'token')}, "
            f"{epochs:.2f} epochs",
            f"run: {config.run.dir}, " + (f"resumed at step {step}" if step else "from the start"),
        ]
    )


def several(means: Mapping[str, float]) -> dict[str, float]:
    """The means whose weighted sum is the loss; {} if there is only one mean, which is the loss itself."""
    return dict(means) if len(means) > 1 else {}


def perplexity(loss: float) -> float:
    """Compute exp(loss), with the loss capped at 20 as in Megatron-LM's `training.py`."""
    return math.exp(min(loss, 20.0))
