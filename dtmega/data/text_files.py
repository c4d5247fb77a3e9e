"""Files of text, by suffix, as batches of raw records; and the document inside a record.

    .txt               the whole file is one document, or each part of it that blank lines end
    .jsonl, .json      one JSON object per line, whose value under a key is one document
    + .gz, .zst        either of them, compressed
    .parquet           each row of one column is one document
    -                  standard input, a .txt unless said otherwise

A byte order mark at the start of a file is no part of its text. Text in another encoding than UTF-8 becomes UTF-8 where
the file is read, so that everything after it knows one encoding only.

Reading cuts files into batches cheaply, in one process; what a record holds is found out later, in many.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import json
import os
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, NamedTuple

from dtmega import extras
from dtmega.strangers import dangling

KINDS = (".txt", ".jsonl", ".json", ".parquet")
LIBRARIES = {".zst": "zstandard", ".parquet": "pyarrow"}  # of the optional extra dtmega[data]
STDIN = "-"
BLANK_LINES = "blank-lines"
BETWEEN_PARTS = re.compile(rb"\n[ \t\r]*\n(?=[ \t\r]*[^ \t\r\n])")  # a line's end, and the last blank line before text
CHUNK_BYTES = 1 << 20  # text per batch of lines; a line or a .txt file that is longer comes whole
MAX_RECORD_BYTES = 1 << 28  # of a compressed file: 22 kB of zstd can be one line of 3 GB
ZSTD_BYTES = 4096  # decompressed at a time, to 128 MiB at most: a block of 4 bytes holds up to 128 KiB
PARQUET_ROWS = 256  # the same for rows, whose size is known only after reading


class File(NamedTuple):
    """A file of the input.

    Attributes:
        path: "-" is standard input.
        kind: one of KINDS.
        n_bytes: as it is stored; 0 for standard input, whose size is not known.
    """

    path: str
    kind: str
    n_bytes: int


@dataclass(frozen=True)
class RecordBatch:
    """Records of one file, one after the other.

    Attributes:
        kind: one of KINDS.
        first: line (row) of the first record, from 1.
        data: whole lines; or a .txt, whole or some parts of it; or rows, None where a row has no value. It is UTF-8 if
            the file is sound.
        is_cut: a .txt whose blank lines end documents.
        position_bytes: in all files one after the other (compressed as they are), when this batch has been read.
    """

    path: str
    kind: str
    first: int
    data: bytes | list[bytes | None]
    is_cut: bool
    position_bytes: int


def find_files(patterns: list[str], kind: str | None = None) -> list[File]:
    """Files in the order of the glob patterns, by name within each, none twice.

    A folder stands for the files of KINDS in it and below it, with a `kind` for all files, but for hidden ones.

    Args:
        kind: of all of them, without its dot; None: by suffix.

    Raises:
        ValueError: a pattern without a file, a suffix nobody reads, a library that is not installed.
    """
    paths: dict[str, None] = {}
    for pattern in patterns:
        if os.path.isdir(pattern):
            found = _below(pattern, of_any_kind=kind is not None)
            expected = (
                f"no file in --input '{pattern}' ends in {', '.join(KINDS)}, .txt or JSON also + .gz or .zst; "
                f"--kind txt reads others as text"
            )
        else:
            found = (
                [pattern] if pattern == STDIN or os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
            )
            found = [path for path in found if not os.path.isdir(path)]
            expected = f"no file matches --input '{pattern}'"
        if not found:
            raise ValueError(expected)
        paths.update(dict.fromkeys(found))
    files = []
    for path in paths:
        its_kind = f".{kind}" if kind else ".txt" if path == STDIN else _kind(path)
        if its_kind not in KINDS:
            raise ValueError(
                f"{path}: expected a name that ends in {', '.join(KINDS)}, .txt or JSON also + .gz or .zst, or --kind"
            )
        for suffix, library in LIBRARIES.items():
            if path.endswith(suffix):
                extras.check(library, "data", path)
        if link := dangling(path):
            raise ValueError(f"{path} cannot be read{link}; remove it, or name the files without it (--input)")
        files.append(File(path, its_kind, 0 if path == STDIN else os.path.getsize(path)))
    return files


def _below(folder: str, *, of_any_kind: bool) -> list[str]:
    """Files of KINDS, or of any kind, in a folder and its folders, sorted by path; hidden ones are left out."""
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        shown = [name for name in names if not name.startswith(".")]
        found += [os.path.join(place, name) for name in shown if of_any_kind or _kind(name) in KINDS]
    return sorted(found)


def _kind(path: str) -> str:
    stem, suffix = os.path.splitext(path)
    inner = os.path.splitext(stem)[1]
    return inner if suffix in (".gz", ".zst") and inner != ".parquet" else suffix


def read_batches(
    files: Sequence[File], column: str, *, at_blank_lines: bool = False, encoding: str = ""
) -> Iterator[RecordBatch]:
    """Read all files as batches.

    Args:
        column: what to read of parquet files.
        at_blank_lines: each part of a .txt that blank lines end is a document.
        encoding: name of the encoding of all text; '' = UTF-8.

    Raises:
        ValueError: a file is damaged or cut off, has no such column of strings, or is not in the encoding.
    """
    before_bytes = 0
    for file in files:
        is_cut = file.kind == ".txt" and at_blank_lines
        if file.kind == ".parquet":
            found = _read_parquet(file.path, column)
        elif file.kind == ".txt":
            found = _read_parts(file.path, encoding) if is_cut else _read_whole(file.path, encoding)
        else:
            found = _read_lines(file.path, encoding)
        for first, data, position in found:
            yield RecordBatch(file.path, file.kind, first, data, is_cut, before_bytes + position)
        before_bytes += file.n_bytes


def _read_whole(path: str, encoding: str) -> Iterator[tuple[int, bytes, int]]:
    parts, position = [], 0
    for chunk, position in _chunks(path, encoding):  # noqa: B007
        parts.append(chunk)
        _check_size(path, 1, parts)
    yield 1, b"".join(parts), position


def _read_lines(path: str, encoding: str) -> Iterator[tuple[int, bytes, int]]:
    """(first line, whole lines, bytes read so far): about CHUNK_BYTES of lines each, in the end what has no newline."""
    first, parts, position = 1, [], 0
    for chunk, position in _chunks(path, encoding):
        end = chunk.rfind(b"\n") + 1
        if end:
            data = b"".join([*parts, chunk[:end]])
            yield first, data, position
            first += data.count(b"\n")
            parts = []
        parts.append(chunk[end:])
        _check_size(path, first, parts)
    yield first, b"".join(parts), position


def _read_parts(path: str, encoding: str) -> Iterator[tuple[int, bytes, int]]:
    """Whole lines as `_read_lines` reads them, cut only where blank lines end a part of the text."""
    first, kept, position = 1, [], 0
    blanks = b""  # at the end of what has been read: the part ends after them, if there is another one
    for _, lines, position in _read_lines(path, encoding):
        read = blanks + lines
        text = read.rstrip(b" \t\r\n")
        blanks = read[len(text) :]
        starts = _starts(text)
        data = b"".join([*kept, text[: starts[-1]]]) if starts else b""
        if data.strip():
            yield first, data, position
            first += data.count(b"\n")
            kept, text = [], text[starts[-1] :]
        kept.append(text)
        _check_size(path, first, kept)
    yield first, b"".join([*kept, blanks]), position


def _starts(text: bytes) -> list[int]:
    """The place where a part begins that follows blank lines."""
    return [match.end() for match in BETWEEN_PARTS.finditer(text)]


def _check_size(path: str, line: int, parts: list[bytes]) -> None:
    """Refuse too large a text of a compressed file, which can hold a million times what its size says."""
    if path.endswith((".gz", ".zst")) and sum(map(len, parts)) > MAX_RECORD_BYTES:
        raise ValueError(
            f"{path}: the document in line {line} has more than {MAX_RECORD_BYTES:,} bytes when decompressed; if that "
            f"is meant, decompress the file first"
        )


def _chunks(path: str, encoding: str) -> Iterator[tuple[bytes, int]]:
    """The text of a file as UTF-8, unchecked if it was that, and how many bytes of the file have been read for it."""
    if not encoding:
        yield from _decompressed(path)
        return
    decoder = codecs.getincrementaldecoder(encoding)()
    decoded_bytes = position = 0
    for chunk, position in _decompressed(path):
        yield _decoded(decoder, chunk, path, encoding, decoded_bytes), position
        decoded_bytes += len(chunk)
    yield _decoded(decoder, b"", path, encoding, decoded_bytes, is_last=True), position


def _decoded(
    decoder: codecs.IncrementalDecoder, chunk: bytes, path: str, encoding: str, before_bytes: int, is_last: bool = False
) -> bytes:
    """The next chunk of a text as UTF-8.

    Raises:
        ValueError: the file is not in the encoding.
    """
    kept_bytes = len(decoder.getstate()[0])  # of a character that the chunk before has begun
    try:
        return decoder.decode(chunk, is_last).encode()
    except UnicodeError as error:
        # A UTF-16 or UTF-32 that does not begin with its mark is a bare UnicodeError.
        place, why = (error.start, error.reason) if isinstance(error, UnicodeDecodeError) else (0, str(error))
        at = before_bytes - kept_bytes + place
        raise ValueError(f"{path} is not in {encoding}: {why} at byte {at} (--encoding)") from None


def _decompressed(path: str) -> Iterator[tuple[bytes, int]]:
    """Decompressed bytes, and how many bytes of the file have been read for them."""
    if path == STDIN:
        position = 0
        while chunk := sys.stdin.buffer.read(CHUNK_BYTES):
            position += len(chunk)
            yield chunk, position
        return
    with open(path, "rb") as raw:
        try:
            if path.endswith(".zst"):
                chunks = _unzstd(raw)
            else:
                stream = gzip.GzipFile(fileobj=raw) if path.endswith(".gz") else raw
                chunks = iter(lambda: stream.read(CHUNK_BYTES), b"")
            for chunk in chunks:
                yield chunk, raw.tell()
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise ValueError(f"{path}: damaged or cut off ({error})") from None


def _unzstd(raw: IO[bytes]) -> Iterator[bytes]:
    """Decompress as zstandard's own stream reader does, which takes a file that was cut off for a whole one."""
    import zstandard

    # Windows of 2 GiB: archives made with `zstd --long=31` are common among text corpora. zstd's memory for one is used
    # only as far as the text goes.
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
    frame, is_open = decompressor.decompressobj(), False
    parts: list[bytes] = []
    while data := raw.read(ZSTD_BYTES):
        while data:
            try:
                parts.append(frame.decompress(data))
            except zstandard.ZstdError as error:
                raise EOFError(error) from None
            is_open, data = not frame.eof, frame.unused_data
            if frame.eof:
                frame = decompressor.decompressobj()
        if sum(map(len, parts)) >= CHUNK_BYTES:
            yield b"".join(parts)
            parts = []
    if is_open:
        raise EOFError("the last zstd frame has no end")
    yield b"".join(parts)


