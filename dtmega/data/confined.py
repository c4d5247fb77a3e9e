"""A child process for what a stranger's file makes a library do: within limits of time and memory, or one message.

    child = Confined("dtmega.data.chat:conversations", folder, where="DIR/chat_template.jinja")
    ids = child.ask(messages)           # any number of times; the child stays
    child.close()

The child calls the function with the arguments and answers each request with what the returned function gives for it.
Requests and answers are JSON. A child that fails, hangs or takes too much memory is ended, and costs its asker a
`ValueError` in one line; the next request starts another child. It cannot import torch, which alone would take more
memory than it may have.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
import weakref
from typing import IO, Any

START_S = 60.0  # for what the child imports and reads, on cores that others use, too
ANSWER_S = 10.0  # for one request
MEMORY_BYTES = 2**30
ANSWER_BYTES = 64 * 2**20
# `-I`: neither the environment nor the working directory decides what is imported, but the path of this process.
MAIN = "import sys; sys.path[:] = sys.argv[3:]; from dtmega.data import confined; confined.serve(*sys.argv[1:3])"


class Confined:
    """A child process with limits.

    Args:
        function: to call in the child, as module:name. It returns another one, from a request to an answer.
        arguments: that the function is called with; JSON.
        where: the file that is read; for messages.
    """

    def __init__(self, function: str, *arguments: Any, where: str) -> None:
        self._function = function
        self._arguments = arguments
        self._where = where
        self._child: subprocess.Popen[bytes] | None = None
        self._end = weakref.finalize(self, int)

    def start(self) -> None:
        """Have a child, if there is none: the function has returned.

        Raises:
            ValueError: it has raised, or did not keep to the limits.
        """
        if self._child is not None:
            return
        command = [sys.executable, "-I", "-c", MAIN, self._function, json.dumps(self._arguments), *sys.path]
        self._child = child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process
        )
        self._end = weakref.finalize(self, _end, child)
        self._answer(child, START_S)

    def ask(self, request: Any) -> Any:
        """The answer to a request.

        Raises:
            ValueError: the function has raised, or did not keep to the limits.
        """
        self.start()
        child = self._child
        assert child is not None
        with contextlib.suppress(BrokenPipeError):  # how the child has ended is told below
            _stream(child.stdin).write(json.dumps(request).encode() + b"\n")
            _stream(child.stdin).flush()
        return self._answer(child, ANSWER_S)

    def close(self) -> None:
        """End the child, if there is one."""
        self._end()
        self._child = None

    def _answer(self, child: subprocess.Popen[bytes], within_s: float) -> Any:
        """What the child says next. A child that says nothing, or nothing more, is ended."""
        line = _read_line(_stream(child.stdout), within_s)
        if line is None:
            self.close()
            raise ValueError(f"{self._where} took more than {within_s:g} s, or said more than {ANSWER_BYTES:,} bytes")
        if not line.endswith(b"\n"):
            self.close()
            raise ValueError(f"{self._where} ended its process: {_ended(child.returncode)}")
        kind, value = json.loads(line)
        if kind == "answer":
            return value
        if kind == "failed at the start":
            self.close()
        raise ValueError(f"{self._where}: {value}")


def serve(function: str, arguments: str) -> None:
    """Answer the requests that come by stdin. Runs in the child, until stdin ends."""
    requests, answers = sys.stdin, sys.stdout
    sys.stdout = sys.stderr  # what a library prints is no answer
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]  # importing it fails, as if it were not there
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    _limit(resource.RLIMIT_CORE, 0)

    def say(kind: str, value: Any) -> None:
        answers.write(json.dumps([kind, value]) + "\n")
        answers.flush()

    try:
        _limit_cpu(START_S)
        module, _, name = function.partition(":")
        answer = getattr(importlib.import_module(module), name)(*json.loads(arguments))
    except BaseException as error:
        return say("failed at the start", _described(error))
    say("answer", None)
    for request in requests:
        try:
            _limit_cpu(ANSWER_S)
            found = answer(json.loads(request))
        except BaseException as error:
            say("failed", _described(error))
        else:
            say("answer", found)


def _limit(kind: int, value: int) -> None:
    """Set a limit of this process, unless a lower one is set."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _limit_cpu(seconds: float) -> None:
    """End this process after so much more CPU time: its parent may be gone, and waits by the clock in any case."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + 2 * seconds) + 1)


def _described(error: BaseException) -> str:
    """The first line of an error; of one that is no refusal with its kind before it."""
    if isinstance(error, MemoryError):
        return f"expected to need at most {MEMORY_BYTES // 2**20} MiB of memory"
    line = str(error).strip().partition("\n")[0][:500]
    return line if isinstance(error, ValueError) else f"{type(error).__name__}: {line}"


def _read_line(stream: IO[bytes], within_s: float) -> bytes | None:
    """A line; the part that is there where the stream ends within it; None: not in time, or too long."""
    deadline = time.monotonic() + within_s
    line = bytearray()
    while not line.endswith(b"\n"):
        left_s = deadline - time.monotonic()
        ready = select.select([stream], [], [], max(left_s, 0))[0]
        part = os.read(stream.fileno(), 2**20) if ready else b""
        line += part
        if not ready or len(line) > ANSWER_BYTES:
            return None
        if not part:
            break
    return bytes(line)


def _ended(code: int | None) -> str:
    """How a child ended, by its exit code."""
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout):
        with contextlib.suppress(BrokenPipeError):  # a request that the child has not read
            _stream(stream).close()


def _stream(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream
