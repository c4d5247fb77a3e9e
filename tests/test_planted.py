"""Claims about the table of planted faults, and about the runner that says which ones no test notices."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import planted

CODE = "import math\n\n\ndef add(a, b):\n    total = a + b\n    return math.trunc(total)\n"
TESTS = "import code_under_test\n\n\ndef test_the_sum():\n    assert code_under_test.add(2, 2) == 4\n"
ENTRY = """
[[fault]]
file = "code_under_test.py"
fault = "{says}"
line = "a + b"
planted = "{planted}"
tests = ["tests/test_code.py::test_the_sum"]
"""


def test_every_entry_fits_the_code():
    assert [*planted.mistakes(planted.ROOT, planted.table(planted.ROOT))] == []


def test_the_runner_lists_a_fault_that_no_test_notices_and_leaves_the_code_as_it_is(tmp_path: Path):
    files = {"code_under_test.py": CODE, "tests/test_code.py": TESTS, "tests/__init__.py": ""}
    entries = {
        "a difference": "a - b",
        "a product, which is the same of 2 and 2": "a * b",
        "the sum of two": "2 + 2",
        "a function that is gone": "math.plus(a, b)",
    }
    files["tests/planted/all.toml"] = "".join(ENTRY.format(says=says, planted=p) for says, p in entries.items())
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copy(planted.__file__, tmp_path / "tests")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    # What the tests of this repository import, those of that one do without.
    code = "import planted; planted.IMPORTS = (); raise SystemExit(planted.main(['--jobs=1', '--log=log']))"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "tests")}
    run = [sys.executable, "-c", code]
    ended = subprocess.run(run, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    seen = {line.partition("  ")[2]: line.startswith("noticed") for line in ended.stdout.splitlines()[1:-1]}
    passed = "passed: tests/test_code.py::test_the_sum"
    assert seen == {
        "code_under_test.py: a difference": True,
        f"code_under_test.py: a product, which is the same of 2 and 2  {passed}": False,
        f"code_under_test.py: the sum of two  {passed}": False,
        "code_under_test.py: a function that is gone  what is planted names what is not there: AttributeError: module "
        "'math' has no attribute 'plus'": False,
    }
    assert ended.returncode == 1
    assert (tmp_path / "code_under_test.py").read_text() == CODE
    # What another run with the same log passes over.
    assert planted.noticed((tmp_path / "log").read_text()) == {"code_under_test.py: a difference"}


def test_an_entry_whose_line_or_test_is_gone_is_a_mistake():
    fault = planted.table(planted.ROOT)[0]
    moved = [fault._replace(line="no such line"), fault._replace(tests=("tests/test_house.py::test_no_such",))]
    assert [message.rpartition(": ")[2] for message in planted.mistakes(planted.ROOT, moved)] == [
        "'no such line'",
        "there is no tests/test_house.py::test_no_such",
    ]


def test_a_planted_text_that_names_what_is_gone_is_a_mistake():
    fault = next(one for one in planted.table(planted.ROOT) if one.file.endswith(".py"))
    gone = fault._replace(line="from __future__ import annotations\n", planted="no_such_name\n")
    assert [*planted.mistakes(planted.ROOT, [gone])] == [
        f"{fault}: planted, the linter says: Undefined name `no_such_name`"
    ]


def test_an_error_of_import_is_no_notice(tmp_path: Path):
    (tmp_path / "test_one.py").write_text("from math import no_such\n\n\ndef test_one(): ...\n")
    failures = planted.Failures(["test_one.py::test_one"])
    pytest.main([str(tmp_path / "test_one.py"), "-p", "no:cacheprovider"], plugins=[failures])
    assert (failures.failed, len(failures.gone)) == (set(), 1)
    assert failures.gone[0].startswith("ImportError: cannot import name 'no_such' from 'math'")
