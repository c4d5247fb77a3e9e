"""Print what a short run loads of dtmega, lines by room: `python benchmarks/loaded.py [train.py's arguments ...]`.

    python benchmarks/loaded.py                                          two steps of bloom.toml on one process
    python benchmarks/loaded.py --config moe.toml --optim.name muon      another run
    python benchmarks/loaded.py --ranks 2 --config llama.toml --mesh.tp 2
    python benchmarks/loaded.py --files                                  each file as well

The run has a validation, a save and a sample, in float32, which all machines can do. It runs in interpreters of its
own, in a temporary folder, after another one has prepared its corpus: `tests/test_closure.py` asks the same way.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHORT = (
    *("--run.device", "cpu", "--run.dir", "run", "--precision.params", "float32", "--train.steps", "2"),
    *("--eval.interval", "2", "--eval.steps", "1", "--eval.sample_tokens", "2"),
    *("--data.num_workers", "0"),  # -1, the default, decides by the time that two batches take
)
PREPARE = """
import sys
from dtmega import config, families
from dtmega.data.text import open_text
cfg = families.resolve(config.load(sys.argv[1:]))
open_text(cfg, families.objective(cfg))
"""
RUN = """
import os, sys
from pathlib import Path
from dtmega import train
from dtmega.distributed import process

if __name__ == "__main__":  # data workers import this file
    code = train.main(sys.argv[1:])
    loaded = [module for name, module in sys.modules.items() if name.split(".")[0] == "dtmega"]
    files = [file for module in loaded if (file := getattr(module, "__file__", None))]
    Path("loaded-" + os.environ.get("RANK", "0")).write_text("\\n".join(files))
    process.leave(code)
"""


def prepare(argv: Sequence[str], folder: Path) -> None:
    """Prepare the corpus of a run with these arguments of train.py, which may name files in `folder`."""
    subprocess.run([sys.executable, "-c", PREPARE, *argv, *SHORT], cwd=folder, env=environment(), check=True)


def loaded(argv: Sequence[str], folder: Path, n_ranks: int = 1) -> list[Path]:
    """The files of dtmega, below the package, that any rank has loaded when a run with these arguments ends.

    Args:
        argv: arguments of train.py.
        folder: empty folder in which the run runs.
        n_ranks: number of processes.
    """
    program = folder / "run.py"
    program.write_text(RUN, encoding="utf-8")
    launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node"]
    launched = [*launch, str(n_ranks)] if n_ranks > 1 else []
    command = [sys.executable, *launched, str(program), *argv, *SHORT]
    ended = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    files = {line for rank in range(n_ranks) for line in (folder / f"loaded-{rank}").read_text().splitlines()}
    return sorted(Path(file).relative_to(ROOT / "dtmega") for file in files)


def environment() -> dict[str, str]:
    """The environment of a run: this tree's dtmega, and one thread."""
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def n_lines(file: Path) -> int:
    """The number of lines of a file of the package."""
    return len((ROOT / "dtmega" / file).read_text(encoding="utf-8").splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--files", action="store_true", help="print each file as well")
    parser.add_argument("--ranks", type=int, default=1, help="number of processes")
    options, argv = parser.parse_known_args()
    argv = argv or ["--config", "bloom.toml"]
    with tempfile.TemporaryDirectory() as folder:
        prepare(argv, Path(folder))
        files = loaded(argv, Path(folder), options.ranks)
    rooms: Counter[str] = Counter()
    for file in files:
        rooms[file.parts[0] if len(file.parts) > 1 else "dtmega"] += n_lines(file)
        if options.files:
            print(f"{n_lines(file):5} {file}")
    print(
        f"{rooms.total():,} lines in {len(files)} files: "
        + ", ".join(f"{room} {n:,}" for room, n in rooms.most_common())
    )


if __name__ == "__main__":
    main()
