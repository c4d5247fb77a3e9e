"""Claims about checkpoint/ on one process: a checkpoint is complete or not there, and read back to the bit.

Two ranks, and what kills or damages: checkpoint/test_kill.py and checkpoint/test_damage.py. Other layouts:
test_resume.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest
import torch
import torch.distributed as dist
import xxhash
from fsspec.implementations.memory import MemoryFileSystem
from torch import Tensor, nn

from dtmega import __version__, config
from dtmega.checkpoint import manifest, resume, tensor_files
from dtmega.checkpoint.base import Base
from dtmega.checkpoint.files import Disk, Place, Remote, open_root
from dtmega.checkpoint.manifest import Damaged
from dtmega.checkpoint.objects import Objects
from dtmega.checkpoint.resume import open_checkpoint
from dtmega.checkpoint.run import Checkpoints, SaveOutcome
from dtmega.checkpoint.staging import Stager
from dtmega.checkpoint.state import ExactState, HealthState, Progress, ScaleState, State
from dtmega.checkpoint.tensors import tensors_of

CPU = torch.device("cpu")
IDENTITY = {"data": "xxh3 of it", "order": 1, "seed": 1}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=["disk", "url", "objects"])
def root(request, tmp_path) -> Iterator[str]:
    """The place of a run's checkpoints; the claims are the same for all."""
    if request.param == "disk":
        yield str(tmp_path / "checkpoints")
    elif request.param == "objects":
        request.getfixturevalue("object_store")
        yield "s3://bucket/run/checkpoints"
    else:
        url = f"memory://{uuid4().hex}/checkpoints"
        yield url
        fs, path = fsspec.url_to_fs(url)
        if fs.exists(path):
            fs.rm(path, recursive=True)


class Run:
    """A model of three parameters after some steps of AdamW, and its checkpoints."""

    def __init__(self, root: str, **keys: object) -> None:
        self.cfg = config.validate({"train": {"steps": 9}, "checkpoint": {"dir": root, **keys}}, "a test")
        self.checkpoints = Checkpoints(self.cfg, CPU)
        self.files = open_root(root)
        self.model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1, bias=False))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.updates = 0

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(2, 5)).sum().backward()
        self.optimizer.step()
        self.updates += 1

    def tensors(self) -> dict[str, Tensor]:
        return tensors_of(dict(self.model.named_parameters()), self.optimizer)

    def save(self, step: int) -> list[SaveOutcome]:
        self.train()
        state = State.of(
            self.cfg.model_dump(), progress=Progress(step, 8 * step), updates=self.updates, identity=IDENTITY
        )
        return self.checkpoints.save(self.tensors(), state)

    def load(self, **keys: object) -> tuple[State | None, list[str]]:
        """Load with other keys of [checkpoint], into this model."""
        found, damage = resume.find_checkpoints(self.with_keys(**keys), IDENTITY)
        return self.checkpoints.load(found, self.model.named_parameters(), self.optimizer, damage), damage

    def with_keys(self, **keys: object) -> config.Config:
        return self.cfg.model_copy(update={"checkpoint": self.cfg.checkpoint.model_copy(update=keys)})

    def finished(self) -> list[int]:
        return [int(folder[5:]) for folder in resume.finished(self.files)]


def bits(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {n: t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for n, t in tensors.items()}


def full(*args: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fill_the_disk(monkeypatch, kind: type[Place], where: str) -> None:
    """No room when the file of that name is written, or in the method of that name."""
    if not where.endswith((".bin", ".json")):
        monkeypatch.setattr(kind, where, full)
        return
    honest = kind.create

    @contextlib.contextmanager
    def create(self, folder: str, name: str):
        with honest(self, folder, name) as file:
            if re.sub("-[0-9a-f]{32}", "", name) == where:
                file.write(b"half of it")
                full()
            yield file

    monkeypatch.setattr(kind, "create", create)


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


# What is loaded is what was saved.


def test_every_dtype_and_shape_is_read_back_to_the_bit(root, monkeypatch):
    monkeypatch.setattr(manifest, "LEAST_BLOCK_BYTES", 64)
    torch.manual_seed(0)
    saved = {
        f"{name} {shape}": torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize))
        .to(torch.uint8)
        .view(dtype)
        .reshape(shape)  # any bits: NaN and -0.0 too
        for name, dtype in manifest.DTYPES.items()
        for shape in [(), (0,), (0, 3), (1,), (7,), (5, 3), (40, 3, 2), (1, 200)]
    }
    saved["a view"] = torch.randn(6, 4).t()
    files = open_root(root)
    group = dist.group.WORLD
    assert group is not None
    written = tensor_files.save(files, "step-00000001", saved, 1, {"a": [1, None]}, group)
    assert written is not None
    with files.create("step-00000001", manifest.NAME) as file:
        file.write(manifest.dump(written))
    checkpoint = tensor_files.Checkpoint(files, "step-00000001")
    assert (checkpoint.manifest.step, checkpoint.manifest.state) == (1, {"a": [1, None]})
    assert checkpoint.tensors == {name: (t.dtype, tuple(t.shape)) for name, t in saved.items()}
    assert bits({name: checkpoint.read(name) for name in saved}) == bits(saved)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    tensor_files.load_tensors(checkpoint, loaded, group)
    assert bits(loaded) == bits(saved)


