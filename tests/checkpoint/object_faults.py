"""Saves and loads in an object store that meet faults: for test_objects.py, test_object_faults.py and faults.py.

Writer    a run that saves tensors filled with one number
Crash     saves of one or two ranks, one of which is killed before or after a request
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dtmega import config
from dtmega.checkpoint import manifest, objects, resume, tensor_files
from dtmega.checkpoint.files import open_root
from dtmega.checkpoint.resume import open_checkpoint
from dtmega.checkpoint.run import Checkpoints
from dtmega.checkpoint.state import Progress, State
from dtmega.files import object_requests
from dtmega.files.outages import Unreachable
from tests.object_server import Request, Server
from tests.ranks import Forks

ROOT = "s3://bucket/run/checkpoints"
IDENTITY = {"data": "xxh3 of it", "order": 1, "seed": 1}
KEY = "run/checkpoints/step-{:08d}/"
MODES = ("sync", "async")
WHEN = ("before", "after")
FAULTS = ("503", "cut", "silence")
SHAPE = (40, 3)
PART_BYTES = 100  # so that a small file is uploaded in several parts
# Constants of object_requests.py: a client that tries again soon, and one that gives up soon, too.
BRISK = {"MAX_RETRIES": 3, "PAUSE_S": 0.01, "REQUEST_S": 2.0, "RETRY_S": 10.0}
HASTY = {"MAX_RETRIES": 1, "PAUSE_S": 0.01, "REQUEST_S": 0.3, "RETRY_S": 0.4}
AT_MOST_S = 60.0  # for a save or load by either, on a busy machine


class Writer:
    """A run that saves tensors filled with one number."""

    def __init__(self, **keys: object) -> None:
        self.cfg = config.validate({"train": {"steps": 9}, "checkpoint": {"dir": ROOT, **keys}}, "a test")
        self.checkpoints = Checkpoints(self.cfg, torch.device("cpu"))

    def save(self, step: int, value: float | None = None) -> str:
        """Save a step, and return the error."""
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        whole = torch.full(SHAPE, float(step if value is None else value))
        tensors = {"model/x": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)}
        state = State.of(self.cfg.model_dump(), progress=Progress(step, 8 * step), identity=IDENTITY)
        ended = self.checkpoints.save(tensors, state) + self.checkpoints.wait()
        return ended[0].error


def saved(step: int | None = None) -> dict[int, float]:
    """Step and number of the checkpoint that is opened, each of whose bytes is read."""
    checkpoint = open_checkpoint(ROOT, step)
    numbers = checkpoint.read("model/x").unique().tolist()
    assert len(numbers) == 1
    return {checkpoint.manifest.step: numbers[0]}


def no_fault(request: Request) -> str:
    return ""


def at(number: int, fault: str, times: int = 1) -> Callable[[Request], str]:
    """A fault that `times` requests meet, from this one on."""
    return lambda request: fault if number <= request.number < number + times else ""


# Kills.


class Point(NamedTuple):
    """A request at which a rank is killed.

    Attributes:
        rank: the rank that sends it.
        number: number of the rank's requests before it.
        when: "before" or "after" the store does what is asked.
    """

    rank: int
    number: int
    when: str


class Crash:
    """Saves of step 2 over step 1, by a number of ranks in a mode of saving; one rank is killed at a request.

    Attributes:
        requests: by rank, the requests of a save that nobody disturbs.
    """

    def __init__(self, forks: Forks, server: Server, n_ranks: int, mode: str) -> None:
        self._forks, self._server, self._n_ranks, self._mode = forks, server, n_ranks, mode
        server.fault, server.after = no_fault, lambda request: None
        server.objects.clear()
        self._save(1)
        self._before = dict(server.objects)
        seen = len(server.seen)
        self._save(2)
        users = [str(rank) for rank in range(n_ranks)]
        self.requests = [[r for r in server.seen[seen:] if r.user.partition("-")[0] == user] for user in users]

    @property
    def points(self) -> list[Point]:
        """All points of the save. The first request of each rank, which opens the place, is before it."""
        found = []
        for rank, requests in enumerate(self.requests):
            found += [Point(rank, number, when) for number in range(1, len(requests)) for when in WHEN]
        return found

    @property
    def publishes(self) -> int:
        """The number of rank 0's request that publishes."""
        published = "PUT", KEY.format(2) + manifest.NAME
        return [(request.method, request.key) for request in self.requests[0]].index(published)

    def survives(self, point: Point) -> None:
        """A rank is killed, and the other ends by itself. What is found is the checkpoint that it must be, whole, and
        the next start clears up and saves the next step."""
        server = self._server
        server.objects.clear()
        server.objects.update(self._before)
        killed: list[int] = []
        n_seen = 0

        def kill(request: Request) -> str:
            nonlocal n_seen
            rank, _, pid = request.user.partition("-")
            if int(rank) == point.rank and not killed:
                n_seen += 1
                if n_seen == point.number + 1:
                    killed.append(request.number)
                    if point.when == "before":
                        os.kill(int(pid), signal.SIGKILL)
                        return "silence"
            return ""

        def kill_now(request: Request) -> None:
            if point.when == "after" and request.number in killed:
                os.kill(int(request.user.partition("-")[2]), signal.SIGKILL)

        server.fault, server.after = kill, kill_now
        ended = self._forks.run(self._n_ranks, save_as, self._mode, 2, server.environment)
        server.fault, server.after = no_fault, lambda request: None
        assert ended[point.rank].code == -signal.SIGKILL
        for rank, end in enumerate(ended):
            assert rank == point.rank or (end.code, end.late) == (1, False)
        published = point.number > self.publishes or (point.number == self.publishes and point.when == "after")
        resumes_from(2 if point.rank == 0 and published else 1)

    def _save(self, step: int) -> None:
        ended = self._forks.run(self._n_ranks, save_as, self._mode, step, self._server.environment)
        assert [rank.code for rank in ended] == [0] * self._n_ranks, [rank.error for rank in ended]


