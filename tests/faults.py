"""Ranks that die on purpose, and what they die in: for test_kill.py, test_damage.py and faults.py.

FileEvents   every change a process makes to files, numbered; SIGKILL at one of them
Trained      a small BLOOM whose every number tells which step it is of
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from dtmega import config, mesh
from dtmega.checkpoint import data_files, manifest
from dtmega.checkpoint.run import Checkpoints, SaveOutcome
from dtmega.checkpoint.state import Progress, State
from dtmega.checkpoint.tensors import tensors_of
from dtmega.ops.optim import build_optimizer
from dtmega.training.parallelize import parallelize

BLOCK_BYTES = 256  # so that a small tensor takes several
IDENTITY = {"data": "of these tests"}
CPU = torch.device("cpu")


class FileEvents:
    """Number each change that this process makes to files from now on, before it is made; at number `die_at`, SIGKILL.

    A write counts twice: before it, and when half of it is written.

    Attributes:
        names: of the events so far, such as "write data-00000.bin".
        kernel: what the kernel saw of it (inotify), which is all but syncs; a rename is two lines. Only of this rank.
    """

    def __init__(self, root: Path, rank: int, die_at: int) -> None:
        self.names: list[str] = []
        self.kernel: list[str] = []
        self._root, self._rank, self._die_at = root, rank, die_at
        root.mkdir(parents=True, exist_ok=True)
        self._libc = ctypes.CDLL(None)
        self._inotify = self._libc.inotify_init1(os.O_NONBLOCK)
        self._wrap("mkdir", "mkdir {0}")
        self._wrap("rename", "rename {0} to {1}")
        self._wrap("unlink", "unlink {0}")
        self._wrap("rmdir", "rmdir {0}")
        self._wrap("fsync", "fsync {0}")
        self._wrap("open", "create {0}", only_if=lambda path, flags, *_: flags & os.O_CREAT)
        fdopen = os.fdopen
        os.fdopen = lambda fd, mode, *args, **keywords: (
            _File(fdopen(fd, mode, *args, **keywords), _base(fd), self) if "w" in mode else fdopen(fd, mode)
        )

    def happens(self, name: str, half: Callable[[], object] = lambda: None) -> None:
        self.watch()
        if len(self.names) == self._die_at:
            half()
            os.kill(os.getpid(), signal.SIGKILL)
        self.names.append(name)

    def watch(self) -> None:
        """The events that the kernel has seen since the last call."""
        with contextlib.suppress(BlockingIOError):
            seen, at = os.read(self._inotify, 2**16), 0
            while at < len(seen):
                _, mask, _, length = struct.unpack_from("iIII", seen, at)
                name = seen[at + 16 : at + 16 + length].rstrip(b"\0").decode()
                at += 16 + length
                words = [f"{word} {name}" for bits, word in INOTIFY.items() if mask & bits == bits][:1]
                self.kernel += [word for word in words if self._rank == (int(name[5:10]) if OWN.match(word) else 0)]
        for folder in (self._root, *(path for path in self._root.iterdir() if path.is_dir())):
            self._libc.inotify_add_watch(self._inotify, os.fsencode(folder), ctypes.c_uint32(sum(CHANGES)))

    def _wrap(self, function: str, name: str, only_if: Callable[..., object] = lambda *_: True) -> None:
        real = getattr(os, function)

        def counted(*args: Any, **keywords: Any) -> Any:
            if only_if(*args):
                self.happens(name.format(*map(_base, args[: name.count("{")])))
            return real(*args, **keywords)

        setattr(os, function, counted)


CHANGES = CREATE, MODIFY, CLOSE_WRITE, MOVED_FROM, MOVED_TO, DELETE = 0x100, 0x2, 0x8, 0x40, 0x80, 0x200
IS_FOLDER = 0x40000000
INOTIFY = {
    CREATE | IS_FOLDER: "mkdir",
    DELETE | IS_FOLDER: "rmdir",
    CREATE: "create",
    DELETE: "unlink",
    MODIFY: "write",
    CLOSE_WRITE: "close",
    MOVED_FROM: "rename",
    MOVED_TO: "to",
}
OWN = re.compile(r"(create|write|close) data-")  # what each rank does to its file; all else is rank 0's


class _File:
    """A raw file that is being written."""

    def __init__(self, file: Any, name: str, events: FileEvents) -> None:
        self._file, self._name, self._events = file, name, events

    def write(self, data: memoryview) -> int:
        self._events.happens(f"write {self._name}")
        self._events.happens(f"half of a write {self._name}", lambda: self._file.write(data[: len(data) // 2]))
        return self._file.write(data)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *exception: object) -> None:
        self._events.happens(f"close {self._name}")
        self._file.close()


def _base(path: Any) -> str:
    return os.path.basename(os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fspath(path))


class Trained:
    """A model and its optimizer, whose every number tells which step it is of."""

    def __init__(self, root: Path, mode: str = "sync", keep: int = 1) -> None:
        self.cfg = config.validate(
            {
                "model": {"vocab_size": 7, "hidden_size": 8, "n_layers": 1, "n_heads": 2},
                "train": {"steps": 9},
                "checkpoint": {"dir": str(root), "keep": keep, "mode": mode},
            },
            "tests/faults.py",
        )
        sizes = mesh.resolve(self.cfg.mesh, dist.get_world_size() if dist.is_initialized() else 1)
        model = parallelize(self.cfg, mesh.start(CPU, sizes))
        model.draw(self.cfg.run.seed)
        self.parameters = dict(model.named_parameters())
        self.optimizer = build_optimizer(self.parameters.items(), self.cfg.optim)
        for p in self.parameters.values():
            self.optimizer.state[p] = {"step": torch.zeros(()), **{k: torch.zeros_like(p) for k in MOMENTS}}
        self.checkpoints = Checkpoints(self.cfg, CPU)

    def tensors(self) -> dict[str, Tensor]:
        return tensors_of(self.parameters, self.optimizer)

    def fill(self, step: int) -> None:
        for name, tensor in self.tensors().items():
            truth = value(name, tensor.shape, step)
            if isinstance(tensor, DTensor):
                truth = distribute_tensor(truth, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
                tensor = tensor.to_local()
            tensor.copy_(truth)

    def save(self, step: int) -> list[SaveOutcome]:
        state = State.of(self.cfg.model_dump(), progress=Progress(step), updates=step, identity=IDENTITY)
        return self.checkpoints.save(self.tensors(), state)


MOMENTS = ("exp_avg", "exp_avg_sq")


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """This process can read what `Trained` wrote, and be the only rank of a group."""
    before = manifest.LEAST_BLOCK_BYTES, data_files.WRITE_BYTES
    manifest.LEAST_BLOCK_BYTES = data_files.WRITE_BYTES = BLOCK_BYTES
    try:
        yield
    finally:
        manifest.LEAST_BLOCK_BYTES, data_files.WRITE_BYTES = before
        if dist.is_initialized():
            dist.destroy_process_group()


def value(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    """The whole tensor of that name at that step."""
    return torch.from_numpy(np.random.default_rng([step, *name.encode()]).standard_normal(shape, np.float32))
