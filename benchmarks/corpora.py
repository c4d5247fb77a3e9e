"""Corpora with any number of documents. All tokens are 0 and take no disk space."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dtmega.data.indexed_files.idx_file import HEADER, MAGIC


def write_corpus(prefix: Path, n_documents: int, longest: int) -> None:
    """Write PREFIX.idx and PREFIX.bin. Documents have 1 to `longest` tokens, with equal random lengths at each call."""
    sizes = np.random.default_rng(0).integers(1, longest + 1, n_documents).astype("<i4")
    ends = np.cumsum(sizes, dtype="<i8")
    with open(f"{prefix}.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, n_documents, n_documents + 1))
        for values in (sizes, (ends - sizes) * 2, np.arange(n_documents + 1, dtype="<i8")):
            file.write(values.data)
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(2 * int(ends[-1]))  # zeros, which take no disk space
