"""Checkpoints saved during training.

Each checkpoint is complete or absent, and readable in any layout. The newest few checkpoints are kept.

    checkpoints/step-00000100/{data-00000.bin, ..., manifest.json}

A checkpoint is written to `.tmp-step-00000100` and published by one rename, once all of its files are on disk. Under a
URL, where no atomic rename exists, the manifest is written last, and a folder without a manifest does not count as a
checkpoint (`files.py`, `objects.py`).
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

from dtmega import config, rooms
from dtmega.checkpoint import manifest, tensor_files
from dtmega.checkpoint.files import open_root
from dtmega.checkpoint.manifest import Damaged, Manifest
from dtmega.checkpoint.reader import Checkpoint
from dtmega.checkpoint.resume import finished, name, root_of, state_of
from dtmega.checkpoint.state import Base, State
from dtmega.checkpoint.tensor_files import Failed
from dtmega.checkpoint.tensors import targets_of
from dtmega.ops.shards import local


class SaveOutcome(NamedTuple):
    """The result of one save.

    Attributes:
        step: number of the step that was saved.
        stall_s: seconds for which training waited for the save.
        error: reason why the save failed; '' if the save succeeded.
        warning: reason why the new checkpoint might not survive a power cut; usually ''.
    """

    step: int
    stall_s: float
    error: str
    warning: str = ""


class Checkpoints:
    """Saves and loads the checkpoints of a run, one at a time.

    All ranks call each method at the same step, except `purge_strays`, which only rank 0 calls.

    With [checkpoint] mode "async", `save` copies the tensors, a thread writes the copies while training continues, and
    `poll` publishes the checkpoint between two later steps.

    Args:
        cfg: configuration of the run.
        device: device for tensors that are sent through the default process group.

    Attributes:
        newest: path of the newest complete checkpoint that this object has loaded or saved; '' before the first load or
            save.
        base: weights that checkpoints leave out; None if checkpoints hold all weights. Set before the first save.
        best: folder name of the checkpoint with the best validation loss, which is kept in addition to the newest
            checkpoints; '' if validations are not compared.
    """

    def __init__(self, cfg: config.Config, device: torch.device) -> None:
        self.newest = ""
        self.base: Base | None = None
        self.best = ""
        self._best_step = 0
        self._files, self._device = open_root(root_of(cfg)), device
        self._keep, self._named = cfg.checkpoint.keep, Path(cfg.checkpoint.resume).name
        # A separate group, because messages from a save in a thread must not mix with the training loop's messages.
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=cfg.run.collective_timeout_s()))
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        self._stager = rooms.staging().Stager() if cfg.checkpoint.mode == "async" else None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._in_flight: tuple[int, float, Future[Manifest | None]] | None = None
        self._attempt = ""  # id of the save in progress; only rank 0's id is used

    def save(self, tensors: Mapping[str, Tensor], state: State) -> list[SaveOutcome]:
        """Save a checkpoint or, if saving is asynchronous, only start the save.

        Returns:
            The outcomes of the saves that have ended: this save or, if saving is asynchronous, the previous save.
        """
        ended, step = self.wait(), state.progress.step
        self._best_step = state.health.best_step
        # The clock starts after `wait`, because the time spent waiting already counts in the previous save's outcome.
        started = time.perf_counter()
        self._attempt = self._files.new_attempt()
        folder = self._files.unpublished(name(step))
        common = step, state.model_dump(), self._group, self._attempt
        if self._stager is None:
            done: Future[Manifest | None] = Future()
            try:
                done.set_result(tensor_files.save(self._files, folder, tensors, *common))
            except Failed as error:
                done.set_exception(error)
            self._in_flight = step, time.perf_counter() - started, done
            return ended + self.wait()
        staged = self._stager.stage(tensors)
        future = self._thread.submit(tensor_files.save, self._files, folder, staged, *common)
        self._in_flight = step, time.perf_counter() - started, future
        return ended

    def poll(self) -> list[SaveOutcome]:
        """Publish the checkpoint if the threads of all ranks have finished writing.

        On all ranks, a save ends during the same call to `poll`.

        Returns:
            A list with the outcome of the save that has ended; [] if no save has ended.
        """
        if self._in_flight is None:
            return []
        done = torch.tensor(int(self._in_flight[2].done()), device=self._device)
        dist.all_reduce(done, dist.ReduceOp.MIN)
        return self.wait() if done.item() else []

    def wait(self) -> list[SaveOutcome]:
        """Wait until the threads of all ranks have finished, publish the checkpoint, and delete old checkpoints.

        Returns:
            A list with the outcome of the save that has ended; [] if there was no save.
        """
        if self._in_flight is None:
            return []
        started = time.perf_counter()
        step, stall_s, future = self._in_flight
        self._in_flight = None
        error = ""
        warning = ""
        try:
            written = future.result()
            # Only rank 0 has the manifest, so only rank 0 publishes.
            if written is not None:
                warning = self._publish(written)
                # Set `best` only now: the previous best checkpoint must stay until its successor is published.
                if step == self._best_step:
                    self.best = name(step)
                if not warning:
                    self._purge(name(step), self._keep)
        except Failed as failed:
            error = str(failed)
            if dist.get_rank() == 0:
                error += self._free()
                self._remove_unfinished(step)
        # Only rank 0 publishes, so the other ranks receive the outcome from rank 0.
        messages = [error, warning]
        dist.broadcast_object_list(messages, src=0, group=self._group)
        error, warning = messages
        if not error:
            self.newest = self._files.path(name(step))
        return [SaveOutcome(step, stall_s + time.perf_counter() - started, error, warning)]

    def _remove_unfinished(self, step: int) -> None:
        """Remove a failed save's files. The next startup, or the next save of this step, removes files that remain."""
        with contextlib.suppress(Exception):
            self._files.discard(name(step), self._attempt)

    def load(
        self,
        candidates: Sequence[Checkpoint],
        parameters: Iterable[tuple[str, Tensor]],
        optimizer: torch.optim.Optimizer,
        damage: list[str],
        pace: tensor_files.Pace | None = None,
    ) -> State | None:
        """Fill parameters and optimizer from the first intact candidate.

        Args:
            candidates: checkpoints to try, in order; all ranks pass the same list.
            parameters: (name, parameter) pairs of this rank. If a name appears twice, both parameters are filled.
            optimizer: optimizer of these parameters; its state is replaced.
            damage: lines about the damaged checkpoints found so far. `load` appends a line for each damaged candidate.
            pace: heartbeats for the ranks that wait for this rank; None if no rank waits.

        Returns:
            The state recorded in the checkpoint; None if there are no candidates.

        Raises:
            Damaged: none of the candidates is intact.
            ValueError: a rank needs a tensor that the checkpoint lacks or has in a different shape. All ranks raise
                this error.
        """
        parameters = list(parameters)
        for checkpoint in candidates:
            try:
                state = state_of(checkpoint)
                targets = self._targets(checkpoint, parameters, optimizer, state.updates, state.base)
                first_copies = {n: copies[0] for n, copies in targets.items()}
                tensor_files.load_tensors(checkpoint, first_copies, self._group, pace)
            except Damaged as error:
                damage.append(f"damaged: {checkpoint.path}: {error}")
                continue
            for first, *others in targets.values():
                for other in others:
                    local(other).copy_(local(first))
            self.newest = checkpoint.path
            if state.health.best_step:
                self.best = name(state.health.best_step)
            return state
        if candidates:
            raise Damaged("\n".join(damage))
        return None

    def _targets(
        self,
        checkpoint: Checkpoint,
        parameters: Iterable[tuple[str, Tensor]],
        optimizer: torch.optim.Optimizer,
        n_updates: int,
        base: Base | None,
    ) -> dict[str, list[Tensor]]:
        """Call `targets_of` on every rank and return this rank's tensors to fill.

        Raises:
            ValueError: a rank's tensors do not match the checkpoint. All ranks raise this error, because otherwise
                the other ranks would wait for the failed rank in the load's collectives.
        """
        targets = dict[str, list[Tensor]]()
        refusal = ""
        try:
            targets = targets_of(checkpoint, parameters, optimizer, n_updates, base)
        except ValueError as error:
            refusal = str(error)
        refusals: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(refusals, refusal, group=self._group)
        if any(refusals):
            raise ValueError(next(filter(None, refusals)))
        return targets

    def purge_strays(self, before: Mapping[str, Mapping[str, Any]]) -> None:
        """Delete old checkpoints that the previous attempt left behind when it was killed. Called on rank 0.

        Args:
            before: configuration recorded in the newest checkpoint. If [checkpoint] keep is larger there than in the
                current configuration, or 0, that value applies.
        """
        folders = finished(self._files)
        if folders:
            keep = before.get("checkpoint", {}).get("keep", self._keep)
            self._purge(folders[-1], max(keep, self._keep) if keep and self._keep else 0)

    def close(self) -> None:
        """End the thread that writes checkpoints."""
        self._thread.shutdown()

    def _publish(self, written: Manifest) -> str:
        """Write the manifest into a folder of data files and give the folder its final name.

        Returns:
            The reason why the new name might not survive a power cut; usually ''.

        Raises:
            Failed: the disk, or the library that serves a URL, raised an exception of any type. The caller catches only
                `Failed` and must then continue, because the other ranks wait for the outcome.
        """
        try:
            return self._files.publish(name(written.step), manifest.dump(written), self._attempt)
        except Exception as error:
            raise Failed(f"{type(error).__name__}: {error}") from error

    def _purge(self, newest: str, keep: int) -> None:
        """Delete all checkpoints except the newest `keep` checkpoints and the best checkpoint. With 0, delete none.

        A failed deletion only costs space.
        """
        if not keep:
            return
        files = self._files
        with contextlib.suppress(Exception):
            others = [folder for folder in finished(files) if folder not in (newest, self.best)]
            # Keep the newest `keep - 1` of these checkpoints. For keep = 1, the slice would be [:0], and `or None`
            # changes it to [:].
            for old in others[: -keep + 1 or None]:
                # Keep the checkpoint that [checkpoint] resume names: the user may run the same command again.
                if old == self._named:
                    continue
                with contextlib.suppress(Exception):
                    files.retire(old)

    def _free(self) -> str:
        """The free space as text, for the message about a failed save; '' if unknown."""
        free = self._files.free_bytes()
        return "" if free is None else f" ({free:,} bytes free)"
