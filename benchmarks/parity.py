"""Print each layout's largest relative deviation from one process, for docs/layouts.md: `python benchmarks/parity.py`.

The script trains the debug model of tests/layouts.py for 20 steps on every layout, with CPU processes on this machine.
To train only some layouts, name these layouts: `python benchmarks/parity.py "bert, tp 3" "bert, HSDP 2 x 2"`.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.layouts import LAYOUTS, Run, deviation, family, train_debug_model, truth_keys, write_data


def main() -> None:
    rows = ["| layout | processes | loss | gradient norm | worst parameter | all |", "| --- |" + " --- |" * 5]
    with tempfile.TemporaryDirectory() as folder:
        data = write_data(Path(folder))
        truths: dict[str, Run] = {}
        for name in sys.argv[1:] or LAYOUTS:
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
