"""Start a job on all ranks or on none. The ranks compare the values that must be equal, and print each error once.

    startup = Startup()
    with startup.step("configuration") as step:  # on every rank
        cfg = load(argv)                         # a ValueError on any rank ends all ranks
        step.must_match = flat(cfg)              # a value that differs between ranks ends all ranks too
    with startup.step("checkpoints") as step:
        if startup.rank == 0:
            step.send = find(cfg)                # all ranks receive this value at the end of the step
    paths = step.received

At the end of each step the ranks exchange reports through the rendezvous store, which needs no process group: making a
process group would hang if the ranks disagreed. Rank 0 reads the reports of all ranks, prints the errors, and only then
publishes its verdict. A launcher kills the other ranks as soon as one rank exits, so everything must be printed before
any rank exits.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, NamedTuple, TypeVar

import torch
import xxhash
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]  # documented

from dtmega import __version__, config, mesh
from dtmega.distributed import exit_codes, process
from dtmega.distributed.rendezvous import Rank0GaveUp
from dtmega.files import console

# Seconds to wait for the other ranks' reports after a rank has failed; the reports may never come.
PATIENCE_S = 10.0
LONGEST_POLL_S = 0.5
HEARTBEAT_S = 1.0  # shortest time between two heartbeats that a rank publishes
SHOWN_KEYS = 8
SHOWN_CHARACTERS = 100
# Configuration keys that may differ between ranks, because their values are node-local paths. The contents of the files
# at these paths must match.
PATH_KEYS = ("[data] path", "[data] tokenizer")

T = TypeVar("T")


class OtherRankFailed(Exception):
    """Raised on a rank that waits inside a step when another rank has failed in that step."""


class Refused(Exception):
    """Raised on every rank to abort startup or a command. The reason has already been printed.

    Attributes:
        exit_code: exit code for this process.
        reason: the reason as it was printed.
    """

    def __init__(self, exit_code: int, reason: str) -> None:
        super().__init__(f"exit code {exit_code}: {reason}")
        self.exit_code = exit_code
        self.reason = reason


@dataclass
class Step:
    """The data that ranks exchange at the end of a step.

    Attributes:
        must_match: mapping from keys to values. The values must be equal on all ranks when written as JSON.
        send: value that rank 0 sends to all ranks, limited to types that JSON can represent.
        received: value that rank 0 sent, set at the end of the step.
    """

    must_match: Mapping[str, Any] = field(default_factory=dict)
    send: Any = None
    received: Any = None


class Failure(NamedTuple):
    """The reason why this rank failed in a step, and its exit code."""

    reason: str
    exit_code: int


def explain_error(error: ValueError | OSError, step_name: str) -> tuple[str, int]:
    """The reason and the exit code for an error that a rank raised in a step.

    The message of an OSError, such as "No space left on device", does not show what the program was doing. The reason
    for an OSError therefore begins with the name of the step.
    """
    if isinstance(error, OSError):
        return f"{step_name}: {error}", getattr(error, "exit_code", exit_codes.REFUSED)
    return str(error), getattr(error, "exit_code", exit_codes.REFUSED)


class Startup:
    """Coordinates all ranks of a command, or all ranks of a training job until the first training step.

    Args:
        timeout_s: initial value of the attribute `timeout_s`.
        program: name of the program, printed at the beginning of each line.
        explain: function that takes an error and the name of the step that raised it, and returns the reason and the
            exit code.

    Attributes:
        rank, size: rank of this process and number of ranks, from the launcher.
        store: rendezvous store of the job; None before the end of the first step.
        timeout_s: longest time, in seconds, that a rank waits for other ranks without a heartbeat from any rank.
        on_heartbeat: function that is called at each heartbeat of this rank, and at each heartbeat of another rank
            that this rank notices while it waits.

    Raises:
        Refused: the launcher set invalid environment variables. The reason has already been printed.
    """

    def __init__(
        self,
        timeout_s: float = mesh.TIMEOUT_S,
        program: str = "dtmega",
        explain: Callable[[ValueError | OSError, str], tuple[str, int]] = explain_error,
    ) -> None:
        self._program, self._explain = program, explain
        try:
            self.rank, self.size, self.timeout_s = mesh.rank(), mesh.world_size(), timeout_s
        except ValueError as error:
            raise self._refused(exit_codes.REFUSED, str(error)) from None
        self.store: Store | None = None
        self.on_heartbeat: Callable[[], object] = _do_nothing
        self._meeting: Store | None = None
        self._n_steps = 0
        self._n_waits = 0
        self._heartbeat_at = 0.0

    @contextmanager
    def step(self, name: str) -> Iterator[Step]:
        """Run one part of startup. All ranks run this part and wait for each other at the end.

        Args:
            name: name of the step, used in messages such as "the ranks do not have the same configuration".

        Raises:
            Refused: a rank failed in this step, values that must match differ, or a rank did not reach the end of the
                step. The exception is raised on every rank that reached the end, after the reason has been printed.
        """
        step, failure = Step(), None
        try:
            yield step
        except (ValueError, OSError) as error:
            failure = Failure(*self._explain(error, name))
        except OtherRankFailed:
            # The verdict will contain the failed rank's reason.
            pass
        except Exception:
            # A single process has no other rank to report to, so it raises the exception itself.
            if self.size == 1:
                raise
            failure = Failure(traceback.format_exc(), exit_codes.FAILED)
        store = self._open_meeting(failure)
        self._report(store, step, failure)
        verdict = self._judge(store, step, name) if self.rank == 0 else self._await_verdict(store, failure, name)
        if verdict["exit_code"]:
            self._leave(store)
            raise self._refused(verdict["exit_code"], verdict["reason"], printed=True)
        step.received = verdict["sent"]

    def with_heartbeats(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items and send a heartbeat before each item. Loops that may exceed timeout_s need this method."""
        for item in items:
            self.heartbeat()
            yield item

    def heartbeat(self) -> None:
        """Tell the waiting ranks that this rank is still working."""
        self.on_heartbeat()
        if self._meeting is not None and time.monotonic() - self._heartbeat_at > HEARTBEAT_S:
            self._heartbeat_at = time.monotonic()
            self._meeting.add("heartbeats", 1)

    def wait_for_all(self) -> None:
        """Wait, inside a step, until every rank has called this method.

        Unlike a collective, this method does not time out while other ranks send heartbeats.

        Raises:
            OtherRankFailed: a rank has failed in this step.
            RuntimeError: not all ranks called this method, and no heartbeat arrived for timeout_s.
        """
        assert self._meeting is not None
        self._n_waits += 1
        store = PrefixStore(f"wait/{self._n_waits}", self._meeting)
        this_step = PrefixStore(str(self._n_steps + 1), self._meeting)
        if store.add("arrived", 1) == self.size:
            store.set("complete", "")

        def is_patient() -> bool:
            # If a rank fails only after all ranks have called this method, the wait was successful and must not raise.
            if this_step.check(["failed"]) and not store.check(["complete"]):
                raise OtherRankFailed
            return True

        if not self._wait(store, "complete", is_patient):
            raise RuntimeError(f"not all ranks came in {self.timeout_s:g} s")

    def leave(self) -> None:
        """Wait until this rank may exit. A program that makes no process group calls this method after its last step.

        Rank 0 waits for all other ranks, because it may serve the store. The other ranks do not wait.
        """
        assert self._meeting is not None
        self._leave(PrefixStore("end", self._meeting))

    def _open_meeting(self, failure: Failure | None) -> Store:
        """Return a view of the store under this step's key prefix. The first step also connects to the store."""
        try:
            if self._meeting is None:
                self.store = mesh.rendezvous(self.timeout_s)
                # A program that starts training twice uses one store both times, so each startup needs its own prefix.
                n_starts = self.store.add(f"startup/{self.rank}", 1)
                self._meeting = PrefixStore(f"startup/{n_starts}", self.store)
        # torch raises RuntimeError if the store is gone.
        except (ValueError, RuntimeError) as error:
            # Without a store, this rank cannot report its failure to other ranks, so it prints the reason itself.
            if failure is not None:
                raise self._refused(failure.exit_code, failure.reason) from None
            # If rank 0 gave up waiting, rank 0 prints the reason.
            printed = isinstance(error, Rank0GaveUp)
            raise self._refused(exit_codes.REFUSED, str(error).partition("\n")[0], printed=printed) from None
        self._n_steps += 1
        return PrefixStore(str(self._n_steps), self._meeting)

    def _report(self, store: Store, step: Step, failure: Failure | None) -> None:
        """Publish this rank's values, or its failure, at the end of the step."""
        # The values are stored under their digest, so values that are equal on many ranks are stored only once.
        content = json.dumps(step.must_match, sort_keys=True, default=str)
        digest = _digest(content)
        store.set(f"values/{digest}", content)
        report = {"values": digest, "reason": failure and failure.reason, "exit_code": failure and failure.exit_code}
        store.set(f"report/{self.rank}", json.dumps(report))
        if failure is not None:
            store.set("failed", "")
        if store.add("arrived", 1) == self.size:
            store.set("complete", "")

    def _judge(self, store: Store, step: Step, name: str) -> dict[str, Any]:
        """Read all reports, print the errors and publish the verdict. Only rank 0 calls this method.

        Returns:
            The verdict, with three keys: `exit_code` (0 if startup continues), `reason`, and `sent` (rank 0's
            `step.send`).
        """
        complete = self._wait(store, "complete", is_patient=lambda: not store.check(["failed"]))
        failed = complete or store.check(["failed"])
        present = [rank for rank in range(self.size) if complete or store.check([f"report/{rank}"])]
        if not failed:
            absent = [rank for rank in range(self.size) if rank not in present]
            raise self._absent(store, absent, name)
        texts = store.multi_get([f"report/{rank}" for rank in present])
        failures: dict[Failure, list[int]] = {}
        ranks_by_digest: dict[str, list[int]] = {}
        for rank, text in zip(present, texts, strict=True):
            report = json.loads(text)
            if report["reason"] is not None:
                failures.setdefault(Failure(report["reason"], report["exit_code"]), []).append(rank)
            else:
                ranks_by_digest.setdefault(report["values"], []).append(rank)
        # If ranks failed with different exit codes, the job takes the exit code of the lowest failed rank.
        exit_code = next((failure.exit_code for failure in failures), 0)
        reasons = []
        for failure, ranks in failures.items():
            who = "" if len(ranks) == self.size else f"{console.name_ranks(ranks)}: "
            self._print_once(store, failure.reason, who)
            reasons.append(who + failure.reason)
        if len(ranks_by_digest) > 1:
            values = [(json.loads(store.get(f"values/{digest}")), ranks) for digest, ranks in ranks_by_digest.items()]
            mismatch = f"the ranks do not have the same {name}: {_differences(values)}"
            console.say(f"{self._program}: {mismatch}")
            exit_code = exit_code or exit_codes.REFUSED
            reasons.append(mismatch)
        verdict = {"exit_code": exit_code, "reason": "; ".join(reasons), "sent": step.send}
        store.set("verdict", json.dumps(verdict))
        return verdict

    def _await_verdict(self, store: Store, failure: Failure | None, name: str) -> dict[str, Any]:
        """Wait for the verdict of rank 0. All ranks except rank 0 call this method.

        If the verdict does not come, a rank that has failed prints its own reason and exits with its own code.
        """
        if not self._wait(store, "verdict", is_patient=lambda: failure is None):
            if failure is None:
                raise self._absent(store, [0], name)
            self._print_once(store, failure.reason, f"{console.name_ranks([self.rank])}: ")
            return {"exit_code": failure.exit_code, "reason": failure.reason}
        return json.loads(store.get("verdict"))

    def _refused(self, exit_code: int, reason: str, *, printed: bool = False) -> Refused:
        """Build the exception to raise. Pass the reason to torchrun and print it unless `printed` is True."""
        if not printed:
            console.say(f"{self._program}: {reason}")
        process.tell_agent(reason)
        return Refused(exit_code, reason)

    def _absent(self, store: Store, absent: list[int], name: str) -> Refused:
        """Build the exception for ranks that missed the end of the step. Only one waiting rank prints the reason."""
        reason = f"{console.name_ranks(absent)} did not come to the end of the step '{name}' in {self.timeout_s:g} s"
        self._print_once(store, reason, "")
        return self._refused(exit_codes.FAILED, reason, printed=True)

    def _print_once(self, store: Store, reason: str, who: str) -> None:
        """Print a reason, unless rank 0 or a rank that gave up waiting for rank 0 has already printed it."""
        if store.add(f"printed/{_digest(reason)}", 1) == 1:
            console.say(f"{self._program}: {who}{reason}")

    def _leave(self, store: Store) -> None:
        """On rank 0, which may serve the store, wait until all other ranks have read the verdict."""
        # A RuntimeError means that the store is gone because the rank that served it has exited.
        with suppress(RuntimeError):
            if store.add("read", 1) == self.size:
                store.set("all read", "")
            if self.rank == 0:
                self._wait(store, "all read", is_patient=lambda: False)

    def _wait(self, store: Store, key: str, is_patient: Callable[[], bool]) -> bool:
        """Wait until `key` is in the store. Returns False if the key did not appear in time.

        The wait ends timeout_s after the last heartbeat of any rank. Once `is_patient` returns False, the wait lasts at
        most another PATIENCE_S, and heartbeats no longer extend the wait.
        """
        assert self._meeting is not None
        n_heartbeats, poll_s = 0, 0.002
        deadline, hurried = time.monotonic() + self.timeout_s, False
        # `store.wait` is not used: each kind of store reports a timeout differently, and TCPStore also prints it.
        while not store.check([key]):
            now = time.monotonic()
            if not hurried and not is_patient():
                deadline, hurried = min(deadline, now + PATIENCE_S), True
            # Adding 0 reads the counter without changing it.
            if not hurried and self._meeting.add("heartbeats", 0) > n_heartbeats:
                n_heartbeats = self._meeting.add("heartbeats", 0)
                deadline = now + self.timeout_s
                self.on_heartbeat()
            if now > deadline:
                return False
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, LONGEST_POLL_S)
        return True


