"""Resume each layout's checkpoint on each layout, and compare with uninterrupted runs: `python benchmarks/resume.py`.

The script runs the 7 x 7 pairs of layouts in tests/resumed.py (dropout, tied embedding, V = 131, checkpoint during the
batch ramp-up), with CPU processes on this machine. A cell of the table is the largest relative difference between the
losses of the ten steps after the checkpoint. "bits" means that all losses, gradient norms and parameters are
bit-identical. A pair of equal layouts passes if it is bit-identical. A pair of different layouts passes within the
bounds of `Deviation.within_bounds`. With `--pad 48`, the embedding has 144 rows. The exit code is 1 if a pair fails.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.layouts import write_text
from tests.resumed import KEYS, LAYOUTS, Deviation, Record, deviation, rest, train_all, whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pad", type=int, default=1, help="[model] pad_vocab_to_multiple")
    parser.add_argument("--eps", type=float, default=KEYS["optim.eps"], help="[optim] eps (%(default)s)")
    args = parser.parse_args()
    changed = {"model.pad_vocab_to_multiple": args.pad, "optim.eps": args.eps}
    with tempfile.TemporaryDirectory() as name:
        found = measure(Path(name), changed)
    print("| written by, read by: | " + " | ".join(LAYOUTS) + " |\n| --- |" + " --- |" * len(LAYOUTS))
    for writer in LAYOUTS:
        cells = ["bits" if (d := found[writer, reader]).same_bits else f"{d.loss:.0e}" for reader in LAYOUTS]
        print(f"| {writer} | " + " | ".join(cells) + " |")
    passed = [d.same_bits if writer == reader else d.within_bounds() for (writer, reader), d in found.items()]
    first, loss, norm, parameter = (max(d[i] for d in found.values()) for i in range(4))
    print(f"largest difference: first loss {first:.0e}, loss {loss:.0e}, grad_norm {norm:.0e}, weights {parameter:.0e}")
    print(f"{sum(passed)} of {len(passed)} pairs")
    return 0 if all(passed) else 1


def measure(folder: Path, changed: dict[str, float]) -> dict[tuple[str, str], Deviation]:
    keys = KEYS | write_text(folder) | changed
    writers = {layout: whole(layout, folder / layout, keys) for layout in LAYOUTS}
    readers = {
        (writer, layout): rest(layout, training.folder, folder / f"{writer} to {layout}", keys)
        for writer, training in writers.items()
        for layout in LAYOUTS
    }
    train_all([*writers.values(), *readers.values()])
    truths = {writer: Record(training.folder) for writer, training in writers.items()}
    return {pair: deviation(Record(training.folder), truths[pair[0]]) for pair, training in readers.items()}


if __name__ == "__main__":
    sys.exit(main())
