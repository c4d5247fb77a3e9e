"""The log of one rank, kept if `[log] ranks = "all"`: a text file with the rank's events and printed lines.

    log = RankLog(Path("runs/bloom/logs"), rank, sizes, device)
    with log:                            # inside, all printed lines also go to logs/rank-00012.txt
        log.line("step 10 | loss 4.2")   # this line goes only to the file

    2026-11-24T08:15:30.123Z start: rank 12 of 16, pp 1 of 2, dp_shard 4 of 8, on cuda:4, process 4711 on node7
    2026-11-24T08:15:48.005Z step 10 | loss 4.2

Each line begins with its time (UTC). Ranks, and their coordinates in the mesh, are counted from 0. A resumed run
appends to the file.
"""

from __future__ import annotations

import faulthandler
import math
import os
import socket
import threading
import traceback
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

from dtmega import mesh
from dtmega.files import atomic, console

FOLDER = "logs"


class RankLog:
    """The log of this rank. In a `with` block, all lines that this process prints on stdout and stderr are logged.

    Each line is written as soon as it is complete, without a buffer, so a killed process loses no line. If lines
    cannot be written, one warning is printed. Several threads may print at once. C++ libraries and `faulthandler` print
    directly to the file descriptor of stderr, so their output is not in the log.

    Args:
        folder: folder for the logs of all ranks.
        rank: index of this rank.
        sizes: size of each axis of the mesh, keyed by name.
        device: device on which this rank computes.
    """

    def __init__(self, folder: Path, rank: int, sizes: Mapping[str, int], device: torch.device) -> None:
        self._path = folder / f"rank-{rank:05d}.txt"
        self._header = _describe_start(rank, sizes, device)
        self._fd: int | None = None
        self._lock = threading.RLock()  # a signal handler may print while its thread holds the lock
        self._copying = ExitStack()
        self._after_break = False  # True if the file may end with an incomplete line (killed run, full disk)
        self._missing = ""  # reason why lines are missing before the next line; '' if no lines are missing
        self._warned = False

    def __enter__(self) -> RankLog:
        """Open the log and write a first line about this process.

        Raises:
            ValueError: the file cannot be written.
        """
        try:
            atomic.make_folder(self._path.parent)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ValueError(f"cannot write to {self._path}: {error.strerror} ([log] ranks)") from None
        self._after_break = os.fstat(self._fd).st_size > 0
        self._copying.enter_context(console.copied(self.line))
        self.line(self._header)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the log. If an error ends the `with` block, first log the traceback, which Python prints only later."""
        if error is not None:
            self.line("".join(traceback.format_exception(kind, error, trace)))
        self._copying.close()
        with self._lock:
            fd, self._fd = self._fd, None
        if fd is not None:
            with suppress(OSError):  # a network file system may report a full disk only here
                os.close(fd)

    def line(self, text: str) -> None:
        """Write one or more lines to the log, without printing them. Empty lines are left out."""
        lines = [console.printable(line) for line in text.split("\n") if line.strip()]
        with self._lock:
            warning = self._append(lines) if lines and self._fd is not None else ""
        if warning:
            console.say(warning)

    def write_stacks(self) -> None:
        """Write the stack of each thread in this process. `faulthandler` writes these lines without times."""
        with self._lock:
            if self._fd is not None:
                self.line("the threads of this process:")
                faulthandler.dump_traceback(self._fd, all_threads=True)

    def _append(self, lines: list[str]) -> str:
        """Append lines to the file. Returns a warning to print; '' if there is no warning."""
        assert self._fd is not None
        if self._missing:
            lines = [f"lines are missing here: {self._missing}", *lines]
        time = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
        text = "".join(f"{time} {line}\n" for line in lines)
        data = ("\n" + text if self._after_break else text).encode()
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            self._after_break, self._missing = True, error.strerror
            warned, self._warned = self._warned, True
            return "" if warned else f"WARNING: lines are missing in {self._path}: {error.strerror}"
        self._after_break, self._missing = False, ""
        return ""


def _describe_start(rank: int, sizes: Mapping[str, int], device: torch.device) -> str:
    shape = [sizes[axis] for axis in mesh.AXES]
    places = zip(mesh.AXES, np.unravel_index(rank, shape), shape, strict=True)
    parts = [f"start: rank {rank} of {math.prod(shape)}"]
    parts += [f"{axis} {place} of {size}" for axis, place, size in places if size > 1]
    return ", ".join([*parts, f"on {device}", f"process {os.getpid()} on {socket.gethostname()}"])
