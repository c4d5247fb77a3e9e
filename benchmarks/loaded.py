"""Print what a short run loads of dtmega, lines by room: `python benchmarks/loaded.py [train.py's arguments ...]`.

    python benchmarks/loaded.py                                          two steps of bloom.toml on one process
    python benchmarks/loaded.py --config moe.toml --optim.name muon      another run
    python benchmarks/loaded.py --files                                  each file as well

The run has a validation, a save and a sample, and it runs in an interpreter of its own, in a temporary folder. A corpus
that is not prepared yet is prepared by an earlier interpreter, so that only training counts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHORT = (
    *("--run.device", "cpu", "--train.steps", "2", "--eval.interval", "2", "--eval.steps", "1"),
    *("--eval.sample_tokens", "2", "--data.num_workers", "0", "--log.tensorboard", "false"),
)
RUN = """
import sys
from dtmega import train
assert train.main(sys.argv[1:]) == 0
print("\\n".join(module.__file__ for name, module in sorted(sys.modules.items())
                if name.split(".")[0] == "dtmega" and getattr(module, "__file__", None)))
"""


def loaded(argv: list[str], folder: Path) -> list[Path]:
    """The files of dtmega that a run with these arguments has loaded when it ends, below the package.

    Args:
        argv: arguments of train.py.
        folder: folder in which the run and its corpus lie.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    lines: list[str] = []
    for run in ("first", "second"):
        command = [sys.executable, "-c", RUN, *argv, *SHORT, "--run.dir", run]
        lines = subprocess.run(
            command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout.splitlines()
    return [Path(line).relative_to(ROOT / "dtmega") for line in lines if line.startswith(str(ROOT / "dtmega"))]


def n_lines(file: Path) -> int:
    """The number of lines of a file of the package."""
    return len((ROOT / "dtmega" / file).read_text(encoding="utf-8").splitlines())


def main() -> None:
    argv = [word for word in sys.argv[1:] if word != "--files"] or ["--config", "bloom.toml"]
    with tempfile.TemporaryDirectory() as folder:
        files = loaded(argv, Path(folder))
    rooms: Counter[str] = Counter()
    for file in files:
        rooms[file.parts[0] if len(file.parts) > 1 else "dtmega"] += n_lines(file)
        if "--files" in sys.argv:
            print(f"{n_lines(file):5} {file}")
    print(
        f"{rooms.total():,} lines in {len(files)} files: "
        + ", ".join(f"{room} {n:,}" for room, n in rooms.most_common())
    )


if __name__ == "__main__":
    main()
