"""Time how long Megatron's sample order takes to make, how long samples in this order take to read, and blending.

    python benchmarks/megatron_order.py [--documents 20000000] [--samples 100000000] [--corpora 3 60]

The corpus has documents of 1 to 999 tokens, which are all 0. S is chosen so that one epoch has about `--samples`
samples.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.corpora import write_corpus
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.megatron.blend import greedy
from dtmega.data.megatron.cache import OrderName
from dtmega.data.megatron.index import Asked
from dtmega.data.megatron.order import MegatronSamples


def timed(what: str, started_s: float) -> None:
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{what}: {time.perf_counter() - started_s:.1f} s, at most {peak_mb:.0f} MB until here", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=20_000_000)
    parser.add_argument("--samples", type=int, default=100_000_000)
    parser.add_argument("--corpora", type=int, nargs="*", default=[3, 60])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        write_corpus(Path(folder, "corpus"), args.documents, longest=999)
        dataset = IndexedDataset(Path(folder, "corpus"))
        seq_len = dataset.n_tokens // args.samples
        asked = Asked(dataset, (0, len(dataset)), args.samples - args.samples // 100, seq_len, 1234, 0.80)
        place = OrderName("train", "train", None, is_described=False)
        for what in ("indices made", "indices opened again"):
            started_s = time.perf_counter()
            samples = MegatronSamples(asked, place)
            timed(f"{len(samples):,} samples of {args.documents:,} documents, S = {seq_len}, {what}", started_s)
        started_s = time.perf_counter()
        for g in range(10_000):
            _ = samples[g]
        timed("10,000 samples read", started_s)
    for n in args.corpora:
        weights = 1 / np.arange(1, n + 1)
        started_s = time.perf_counter()
        greedy(weights / weights.sum(), args.samples)
        timed(f"{args.samples:,} samples blended of {n} corpora", started_s)


if __name__ == "__main__":
    main()
