"""Plant one-line faults in a copy of this repository, one at a time, and list those that no test notices.

    python tests/planted.py                   all faults
    python tests/planted.py --quick           those whose tests take seconds
    python tests/planted.py optim "test loss" those with one of these words in their line of --list
    python tests/planted.py --list            one fault a line
    python tests/planted.py --log FILE        also write the answers to FILE; what it says was noticed is not run again

The faults stand in `tests/planted/*.toml`, a file for each part of the house:

    [[fault]]
    file = "dtmega/ops/optim/rates.py"
    fault = "biases and norms keep the peak learning rate"
    line = 'for group in optimizer.param_groups:'
    planted = 'for group in optimizer.param_groups[:1]:'
    tests = ["tests/ops/test_optim.py::test_..."]
    quick = true

`line` must stand exactly once in the file (it may be several lines, or part of one). Each of `tests` must fail: without
`[...]`, at least one of its cases. `quick` says that this takes seconds. A planted line that names what is not there
proves nothing: the table may have no undefined name, and a test that fails by an error of import or of a name has not
noticed the fault. CONTRIBUTING.md has the rule for which faults belong in the table.
Exit code: 0 if all were noticed, 1 if one was not, 2 if the table does not fit the code.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import pytest
import tomli

ROOT = Path(__file__).resolve().parent.parent
# What the tests import from other projects, and what takes long: once here, instead of in each run of tests.
IMPORTS = (
    "numpy",
    "pydantic",
    "safetensors.torch",
    "tensorboardX",
    "tokenizers",
    "torch",
    "torch._dynamo",
    "torch._dynamo.repro.after_dynamo",
    "torch._inductor.debug",
    "torch._inductor.pattern_matcher",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torchdata.stateful_dataloader",
    "transformers.modeling_utils",
)
PR_SET_PDEATHSIG = 1
# The end of a test that never came to the fault: the planted line names what is gone.
GONE = re.compile(
    r"(?:NameError: (?:free variable|name) '|UnboundLocalError: |ImportError: cannot import name '"
    r"|ModuleNotFoundError: No module named '(?:dtmega|tests)"
    r"|AttributeError: (?:partially initialized )?module '|SyntaxError: |IndentationError: ).*"
)


class Fault(NamedTuple):
    """A fault of the table."""

    file: str
    fault: str
    line: str
    planted: str
    tests: tuple[str, ...]
    quick: bool = False

    def __str__(self) -> str:
        return f"{self.file}: {self.fault}"


class Running(NamedTuple):
    """A run of tests in a copy that has a fault."""

    fault: Fault
    copy: Path
    pid: int
    started: float


def table(root: Path) -> list[Fault]:
    """All faults, in the order of their files.

    Raises:
        ValueError: an entry has unknown or missing keys.
    """
    found = []
    for path in sorted((root / "tests" / "planted").glob("*.toml")):
        for entry in tomli.loads(path.read_text())["fault"]:
            try:
                fault = Fault(**entry)
            except TypeError as error:
                raise ValueError(f"{path.name}: {entry.get('fault', entry)}: {error}") from None
            found.append(fault._replace(tests=tuple(fault.tests)))
    return found


def mistakes(root: Path, faults: list[Fault]) -> Iterator[str]:
    """The ways in which entries do not fit the code."""
    for fault in faults:
        text = (root / fault.file).read_text() if (root / fault.file).exists() else ""
        count = text.count(fault.line)
        if count != 1:
            yield f"{fault}: its line stands {count} times in the file, not once: {fault.line!r}"
        if fault.line == fault.planted:
            yield f"{fault}: nothing is planted"
        if not fault.tests:
            yield f"{fault}: needs tests that notice it"
        for test in fault.tests:
            file, _, name = test.partition("::")
            function = name.partition("[")[0].rpartition("::")[2]
            if not (root / file).exists() or f"def {function}(" not in (root / file).read_text():
                yield f"{fault}: there is no {test}"
    yield from undefined_names(root, faults)


def undefined_names(root: Path, faults: list[Fault]) -> Iterator[str]:
    """The names in planted texts that nothing defines, as the linter finds them, and texts that are no Python."""
    with tempfile.TemporaryDirectory() as folder:
        for number, fault in enumerate(faults):
            path = root / fault.file
            if path.suffix == ".py" and path.exists():
                Path(folder, f"{number}.py").write_text(path.read_text().replace(fault.line, fault.planted))
        rules = ["--isolated", "--no-cache", "--select=F821,F822,F823", "--output-format=json"]
        command = [sys.executable, "-m", "ruff", "check", *rules, folder]
        found = json.loads(subprocess.run(command, stdout=-1, check=False).stdout)
    for one in found:
        yield f"{faults[int(Path(one['filename']).stem)]}: planted, the linter says: {one['message']}"


def plant(fault: Fault, copy: Path, number: int) -> None:
    """Write the fault into the copy. Each version of a file has a time of its own, else an older .pyc would be run."""
    path = copy / fault.file
    path.write_text(path.read_text().replace(fault.line, fault.planted))
    new = path.stat().st_mtime + 10 * (number + 1)
    os.utime(path, (new, new))


def run_tests(fault: Fault, copy: Path) -> int:
    """Fork a process that runs the tests of a fault, in a session of its own; returns its pid."""
    if pid := os.fork():
        return pid
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    os.chdir(copy)
    # Plugins of what is imported already, as anyio's, would be warned of.
    os.environ |= {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    sys.path.insert(0, str(copy))
    for stream in (sys.stdout, sys.stderr):
        os.dup2(os.open(copy / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream.fileno())
    failures = Failures(fault.tests)
    try:
        with contextlib.suppress(BaseException):  # what the fault breaks here breaks the tests too
            start_ranks()
        code = pytest.main([*fault.tests, "-p", "no:cacheprovider"], plugins=[failures])
        (copy / "answer").write_text(
            json.dumps({"code": code, "failed": sorted(failures.failed), "gone": failures.gone})
        )
    finally:
        os._exit(0)


def start_ranks() -> None:
    """Fork the server of the tests' processes, if this repository has one: spawned, it would import all of torch."""
    if importlib.util.find_spec("tests.ranks"):
        ranks = importlib.import_module("tests.ranks")
        ranks.start_method = "fork"
        ranks.forks()


