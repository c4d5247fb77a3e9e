"""Check that pip can install each extra of pyproject.toml under constraints.txt; nothing is installed.

    python tools/check_extras.py [EXTRA ...]        default: all

Prints a line for each extra. Packages that this environment has already are kept if the constraints allow them.
Exit code: 0 if pip finds versions for all of them, 1 if not.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import tomli

ROOT = Path(__file__).resolve().parent.parent
PIP = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run"]


def main(names: Sequence[str]) -> int:
    project = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    failed = 0
    for extra in names or project["optional-dependencies"]:
        command = [*PIP, "-c", "constraints.txt", f".[{extra}]"]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if result.returncode == 0:
            print(f"{extra}: installs", flush=True)
        else:
            failed += 1
            print(f"{extra}: does not install\n{result.stderr}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