def _read_parquet(path: str, column: str) -> Iterator[tuple[int, list[bytes | None], int]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            if column not in file.schema_arrow.names:
                raise ValueError(f"{path}: expected a column '{column}' (--json-key), got {file.schema_arrow.names}")
            row, n_rows, size_bytes = 0, file.metadata.num_rows, os.path.getsize(path)
            for rows in file.iter_batches(batch_size=PARQUET_ROWS, columns=[column]):
                values = rows.column(0)
                if pa.types.is_dictionary(values.type):
                    values = values.dictionary_decode()
                if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
                    raise ValueError(f"{path}: expected strings in '{column}' (--json-key), got {values.type}")
                # As bytes, so that a row that is no UTF-8 is one malformed row and no more.
                data = values.cast(pa.large_binary()).to_pylist()
                row += len(data)
                yield row - len(data) + 1, data, size_bytes * row // n_rows
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: damaged or cut off ({error})") from None


def records(batch: RecordBatch) -> Iterator[tuple[int, bytes | None]]:
    """(line or row, raw bytes) of each record in a batch; a blank line of JSON is none."""
    if isinstance(batch.data, list):
        yield from enumerate(batch.data, batch.first)
    elif batch.kind == ".txt":
        yield from _parts(batch.data, batch.first) if batch.is_cut else [(1, batch.data)]
    else:
        yield from ((n, line) for n, line in enumerate(batch.data.split(b"\n"), batch.first) if line.strip())


def _parts(text: bytes, line: int) -> Iterator[tuple[int, bytes]]:
    """(its first line, part) of each; one after the other they are the text. Blank lines at its start are no part."""
    blanks = len(text) - len(text.lstrip(b" \t\r\n"))
    starts = [0, *(start for start in _starts(text) if start > blanks), len(text)]
    for start, end in pairwise(starts):
        yield line, text[start:end]
        line += text.count(b"\n", start, end)


def document(record: bytes | None, number: int, kind: str, key: str) -> str:
    """The text in a record.

    Args:
        number: its line or row.

    Raises:
        ValueError: the record is malformed; says how.
    """
    if record is None:
        raise ValueError(f"expected a string in '{key}', got null")
    # Files that are put together have a byte order mark in the middle; in JSON it is never text.
    starts_file = kind not in (".txt", ".parquet") or (kind == ".txt" and number == 1)
    try:
        text = record.decode("utf-8-sig" if starts_file else "utf-8")
    except UnicodeDecodeError as error:
        cure = "" if kind == ".parquet" else f"; --encoding names another, such as {_likely(record)}"
        byte = record[error.start : error.start + 1]
        raise ValueError(f"expected UTF-8, got {byte!r} at byte {error.start}{cure}") from None
    if kind in (".txt", ".parquet"):
        return text
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"bad JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("bad JSON: nested too deeply") from None
    if not isinstance(value, dict) or key not in value:
        got = f"keys {list(value)[:8]}" if isinstance(value, dict) else type(value).__name__
        raise ValueError(f"expected an object with '{key}' (--json-key), got {got}")
    if not isinstance(value[key], str):
        raise ValueError(f"expected a string in '{key}', got {type(value[key]).__name__}")
    value[key].encode()  # half a surrogate pair (\ud83d) is JSON but no text
    return value[key]


def _likely(text: bytes) -> str:
    """The encodings to try first of a text that is not UTF-8."""
    is_wide = text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in text[:1000]
    return "utf-16" if is_wide else "latin-1 or cp1252"
