"""The checkpoints of one run as it goes: complete or not there, the newest few kept, read back on any layout.

    checkpoints/step-00000100/{data-00000.bin, ..., manifest.json}

Written to `.tmp-step-00000100`, published by one rename when everything in it is on the disk. Under a URL there is no
such rename: there the manifest is written last, and a folder without one does not count.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtmega import config
from dtmega.checkpoint import manifest, tensor_files
from dtmega.checkpoint.files import Disk, open_root
from dtmega.checkpoint.manifest import Damaged, Manifest
from dtmega.checkpoint.reader import Checkpoint
from dtmega.checkpoint.resume import State, finished, name, root_of, state_of
from dtmega.checkpoint.staging import Stager
from dtmega.checkpoint.tensor_files import Failed
from dtmega.shards import local


class SaveOutcome(NamedTuple):
    """The result of one save.

    Attributes:
        step: that was saved.
        stall_s: how long training stood still for it.
        error: why there is no new checkpoint; '' if there is one.
        warning: what is wrong with one that is there.
    """

    step: int
    stall_s: float
    error: str
    warning: str = ""


class Checkpoints:
    """The saves of a run, one at a time. All ranks call every method at the same step.

    Args:
        cfg: with [checkpoint] mode "async" the tensors are copied, and written in a thread while training goes on; what
            it wrote is published by `poll`, between two steps.
        device: what the default process group communicates on.

    Attributes:
        newest: the path of the newest complete one of the run, read or written here; '' while there is none.
    """

    def __init__(self, cfg: config.Config, device: torch.device) -> None:
        self.newest = ""
        self._files, self._device = open_root(root_of(cfg)), device
        self._keep, self._named = cfg.checkpoint.keep, Path(cfg.checkpoint.resume).name
        # Its own group: a save in a thread and the training loop must not mix their messages.
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=cfg.run.collective_timeout_s()))
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        self._stager = Stager() if cfg.checkpoint.mode == "async" else None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._in_flight: tuple[int, float, Future[Manifest | None]] | None = None

    def save(self, tensors: Mapping[str, Tensor], state: State) -> list[SaveOutcome]:
        """Save now, or begin to. Returns the saves that have ended: this one or, of an asynchronous run, the last."""
        ended, step = self.wait(), state.progress.step
        started = time.perf_counter()  # what `wait` took is in the outcome of the last save
        arguments = self._files, self._aside(step)
        if self._stager is None:
            done: Future[Manifest | None] = Future()
            try:
                done.set_result(tensor_files.save(*arguments, tensors, step, state.model_dump(), self._group))
            except Failed as error:
                done.set_exception(error)
            self._in_flight = step, time.perf_counter() - started, done
            return ended + self.wait()
        staged = self._stager.stage(tensors)
        future = self._thread.submit(tensor_files.save, *arguments, staged, step, state.model_dump(), self._group)
        self._in_flight = step, time.perf_counter() - started, future
        return ended

    def poll(self) -> list[SaveOutcome]:
        """Publish what a thread has finished writing, on all ranks or on none."""
        if self._in_flight is None:
            return []
        done = torch.tensor(int(self._in_flight[2].done()), device=self._device)
        dist.all_reduce(done, dist.ReduceOp.MIN)
        return self.wait() if done.item() else []

    def wait(self) -> list[SaveOutcome]:
        """Wait for the thread, then publish as `poll` does."""
        if self._in_flight is None:
            return []
        started = time.perf_counter()
        step, stall_s, future = self._in_flight
        self._in_flight = None
        error = ""
        warning = ""
        try:
            written = future.result()
            if written is not None:  # on rank 0
                warning = self._publish(written)
                if not warning:
                    self._purge(name(step), self._keep)
        except Failed as failed:
            error = str(failed)
            if dist.get_rank() == 0:
                error += self._free()
                self._remove_unfinished(step)
        # Rank 0 alone knows how it went.
        told = [error, warning]
        dist.broadcast_object_list(told, src=0, group=self._group)
        if not told[0]:
            self.newest = self._files.path(name(step))
        return [SaveOutcome(step, stall_s + time.perf_counter() - started, *told)]

    def _remove_unfinished(self, step: int) -> None:
        """Remove what a failed save of this step has left; the next one tries again where that fails."""
        with contextlib.suppress(Exception):
            if self._aside(step) not in finished(self._files):
                self._files.remove(self._aside(step))

    def load(
        self,
        candidates: Sequence[Checkpoint],
        parameters: Iterable[tuple[str, Tensor]],
        optimizer: torch.optim.Optimizer,
        damage: list[str],
        pace: tensor_files.Pace | None = None,
    ) -> State | None:
        """Fill parameters and optimizer from the first intact candidate; None if there are none.

        Args:
            candidates: the same on all ranks.
            parameters: of this rank; two of one name are both filled.
            damage: what was found damaged so far, one line each; more are added.
            pace: where loading may take long, and the ranks watch each other.

        Raises:
            Damaged: none is intact.
            ValueError: a tensor is missing or of another shape, for any rank; on all of them.
        """
        parameters = list(parameters)
        for checkpoint in candidates:
            try:
                state = state_of(checkpoint)
                targets = self._targets(checkpoint, parameters, optimizer, state.updates)
                tensor_files.load_tensors(
                    checkpoint, {n: copies[0] for n, copies in targets.items()}, self._group, pace
                )
            except Damaged as error:
                damage.append(f"damaged: {checkpoint.path}: {error}")
                continue
            for first, *others in targets.values():
                for other in others:
                    local(other).copy_(local(first))
            self.newest = checkpoint.path
            return state
        if candidates:
            raise Damaged("\n".join(damage))
        return None

    def _targets(self, checkpoint: Checkpoint, *rest: Any) -> dict[str, list[Tensor]]:
        """The tensors to fill, or any rank's refusal: the others would wait for it in the collectives of loading."""
        targets, mine = dict[str, list[Tensor]](), ""
        try:
            targets = _targets(checkpoint, *rest)
        except ValueError as error:
            mine = str(error)
        refusals: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(refusals, mine, group=self._group)
        if any(refusals):
            raise ValueError(next(filter(None, refusals)))
        return targets

    def purge_strays(self, before: Mapping[str, Mapping[str, Any]]) -> None:
        """Delete the checkpoints that the last save was killed before it could delete. For rank 0.

        Args:
            before: the configuration that the newest checkpoint was saved under. What it was to keep stays, even if
                this start is to keep less.
        """
        there = finished(self._files)
        if there:
            keep = before.get("checkpoint", {}).get("keep", self._keep)
            self._purge(there[-1], max(keep, self._keep))

    def close(self) -> None:
        self._thread.shutdown()

    def _aside(self, step: int) -> str:
        return f".tmp-{name(step)}" if isinstance(self._files, Disk) else name(step)

    def _publish(self, written: Manifest) -> str:
        """Publish a folder that is written: from here on it is a checkpoint.

        Returns:
            Why a power cut may undo that; '' as a rule.

        Raises:
            Failed: whatever the disk, or the library behind a URL, has against it; the other ranks are waiting for it.
        """
        files, aside = self._files, self._aside(written.step)
        try:
            with files.create(aside, manifest.NAME) as file:
                file.write(manifest.dump(written))
            if isinstance(files, Disk):
                files.sync(aside)
                files.rename(aside, name(written.step))
        except Exception as error:
            raise Failed(f"{type(error).__name__}: {error}") from error
        try:
            if isinstance(files, Disk):
                files.sync("")
        except OSError as error:
            return str(error)
        return ""

    def _purge(self, newest: str, keep: int) -> None:
        """Delete all but the newest `keep`. One that cannot be deleted takes room, no more."""
        files = self._files
        with contextlib.suppress(Exception):
            olds = [folder for folder in finished(files) if folder != newest][: -keep + 1 or None]
            for old in olds:
                if old == self._named:
                    continue  # the same command needs it again
                with contextlib.suppress(Exception):
                    if isinstance(files, Disk):
                        files.rename(old, f".old-{old}")
                        old = f".old-{old}"
                    files.remove(old)

    def _free(self) -> str:
        free = self._files.free_bytes()
        return "" if free is None else f" ({free:,} bytes free)"


