"""The two layouts of Megatron's .idx files: their headers and arrays.

    MMIDIDX  b"MMIDIDX" 0 0 · <Q version 1 · <B dtype code · <Q sequences n · <Q document index entries d (34 bytes)
             int32 [n] tokens per sequence
             int64 [n] start of each sequence in .bin, in bytes
             int64 [d] first sequence of each document, then n

    TNTIDX   b"TNTIDX" 0 0 · <Q version 1 · <Q dtype code · <Q bytes per token · <Q sequences n · <Q sizes s ·
             <Q document index entries d (56 bytes)
             int64 [n + 1] index of each sequence's first size in the sizes below; 0, 1, ..., n for 1-dim sequences
             int64 [n + 1] start of each sequence in .bin, in tokens, then the total number of tokens
             int64 [s] tokens per sequence
             int64 [d] first sequence of each document, then n

All numbers are little-endian. Sources: megatron-core's `datasets/indexed_dataset.py` for MMIDIDX; Megatron-LM's
`megatron/data/indexed_dataset.py` from 2022 for TNTIDX, the legacy layout of its "lazy" and "cached" implementations.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
LEGACY_MAGIC = b"TNTIDX\0\0"
LEGACY_HEADER = struct.Struct("<8s6Q")


def _codes(names: dict[int, str]) -> dict[int, np.dtype[Any]]:
    return {code: np.dtype(name) for code, name in names.items()}


INTEGERS = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
DTYPE_OF_CODE = _codes({**INTEGERS, 6: "<f8", 7: "<f4"})
LEGACY_DTYPES = _codes({**INTEGERS, 6: "<f8", 7: "<f8"})  # np.float and np.double, both of 8 bytes


class Index(NamedTuple):
    """The content of an .idx file; the arrays are views of the file.

    Attributes:
        dtype: dtype of the tokens in .bin.
        sizes: number of tokens in each sequence, int32 or int64 [n].
        pointers: start of each sequence in .bin, int64 [n], in bytes (MMIDIDX) or tokens (TNTIDX).
        per_token: size of a token in the unit of `pointers`: bytes per token (MMIDIDX), or 1 (TNTIDX).
        document_index: index of each document's first sequence, followed by n, int64 [d].
    """

    dtype: np.dtype[Any]
    sizes: NDArray[np.integer]
    pointers: NDArray[np.int64]
    per_token: int
    document_index: NDArray[np.int64]


def read_index(path: str, index: NDArray[np.uint8]) -> Index:
    """Read the arrays of an .idx file in either layout.

    `IndexedDataset` checks the arrays' values; this function does not.

    Args:
        path: the file's name, for messages.
        index: the file's bytes.

    Raises:
        ValueError: the header is invalid, or the file's length does not match the header.
    """
    start = index[: LEGACY_HEADER.size].tobytes()
    return _legacy(path, index, start) if start.startswith(LEGACY_MAGIC) else _mmap(path, index, start)


def _mmap(path: str, index: NDArray[np.uint8], start: bytes) -> Index:
    if not start.startswith(MAGIC) or len(start) < HEADER.size:
        raise ValueError(
            f"{path}: expected a header of {HEADER.size} bytes that starts with {MAGIC!r}, got "
            f"{min(len(start), HEADER.size)} bytes that start with {start[: len(MAGIC)]!r}: this is no index of token "
            f"files, or it was cut off; make the pair again (dtmega tokenize --overwrite), or name another "
            f"([data] path)"
        )
    _, version, code, n, n_doc = HEADER.unpack(start[: HEADER.size])
    dtype = _dtype(path, version, code, DTYPE_OF_CODE)
    expected = HEADER.size + 12 * n + 8 * n_doc
    if len(index) != expected:
        raise ValueError(
            f"{path}: expected {expected} bytes ({HEADER.size} + 12 x {n} sequences + 8 x {n_doc} entries of "
            f"the document index), got {len(index)}"
        )
    sizes_end = HEADER.size + 4 * n
    pointers_end = HEADER.size + 12 * n
    return Index(
        dtype=dtype,
        sizes=index[HEADER.size : sizes_end].view("<i4"),
        pointers=index[sizes_end:pointers_end].view("<i8"),
        per_token=dtype.itemsize,
        document_index=index[pointers_end:].view("<i8"),
    )


def _legacy(path: str, index: NDArray[np.uint8], start: bytes) -> Index:
    if len(start) < LEGACY_HEADER.size:
        raise ValueError(f"{path}: expected a header of {LEGACY_HEADER.size} bytes, got {len(start)}")
    _, version, code, token_bytes, n, n_sizes, n_doc = LEGACY_HEADER.unpack(start)
    dtype = _dtype(path, version, code, LEGACY_DTYPES)
    if token_bytes != dtype.itemsize:
        raise ValueError(
            f"{path}: expected tokens of {dtype.itemsize} bytes, as dtype code {code} says ({dtype}), got "
            f"{token_bytes} bytes in the header: it is unclear how to read the .bin; tokenize the text again"
        )
    expected = LEGACY_HEADER.size + 8 * (2 * (n + 1) + n_sizes + n_doc)
    if len(index) != expected:
        raise ValueError(
            f"{path}: expected {expected} bytes ({LEGACY_HEADER.size} + 8 x (2 x ({n} sequences + 1) + {n_sizes} sizes "
            f"+ {n_doc} entries of the document index)), got {len(index)} (files of fairseq have no document index)"
        )
    if n_sizes != n:
        raise ValueError(f"{path}: expected one size for each of {n} sequences, as rows of tokens have, got {n_sizes}")
    # Skip the first array (the index of each sequence's first size), because each sequence has a single size.
    numbers = index[LEGACY_HEADER.size :].view("<i8")
    _, pointers, sizes, documents = np.split(numbers, np.cumsum([n + 1, n + 1, n]))
    end = pointers[n - 1] + sizes[n - 1] if n else 0
    if pointers[n] != end:
        raise ValueError(f"{path}: expected the last sequence to end at token {end}, got {pointers[n]}")
    return Index(dtype, sizes, pointers[:-1], 1, documents)


def _dtype(path: str, version: int, code: int, codes: dict[int, np.dtype[Any]]) -> np.dtype[Any]:
    """Check a header's version and return the dtype for the header's dtype code."""
    if version != 1:
        raise ValueError(f"{path}: expected version 1, got {version}")
    if code not in codes:
        raise ValueError(f"{path}: expected a dtype code in {sorted(codes)}, got {code}")
    return codes[code]