def save_as(mode: str, step: int, environment: dict[str, str]) -> None:
    """Save a step on a rank whose requests tell its number and process, with uploads in several parts."""
    os.environ.update(environment)
    os.environ["AWS_ACCESS_KEY_ID"] = f"{dist.get_rank()}-{os.getpid()}"
    objects.PART_BYTES = PART_BYTES
    assert Writer(keep=1, mode=mode).save(step) == ""


def resumes_from(step: int) -> None:
    """The next start finds this step, whole, and nothing is damaged; it goes on and keeps its own next checkpoint."""
    writer = Writer(keep=1)
    candidates, damage = resume.find_checkpoints(writer.cfg, IDENTITY)
    assert (candidates[0].manifest.step, damage) == (step, [])
    x = torch.zeros(SHAPE)
    group = dist.group.WORLD
    assert group is not None
    tensor_files.load_tensors(candidates[0], {"model/x": x}, group)
    assert torch.equal(x, torch.full(SHAPE, float(step)))
    resume.set_aside_newer(writer.cfg, step)
    assert writer.save(3) == ""
    assert resume.finished(open_root(ROOT)) == ["step-00000003"]
    assert saved() == {3: 3.0}


# Requests that fail. The caller's process is the only rank.


@contextlib.contextmanager
def client(constants: Mapping[str, float]) -> Iterator[None]:
    """Give clients that are opened in the `with` block such constants, and let them upload files in several parts."""
    before = {name: getattr(object_requests, name) for name in constants}
    part_bytes = objects.PART_BYTES
    try:
        for name, value in constants.items():
            setattr(object_requests, name, value)
        objects.PART_BYTES = PART_BYTES
        yield
    finally:
        for name, value in before.items():
            setattr(object_requests, name, value)
        objects.PART_BYTES = part_bytes


def begin(server: Server) -> None:
    """Save step 1 in an empty store."""
    server.fault = no_fault
    server.objects.clear()
    assert Writer(keep=1).save(1) == ""


def count_of_a_save(server: Server) -> int:
    """The number of requests of a save of step 2 over step 1."""
    begin(server)
    writer = Writer(keep=1)
    before = len(server.seen)
    with client(BRISK):
        assert writer.save(2) == ""
    return len(server.seen) - before


