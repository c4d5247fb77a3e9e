"""Experiment trackers: wandb, mlflow and trackio. `[log] trackers` names the trackers that a run uses.

    trackers = Trackers(config, new=True)
    trackers.record(step, {"loss": 2.5})  # returns at once
    trackers.close(finished=True)

Each tracker has its own thread, which imports the library during the first steps, opens the run, and sends the queued
rows. If a tracker fails or is slow, one line on stderr reports the problem. Training never waits for a tracker, and
continues if a tracker fails.

`trackers.json` in the run directory keeps the run's id at each tracker, and the last step sent to the tracker. With
this file, a resumed run continues its own run at each tracker, and steps that a resumed run repeats are sent only once.
"""

from __future__ import annotations

import json
import os
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dtmega.config import Config
from dtmega.files import atomic, console, optional_imports, urls
from dtmega.files.untrusted_json import read_object

FILE = "trackers.json"
WAITING = 10_000  # maximum number of rows in the queue of one tracker; further rows are lost
PAUSE_S = 1.0  # time between two checks for new rows
CLOSE_S = 10.0  # time limit for closing all trackers at the end of the run
ABANDON_S = 5.0  # time limit for closing all trackers if the watch ends the process during the run
# Limits of one request to mlflow (mlflow/utils/validation.py).
MLFLOW_METRICS = 1000
MLFLOW_PARAMS = 100
MLFLOW_VALUE = 6000  # characters

# Matches the names of keys with secret values, but not the names "tokens" and "tokenizer".
SECRET = re.compile(
    r"(?i)(^|[_-])(password|passphrase|secret|credentials?|token|(api|access|account|private|secret)[_-]?key)$"
)


class Row(NamedTuple):
    """The finite numbers from one line of metrics.jsonl.

    Attributes:
        step: step number.
        values: key in metrics.jsonl -> number.
        time_s: time at which the line was written, in seconds since 1970.
    """

    step: int
    values: dict[str, float]
    time_s: float


class Tracker(Protocol):
    """An open run at one tracker. After a method has raised an exception, the tracker is no longer used.

    Attributes:
        id: identifier of the run at the tracker. A resumed run uses the id to continue its run at the tracker.
    """

    id: str

    def send(self, rows: list[Row]) -> None: ...

    def close(self, finished: bool) -> None: ...


class Wandb:
    """A wandb run (https://docs.wandb.ai). Without a login, the run is offline and is kept in the run directory."""

    def __init__(self, config: Config, known: str) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._wandb = import_module("wandb")
        self.id = known or uuid.uuid4().hex[:8]
        # Without an API key, the online mode would wait for the user to type a key.
        mode = os.environ.get("WANDB_MODE") or ("online" if self._wandb.login(prompt=False) else "offline")
        self._run = self._wandb.init(
            project=config.log.project,
            name=Path(config.run.dir).name,
            id=self.id,
            resume="allow",
            dir=config.run.dir,
            mode=mode,
            config=masked(config.model_dump()),
            settings=self._wandb.Settings(
                silent=True, console="off", x_disable_stats=True, x_disable_meta=True, disable_git=True
            ),
        )

    def send(self, rows: list[Row]) -> None:
        for row in rows:
            self._run.log(row.values, step=row.step)

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)
        self._wandb.teardown()  # ends wandb's own process, which would otherwise run until this process exits