def test_the_dtypes_of_a_checkpoint_are_these():
    floats = {"float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"}
    assert manifest.DTYPES.keys() == floats | {"int64", "int32", "int16", "int8", "uint8", "bool"}


def test_a_checkpoint_is_written_as_these_bytes(tmp_path):
    """Another format needs another number, and a reader for this one."""
    numbers = torch.tensor([[1.0, -2.0], [0.5, 3.0]], dtype=torch.bfloat16)
    group = dist.group.WORLD
    assert group is not None
    written = tensor_files.save(Disk(str(tmp_path)), "a", {"model/x": numbers}, 7, {"key": None}, group)
    assert written is not None
    data = (tmp_path / "a" / "data-00000.bin").read_bytes()
    assert data == bytes.fromhex("803f 00c0 003f 4040")  # each the upper half of a little-endian float32
    body = (
        b'{"content":{"format":2,"step":7,"state":{"key":null},"files":{"data-00000.bin":8},"block_bytes":16384,'
        b'"tensors":{"model/x":{"dtype":"bfloat16","shape":[2,2],"chunks":[[[0,0],[2,2],"data-00000.bin",0,["%s"]]]}}}'
    ) % xxhash.xxh3_128_hexdigest(data).encode()
    assert manifest.dump(written) == body + b',"xxh3":"%s"}\n' % xxhash.xxh3_128_hexdigest(body).encode()


def test_a_run_is_read_back_to_the_bit_with_its_optimizer_and_its_counts(root):
    run = Run(root)
    assert [outcome.error for outcome in run.save(7)] == [""]
    before, other = bits(run.tensors()), Run(root)
    state, damage = other.load()
    assert state is not None
    assert (state.progress, state.updates, state.identity, damage) == (Progress(7, 56), 1, IDENTITY, [])
    assert bits(other.tensors()) == before
    run.model.load_state_dict(other.model.state_dict())
    for a, b in zip(run.model.parameters(), other.model.parameters(), strict=True):
        a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
    run.optimizer.step()
    other.optimizer.step()
    assert bits(run.tensors()) == bits(other.tensors())  # AdamW's own count of steps too