class Failures:
    """A pytest plugin: the tests that failed.

    Attributes:
        wanted: the tests of a fault; of one without `[...]`, no case is run after one that failed.
        failed: tests that noticed the fault.
        gone: the errors of import or of a name by which other tests failed.
    """

    def __init__(self, wanted: Sequence[str]) -> None:
        self.wanted = wanted
        self.failed: set[str] = set()
        self.gone: list[str] = []

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """True, which is that it has been run, where nothing more is to be learned from it."""
        function = item.nodeid.partition("[")[0]
        return True if function in self.failed and item.nodeid not in self.wanted else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        if error := GONE.search(report.longreprtext):
            self.gone.append(error[0])
        else:
            self.failed |= {report.nodeid, report.nodeid.partition("[")[0]}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            error = GONE.search(report.longreprtext)
            self.gone.append(error[0] if error else f"{report.nodeid} cannot be imported")


def verdict(fault: Fault, copy: Path) -> str:
    """'' if each of its tests failed; else why the fault counts as not noticed."""
    if not (copy / "answer").exists():
        return "its tests did not end"
    answer = json.loads((copy / "answer").read_text())
    if answer["code"] not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
        return f"its tests cannot be run (pytest ends with {answer['code']})"
    passed = [test for test in fault.tests if test not in answer["failed"]]
    if passed and answer["gone"]:
        return f"what is planted names what is not there: {answer['gone'][0]}"
    return f"passed: {' '.join(passed)}" if passed else ""


def run(root: Path, faults: list[Fault], jobs: int, timeout_s: float) -> Iterator[tuple[Fault, str, float]]:
    """Each fault, why it was not noticed ('' if it was), and the seconds that its tests took."""
    for name in IMPORTS:
        importlib.import_module(name)
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=root, stdout=-1, check=True)
    files = [name for name in listed.stdout.decode().splitlines() if (root / name).exists()]
    waiting = deque(enumerate(faults))
    running: dict[int, Running] = {}
    with tempfile.TemporaryDirectory() as folder:
        idle = [Path(folder, str(i)) for i in range(jobs)]
        for copy in idle:
            for name in files:
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, copy / name, follow_symlinks=False)
        while waiting or running:
            while waiting and idle:
                number, fault = waiting.popleft()
                copy = idle.pop()
                plant(fault, copy, number)
                pid = run_tests(fault, copy)
                running[os.pidfd_open(pid)] = Running(fault, copy, pid, time.monotonic())
            ready = set(wait([*running], timeout=1.0))
            for fd, one in [*running.items()]:
                took_s = time.monotonic() - one.started
                if fd not in ready and took_s < timeout_s:
                    continue
                del running[fd]
                kill_session(one.pid)
                os.waitpid(one.pid, 0)
                os.close(fd)
                yield one.fault, verdict(one.fault, one.copy), took_s
                (one.copy / "answer").unlink(missing_ok=True)
                shutil.copy2(root / one.fault.file, one.copy / one.fault.file)
                idle.append(one.copy)


def noticed(log: str) -> set[str]:
    """The faults, as --list has them, that a log says were noticed."""
    return {line.split("  ", 1)[1] for line in log.splitlines() if line.startswith("noticed in ")}


def kill_session(leader: int) -> None:
    """Kill a process and what it started: a test that failed may have left some."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only faults whose line of --list contains one of these")
    parser.add_argument("--quick", action="store_true", help="only those whose tests take seconds")
    parser.add_argument("--list", action="store_true", help="one fault a line; nothing is run")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="at a time (default: one a core)")
    parser.add_argument(
        "--log", type=Path, metavar="FILE", help="continue what it has: add to it, skip what was noticed"
    )
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="for the tests of one fault")
    args = parser.parse_args(argv)

    faults = table(ROOT)
    wrong = [*mistakes(ROOT, faults)]
    print("\n".join(wrong) or f"{len(faults)} faults, each of whose lines stands once")
    if wrong:
        return 2
    chosen = [f for f in faults if (f.quick or not args.quick) and any(w in str(f) for w in args.words or [""])]
    if args.list:
        print("\n".join(map(str, chosen)))
        return 0
    before = noticed(args.log.read_text()) if args.log and args.log.exists() else set()
    unnoticed = 0
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(args.log.open("a")) if args.log else None
        waiting = [fault for fault in chosen if str(fault) not in before]
        for fault, why, took_s in run(ROOT, waiting, args.jobs, args.timeout):
            unnoticed += why != ""
            line = f"{'NOT NOTICED' if why else 'noticed'} in {took_s:.1f} s  {fault}  {why}".rstrip()
            for file in (sys.stdout, log):
                print(line, file=file, flush=True) if file else None
    print(f"{len(chosen) - unnoticed} of {len(chosen)} noticed, {unnoticed} were not")
    return int(unnoticed > 0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of the imports; each run of tests has its own filters
    sys.exit(main(sys.argv[1:]))