class Mlflow:
    """An mlflow run (https://mlflow.org), stored at MLFLOW_TRACKING_URI or in the run directory's `mlruns/`.

    This class uses mlflow's client, because mlflow's fluent interface keeps the run in a global variable.
    """

    def __init__(self, config: Config, known: str) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._entities = import_module("mlflow.entities")
        folder = Path(config.run.dir, "mlruns").resolve()
        uri = os.environ.get("MLFLOW_TRACKING_URI", folder.as_uri())
        self._client = import_module("mlflow").MlflowClient(tracking_uri=uri)
        if known:
            self._client.update_run(known, status="RUNNING")
            self.id = known
            return
        experiment = self._client.get_experiment_by_name(config.log.project)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(config.log.project)
        self.id = self._client.create_run(experiment_id, run_name=Path(config.run.dir).name).info.run_id
        keys = masked(config.model_dump())
        parameters = [
            self._entities.Param(f"{section}.{key}", str(value)[:MLFLOW_VALUE])
            for section, values in keys.items()
            for key, value in values.items()
        ]
        for first in range(0, len(parameters), MLFLOW_PARAMS):
            self._client.log_batch(self.id, params=parameters[first : first + MLFLOW_PARAMS])

    def send(self, rows: list[Row]) -> None:
        metrics = [
            self._entities.Metric(name, value, int(row.time_s * 1000), row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        for first in range(0, len(metrics), MLFLOW_METRICS):
            self._client.log_batch(self.id, metrics=metrics[first : first + MLFLOW_METRICS])

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self.id, status="FINISHED" if finished else "KILLED")


class Trackio:
    """A trackio run (https://github.com/gradio-app/trackio), in trackio's own folder (TRACKIO_DIR)."""

    def __init__(self, config: Config, known: str) -> None:
        trackio = import_module("trackio")
        for module in (trackio, import_module("trackio.run"), import_module("trackio.utils")):
            vars(module)["print"] = _nothing  # trackio prints six lines at each start, and no option turns them off
        # Trackio identifies a run by its name alone, so the name must be unique.
        name = Path(config.run.dir).name
        self.id = known or f"{name}-{uuid.uuid4().hex[:8]}"
        self._run = trackio.init(
            project=config.log.project,
            name=self.id,
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
            config=masked(config.model_dump()),
        )

    def send(self, rows: list[Row]) -> None:
        for row in rows:
            self._run.log(row.values, step=row.step)

    def close(self, finished: bool) -> None:
        self._run.finish()


def masked(value: Any) -> Any:
    """Mask secrets in a configuration: values of keys with names such as "password", and credentials in URLs."""
    if isinstance(value, Mapping):
        return {key: urls.MASK if SECRET.search(str(key)) else masked(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inside) for inside in value]
    if not isinstance(value, str):
        return value
    return urls.masked(value)


def _nothing(*words: object, **options: object) -> None:
    """Replacement for `print` that prints nothing."""


TRACKERS: Mapping[str, Callable[[Config, str], Tracker]] = {"wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio}


def check(names: Sequence[str]) -> None:
    """Before anything starts, refuse trackers whose library is missing.

    Raises:
        ValueError: a library is missing; the message names the extra to install.
    """
    for name in names:
        optional_imports.check(name, name, "[log] trackers")


class Trackers:
    """All trackers of one run. Only the process that writes the reports uses this class.

    Args:
        config: configuration of the run.
        new: whether the run starts at step 0, so that each tracker also opens a new run.
    """

    def __init__(self, config: Config, *, new: bool) -> None:
        kept = Kept(Path(config.run.dir, FILE), new)
        self._sinks = [Sink(name, config, kept) for name in config.log.trackers]

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Queue the finite numbers from one line of metrics.jsonl for each tracker. Returns at once."""
        row = Row(step, dict(values), time.time())
        for sink in self._sinks:
            sink.take(row)

    def close(self, finished: bool, within_s: float = CLOSE_S) -> None:
        """Send the queued rows and close the run at each tracker. Any thread may call this method.

        Args:
            finished: whether the run has done all its steps.
            within_s: time limit for all trackers together, in seconds.
        """
        deadline = time.monotonic() + within_s
        for sink in self._sinks:
            sink.finish(finished)
        for sink in self._sinks:
            if not sink.joined(deadline):
                console.say(f"{sink.name} did not close in {within_s:g} s: it may lack the last steps")

    def abandon(self) -> None:
        """Close before the run has ended, in less time."""
        self.close(False, ABANDON_S)


class Kept:
    """The content of `trackers.json`: for each tracker, the id of the run and the newest step that was sent.

    Args:
        path: path of the file.
        new: whether to ignore the ids and steps that an earlier run has left in the file.
    """

    def __init__(self, path: Path, new: bool) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._known: dict[str, Any] = {}
        if new or not path.is_file():
            return
        try:
            self._known = read_object(path)
        except ValueError as error:
            console.say(f"trackers begin new runs: {error}")

    def last(self, name: str) -> tuple[str, int]:
        """The run's id at the named tracker, and the newest step that was sent; '' and −1 if there is no run."""
        known = self._known.get(name)
        if not isinstance(known, dict):
            return "", -1
        run_id = known.get("id")
        newest = known.get("newest")
        if not isinstance(run_id, str) or type(newest) is not int:
            return "", -1
        return run_id, newest

    def keep(self, name: str, run_id: str, newest: int) -> None:
        with self._lock:
            self._known[name] = {"id": run_id, "newest": newest}
            # If the disk is full, the file keeps an older step, and a resumed run may send some steps again.
            with suppress(OSError), atomic.replaced(self._path) as file:
                json.dump(self._known, file, indent=1)


class Sink:
    """One tracker and the thread that feeds it."""

    def __init__(self, name: str, config: Config, kept: Kept) -> None:
        self.name = name
        self._config = config
        self._kept = kept
        self._rows: queue.Queue[Row] = queue.Queue(WAITING)
        self._lost = 0
        self._ending = threading.Event()
        self._finished = False
        # The thread is a daemon, so that the process can exit while a library hangs.
        self._thread = threading.Thread(target=self._feed, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def take(self, row: Row) -> None:
        """Queue a row. The row is lost if the tracker has failed, or if WAITING rows are already queued."""
        if not self._thread.is_alive():
            return
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._lost += 1
            if self._lost == 1:
                console.say(f"{self.name} is {WAITING} lines behind: it gets no more until it has caught up")

    def finish(self, finished: bool) -> None:
        """Ask the thread to send the queued rows, close the run, and end."""
        self._finished = finished
        self._ending.set()

    def joined(self, deadline: float) -> bool:
        """Wait for the thread to end, until `deadline` (`time.monotonic`). Returns True if the thread has ended."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _feed(self) -> None:
        try:
            known, sent = self._kept.last(self.name)
            tracker: Tracker = TRACKERS[self.name](self._config, known)
            self._kept.keep(self.name, tracker.id, sent)
            while True:
                ending = self._ending.is_set()
                rows = [row for row in self._waiting() if row.step > sent]
                if rows:
                    tracker.send(rows)
                    self._kept.keep(self.name, tracker.id, rows[-1].step)
                if ending:
                    break
                self._ending.wait(PAUSE_S)
            tracker.close(self._finished)
        # The libraries may raise any exception, for example if the network fails.
        except Exception as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            console.say(f"{self.name} tracks no longer: {reason[0]}")

    def _waiting(self) -> list[Row]:
        rows = []
        while True:
            try:
                rows.append(self._rows.get_nowait())
            except queue.Empty:
                return rows
