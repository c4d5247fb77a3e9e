"""Join the token files of a text that was tokenised in parts; `python -m dtmega merge` calls `write`.

    python -m dtmega merge --input 'data/mine.part-*' --output data/mine

Tokens, sequences and documents keep the order of the parts, so the result is byte-identical to the output of
tokenising the whole text at once. Megatron's own `merge_file_` loses the document boundaries. Memory use does not grow
with the number of documents.
"""

from __future__ import annotations

import argparse
import glob
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from dtmega.data.indexed_files.dataset import CHUNK, IndexedDataset
from dtmega.data.indexed_files.idx_file import check_integer, index_pieces
from dtmega.data.indexed_files.record import record_of
from dtmega.data.indexed_files.stored_output import check_free, pair_files
from dtmega.data.preparing.copying import join_files
from dtmega.data.preparing.joined_records import Part, in_order, joined_record
from dtmega.files.console import counted
from dtmega.files.object_file import ObjectFile, matching
from dtmega.files.urls import is_object_store


def write(args: argparse.Namespace) -> str:
    """Write the joined `.bin/.idx` pair. If writing fails, an existing pair at the output's path stays unchanged.

    Args:
        args: the options of `python -m dtmega merge`.

    Returns:
        A line for the user: counts of parts, documents and tokens, and the names of the files.

    Raises:
        ValueError: a part is missing or damaged, or the parts differ in dtype or record.
        OSError: a file cannot be read or written.
    """
    prefixes = _prefixes(args.input)
    if args.output in prefixes:
        raise ValueError(f"--output {args.output} is one of the parts, which stay as they are")
    check_free(args.output, args.overwrite)
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    parts = in_order([Part(dataset, record_of(dataset)) for dataset in datasets])
    dtype = _dtype(parts)
    check_integer(args.output, dtype)
    merged = joined_record(parts)
    n_documents = sum(part.n_documents for part in parts)
    n_tokens = sum(part.dataset.n_tokens for part in parts)
    if n_documents == 0:
        raise ValueError(f"no documents in {counted(len(parts), 'part')}")
    n_sequences = sum(len(part.dataset) for part in parts)
    files = pair_files(args.output)
    try:
        join_files([_bin(part) for part in parts], files.temporary("bin"))
        files.write("idx", index_pieces(dtype, n_sequences, n_documents, lambda: _sizes(parts), lambda: _ends(parts)))
        if merged:
            files.write("meta.json", [merged.text().encode()])
        files.publish()
    finally:
        files.discard()
    known = "" if merged else ", without a record of the tokenizer, as the parts have none"
    return (
        f"{counted(len(parts), 'part')}: {counted(n_documents, 'document')}, {counted(n_tokens, 'token')}{known}: "
        f"{args.output}.bin, {args.output}.idx"
    )


def _prefixes(patterns: Sequence[str]) -> list[str]:
    """The parts' prefixes in pattern order; within a pattern, sorted by name with part-2 before part-10.

    Raises:
        ValueError: a pattern matches no part, or the patterns name a part twice.
    """
    prefixes: list[str] = []
    for pattern in patterns:
        paths = matching(f"{pattern}.idx", "--input") if is_object_store(pattern) else glob.glob(f"{pattern}.idx")
        matches = sorted((path.removesuffix(".idx") for path in paths), key=_by_numbers)
        # Pass on a plain prefix that has no files: `IndexedDataset` has a better message about missing files.
        if not matches and not glob.has_magic(pattern):
            matches = [pattern]
        if not matches:
            raise ValueError(f"--input {pattern}: no {pattern}.idx")
        prefixes += matches
    twice = next((prefix for prefix, n in Counter(prefixes).items() if n > 1), None)
    if twice:
        raise ValueError(f"--input names {twice} twice")
    return prefixes


def _bin(part: Part) -> str | ObjectFile:
    """The .bin of a part: the path of a file, or an object in an object store."""
    stored = part.dataset.stored
    return f"{part.dataset.prefix}.bin" if stored is None else stored.bin


def _by_numbers(name: str) -> list[str | int]:
    """Sort key that compares numbers in names by value: a list in which text and numbers alternate."""
    return [int(piece) if i % 2 else piece for i, piece in enumerate(re.split(r"(\d+)", name, flags=re.ASCII))]


def _dtype(parts: Sequence[Part]) -> Any:
    """The dtype of all parts.

    Raises:
        ValueError: two parts have different dtypes.
    """
    first = parts[0].dataset
    for part in parts:
        if part.dataset.dtype != first.dtype:
            raise ValueError(
                f"{part.dataset.prefix}.bin: expected tokens of {first.dtype}, as {first.prefix}.bin has, got "
                f"{part.dataset.dtype}: these were made with different tokenizers"
            )
    return first.dtype


def _sizes(parts: Sequence[Part]) -> Iterator[NDArray[Any]]:
    """Yield arrays with the number of tokens in each sequence."""
    for part in parts:
        sizes = part.dataset.sizes
        for start in range(0, len(sizes), CHUNK):
            yield sizes[start : start + CHUNK]


def _ends(parts: Sequence[Part]) -> Iterator[NDArray[Any]]:
    """Yield arrays with the number of sequences up to the end of each document."""
    before = 0
    for part in parts:
        ends = part.dataset.document_index[1:]
        for start in range(0, len(ends), CHUNK):
            yield ends[start : start + CHUNK] + before
        before += len(part.dataset)