def one_fault_in_a_save(server: Server, number: int, fault: str) -> None:
    """One request of a save fails once, and the save succeeds."""
    begin(server)
    with client(BRISK):
        writer = Writer(keep=1)
        server.fault = at(len(server.seen) + number, fault)
        began = time.monotonic()
        error = writer.save(2)
    assert (error, time.monotonic() - began < AT_MOST_S) == ("", True)
    server.fault = no_fault
    assert saved() == {2: 2.0}


def endless_fault_in_a_save(server: Server, number: int, fault: str) -> None:
    """All requests of a save fail from one on: the save ends in time, tells the truth, and a whole one is there."""
    begin(server)
    with client(HASTY):
        writer = Writer(keep=1)
        server.fault = at(len(server.seen) + number, fault, times=10**6)
        began = time.monotonic()
        error = writer.save(2)
    assert time.monotonic() - began < AT_MOST_S
    assert f":{server.server_port}" not in error
    server.fault = no_fault
    (step,) = saved()
    # An answer that is cut off leaves open what was done: then the new one may be there.
    assert step == (1 if error and fault != "cut" else step)
    assert error or step == 2
    resumes_from(step)


def load() -> None:
    """Open the newest checkpoint, as a start does, and load it."""
    group = dist.group.WORLD
    assert group is not None
    x = torch.zeros(SHAPE)
    tensor_files.load_tensors(open_checkpoint(ROOT), {"model/x": x}, group)
    assert torch.equal(x, torch.full(SHAPE, 1.0))


def count_of_a_load(server: Server) -> int:
    """The number of requests of a load."""
    begin(server)
    before = len(server.seen)
    load()
    return len(server.seen) - before


def one_fault_in_a_load(server: Server, number: int, fault: str) -> None:
    """One request of a load fails once, and the load succeeds."""
    server.fault = at(len(server.seen) + number, fault)
    began = time.monotonic()
    with client(BRISK):
        load()
    server.fault = no_fault
    assert time.monotonic() - began < AT_MOST_S


def endless_fault_in_a_load(server: Server, number: int, fault: str) -> None:
    """All requests of a load fail from one on: it is told in time as what it is, and not as damage."""
    server.fault = at(len(server.seen) + number, fault, times=10**6)
    began = time.monotonic()
    error: Exception | None = None
    try:
        with client(HASTY):
            load()
    except (Unreachable, ValueError) as raised:
        error = raised
    server.fault = no_fault
    assert time.monotonic() - began < AT_MOST_S
    # Where the place is opened, the refusal names it and the key.
    assert isinstance(error, Unreachable) or str(error).startswith("cannot open s3://bucket/run"), repr(error)
    assert not isinstance(error, manifest.Damaged)
    load()


# Two writers.


def save_against(environment: dict[str, str], meeting: str, rounds: int) -> list[str]:
    """Save the steps 1 to `rounds`, each at the same time as the other rank does in a run of its own.

    Args:
        environment: variables that lead to the store.
        meeting: path of a file by which the two ranks meet.
        rounds: number of steps.

    Returns:
        The error of each save.
    """
    os.environ.update(environment)
    rank, store = dist.get_rank(), dist.FileStore(meeting, 2)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    writer = Writer(keep=100)
    errors = []
    for step in range(1, rounds + 1):
        store.add(f"ready {step}", 1)
        while store.add(f"ready {step}", 0) < 2:
            pass
        errors.append(writer.save(step, value=10.0 * step + rank))
    return errors


def told(server: Server, errors: list[list[str]], step: int) -> bool:
    """True if one of two writers of a step has saved it, the other was told, and the first one's numbers are there.

    Args:
        server: the store.
        errors: errors of each writer, by step.
        step: the step.
    """
    winners = [rank for rank in range(2) if not errors[rank][step - 1]]
    if len(winners) != 1:
        return False
    loser = errors[1 - winners[0]][step - 1]
    says_so = "another process has saved" in loser or "is a finished checkpoint" in loser
    return says_so and saved(step) == {step: 10.0 * step + winners[0]}
