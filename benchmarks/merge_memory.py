"""Measure the memory of a merge, and of opening its result, for two corpora of which one has ten times the documents.

    python benchmarks/merge_memory.py [--documents 5000000] [--parts 5] [--folder DIR]

The documents have one or two tokens, so that their number, not their length, takes the memory. Of each process, the
script prints the largest anonymous memory (RssAnon of /proc, read every few milliseconds), which leaves out the mapped
files. It ends with exit code 1 if two peaks of the same command differ by more than 64 MiB. With the default, the
folder needs 2.5 GB.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.corpora import write_corpus
from dtmega.data.indexed_files.dataset import IndexedDataset

ROOT = Path(__file__).resolve().parent.parent
MOST_MIB = 64
OPEN = "import sys; from dtmega.data.indexed_files.dataset import IndexedDataset; IndexedDataset(sys.argv[1])"


def peak_mib(*arguments: str) -> tuple[float, float]:
    """The largest anonymous memory of a Python process, in MiB, and its seconds."""
    started_s = time.perf_counter()
    peak_kib = 0
    with subprocess.Popen([sys.executable, *arguments], cwd=ROOT) as process:
        while process.poll() is None:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            # A process that has just ended has no memory, and no such line.
            found = [int(line.split()[1]) for line in lines if line.startswith("RssAnon:")]
            peak_kib = max(peak_kib, *found, 0)
            time.sleep(0.004)
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)}: exit code {process.returncode}")
    return peak_kib / 1024, time.perf_counter() - started_s


def measure(n_documents: int, n_parts: int, parent: Path) -> dict[str, float]:
    """The peaks of a merge and of opening its result, in MiB, by name."""
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        parts = [f"{folder}/part-{i}" for i in range(n_parts)]
        for part in parts:
            write_corpus(Path(part), n_documents // n_parts, longest=2)
        merged = f"{folder}/merged"
        merge, merge_s = peak_mib("-m", "dtmega", "merge", "--input", *parts, "--output", merged)
        opened, opened_s = peak_mib("-c", OPEN, merged)
        dataset = IndexedDataset(merged)
        assert len(dataset.document_index) == n_documents + 1
        size_mb = Path(f"{merged}.idx").stat().st_size / 1e6
        print(f"{n_documents:,} documents, {dataset.n_tokens:,} tokens, .idx of {size_mb:,.0f} MB:", flush=True)
        print(f"    merge  {merge:6.1f} MiB, {merge_s:5.1f} s", flush=True)
        print(f"    open   {opened:6.1f} MiB, {opened_s:5.1f} s", flush=True)
        return {"merge": merge, "open": opened}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=5_000_000, help="of the smaller corpus")
    parser.add_argument("--parts", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    few = measure(args.documents, args.parts, args.folder)
    many = measure(10 * args.documents, args.parts, args.folder)
    differences = {name: abs(many[name] - few[name]) for name in few}
    for name, mib in differences.items():
        print(f"{name}: {mib:.1f} MiB apart, expected at most {MOST_MIB}")
    return int(max(differences.values()) > MOST_MIB)


if __name__ == "__main__":
    sys.exit(main())