def test_every_field_of_the_state_is_read_back_as_it_was_given():
    run = Run(f"memory://{uuid4().hex}")
    given = {
        "progress": Progress(step=7, samples=55, skipped=3, overflowed=2, overflowed_samples=16),
        "loss_scale": ScaleState(scale=1024.0, growth=5, hysteresis=1),
        "exact": ExactState({"a": 1 / 3}, {"torch's version": "2", "[mesh] tp": 1}),
        "health": HealthState(losses_above=2, rises=1, best_loss=1 / 3, best_step=5, stopped="a reason"),
        "base": Base("there", {"a": "0f", "b": "1e"}, transposed=("c",), elements=12),
        "recent": [(2.5, 0.25), (2.4, 0.125)],
        "updates": 4,
        "identity": IDENTITY,
        "digest": "0123456789ab",
        "layout": {"processes": 8, "tp": 2},
    }
    run.checkpoints.save(run.tensors(), State.of(run.cfg.model_dump(), **given))  # pyright: ignore[reportArgumentType]
    state = resume.state_of(open_checkpoint(run.files.path("step-00000007")))
    expected = given | {
        "config": run.cfg.model_dump(mode="json"),
        "versions": {"dtmega": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    assert {key: getattr(state, key) for key in State.model_fields} == expected


def test_a_state_that_json_cannot_hold_is_an_error_of_the_save():
    run = Run(f"memory://{uuid4().hex}")
    (outcome,) = run.checkpoints.save(run.tensors(), State.of({}, recent=[(float("nan"), 1.0)]))
    assert "not JSON compliant" in outcome.error
    assert run.finished() == []


def test_two_parameters_of_one_name_on_a_rank_are_both_filled(root):
    """The embedding is such a pair where a rank has the first and the last stage of a pipeline."""
    run, twin = Run(root), nn.Parameter(torch.zeros(3, 5))
    run.save(1)
    before = bits(run.tensors())
    found, _ = resume.find_checkpoints(run.cfg, IDENTITY)
    named = [*run.model.named_parameters(), ("0.weight", twin)]
    optimizer = torch.optim.AdamW([p for _, p in named])
    run.checkpoints.load(found, named, optimizer, [])
    assert bits(tensors_of(dict(run.model.named_parameters()), optimizer)) == before
    first = run.model.get_parameter("0.weight")
    assert torch.equal(twin, first)
    assert torch.equal(optimizer.state[twin]["exp_avg"], optimizer.state[first]["exp_avg"])


def test_a_frozen_parameter_is_saved_without_moments_and_what_is_trained_later_needs_them(root):
    run = Run(root)
    run.model[1].weight.requires_grad_(False)
    run.save(1)
    frozen = {"model/0.weight", "model/0.bias", "model/1.weight"}
    assert {n for n in run.tensors() if "1.weight" in n or n.startswith("model/")} == frozen
    run.load()
    assert run.model[1].weight not in run.optimizer.state
    run.model[1].weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"has no moments of '1.weight', which was frozen then and is trained now"):
        run.load()


def test_an_optimizer_that_is_not_of_these_parameters_is_not_saved():
    run = Run(f"memory://{uuid4().hex}")
    run.train()
    stranger = dict(nn.Linear(2, 2).named_parameters())
    with pytest.raises(AssertionError):
        tensors_of(stranger, run.optimizer)
    run.optimizer.state[run.model.get_parameter("0.weight")]["step"] += 1
    with pytest.raises(AssertionError, match=r"parameters have been updated \{1, 2\} times"):
        run.tensors()


def test_a_save_waits_for_a_rank_as_long_as_a_collective_may(monkeypatch):
    """Twice [run] timeout_s: a rank that hangs is named by the watch before."""
    asked: list[timedelta] = []
    new_group = dist.new_group

    def noted(*args: Any, timeout: timedelta, **keywords: Any) -> Any:
        asked.append(timeout)
        return new_group(*args, timeout=timeout, **keywords)

    monkeypatch.setattr(dist, "new_group", noted)
    run = Run(f"memory://{uuid4().hex}")
    assert asked == [timedelta(seconds=run.cfg.run.collective_timeout_s())]
    assert asked[0] > timedelta(seconds=run.cfg.run.timeout_s)


def test_a_part_is_what_slicing_gives_and_reads_only_the_blocks_it_needs(root, monkeypatch):
    monkeypatch.setattr(manifest, "LEAST_BLOCK_BYTES", 64)
    run, whole = Run(root), torch.arange(60 * 6.0).view(60, 6)
    run.checkpoints.save({"x": whole}, State.of({}, progress=Progress(1)))
    for rows, columns in [
        ((0, 60), (0, 6)),
        ((3, 4), (0, 6)),
        ((59, 60), (5, 6)),
        ((10, 30), (2, 3)),
        ((7, 7), (0, 1)),
    ]:
        checkpoint = open_checkpoint(f"{root}/step-00000001")
        assert torch.equal(checkpoint.read("x", (slice(*rows), slice(*columns))), whole[slice(*rows), slice(*columns)])
        row_bytes = 6 * 4
        first, last = rows[0] * row_bytes // 64, -(-rows[1] * row_bytes // 64)
        assert checkpoint.bytes_read == (min(last * 64, whole.nbytes) - first * 64 if rows[0] < rows[1] else 0)


def test_damage_is_noticed_in_the_blocks_that_are_read_and_only_there(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "LEAST_BLOCK_BYTES", 64)
    run, whole = Run(str(tmp_path)), torch.arange(64.0)
    run.checkpoints.save({"x": whole}, State.of({}, progress=Progress(1)))
    flip(tmp_path / "step-00000001" / "data-00000.bin", 130)  # in the third block: elements 32 to 47
    checkpoint = open_checkpoint(str(tmp_path / "step-00000001"))
    for intact in (slice(0, 32), slice(48, 64)):
        assert torch.equal(checkpoint.read("x", (intact,)), whole[intact])
    for damaged in (slice(0, 33), slice(47, 48)):
        with pytest.raises(Damaged, match=r"data-00000.bin: the bytes of 'x' from .* do not match"):
            checkpoint.read("x", (damaged,))


# Which ones stay.


def test_only_the_newest_finished_ones_stay_and_what_is_not_finished_does_not_count(root):
    run = Run(root, keep=2)
    for step in (1, 2):
        run.save(step)
    for left in (
        (".tmp-step-00000003", ".old-step-00000000", "superseded-1")
        if isinstance(run.files, Disk)
        else ("step-00000003",)
    ):
        run.files.make(left)
        with run.files.create(left, "data-00000.bin") as file:
            file.write(b"of a save that was killed")
    assert run.finished() == [1, 2]
    run.save(10)
    assert run.finished() == [2, 10]
    run.save(11)
    assert run.finished() == [10, 11]


@pytest.mark.parametrize(("before", "now"), [(0, 0), (0, 1), (1, 0)])
def test_with_keep_0_all_stay_also_at_a_start_whose_value_differs(root, before, now):
    run = Run(root, keep=0)
    for step in (1, 2, 3):
        run.save(step)
    Run(root, keep=now).checkpoints.purge_strays({"checkpoint": {"keep": before}})
    assert run.finished() == [1, 2, 3]


def test_the_one_that_the_command_names_stays(root):
    Run(root).save(5)
    run = Run(root, keep=1, resume=f"{root}/step-00000005")
    for step in (6, 7, 8):
        run.save(step)
    assert run.finished() == [5, 8]


def test_a_new_branch_is_not_deleted_for_the_older_one_that_has_higher_steps(root):
    run = Run(root, keep=9)
    for step in (50, 100, 200):
        run.save(step)
    branch = Run(root, keep=2, resume=f"{root}/step-00000050")
    state, _ = branch.load()
    assert state is not None
    resume.set_aside_newer(branch.cfg, state.progress.step)
    assert branch.finished() == [50]
    branch.save(60)
    assert branch.finished() == [50, 60]
    state, _ = branch.load(resume="auto")
    assert state is not None
    assert state.progress.step == 60
    aside = open_checkpoint(f"{root}/superseded-1/step-00000200")
    aside.verify()
    resume.set_aside_newer(branch.cfg, 50)
    assert [folder for folder in branch.files.folders() if folder.startswith("superseded")] == [
        "superseded-1",
        "superseded-2",
    ]


def test_what_cannot_be_deleted_fails_neither_the_save_nor_the_next_start(root, monkeypatch):
    def forbidden(*args: object) -> None:
        raise RuntimeError("403 Forbidden")  # as a library behind a URL raises it: no OSError

    run = Run(root, keep=1)
    run.save(1)
    run.files.make(".tmp-step-probe")
    deletion = "retire" if isinstance(run.files, Objects) else "remove"
    monkeypatch.setattr(type(run.files), deletion, full if isinstance(run.files, Disk) else forbidden)
    on_disk = isinstance(run.files, Disk)
    make = (lambda self, folder: Path(self.path(folder)).mkdir()) if on_disk else lambda self, folder: None
    monkeypatch.setattr(type(run.files), "make", make)
    assert [outcome.error for outcome in run.save(2)] == [""]
    assert 2 in run.finished()
    resume.set_aside_newer(run.cfg, 2)
    state, _ = run.load()
    assert state is not None
    assert state.progress.step == 2


def test_one_that_cannot_be_deleted_does_not_keep_the_others(root, monkeypatch):
    run = Run(root, keep=9)
    for step in (1, 2, 3):
        run.save(step)
    honest = type(run.files).remove
    monkeypatch.setattr(
        type(run.files), "remove", lambda self, folder: full() if "00000001" in folder else honest(self, folder)
    )
    Run(root, keep=2).save(4)
    assert [folder for folder in run.files.folders() if "00000001" not in folder] == ["step-00000003", "step-00000004"]


# A save that fails.


@pytest.mark.parametrize("where", ["make", "data-00000.bin", "manifest.json", "sync", "rename"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_full_disk_is_reported_with_what_is_free_and_the_older_checkpoint_stays(tmp_path, monkeypatch, where, mode):
    run = Run(str(tmp_path), keep=1, mode=mode)
    assert [*run.save(1), *run.checkpoints.wait()][0].error == ""
    before = bits(run.tensors())
    with monkeypatch.context() as full_disk:
        fill_the_disk(full_disk, Disk, where)
        (outcome,) = [*run.save(2), *run.checkpoints.wait()]
        assert "No space left on device" in outcome.error
        assert "bytes free" in outcome.error
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    state, _ = run.load()
    assert state is not None
    assert (state.progress.step, bits(run.tensors())) == (1, before)
    assert [*run.save(3), *run.checkpoints.wait()][0].error == ""
    assert run.finished() == [3]


def test_a_parent_that_cannot_be_synced_is_a_warning_and_the_older_checkpoint_stays(tmp_path, monkeypatch):
    run = Run(str(tmp_path), keep=1)
    run.save(1)
    fsync = os.fsync

    def failing(fd: int) -> None:
        if os.path.samestat(os.fstat(fd), tmp_path.stat()):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    with monkeypatch.context() as failed:
        failed.setattr(os, "fsync", failing)
        (outcome,) = run.save(2)
    assert (outcome.step, outcome.error, outcome.warning) == (2, "", "[Errno 5] Input/output error")
    assert run.finished() == [1, 2]
    assert open_checkpoint(str(tmp_path)).manifest.step == 2
    (outcome,) = run.save(3)
    assert (outcome.error, outcome.warning) == ("", "")
    assert run.finished() == [3]


@pytest.mark.parametrize("where", ["make", "data-00000.bin", "manifest.json"])
def test_a_url_that_fails_is_reported_and_the_older_checkpoint_stays(monkeypatch, where):
    run = Run(f"memory://{uuid4().hex}", keep=1)
    run.save(1)
    with monkeypatch.context() as full_disk:
        fill_the_disk(full_disk, Remote, where)
        (outcome,) = run.save(2)
        assert "No space left on device" in outcome.error
    assert run.finished() == [1]
    run.save(2)
    assert run.finished() == [2]


def test_what_a_library_behind_a_url_raises_is_reported_to_all_ranks_whatever_its_type(monkeypatch):
    class HttpError(Exception):
        """Such as gcsfs raises; no OSError."""

    def refuse(*args: object) -> None:
        raise HttpError("429 Too Many Requests")

    run = Run(f"memory://{uuid4().hex}", keep=1)
    run.save(1)
    monkeypatch.setattr(manifest, "dump", refuse)
    (outcome,) = run.save(2)
    assert "429 Too Many Requests" in outcome.error
    assert run.finished() == [1]


def test_what_a_killed_save_left_is_written_over_and_cleared_up_at_the_next_start(tmp_path):
    run = Run(str(tmp_path), keep=9)
    run.save(1)
    for left in (".tmp-step-00000002", ".tmp-step-00000003", ".old-step-00000001"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "data-00000.bin").write_bytes(b"half")
    run.save(2)
    assert open_checkpoint(str(tmp_path)).manifest.step == 2
    open_checkpoint(str(tmp_path)).verify()
    resume.set_aside_newer(run.cfg, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_finished_checkpoint_is_never_written_over(root):
    run = Run(root)
    run.save(1)
    before = bits(run.tensors())
    (outcome,) = run.save(1)
    assert "step-00000001" in outcome.error
    run.load()
    assert bits(run.tensors()) == before


# In a thread.


class Gate:
    """Holds a save in its thread until `open`; `reached` and `done` tell where it is."""

    def __init__(self, monkeypatch) -> None:
        self.reached, self.open, self.done = threading.Event(), threading.Event(), threading.Event()
        honest = tensor_files.save

        def save(*args, **keywords):
            self.reached.set()
            assert self.open.wait(120)
            try:
                return honest(*args, **keywords)
            finally:
                self.done.set()

        monkeypatch.setattr(tensor_files, "save", save)


def test_what_is_saved_in_a_thread_is_what_it_was_when_the_save_began(root, monkeypatch):
    gate, run = Gate(monkeypatch), Run(root, mode="async")
    assert run.save(1) == []
    before = bits(run.tensors())
    run.train()
    assert bits(run.tensors()) != before
    gate.open.set()
    assert [outcome.error for outcome in run.checkpoints.wait()] == [""]
    run.load()
    assert bits(run.tensors()) == before


def test_what_a_thread_has_written_is_a_checkpoint_only_after_the_poll_between_two_steps(root, monkeypatch):
    gate, run = Gate(monkeypatch), Run(root, mode="async")
    run.save(1)
    assert gate.reached.wait(120)
    assert run.checkpoints.poll() == []
    gate.open.set()
    assert gate.done.wait(120)
    assert run.finished() == []
    while not (ended := run.checkpoints.poll()):
        pass
    assert [(outcome.step, outcome.error) for outcome in ended] == [(1, "")]
    assert run.finished() == [1]
    assert run.checkpoints.poll() == []


def test_one_save_is_in_flight_and_the_next_waits_for_it(root, monkeypatch):
    gate, run = Gate(monkeypatch), Run(root, mode="async")
    run.save(1)
    threading.Timer(0.05, gate.open.set).start()
    assert [outcome.step for outcome in run.save(2)] == [1]
    assert run.finished() == [1]
    assert [outcome.step for outcome in run.checkpoints.wait()] == [2]
    assert run.finished() == [1, 2]


@pytest.mark.parametrize(("mode", "stall_s"), [("sync", 10 + 5), ("async", 1 + 5)])
def test_training_stands_still_for_a_copy_or_a_save_and_for_its_publication_and_no_other(monkeypatch, mode, stall_s):
    """Run on a clock that these three move by 1, 10 and 5 s, and training by 100."""
    now_s = [0.0]

    def takes(seconds: float, honest: Callable[..., object]) -> Callable[..., object]:
        def slow(*args: object, **keywords: object) -> object:
            if threading.current_thread() is threading.main_thread():  # what a thread does, nobody stands still for
                now_s[0] += seconds
            return honest(*args, **keywords)

        return slow

    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(Stager, "stage", takes(1, Stager.stage))
    monkeypatch.setattr(tensor_files, "save", takes(10, tensor_files.save))
    monkeypatch.setattr(manifest, "dump", takes(5, manifest.dump))
    run = Run(f"memory://{uuid4().hex}", mode=mode)
    ended: list[SaveOutcome] = []
    for step in (1, 2):
        ended += run.save(step)
        now_s[0] += 100
    ended += run.checkpoints.wait()
    assert [(outcome.step, outcome.stall_s) for outcome in ended] == [(1, stall_s), (2, stall_s)]


@pytest.mark.parametrize("polls", [True, False])
def test_a_writer_thread_that_fails_is_reported_before_the_next_save_and_the_older_checkpoint_stays(
    root, monkeypatch, polls
):
    run = Run(root, mode="async", keep=1)
    run.save(1)
    run.checkpoints.wait()
    with monkeypatch.context() as full_disk:
        fill_the_disk(full_disk, type(run.files), "data-00000.bin")
        run.save(2)
        ended: list[SaveOutcome] = []
        while polls and not ended:
            ended = run.checkpoints.poll()
    assert run.finished() == [1]
    ended = ended or run.save(3)
    assert [outcome.step for outcome in ended] == [2]
    if polls:
        assert "No space left on device" in ended[0].error
        run.save(3)
    assert [outcome.error for outcome in run.checkpoints.wait()] == [""]
    assert run.finished() == [3]


# Where a run goes on.


def test_what_is_damaged_is_named_and_the_newest_intact_one_is_loaded(tmp_path):
    run, before = Run(str(tmp_path), keep=9), {}
    for step in (1, 2, 3, 4):
        run.save(step)
        before[step] = bits(run.tensors())
    flip(tmp_path / "step-00000004" / "data-00000.bin", 9)
    (tmp_path / "step-00000003" / "manifest.json").unlink()
    state, damage = run.load()
    assert state is not None
    assert (state.progress.step, bits(run.tensors())) == (2, before[2])
    assert sorted(line.split(": ")[1].rpartition("/")[2] for line in damage) == ["step-00000003", "step-00000004"]
    resume.set_aside_newer(run.cfg, 2)
    assert run.finished() == [1, 2]


def test_an_older_checkpoint_without_moments_is_not_mixed_with_those_of_a_damaged_newer_one(tmp_path):
    run = Run(str(tmp_path))
    weights = {name: tensor for name, tensor in run.tensors().items() if name.startswith("model/")}
    run.checkpoints.save(weights, State.of(run.cfg.model_dump(), progress=Progress(1), identity=IDENTITY))
    run.save(2)
    flip(tmp_path / "step-00000002" / "data-00000.bin", -1)
    state, _ = run.load()
    assert state is not None
    assert (state.progress.step, len(run.optimizer.state)) == (1, 0)


@pytest.mark.parametrize("file", ["manifest.json", "data-00000.bin"])
def test_where_all_are_damaged_it_stops_with_a_message_that_names_each_and_exit_code_3(tmp_path, file):
    run = Run(str(tmp_path))
    for step in (1, 2):
        run.save(step)
        flip(tmp_path / resume.name(step) / file, -9)
    with pytest.raises(Damaged) as stop:
        run.load()
    for step in (1, 2):
        assert f"{resume.name(step)}: {file}" in str(stop.value)
    assert stop.value.exit_code == 3


def test_a_state_that_is_not_ours_is_damage_and_the_older_checkpoint_is_loaded(tmp_path, monkeypatch):
    run = Run(str(tmp_path))
    run.save(1)
    monkeypatch.setattr(State, "model_dump", lambda self: {"progress": "far"})
    run.checkpoints.save(run.tensors(), State.of({}, progress=Progress(2)))
    monkeypatch.undo()
    state, damage = run.load()
    assert state is not None
    assert state.progress.step == 1
    assert "step-00000002: manifest.json" in damage[0]


@pytest.mark.parametrize("resumed", ["none", "auto"])
def test_with_nothing_there_a_run_starts_anew_and_nothing_is_made(root, resumed, request):
    cfg = config.validate({"train": {"steps": 9}, "checkpoint": {"dir": root, "resume": resumed}}, "a test")
    assert resume.find_checkpoints(cfg, IDENTITY) == ([], [])
    if root.startswith("s3://"):
        assert request.getfixturevalue("object_store").objects == {}
        return
    fs, path = fsspec.url_to_fs(root)
    assert not fs.exists(path)


def test_resume_names_none_the_newest_or_one_folder(root):
    run = Run(root, keep=9)
    for step in (1, 2, 3):
        run.save(step)
    for resumed, expected in {"none": None, "auto": 3, f"{root}/step-00000002": 2, f"{root}/step-00000001/": 1}.items():
        state, _ = run.load(resume=resumed)
        assert (None if state is None else state.progress.step) == expected
    for wrong in (f"{root}/step-00000009", f"{root}/nothing/step-00000001"):
        with pytest.raises(ValueError, match=rf"{wrong} is neither a checkpoint nor a run.*\[checkpoint\] resume"):
            run.load(resume=wrong)


@pytest.mark.parametrize("elsewhere", [True, False])
def test_what_torchrun_starts_again_goes_on_with_what_the_attempt_before_it_saved(root, monkeypatch, elsewhere):
    older = Run(f"{root}/older" if elsewhere else root, keep=9)
    for step in (1, 2, 3):
        older.save(step)
    run = Run(root, keep=9, resume=older.files.path("step-00000001"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")

    def goes_on_from() -> int:
        state, _ = run.load()
        return -1 if state is None else state.progress.step

    assert goes_on_from() == 1  # the first attempt died before it had set newer ones aside, or saved
    resume.set_aside_newer(run.cfg, 1)
    assert goes_on_from() == 1
    run.save(2)
    assert goes_on_from() == 2
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert goes_on_from() == 1


def test_what_torchrun_starts_again_does_not_start_anew_twice(root, monkeypatch):
    Run(root, keep=9).save(5)
    run = Run(root, keep=9, resume="none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert run.load()[0] is None
    resume.set_aside_newer(run.cfg, 0)
    run.save(1)
    state, _ = run.load()
    assert state is not None
    assert state.progress.step == 1


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        (IDENTITY | {"seed": 2}, "seed was 1, is 2"),
        (IDENTITY | {"data": "another"}, "data was xxh3 of it, is another"),
        (IDENTITY | {"tokenizer": "bytes"}, "tokenizer was None, is bytes"),
        ({"order": 1, "seed": 1}, "data was xxh3 of it, is None"),
    ],
)
def test_another_seed_data_or_tokenizer_is_refused_unless_that_is_allowed(root, identity, message):
    run = Run(root)
    run.save(1)
    with pytest.raises(ValueError, match=f"{message}.*allow_changed_data"):
        resume.find_checkpoints(run.cfg, identity)
    assert len(resume.find_checkpoints(run.with_keys(allow_changed_data=True), identity)[0]) == 1


def test_what_the_newest_checkpoint_was_of_is_what_counts(root):
    """Older checkpoints are of the data before, where a run was allowed to go on with other data."""
    run = Run(root, keep=9)
    run.save(1)
    state = State.of(run.cfg.model_dump(), progress=Progress(2), identity=IDENTITY | {"data": "another"})
    run.checkpoints.save(run.tensors(), state)
    found, _ = resume.find_checkpoints(run.cfg, IDENTITY | {"data": "another"})
    assert [checkpoint.manifest.step for checkpoint in found] == [2, 1]
    with pytest.raises(ValueError, match="data was another, is xxh3 of it"):
        resume.find_checkpoints(run.cfg, IDENTITY)


@pytest.mark.parametrize("allow", [False, True])
def test_a_run_of_another_order_of_samples_is_never_continued(root, allow):
    run = Run(root)
    run.save(1)
    cfg = run.with_keys(allow_changed_data=allow)
    with pytest.raises(ValueError, match=r"order number 1, .* 2: .* finish that run with the version that wrote it"):
        resume.find_checkpoints(cfg, IDENTITY | {"order": 2})


@pytest.mark.parametrize("allow", [False, True])
def test_keys_that_change_the_order_of_samples_are_named_and_no_version(root, allow):
    run = Run(root)
    run.save(1)
    cfg = run.with_keys(allow_changed_data=allow)
    cfg = cfg.model_copy(update={"data": cfg.data.model_copy(update={"objective": "prefix-lm"})})
    changed = r"reads its samples in another order: \[data\] objective was auto, is prefix-lm \(to start anew"
    with pytest.raises(ValueError, match=changed):
        resume.find_checkpoints(cfg, IDENTITY | {"order": 2})


def test_another_model_is_refused_with_the_key(root):
    run = Run(root)
    run.save(1)
    cfg = run.cfg.model_copy(update={"model": run.cfg.model.model_copy(update={"hidden_size": 64})})
    with pytest.raises(ValueError, match=r"\[model\] hidden_size was 256, is 64"):
        resume.find_checkpoints(cfg, IDENTITY)


def test_a_tensor_that_is_missing_or_of_another_shape_is_named(root):
    run = Run(root)
    run.save(1)
    run.model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 1, bias=False))
    with pytest.raises(ValueError, match=r"'model/0.weight' is \[3, 5\] there, \[4, 5\] here"):
        run.load()
    run.model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1))
    with pytest.raises(ValueError, match=r"it has no 'model/1\.bias'"):
        run.load()


def test_a_url_whose_library_caches_listings_shows_what_other_ranks_wrote():
    class Cached(MemoryFileSystem):
        protocol = "cached"
        store: dict = {}  # noqa: RUF012
        pseudo_dirs: list = [""]  # noqa: RUF012
        listings: dict = {}  # noqa: RUF012

        def ls(self, path, detail=True, **keywords):
            if path not in self.listings:
                self.listings[path] = super().ls(path, detail=detail, **keywords)
            return self.listings[path]

        def invalidate_cache(self, path=None):
            self.listings.clear()

    fsspec.register_implementation("cached", Cached, clobber=True)
    ours, theirs = open_root("cached://run"), open_root("cached://run")
    see: Callable[[], tuple[object, ...]] = lambda: (ours.folders(), ours.sizes("step-00000001"))  # noqa: E731
    theirs.make("step-00000001")
    assert see() == (["step-00000001"], {})
    with theirs.create("step-00000001", manifest.NAME) as file:
        file.write(b"{}")
    assert see() == (["step-00000001"], {manifest.NAME: 2})
