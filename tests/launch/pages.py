"""What docs/ say of the exit codes of a run, for tests of the files in launch/."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| (\d+) \| (?:.+) \| (.+) \|$", re.MULTILINE)


def resumable_codes() -> dict[int, bool]:
    """True for each code after which the same command resumes the run, by the table in docs/reliability.md."""
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    table = page.partition("## How a run has ended")[2].partition("\n## ")[0]
    return {int(code): "start the same command again" in advice for code, advice in ROW.findall(table)}
