"""Extract the documents from a batch: the raw records, and the text inside each record.

A byte order mark at the start of a file is not part of the text.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from dtmega.data.preparing.messages import is_conversation
from dtmega.data.preparing.text_files import RecordBatch, part_starts


def records_of(batch: RecordBatch) -> Iterator[tuple[int, bytes | None]]:
    """The records of a batch, each as (line or row number, raw bytes); blank lines between JSON objects are skipped."""
    if isinstance(batch.data, list):
        yield from enumerate(batch.data, batch.first)
    elif batch.is_cut:
        yield from _parts(batch.data, batch.first)
    elif batch.kind == ".txt":
        yield 1, batch.data
    else:
        for number, line in enumerate(batch.data.split(b"\n"), batch.first):
            if line.strip():
                yield number, line


def _parts(text: bytes, line: int) -> Iterator[tuple[int, bytes]]:
    """Divide a text at its blank lines. Yield each part as (line number of its first line, bytes).

    Blank lines stay at the end of the part before them, or at the start of the first part, so no byte is lost.

    Args:
        text: bytes of one or more complete parts.
        line: number of the file's line at which `text` starts.
    """
    blanks = len(text) - len(text.lstrip(b" \t\r\n"))
    starts = [0, *(start for start in part_starts(text) if start > blanks), len(text)]
    for start, end in pairwise(starts):
        yield line, text[start:end]
        line += text.count(b"\n", start, end)


def document_text(record: bytes | None, number: int, kind: str, key: str) -> str:
    """The text in a record.

    Args:
        record: bytes of the record, or None for a null in parquet.
        number: line or row number of the record.
        kind: one of KINDS.
        key: JSON key or parquet column that holds the text.

    Raises:
        ValueError: the record is malformed; the message gives the reason.
    """
    text = _decoded(record, number, kind, key)
    if kind in (".txt", ".parquet"):
        return text
    value = _parsed(text)
    if not isinstance(value, dict) or key not in value:
        got = f"keys {list(value)[:8]}" if isinstance(value, dict) else type(value).__name__
        is_chat = isinstance(value, dict) and is_conversation(value)
        cure = "; for conversations: --chat" if is_chat else ""
        raise ValueError(f"expected an object with '{key}' (--json-key), got {got}{cure}")
    if not isinstance(value[key], str):
        raise ValueError(f"expected a string in '{key}', got {type(value[key]).__name__}")
    value[key].encode()  # raises UnicodeEncodeError, a ValueError, for a lone surrogate (\ud83d), which JSON allows
    return value[key]


def json_object(record: bytes, number: int, kind: str) -> dict[str, Any]:
    """The JSON object in a record.

    Args:
        record: bytes of the record.
        number: line number of the record.
        kind: ".jsonl" or ".json".

    Raises:
        ValueError: the record is not a JSON object; the message gives the reason.
    """
    value = _parsed(_decoded(record, number, kind, ""))
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    json.dumps(value, ensure_ascii=False).encode()  # raises UnicodeEncodeError for a lone surrogate
    return value


def _decoded(record: bytes | None, number: int, kind: str, key: str) -> str:
    """Decode the text of a record. The arguments are the same as for `document_text`."""
    if record is None:
        raise ValueError(f"expected a string in '{key}', got null")
    # Drop a byte order mark at the start of a .txt, and at the start of every line of JSON: concatenated files have
    # byte order marks in the middle, and no JSON text begins with this character.
    starts_file = kind not in (".txt", ".parquet") or (kind == ".txt" and number == 1)
    try:
        return record.decode("utf-8-sig" if starts_file else "utf-8")
    except UnicodeDecodeError as error:
        cure = "" if kind == ".parquet" else f"; --encoding names another, such as {_likely(record)}"
        byte = record[error.start : error.start + 1]
        raise ValueError(f"expected UTF-8, got {byte!r} at byte {error.start}{cure}") from None


def _parsed(text: str) -> Any:
    """Parse text as JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"bad JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("bad JSON: nested too deeply") from None


def _likely(text: bytes) -> str:
    """The encodings to suggest to the user for text that is not UTF-8."""
    is_wide = text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in text[:1000]
    return "utf-16" if is_wide else "latin-1 or cp1252"
