"""Claims about distributed/flight_recorder.py, and the watch that writes its records, with the recorder of gloo."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.flight_recorder import fr_trace

from dtmega.distributed import exit_codes, flight_recorder, process, watchdog
from dtmega.distributed.watchdog import Watch
from tests.distributed.test_process import PATIENCE_S, ROOT, script
from tests.ranks import forks

C10D = torch._C._distributed_c10d  # pyright: ignore[reportAttributeAccessIssue]
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def never_comes() -> None:
    while True:
        time.sleep(1)


def wait_in(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(3, 5), group=group)


def hang(folder: str, patience_s: float) -> None:
    """Two ranks are in step until rank 1 does not come to a sum of a group of theirs; stderr goes to a file."""
    rank = dist.get_rank()
    group = dist.new_group([0, 1], group_desc="tp")
    assert isinstance(group, dist.ProcessGroup)
    with Path(folder, f"stderr-{rank}").open("w") as file, contextlib.redirect_stderr(file):
        watch = Watch(20, 3 if rank == 1 else patience_s, rank, None, Path(folder, "run", "flight-recorder"))
        watch.share(FileStore(f"{folder}/beats", 2), 2)
        for _ in range(3):
            dist.all_reduce(torch.ones(2))
            dist.broadcast(torch.ones(2), 0, group=group)
        watch.beat(7, "forward")
        if rank == 1:
            never_comes()
        try:
            wait_in(group)
        except RuntimeError as error:
            watch.record_exit(exit_codes.FAILED, "a consequence")
            process.leave(watch.report_first_exit(error))


def ranks_in(records: Path) -> tuple[Path, list[str]]:
    """The only folder in there, and the names of its files of ranks; a thread that was ended may have left a part."""
    (folder,) = records.iterdir()
    return folder, sorted(path.name for path in folder.iterdir() if path.suffix != ".part")


# In the second case rank 0 is ended by the connection that breaks when the watch ends rank 1.
@pytest.mark.parametrize("patience_s", [3, 60])
def test_after_a_hang_torchs_reader_names_the_collective_that_one_rank_waits_in_and_the_other_has_not_come_to(
    tmp_path, caplog, patience_s
):
    ended = forks().run(2, hang, str(tmp_path), patience_s)
    assert [rank.code for rank in ended] == [exit_codes.HUNG, exit_codes.HUNG]
    folder, names = ranks_in(tmp_path / "run" / "flight-recorder")
    assert names == ["rank_0", "rank_1"]
    said = "".join((tmp_path / f"stderr-{rank}").read_text() for rank in (0, 1))
    line = r"^rank [01]: last collectives in (\S+); to compare those of all ranks: (.+)$"
    ((path, command),) = re.findall(line, said, re.MULTILINE)
    assert Path(path).parent == folder
    assert shlex.split(command) == ["torchfrtrace", str(folder)]
    if TORCH >= (2, 13):
        caplog.set_level("INFO", "Flight Recorder")
        fr_trace.main(shlex.split(command)[1:])
        gc.enable()  # which the reader has switched off
        lines = "\n".join(caplog.messages)
        assert re.findall(r"^Not all ranks joining collective, sequence number: (\d+)$", lines, re.M) == ["4"]
        told = dict(re.findall(r"^(group info|collective|missing ranks|input sizes): (.+)$", lines, re.M))
        assert re.fullmatch(r"\w+:tp", told.pop("group info"))
        assert told == {"collective": "gloo:all_reduce", "missing ranks": "{1}", "input sizes": "[[3, 5]]"}
        assert re.search(r"^wait_in at .*test_flight_recorder\.py:\d+$", lines, re.M)
    else:  # the reader of torch 2.11 refuses every record of gloo
        records = [pickle.loads((folder / f"rank_{rank}").read_bytes()) for rank in (0, 1)]
        waiting, hanging = ([entry["profiling_name"] for entry in record["entries"]] for record in records)
        assert waiting == [*hanging, "gloo:all_reduce"]


def stuck(folder: str) -> None:
    """Rank 0 waits in a collective, and both have a signal; stderr goes to a file."""
    rank = dist.get_rank()
    with Path(folder, f"stderr-{rank}").open("w") as file, contextlib.redirect_stderr(file):
        watch = Watch(1 if rank == 1 else 60, 0, rank, None, Path(folder, "flight-recorder"))
        watch.share(FileStore(f"{folder}/beats", 2), 2)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGTERM)
        if rank == 1:
            never_comes()
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            process.leave(watch.report_stuck(f"before this: {error}"))


def test_ranks_that_are_stuck_after_a_signal_leave_their_records_too(tmp_path):
    assert [rank.code for rank in forks().run(2, stuck, str(tmp_path))] == [exit_codes.STUCK, exit_codes.STUCK]
    assert ranks_in(tmp_path / "flight-recorder")[1] == ["rank_0", "rank_1"]


def hang_alone(records: str, holds_the_lock: bool) -> None:
    """A rank hangs after a collective; stderr goes to a file."""
    if holds_the_lock:
        watchdog.RECORD_S = 1.0
        # Longer than that limit, and shorter than the one before it.
        C10D._dump_fr_trace = lambda **_: ctypes.PyDLL(None).sleep(6)
    with Path(f"{records}.stderr").open("w") as file, contextlib.redirect_stderr(file):
        watch = Watch(20, 1, 0, None, Path(records))
        watch.share(HashStore(), 1)
        watch.before_exit(Path(f"{records}.closed").touch)
        never_comes()


def test_a_folder_that_cannot_be_written_changes_no_exit_code_and_is_said(tmp_path):
    (tmp_path / "records").touch()
    (ended,) = forks().run(1, hang_alone, str(tmp_path / "records"), False)
    assert ended.code == exit_codes.HUNG
    said = (tmp_path / "records.stderr").read_text()
    assert re.search(r"^rank 0: flight recorder: (NotADirectoryError|FileExistsError): ", said, re.MULTILINE)
    assert "torchfrtrace" not in said


def test_a_recorder_that_lets_no_python_run_keeps_neither_the_process_nor_what_is_to_be_done_before_its_end(tmp_path):
    (ended,) = forks().run(1, hang_alone, str(tmp_path / "records"), True)
    assert (ended.code, ended.late) == (exit_codes.FAILED, False)
    assert (tmp_path / "records.closed").exists()


SWITCHED_OFF = """
import time
import torch
import torch.distributed as dist
from pathlib import Path
from dtmega.distributed.watchdog import Watch
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
watch = Watch(20, 1, 0, None, Path("records"))
watch.share(dist.HashStore(), 1)
time.sleep(100)
"""


def test_nothing_is_written_or_said_where_nothing_was_recorded(tmp_path):
    ended = subprocess.run(
        [sys.executable, script(tmp_path, SWITCHED_OFF)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TORCH_FR_BUFFER_SIZE": "0"},
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == exit_codes.HUNG
    assert not (tmp_path / "records").exists()
    assert "flight recorder" not in ended.stderr
    assert "collectives" not in ended.stderr


def test_for_a_gpu_the_recorder_is_switched_on_with_a_bounded_buffer_unless_the_user_has_set_its_size(monkeypatch):
    def sizes(device: str, **before: str) -> dict[str, str]:
        with monkeypatch.context() as context:
            for name in flight_recorder.BUFFER_SIZE:
                # Set first, so that whatever the function sets is undone.
                context.setenv(name, "")
                context.delenv(name)
            for name, value in before.items():
                context.setenv(name, value)
            flight_recorder.switch_on(torch.device(device))
            return {name: os.environ[name] for name in flight_recorder.BUFFER_SIZE if name in os.environ}

    assert sizes("cuda:0") == {"TORCH_FR_BUFFER_SIZE": "2000"}
    assert sizes("cuda:0", TORCH_FR_BUFFER_SIZE="0") == {"TORCH_FR_BUFFER_SIZE": "0"}
    assert sizes("cuda:0", TORCH_NCCL_TRACE_BUFFER_SIZE="9") == {"TORCH_NCCL_TRACE_BUFFER_SIZE": "9"}
    assert sizes("cpu") == {}


def test_a_record_of_nccl_is_written_as_it_is(tmp_path, monkeypatch):
    content = pickle.dumps({"entries": [{"profiling_name": "nccl:all_reduce"}], "pg_config": {"0": {}}}, protocol=2)
    monkeypatch.setattr(C10D, "_dump_nccl_trace", lambda includeStackTraces: content, raising=False)
    path = flight_recorder.dump(tmp_path / "new", 3)
    assert path == str(tmp_path / "new" / "rank_3")
    assert Path(path).read_bytes() == content


def test_where_nccl_has_recorded_nothing_the_record_is_that_of_gloo(tmp_path, monkeypatch):
    of_gloo = [{"profiling_name": "gloo:barrier"}]
    monkeypatch.setattr(C10D, "_dump_nccl_trace", lambda **_: pickle.dumps({"entries": []}), raising=False)
    monkeypatch.setattr(C10D, "_dump_fr_trace", lambda **_: pickle.dumps({"entries": of_gloo}))
    path = flight_recorder.dump(tmp_path, 0)
    assert pickle.loads(Path(path).read_bytes())["entries"] == of_gloo


def test_a_record_whose_stacks_cannot_be_read_in_time_is_written_without_them(tmp_path, monkeypatch):
    forever = threading.Event()

    def slow(includeStackTraces: bool) -> bytes:
        if includeStackTraces:
            forever.wait(2 * flight_recorder.PATIENCE_S)
        return pickle.dumps({"entries": [{}]})

    monkeypatch.setattr(C10D, "_dump_nccl_trace", slow, raising=False)
    started = time.monotonic()
    try:
        path = flight_recorder.dump(tmp_path, 0, patience_s=0.5)
        assert time.monotonic() - started < flight_recorder.PATIENCE_S
        assert pickle.loads(Path(path).read_bytes()) == {"entries": [{}]}
    finally:
        forever.set()


def test_a_disk_that_hangs_keeps_a_process_no_longer_than_the_patience(tmp_path, monkeypatch):
    forever = threading.Event()
    monkeypatch.setattr(C10D, "_dump_nccl_trace", lambda **_: pickle.dumps({"entries": [{}]}), raising=False)
    monkeypatch.setattr(os, "fsync", lambda _: forever.wait(2 * flight_recorder.PATIENCE_S))
    started = time.monotonic()
    try:
        assert flight_recorder.dump(tmp_path, 0, patience_s=0.5) == ""
        assert time.monotonic() - started < flight_recorder.PATIENCE_S
    finally:
        forever.set()


class Clock:
    """Stands in for `datetime`: a time that reads as the given name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def now(self, _: object) -> Clock:
        return self

    def strftime(self, _: str) -> str:
        return self._name


def test_each_start_writes_into_a_folder_of_its_own_and_all_ranks_of_a_start_into_the_same(tmp_path, monkeypatch):
    folders = []
    monkeypatch.setattr(flight_recorder, "dump", lambda folder, rank: folders.append(folder))
    for store in (HashStore(), HashStore()):
        for rank in (0, 1):
            monkeypatch.setattr(watchdog, "datetime", Clock(f"start-{len(folders)}"))
            watch = Watch(60, 0, rank, None, tmp_path)
            watch.share(store, 2)
            watch.report_stuck("in 1 s")
            watch.close()
    assert folders == [tmp_path / name for name in ("start-0", "start-0", "start-2", "start-2")]


def test_a_rank_that_leaves_because_another_failed_or_without_a_folder_writes_no_record(tmp_path, monkeypatch):
    dumps = []
    monkeypatch.setattr(flight_recorder, "dump", lambda *arguments: dumps.append(arguments))
    for code, records in ((exit_codes.FAILED, tmp_path), (exit_codes.HUNG, None)):
        watch = Watch(60, 0, 0, None, records)
        watch.record_exit(code, "rank 1: nothing for 6 s")
        watch.report_first_exit(RuntimeError("Connection closed by peer"))
        watch.close()
    assert dumps == []
