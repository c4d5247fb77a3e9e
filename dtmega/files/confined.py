"""A child process that reads an untrusted file with a library, under limits on time and memory.

    child = Confined("dtmega.data.tokenizers.rendering:read_prompts", *arguments, where="DIR/chat_template.jinja")
    ids = child.ask(messages)           # any number of times, with the same child
    child.close()

The child calls the named function with the arguments. The named function returns a second function, which the child
calls to answer each request. Requests and answers are JSON. If a request fails, hangs or takes too much memory, the
caller gets a one-line `ValueError`. A child that hangs is killed. After a child has died, the next request starts a new
child. The limits grow with the size of the request, so that a long text takes its time, but no text takes for ever. The
child cannot import torch, because torch alone needs more memory than the limit allows.
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
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

START_S = 60.0  # time limit for the child's imports and for reading the file; generous, because cores may be busy
ANSWER_S = 10.0  # time limit for a short request
MEMORY_BYTES = 2**30  # memory limit while a short request is answered
ANSWER_BYTES = 64 * 2**20  # size limit for the answer to a short request
# Additional limits for each byte of a request. A core encodes some 2,800,000 bytes of text a second with stdlib-8k as a
# tokenizer.json; other vocabularies are slower, and cores may be busy.
S_PER_BYTE = 1 / 20_000
MEMORY_PER_BYTE = 1024
ANSWER_PER_BYTE = 64
STATM = Path("/proc/self/statm")  # the sixth number is the process's own writable memory, in pages
# With `-I`, neither the environment nor the working directory affects the child's imports. The child gets `sys.path`
# from this process instead.
MAIN = "import sys; sys.path[:] = sys.argv[3:]; from dtmega.files import confined; confined.serve(*sys.argv[1:3])"


class Confined:
    """A child process with limits on time and memory.

    Args:
        function: function to call in the child, as module:name. This function returns a second function, which turns
            a request into an answer.
        arguments: arguments of `function`, sent to the child as JSON.
        where: name of the file that the child reads, for messages.
    """

    def __init__(self, function: str, *arguments: Any, where: str) -> None:
        self._function = function
        self._arguments = arguments
        self._where = where
        self._child: subprocess.Popen[bytes] | None = None
        # Kill the child once this object is gone. While there is no child, the finalizer calls `int`, a no-op.
        self._end = weakref.finalize(self, int)

    def start(self) -> None:
        """Start the child unless it is already running, then wait until `function` has returned.

        Raises:
            ValueError: `function` raised an error, or the child exceeded the limits.
        """
        if self._child is not None:
            return
        command = [sys.executable, "-I", "-c", MAIN, self._function, json.dumps(self._arguments), *sys.path]
        self._child = child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that Ctrl-C reaches only the parent
        )
        self._end = weakref.finalize(self, _end, child)
        self._answer(child, START_S)

    def ask(self, request: Any) -> Any:
        """Send a request to the child and return the child's answer.

        Raises:
            ValueError: the child could not answer the request or exceeded the limits.
        """
        self.start()
        child = self._child
        assert child is not None
        # Text may hold lone surrogates, which only "surrogatepass" encodes.
        line = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        with contextlib.suppress(BrokenPipeError):  # the child is dead; `_answer` reports how it ended
            _stream(child.stdin).write(line)
            _stream(child.stdin).flush()
        return self._answer(child, ANSWER_S + S_PER_BYTE * len(line), ANSWER_BYTES + ANSWER_PER_BYTE * len(line))

    def close(self) -> None:
        """Kill the child, if there is one."""
        self._end()
        self._child = None

    def _answer(self, child: subprocess.Popen[bytes], within_s: float, max_bytes: int = ANSWER_BYTES) -> Any:
        """Read the child's next answer. Call `close` if the child has ended or does not answer in time.

        Raises:
            ValueError: the child did not answer or reported an error.
        """
        line = _read_line(_stream(child.stdout), within_s, max_bytes)
        if line is None:
            self.close()
            raise ValueError(f"{self._where} took more than {within_s:.3g} s, or wrote more than {max_bytes:,} bytes")
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
    """Answer the requests on stdin until stdin ends. The child runs this function.

    Args:
        function: function to call, as module:name (see `Confined`).
        arguments: arguments of `function`, as a JSON list.
    """
    requests, answers = sys.stdin.buffer, sys.stdout
    sys.stdout = sys.stderr  # so that output printed by a library does not mix with the answers
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]  # `import torch` now raises ImportError
    _limit(resource.RLIMIT_CORE, 0)

    def reply(kind: str, value: Any) -> None:
        answers.write(json.dumps([kind, value]) + "\n")
        answers.flush()

    try:
        _limit_memory(MEMORY_BYTES)
        _limit_cpu(START_S)
        module, _, name = function.partition(":")
        answer = getattr(importlib.import_module(module), name)(*json.loads(arguments))
    except BaseException as error:
        return reply("failed at the start", _first_line(error))
    reply("answer", None)
    _limit_memory(None)  # while a request is read, which may be long
    for line in requests:
        try:
            request = json.loads(line.decode("utf-8", "surrogatepass"))
            _limit_memory(MEMORY_BYTES + MEMORY_PER_BYTE * len(line))
            _limit_cpu(ANSWER_S + S_PER_BYTE * len(line))
            result = answer(request)
        except BaseException as error:
            reply("failed", _first_line(error))
        else:
            reply("answer", result)
        _limit_memory(None)


@contextlib.contextmanager
def limited_memory(n_bytes: int) -> Iterator[None]:
    """Let this process take at most `n_bytes` of further memory in a `with` block, if the system can tell its use.

    Raises:
        MemoryError: the block needs more, and its library reports that.
    """
    if not STATM.exists():
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    used_bytes = int(STATM.read_text().split()[5]) * resource.getpagesize()
    _limit(resource.RLIMIT_DATA, used_bytes + n_bytes)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _limit_memory(n_bytes: int | None) -> None:
    """Limit this process's own writable memory, or lift the limit again (None).

    The address space is not limited, because each thread of a library reserves some of it that it never uses.
    """
    _limit(resource.RLIMIT_DATA, resource.RLIM_INFINITY if n_bytes is None else n_bytes)


def _limit(kind: int, value: int) -> None:
    """Set a resource limit for this process, unless a lower limit is already set."""
    _, hard = resource.getrlimit(kind)
    is_lower = hard == resource.RLIM_INFINITY or 0 <= value < hard
    resource.setrlimit(kind, (value if is_lower else hard, hard))


def _limit_cpu(seconds: float) -> None:
    """Limit this process to about 2 x `seconds` of additional CPU time; the system then ends the process.

    The parent already kills a child that takes too long by wall-clock time. The limit on CPU time also ends a child
    whose parent is gone.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + 2 * seconds) + 1)


