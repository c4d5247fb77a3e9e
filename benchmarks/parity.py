"""Print each layout's largest relative deviation from one process, for docs/layouts.md: `python benchmarks/parity.py`.

Trains the debug model of tests/layouts.py for 20 steps on each layout, on CPU processes of this machine; on some of
them where they are named: `python benchmarks/parity.py "bert, tp 3" "bert, HSDP 2 x 2"`. The word `cp` names the rows
of the table whose ranks share sequences; the other layouts over cp have a row only where they are named.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.layouts import LAYOUTS, OF_CP, Run, deviation, family, train_debug_model, truth_keys, write_data

FORMS = ("gather", "heads")
SHARED = [f"{prefix}cp 2, {form}" for prefix in OF_CP for form in FORMS]
SHARED += [f"cp 2 x {axis}, {form}" for axis in ("tp 2", "pp 2, 1F1B", "dp_shard 2") for form in FORMS]


def asked(words: list[str]) -> list[str]:
    """The names of the layouts that the command line asks for."""
    if not words:
        return [name for name, (_, keys) in LAYOUTS.items() if "mesh.cp" not in keys or name in SHARED]
    return [name for word in words for name in (SHARED if word == "cp" else [word])]


def main() -> None:
    rows = ["| layout | processes | loss | gradient norm | worst parameter | all |", "| --- |" + " --- |" * 5]
    with tempfile.TemporaryDirectory() as folder:
        data = write_data(Path(folder))
        truths: dict[str, Run] = {}
        for name in asked(sys.argv[1:]):
            n, keys = LAYOUTS[name]
            wanted, text = truth_keys(keys), data[family(keys)]
            if str(wanted) not in truths:
                truths[str(wanted)] = train_debug_model(1, text | wanted, Path(tempfile.mkdtemp(dir=folder)))
            run = train_debug_model(n, text | keys, Path(tempfile.mkdtemp(dir=folder)))
            found = deviation(run, truths[str(wanted)])
            rows.append(f"| {name} | {n} | " + " | ".join(f"{value:.0e}" for value in found.values()) + " |")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
