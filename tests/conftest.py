import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.object_server import Server, serving

# A file stays in one process, and no long one should come last. Those that mostly wait (watch, torchrun, job) are each
# beside one whose ranks keep both cores busy.
LONGEST = (
    "test_parity.py",
    "distributed/test_watchdog.py",
    "interop/hf/tp/test_plan.py",
    "distributed/test_torchrun.py",
    "interop/hf/test_training.py",
    "distributed/test_process.py",
    "plans/test_plans.py",
    "test_resume.py",
    "test_train.py",
    "test_wire.py",
)

# Inductor would compile eight small programs to learn what the CPU says of itself, and a header, which takes longer
# than it saves for a handful of kernels, and would start processes for each core.
for _name, _value in (("VEC_ISA_OK", "1"), ("CPP_CACHE_PRECOMPILE_HEADERS", "0"), ("COMPILE_THREADS", "1")):
    os.environ.setdefault(f"TORCHINDUCTOR_{_name}", _value)

# Until all tests are imported: what they import is no garbage.
gc.disable()

# A shell may start a job in the background with these ignored, and what the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first; all others as they are."""
    import torch  # here, which the process that only hands out tests does not reach

    # Two threads on two busy cores wait for each other longer than one of them computes.
    torch.set_num_threads(1)
    tests = Path(__file__).parent
    # A run collects garbage when it ends, and would look through all that is imported each time.
    gc.freeze()
    gc.enable()
    places = {tests / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(LONGEST)))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Fork the server of `ranks.py`, if a test may need it, before any test and outside of pytest's filters."""
    ranks = sys.modules.get("tests.ranks")
    if ranks is not None:
        ranks.start_method = "fork"
        # What ranks print is captured with what tests print.
        capture = session.config.pluginmanager.getplugin("capturemanager")
        capture.resume_global_capture()
        ranks.forks()
        capture.suspend_global_capture()
    return (yield)


@pytest.fixture(scope="module", autouse=True)
def groups_end_with_their_file() -> Iterator[None]:
    """Destroy a process group that a test has left: the next file of this process may start one."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    """Documents of a counting pattern, which any model learns in a few steps, by the tokenizer `bytes`."""
    import numpy as np

    from dtmega.data.indexed_files.writer import IndexedWriter

    prefix = tmp_path_factory.mktemp("corpus") / "counting"
    end_of_document = 256
    rng = np.random.default_rng(0)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(200):
            start, length = rng.integers(0, 200), rng.integers(20, 80)
            writer.add([*((start + np.arange(length)) % 256).tolist(), end_of_document])
    return str(prefix)


@pytest.fixture
def object_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """An empty object store on the loopback interface, which s3:// URLs lead to."""
    with serving() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of object stores that gives up soon."""
    from dtmega.files import object_requests

    monkeypatch.setattr(object_requests, "MAX_RETRIES", 2)
    monkeypatch.setattr(object_requests, "PAUSE_S", 0.01)
    monkeypatch.setattr(object_requests, "REQUEST_S", 0.2)
    monkeypatch.setattr(object_requests, "RETRY_S", 0.5)
