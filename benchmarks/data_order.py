"""Measure the memory of a loader worker, and the time to its first sample, for a corpus of many documents.

    python benchmarks/data_order.py [--documents 20000000] [--workers 2] [--samples 2000]

The corpus has documents of 1 to 39 tokens. All workers start together, as the workers of one node do. For each worker,
the script prints the memory that the samples take (without mapped files), the seconds from opening the corpus to the
first sample, and the time of each further sample.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from queue import Queue
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.corpora import write_corpus
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.sampling.samples import Samples


def own_bytes() -> int:
    """The memory of this process, without mapped files, because the kernel shares their pages and can drop them."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


def worker(samples: Samples, n_samples: int, results: Queue[Any]) -> None:
    before_bytes, started_s = own_bytes(), time.time()
    _ = samples[0]
    first_s = time.time() - started_s
    for g in range(1, n_samples):
        _ = samples[g]
    each_s = (time.time() - started_s - first_s) / max(1, n_samples - 1)
    results.put((own_bytes() - before_bytes, first_s, each_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=20_000_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=2000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        write_corpus(Path(folder, "corpus"), args.documents, longest=39)
        samples = Samples(IndexedDataset(Path(folder, "corpus")), (0, args.documents), 2048, 1234, "train")
        context = multiprocessing.get_context("spawn")
        for attempt in ("first start", "again"):
            results = context.Queue()
            processes = [
                context.Process(target=worker, args=(samples, args.samples, results)) for _ in range(args.workers)
            ]
            for process in processes:
                process.start()
            for _ in processes:
                grown_bytes, first_s, each_s = results.get()
                figures = f"{grown_bytes / 1e6:.0f} MB of its own, first sample after {first_s:.2f} s"
                print(f"{attempt}: {figures}, then {each_s * 1e6:.0f} us each", flush=True)
            for process in processes:
                process.join()


if __name__ == "__main__":
    main()
