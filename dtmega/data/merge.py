"""Join token files into one; `python -m dtmega merge` does so with a text tokenised in parts on several nodes.

    python -m dtmega merge --input data/part-0 data/part-1 --output data/mine

Tokens, sequences and documents come in the order of the parts, so that the result is, to the byte, what the whole text
becomes at once. Megatron's own `merge_file_` forgets which sequences are one document.
"""

from __future__ import annotations

import argparse
import glob
from collections.abc import Sequence

from dtmega.data import record
from dtmega.data.indexed import IndexedDataset, IndexedWriter, check_free
from dtmega.data.record import Record
from dtmega.output import counted


def write(args: argparse.Namespace) -> str:
    """Write the pair and return what is to be said of it, or raise and leave what was there before.

    Raises:
        ValueError: a part is missing or damaged, or the parts are not of one kind.
        OSError: something cannot be read or written.
    """
    prefixes = _prefixes(args.input)
    if args.output in prefixes:
        raise ValueError(f"--output {args.output} is one of the parts, which stay as they are")
    check_free(args.output, args.overwrite)
    parts = [IndexedDataset(prefix) for prefix in prefixes]
    for part in parts:
        if part.dtype != parts[0].dtype:
            raise ValueError(
                f"{part.prefix}.bin: expected tokens of {parts[0].dtype}, as {parts[0].prefix}.bin has, got "
                f"{part.dtype}: these are of two tokenizers"
            )
    merged = _record(parts)
    with IndexedWriter(args.output, parts[0].dtype) as writer:
        for part in parts:
            writer.add_all(part)
        if merged:
            totals = {"documents": writer.n_documents, "tokens": writer.n_tokens}
            writer.about = f"{merged.model_copy(update=totals).model_dump_json()}\n"
    known = "" if merged else ", without a record of the tokenizer, as the parts have none"
    return (
        f"{counted(len(parts), 'part')}: {counted(writer.n_documents, 'document')}, "
        f"{counted(writer.n_tokens, 'token')}{known}: {args.output}.bin, {args.output}.idx"
    )


def _prefixes(patterns: Sequence[str]) -> list[str]:
    """The parts in the order of the patterns, those of one pattern by name.

    Raises:
        ValueError: a pattern without a part, or a part that is named twice.
    """
    found: list[str] = []
    for pattern in patterns:
        of_it = sorted(path.removesuffix(".idx") for path in glob.glob(f"{pattern}.idx"))
        if not of_it and not glob.has_magic(pattern):
            of_it = [pattern]  # whose files are then named as missing
        if not of_it:
            raise ValueError(f"--input {pattern}: no {pattern}.idx")
        found += of_it
    twice = next((prefix for prefix in found if found.count(prefix) > 1), None)
    if twice:
        raise ValueError(f"--input names {twice} twice")
    return found


def _record(parts: Sequence[IndexedDataset]) -> Record | None:
    """The record that all parts share; None: not one has any.

    Raises:
        ValueError: they say different things, or some say nothing.
    """
    records = [record.record_of(part) for part in parts]
    first = records[0]
    for part, one in zip(parts, records, strict=True):
        said = [found and found.model_dump(exclude={"documents", "tokens", "tokenizer"}) for found in (first, one)]
        if said[0] != said[1]:
            raise ValueError(
                f"{part.prefix}.meta.json and {parts[0].prefix}.meta.json say how the parts were tokenised: expected "
                f"the same of both, got {said[1] or 'nothing'} and {said[0] or 'nothing'}"
            )
    return first