def tensors_of(stored: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The tensors to save: `model/NAME`, and for each tensor of its optimizer state `optimizer/KEY/NAME`.

    What is not trained has no such state. A count of updates, one number for all, is in `State`.
    """
    trained = {n: p for n, p in stored.items() if p.requires_grad}
    # A module that FSDP has left gathered would give parameters the optimizer never saw.
    assert not optimizer.state or all(p in optimizer.state for p in trained.values())
    counts = {int(state["step"]) for state in optimizer.state.values() if "step" in state}
    assert len(counts) <= 1, f"parameters have been updated {counts} times"
    found: dict[str, Tensor] = {f"model/{n}": p.detach() for n, p in stored.items()}
    for n, p in trained.items():
        found |= {f"optimizer/{key}/{n}": t for key, t in optimizer.state.get(p, {}).items() if key != "step"}
    return found


def _targets(
    checkpoint: Checkpoint,
    stored: Iterable[tuple[str, Tensor]],
    optimizer: torch.optim.Optimizer,
    n_updates: int,
) -> dict[str, list[Tensor]]:
    """The tensors to fill, by the names of `tensors_of`; makes the optimizer's state for that."""
    there = checkpoint.manifest.tensors
    kinds = sorted({n.split("/")[1] for n in there if n.startswith("optimizer/")})
    targets: dict[str, list[Tensor]] = {}
    optimizer.state.clear()
    for n, p in stored:
        targets.setdefault(f"model/{n}", []).append(p.detach())
        moments = {kind: torch.zeros_like(p) for kind in kinds if p.requires_grad}
        for kind, moment in moments.items():
            targets.setdefault(f"optimizer/{kind}/{n}", []).append(moment)
        if moments:
            # Adam counts its updates, SGD does not.
            counted = {"step": torch.tensor(float(n_updates), device=p.device)} if "exp_avg" in kinds else {}
            optimizer.state[p] = {**counted, **moments}
    for n, copies in targets.items():
        name = n.split("/")[-1]
        if n not in there and n != f"model/{name}" and f"model/{name}" in there:
            raise ValueError(
                f"{checkpoint.path} has no moments of '{name}', which was frozen then and is trained now: freeze it, "
                f"or start a new run from these weights ([model] init_from, [checkpoint] resume = 'none')"
            )
        if n not in there:
            raise ValueError(f"{checkpoint.path} is of another model: it has no '{n}' ([model])")
        if there[n].shape != tuple(copies[0].shape):
            raise ValueError(
                f"{checkpoint.path} is of another model: '{n}' is {list(there[n].shape)} there, "
                f"{list(copies[0].shape)} here ([model])"
            )
    return targets
