"""Time the first BERT sample from a corpus of many sentences, and measure how fast batches for BERT and T5 are made.

    python benchmarks/bert_data.py [--sentences 100000000] [--per-document 30]

The corpus has sentences of 3 to 59 tokens, and documents of random length. The first start divides the corpus into
samples and writes a file. Later starts, and other processes on the node, map this file. Batches are made from the
default corpus. Times are CPU seconds of one process. Memory is the process's own memory, without mapped files.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np

from dtmega.config import Data
from dtmega.data import default_corpus
from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.indexed_files.idx_file import HEADER, MAGIC
from dtmega.data.objectives.denoising.masked import MASKED
from dtmega.data.objectives.denoising.pairs import PairSamples
from dtmega.data.objectives.denoising.span_objectives import SEPARATE_SPANS, SPANS
from dtmega.data.objectives.objective import Objective
from dtmega.data.tokenizers.load import load_tokenizer

SEQ_LEN = 512


def write_corpus(prefix: Path, n: int, per_document: int) -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(3, 60, n, dtype="<i4")
    bounds = np.unique(np.concatenate([[0, n], rng.integers(1, n, n // per_document)])).astype("<i8")
    ends = np.cumsum(sizes, dtype="<i8")
    with open(f"{prefix}.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, n, len(bounds)))
        for values in (sizes, (ends - sizes) * 2, bounds):
            file.write(values.data)
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(2 * int(ends[-1]))  # zeros, which take no disk space


def start(prefix: Path, what: str) -> None:
    before_s = time.process_time()
    dataset = IndexedDataset(prefix)
    opened_s = time.process_time()
    tracemalloc.start()
    samples = PairSamples(dataset, (0, len(dataset.document_index) - 1), SEQ_LEN, 0.1, 1234, "train")
    _ = samples[0]
    left_bytes, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    first_s = time.process_time()
    print(
        f"{what}: {len(dataset):,} sentences, {samples.n_samples:,} samples; {opened_s - before_s:.1f} s to check the "
        f"index, {first_s - opened_s:.1f} s to the first sample, with at most {peak_bytes / 1e6:.0f} MB, of which "
        f"{left_bytes / 1e6:.0f} stay",
        flush=True,
    )


def make_rows(objective: Objective, seq_len: int, size: int) -> None:
    tokenizer = load_tokenizer("stdlib-wordpiece")
    dataset = IndexedDataset(default_corpus.prepare(tokenizer, in_sentences=objective.sentences))
    data = Data(seq_len=seq_len)
    samples = objective.samples(dataset, (0, len(dataset.document_index) - 1), data, 1234, "train", 0)
    rows = objective.rows(samples, data, tokenizer)
    begin_s, n = time.process_time(), 0
    while time.process_time() - begin_s < 3:
        rows[range(n, n + size)]
        n += size
    per_s = n / (time.process_time() - begin_s)
    print(f"{objective.aim}: S {seq_len}, {size} at a time: {per_s:,.0f} samples/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=100_000_000)
    parser.add_argument("--per-document", type=int, default=30)
    args = parser.parse_args()
    for objective in (MASKED, SPANS, SEPARATE_SPANS):
        for seq_len in (128, 512):
            for size in (8, 32, 128):
                make_rows(objective, seq_len, size)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        write_corpus(Path(folder, "corpus"), args.sentences, args.per_document)
        start(Path(folder, "corpus"), "first start")
        start(Path(folder, "corpus"), "again")


if __name__ == "__main__":
    main()
