"""Join the token files of a text that was tokenised in parts; `python -m dtmega merge` calls `write`.

    python -m dtmega merge --input data/part-0 data/part-1 --output data/mine

Tokens, sequences and documents keep the order of the parts, so the result is byte-identical to tokenising the whole
text at once. Megatron's own `merge_file_` loses the document boundaries.
"""

from __future__ import annotations

import argparse
import glob
from collections import Counter
from collections.abc import Sequence
from typing import Any

from dtmega.data.indexed_files import record
from dtmega.data.indexed_files.dataset import IndexedDataset, IndexedWriter, check_free
from dtmega.data.indexed_files.record import Record
from dtmega.files.console import counted


def write(args: argparse.Namespace) -> str:
    """Write the joined `.bin/.idx` pair. If writing fails, an existing pair of that name stays unchanged.

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
    parts = [IndexedDataset(prefix) for prefix in prefixes]
    for part in parts:
        if part.dtype != parts[0].dtype:
            raise ValueError(
                f"{part.prefix}.bin: expected tokens of {parts[0].dtype}, as {parts[0].prefix}.bin has, got "
                f"{part.dtype}: these were made with different tokenizers"
            )
    merged = _record(parts)
    with IndexedWriter(args.output, parts[0].dtype) as writer:
        for part in parts:
            writer.add_all(part)
        if merged:
            totals = {"documents": writer.n_documents, "tokens": writer.n_tokens}
            writer.about = merged.model_copy(update=totals).text()
    known = "" if merged else ", without a record of the tokenizer, as the parts have none"
    return (
        f"{counted(len(parts), 'part')}: {counted(writer.n_documents, 'document')}, "
        f"{counted(writer.n_tokens, 'token')}{known}: {args.output}.bin, {args.output}.idx"
    )


def _prefixes(patterns: Sequence[str]) -> list[str]:
    """The prefixes of the parts in the order of the patterns, sorted within each pattern.

    Raises:
        ValueError: a pattern matches no part, or the patterns name a part twice.
    """
    prefixes: list[str] = []
    for pattern in patterns:
        matches = sorted(path.removesuffix(".idx") for path in glob.glob(f"{pattern}.idx"))
        # Pass on a plain prefix that has no files: `IndexedDataset` has a better message about missing files.
        if not matches and not glob.has_magic(pattern):
            matches = [pattern]
        if not matches:
            raise ValueError(f"--input {pattern}: no {pattern}.idx")
        prefixes += matches
    twice = next((prefix for prefix in prefixes if prefixes.count(prefix) > 1), None)
    if twice:
        raise ValueError(f"--input names {twice} twice")
    return prefixes


def _record(parts: Sequence[IndexedDataset]) -> Record | None:
    """The record that all parts share, with the sums of what they count; None if no part has a record.

    Raises:
        ValueError: the parts' records differ, or only some parts have a record.
    """
    records = [record.record_of(part) for part in parts]
    expected = _how_made(records[0])
    for part, part_record in zip(parts, records, strict=True):
        how_made = _how_made(part_record)
        if how_made != expected:
            raise ValueError(
                f"{part.prefix}.meta.json and {parts[0].prefix}.meta.json say how the parts were tokenised: expected "
                f"the same of both, got {how_made or 'nothing'} and {expected or 'nothing'}"
            )
    chats = [part_record.chat for part_record in records if part_record and part_record.chat]
    if records[0] is None or not chats:
        return records[0]
    refused: Counter[str] = Counter()
    for chat in chats:
        refused.update(chat.refused)
    end_ids = sorted({i for chat in chats for i in chat.end_ids})
    learned = sum(chat.learned for chat in chats)
    sums = {"end_ids": end_ids, "learned": learned, "refused": dict(sorted(refused.items()))}
    return records[0].model_copy(update={"chat": chats[0].model_copy(update=sums)})


def _how_made(part_record: Record | None) -> dict[str, Any] | None:
    """The settings that must be equal in all records: those that are neither a count nor the tokenizer's name."""
    counts = {"documents": True, "tokens": True, "chat": {"end_ids", "learned", "refused"}}
    return part_record and part_record.model_dump(exclude={"tokenizer": True, **counts}, exclude_none=True)