def _first_line(error: BaseException) -> str:
    """The first line of an error's message, preceded by the class name unless the error is a ValueError.

    For a MemoryError, the line names the memory limit instead.
    """
    if isinstance(error, MemoryError):
        return f"expected to need at most {resource.getrlimit(resource.RLIMIT_DATA)[0] // 2**20} MiB of memory"
    line = str(error).strip().partition("\n")[0][:500]
    return line if isinstance(error, ValueError) else f"{type(error).__name__}: {line}"


def _read_line(stream: IO[bytes], within_s: float, max_bytes: int) -> bytes | None:
    """The next line of a stream.

    Returns:
        The line with its newline, or without a newline if the stream ended in the middle of the line. None if the line
        did not come in time, or is longer than `max_bytes`.
    """
    deadline = time.monotonic() + within_s
    line = bytearray()
    while not line.endswith(b"\n"):
        remaining_s = deadline - time.monotonic()
        ready = select.select([stream], [], [], max(remaining_s, 0))[0]
        part = os.read(stream.fileno(), 2**20) if ready else b""
        line += part
        if not ready or len(line) > max_bytes:
            return None
        if not part:  # end of the stream
            break
    return bytes(line)


def _ended(code: int | None) -> str:
    """A description of a child's exit code: the signal that killed the child, or the code itself."""
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout):
        with contextlib.suppress(BrokenPipeError):  # closing flushes a request that the child did not read
            _stream(stream).close()


def _stream(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream
