"""exit_codes.py: the codes, and the reason that torchrun prints. tests/test_endings.py has the tests of exit.json."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from dtmega.distributed import exit_codes

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "running.md").read_text()
# Other people's scripts ask for these.
CODES = {
    **{"DONE": 0, "FAILED": 1, "REFUSED": 2, "DAMAGED": 3, "DOES_NOT_FIT": 4, "DIFFERS": 5},
    **{"PREEMPTED": 75, "STUCK": 76, "HUNG": 77},
}


def test_the_exit_codes_are_those_that_the_pages_name():
    assert {name: getattr(exit_codes, name) for name in CODES} == CODES
    rows = re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", exit_codes.__doc__ or "", re.MULTILINE)
    assert {name: int(code) for code, name in rows} == CODES
    assert [code for code in CODES.values() if not re.search(rf"\b{code}\b", PAGE)] == []


def test_torchruns_summary_ends_with_the_reason_of_whoever_left_first(tmp_path: Path, monkeypatch):
    failures = {}
    for rank, (code, reason) in enumerate(
        [(exit_codes.HUNG, "rank 1 behind: step 7 in data"), (exit_codes.DONE, "finished")]
    ):
        path = tmp_path / f"error-{rank}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        assert exit_codes.ExitStatus().set(code, reason) == code
        failures[rank] = ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file=str(path))
    summary = ChildFailedError("train.py", failures).format_msg()
    assert [path.name for path in tmp_path.iterdir()] == ["error-0.json"]
    assert summary.partition("Root Cause")[2].count("traceback : rank 1 behind: step 7 in data\n") == 1, summary


def test_a_reason_that_the_agent_cannot_be_told_changes_no_code(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))
    assert exit_codes.ExitStatus().set(exit_codes.REFUSED, "no such key") == exit_codes.REFUSED


@pytest.mark.parametrize(("before", "code"), [(None, 1), (0, 1), (75, 1), (2, 2), (76, 76), (77, 77)])
def test_an_error_replaces_only_the_codes_that_say_that_all_is_saved(tmp_path: Path, before: int | None, code: int):
    status = exit_codes.ExitStatus()

    def fail() -> None:
        with status.recorded_in(tmp_path, lambda: (3, "")):
            if before is not None:
                status.set(before, "set before")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk"):
        fail()
    record = exit_codes.ExitRecord.read(tmp_path)
    assert record is not None
    assert (record.code, record.reason) == (code, "OSError: the disk is full" if code == 1 else "set before")
