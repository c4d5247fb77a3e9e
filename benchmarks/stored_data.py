"""Requests and bytes of a step whose tokens are in an object store, on the loopback interface.

    python -m benchmarks.stored_data        a table; about a minute

A corpus of documents of about 3,500 tokens is read as a run of 8 sequences of 2,048 tokens reads it. `needed` is the
closed form: S + 1 tokens of 2 bytes a sample. `ranges` are the pieces of documents that a sample consists of; with
lengths that vary little they are 1 + (S + 1 - 1) / 3,500 on average, as a sample has one more for each document's end
within it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from dtmega import config
from dtmega.data.indexed_files.stored import planned
from dtmega.data.indexed_files.writer import IndexedWriter
from dtmega.data.objectives.next_token import NEXT_TOKEN
from dtmega.data.objectives.stored_rows import StoredRows
from dtmega.data.text import open_text
from tests.object_server import serving
from tests.stored_data import reads, store

S, SAMPLES, STEPS = 2048, 8, 20
LENGTHS = {"1,000 documents": 1000, "10,000 documents": 10_000}


def main() -> None:
    print("| corpus | ranges a sample | requests a step | bytes a step | / needed | ms a step |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, n_documents in LENGTHS.items():
        with serving() as server, TemporaryDirectory() as folder:
            os.environ |= {**server.environment, "XDG_CACHE_HOME": folder}
            prefix = f"{folder}/text"
            write(prefix, n_documents)
            rows = rows_of(store(server, prefix, "text"))
            ranges = 0
            for step in range(STEPS):
                with planned() as plan:
                    for g in range(step * SAMPLES, (step + 1) * SAMPLES):
                        rows.samples[g]
                ranges += sum(map(len, plan.values()))
            server.bytes_sent, before, began = 0, reads(server), time.perf_counter()
            for step in range(STEPS):
                rows[range(step * SAMPLES, (step + 1) * SAMPLES)]
            took = time.perf_counter() - began
            requests, sent = (reads(server) - before) / STEPS, server.bytes_sent / STEPS
            needed = SAMPLES * (S + 1) * 2
            print(
                f"| {name}, {Path(f'{prefix}.bin').stat().st_size / 1e6:.0f} MB | {ranges / STEPS / SAMPLES:.2f} | "
                f"{requests:.1f} | {sent:,.0f} | {sent / needed:.2f} | {1000 * took / STEPS:.0f} |",
                flush=True,
            )


def write(prefix: str, n_documents: int) -> None:
    """A corpus of random ids."""
    rng = np.random.default_rng(0)
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        for length in rng.integers(3000, 4000, n_documents):
            writer.add(rng.integers(0, 256, length))


def rows_of(path: str) -> StoredRows:
    """The rows of a run on this corpus."""
    values = {
        "model": {"vocab_size": 257},
        "data": {"path": path, "tokenizer": "bytes", "seq_len": S},
        "train": {"steps": STEPS},
        "eval": {"steps": 1},
    }
    rows = open_text(config.validate(values, "a benchmark"), NEXT_TOKEN).rows("train")
    assert isinstance(rows, StoredRows)
    return rows


if __name__ == "__main__":
    main()
