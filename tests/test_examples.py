"""examples/*.py say what they need; tests/test_notebook.py and docs/hugging-face.md show what they do."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_without_arguments_says_in_one_line_what_it_needs(path: Path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(path)])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(path), run_name="__main__")
    assert stop.value.code == 2
    assert re.fullmatch(rf"usage: .*examples/{path.name} DIR OUT.*\n", capsys.readouterr().err)