def same_job(cfg: config.Config, device: torch.device, libraries: Sequence[str]) -> dict[str, Any]:
    """The properties of a job that must be equal on all ranks: configuration, device type and library versions.

    Args:
        cfg: the run's configuration.
        device: this rank's device.
        libraries: names of the libraries that the model needs in addition to torch.
    """
    sections: dict[str, dict[str, Any]] = cfg.model_dump()
    values: dict[str, Any] = {}
    for section, keys in sections.items():
        values |= {f"[{section}] {key}": value for key, value in keys.items()}
    versions = {"dtmega": __version__, "torch": torch.__version__}
    versions |= {library: version(library) for library in libraries}
    compared = {key: value for key, value in values.items() if key not in PATH_KEYS}
    return compared | {"device": device.type} | versions


def _differences(contents: Sequence[tuple[Mapping[str, Any], list[int]]]) -> str:
    """Describe each key whose value differs between ranks: `[optim] lr is 0.01 on ranks 0, 2, 0.02 on rank 1`.

    Args:
        contents: pairs of a mapping (key -> value) and the ranks that reported this mapping.
    """
    all_keys: set[str] = set()
    for values, _ in contents:
        all_keys |= values.keys()
    differences: list[str] = []
    for key in sorted(all_keys):
        ranks_by_value: dict[str, list[int]] = {}
        for values, ranks in contents:
            shown = json.dumps(values[key]) if key in values else "not there"
            ranks_by_value.setdefault(shown, []).extend(ranks)
        if len(ranks_by_value) > 1:
            values_and_ranks = []
            for shown, ranks in ranks_by_value.items():
                values_and_ranks.append(f"{_short(shown)} on {console.name_ranks(sorted(ranks))}")
            differences.append(f"{key} is {', '.join(values_and_ranks)}")
    n_more = len(differences) - SHOWN_KEYS
    more = f"; and {n_more} more" if n_more > 0 else ""
    return "; ".join(differences[:SHOWN_KEYS]) + more


def _digest(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())


def _short(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def _do_nothing() -> None:
    """Ignore a heartbeat."""
