"""Text files as batches of raw records, and the document inside a record. The suffix of a file is its format:

    .txt               the whole file is one document, or each part that ends with blank lines is one
    .jsonl, .json      one JSON object per line, whose value under a key is one document
    + .gz, .zst        any of these, compressed
    .parquet           each row of one column is one document
    -                  standard input, a .txt unless `--kind` says otherwise

A byte order mark at the start of a file does not belong to its text. Text in an encoding other than UTF-8 is converted
when the file is read, so that all later code sees UTF-8 only.

One process reads the files and cuts them into batches, which is cheap. Many workers then parse the records.
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

from dtmega.files import optional_imports
from dtmega.files.untrusted_json import dangling

KINDS = (".txt", ".jsonl", ".json", ".parquet")
LIBRARIES = {".zst": "zstandard", ".parquet": "pyarrow"}  # libraries of the optional extra dtmega[data]
STDIN = "-"
BLANK_LINES = "blank-lines"
# The end of a line and the last blank line before the next text.
BETWEEN_PARTS = re.compile(rb"\n[ \t\r]*\n(?=[ \t\r]*[^ \t\r\n])")
CHUNK_BYTES = 1 << 20  # text in a batch of lines; a longer line or .txt file is a batch of its own
MAX_RECORD_BYTES = 1 << 28  # of a record in a compressed file, because 22 kB of zstd can hold a line of 3 GB
# Compressed bytes that are decompressed at a time. They become 128 MiB at most: a block of 4 bytes holds up to 128 KiB.
ZSTD_BYTES = 4096
PARQUET_ROWS = 256  # rows in a batch: their bytes are known only after reading


class File(NamedTuple):
    """An input file.

    Attributes:
        path: path of the file; "-" is standard input.
        kind: one of KINDS.
        n_bytes: size on disk, still compressed; 0 for standard input, whose size is not known.
    """

    path: str
    kind: str
    n_bytes: int


@dataclass(frozen=True)
class RecordBatch:
    """Consecutive records of one file.

    Attributes:
        path: path of the file.
        kind: one of KINDS.
        first: line (of parquet: row) of the first record, from 1.
        data: whole lines of JSON; a .txt, or some parts of it; or the rows of a parquet file, None for a null. If the
            file is sound, it is UTF-8.
        is_cut: blank lines end documents; only for a .txt.
        position_bytes: bytes of all input files, as stored, that had been read when this batch was complete.
    """

    path: str
    kind: str
    first: int
    data: bytes | list[bytes | None]
    is_cut: bool
    position_bytes: int


def find_files(patterns: list[str], kind: str | None = None) -> list[File]:
    """The files that glob patterns match: in the order of the patterns, sorted within each, no file twice.

    A folder stands for the files of KINDS in it and below it, or for all files if a `kind` is given. Hidden files and
    folders are left out.

    Args:
        patterns: paths, folders or glob patterns.
        kind: kind of all files, without its dot; None takes the kind from each suffix.

    Raises:
        ValueError: a pattern without a file, an unknown suffix, a dangling link, or a library that is not installed.
    """
    paths: dict[str, None] = {}  # keys in order, like a set that keeps the first of two equal paths
    for pattern in patterns:
        paths.update(dict.fromkeys(_matching(pattern, of_any_kind=kind is not None)))
    return [_file(path, kind) for path in paths]


def _matching(pattern: str, *, of_any_kind: bool) -> list[str]:
    """The paths that a pattern stands for.

    Raises:
        ValueError: there are none.
    """
    if os.path.isdir(pattern):
        paths = _below(pattern, of_any_kind=of_any_kind)
        complaint = (
            f"no file in --input '{pattern}' ends in {', '.join(KINDS)}, .txt or JSON also + .gz or .zst; "
            f"--kind txt reads others as text"
        )
    else:
        # A file whose name contains a star or brackets is meant as it is.
        is_path = pattern == STDIN or os.path.exists(pattern)
        matches = [pattern] if is_path else sorted(glob.glob(pattern, recursive=True))
        paths = [path for path in matches if not os.path.isdir(path)]
        complaint = f"no file matches --input '{pattern}'"
    if not paths:
        raise ValueError(complaint)
    return paths


def _file(path: str, kind: str | None) -> File:
    """A path as an input file; `kind` is as in `find_files`.

    Raises:
        ValueError: an unknown suffix, a dangling link, or a library that is not installed.
    """
    if kind:
        suffix = f".{kind}"
    elif path == STDIN:
        suffix = ".txt"
    else:
        suffix = _suffix(path)
    if suffix not in KINDS:
        raise ValueError(
            f"{path}: expected a name that ends in {', '.join(KINDS)}, .txt or JSON also + .gz or .zst, or --kind"
        )
    for ending, library in LIBRARIES.items():
        if path.endswith(ending):
            optional_imports.check(library, "data", path)
    if link := dangling(path):
        raise ValueError(f"{path} cannot be read{link}; remove it, or name the files without it (--input)")
    return File(path, suffix, 0 if path == STDIN else os.path.getsize(path))


def _below(folder: str, *, of_any_kind: bool) -> list[str]:
    """Files of KINDS, or of any kind, in a folder and its subfolders, sorted by path; hidden ones are left out."""
    paths: list[str] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]  # os.walk then skips the hidden ones
        for name in names:
            if not name.startswith(".") and (of_any_kind or _suffix(name) in KINDS):
                paths.append(os.path.join(parent, name))
    return sorted(paths)


def _suffix(path: str) -> str:
    """The suffix of a name; the one before it if a .gz or .zst comes last (parquet files compress themselves)."""
    stem, suffix = os.path.splitext(path)
    inner = os.path.splitext(stem)[1]
    return inner if suffix in (".gz", ".zst") and inner != ".parquet" else suffix


def read_batches(
    files: Sequence[File], column: str, *, at_blank_lines: bool = False, encoding: str = ""
) -> Iterator[RecordBatch]:
    """Read all files as batches.

    Args:
        files: the files, in the order in which they are read.
        column: column of parquet files that holds the text.
        at_blank_lines: each part of a .txt that ends with blank lines is a document of its own.
        encoding: name of the encoding of all text files; '' is UTF-8.

    Raises:
        ValueError: a file is damaged or cut off, is not in the encoding, or lacks a column of strings of that name.
    """
    before_bytes = 0
    for file in files:
        is_cut = file.kind == ".txt" and at_blank_lines
        if file.kind == ".parquet":
            batches = _read_parquet(file.path, column)
        elif is_cut:
            batches = _read_parts(file.path, encoding)
        elif file.kind == ".txt":
            batches = _read_whole(file.path, encoding)
        else:
            batches = _read_lines(file.path, encoding)
        for first, data, position in batches:
            yield RecordBatch(file.path, file.kind, first, data, is_cut, before_bytes + position)
        before_bytes += file.n_bytes


# The readers below yield (line or row of the first record, data of a batch, bytes of the stored file read so far).


def _read_whole(path: str, encoding: str) -> Iterator[tuple[int, bytes, int]]:
    """A whole file in one batch."""
    chunks, position = [], 0
    for chunk, position in _chunks(path, encoding):  # noqa: B007
        chunks.append(chunk)
        _check_size(path, 1, chunks)
    yield 1, b"".join(chunks), position


def _read_lines(path: str, encoding: str) -> Iterator[tuple[int, bytes, int]]:
    """Batches of whole lines, about CHUNK_BYTES each; the last batch is the text after the last newline, maybe b""."""
    first, pending, position = 1, [], 0
    for chunk, position in _chunks(path, encoding):
        end = chunk.rfind(b"\n") + 1
        if end:
            data = b"".join([*pending, chunk[:end]])
            yield first, data, position
            first += data.count(b"\n")
            pending = []
        pending.append(chunk[end:])
        _check_size(path, first, pending)
    yield first, b"".join(pending), position


def _read_parts(path: str, encoding: str) -> Iterator[tuple[int, bytes, int]]:
    """Batches of whole parts, where a part of the text ends with blank lines."""
    first, pending, position = 1, [], 0
    # Blanks at the end of the text read so far. They may be the end of a part, which the next lines will show.
    blanks = b""
    for _, lines, position in _read_lines(path, encoding):
        read = blanks + lines
        text = read.rstrip(b" \t\r\n")
        blanks = read[len(text) :]
        starts = _starts(text)
        data = b"".join([*pending, text[: starts[-1]]]) if starts else b""
        if data.strip():
            yield first, data, position
            first += data.count(b"\n")
            pending, text = [], text[starts[-1] :]
        pending.append(text)
        _check_size(path, first, pending)
    yield first, b"".join([*pending, blanks]), position


def _starts(text: bytes) -> list[int]:
    """The places in a text where a part begins after blank lines."""
    return [match.end() for match in BETWEEN_PARTS.finditer(text)]


def _check_size(path: str, line: int, pieces: list[bytes]) -> None:
    """Refuse a record that is too large, in a compressed file: one can hold a million times its own size.

    Args:
        path: path of the file.
        line: line where the record starts, for the message.
        pieces: the decompressed bytes of the record so far.
    """
    if path.endswith((".gz", ".zst")) and sum(map(len, pieces)) > MAX_RECORD_BYTES:
        raise ValueError(
            f"{path}: the document in line {line} has more than {MAX_RECORD_BYTES:,} bytes when decompressed; if that "
            f"is meant, decompress the file first"
        )


def _chunks(path: str, encoding: str) -> Iterator[tuple[bytes, int]]:
    """Chunks of a file's text, each with the number of bytes of the stored file read so far.

    The text becomes UTF-8. A file without an `encoding` should be UTF-8 already; `document` checks that.
    """
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

    Args:
        decoder: decoder of the file, which keeps the bytes of an incomplete character from chunk to chunk.
        chunk: decompressed bytes in `encoding`.
        path: path of the file, for messages.
        encoding: name of the encoding, for messages.
        before_bytes: decompressed bytes before this chunk.
        is_last: no more chunks follow.

    Raises:
        ValueError: the file is not in the encoding.
    """
    kept_bytes = len(decoder.getstate()[0])
    try:
        return decoder.decode(chunk, is_last).encode()
    except UnicodeError as error:
        # UTF-16 or UTF-32 without the byte order mark at its start raises a bare UnicodeError, without a place.
        place, why = (error.start, error.reason) if isinstance(error, UnicodeDecodeError) else (0, str(error))
        at = before_bytes - kept_bytes + place
        raise ValueError(f"{path} is not in {encoding}: {why} at byte {at} (--encoding)") from None


def _decompressed(path: str) -> Iterator[tuple[bytes, int]]:
    """Chunks of decompressed bytes, each with the number of bytes of the stored file read so far.

    Raises:
        ValueError: a compressed file is damaged or cut off.
    """
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
    """Decompress a zstd file. (zstandard's own stream reader reads a file that was cut off without an error.)

    Raises:
        EOFError: the file is damaged or cut off.
    """
    import zstandard

    # Allow windows of 2 GiB: archives made with `zstd --long=31` are common among text corpora. zstd allocates a window
    # only as far as the text fills it.
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
    frame, is_open = decompressor.decompressobj(), False
    chunks: list[bytes] = []
    while data := raw.read(ZSTD_BYTES):
        # A file may have several frames, and one read may end a frame and begin the next.
        while data:
            try:
                chunks.append(frame.decompress(data))
            except zstandard.ZstdError as error:
                raise EOFError(error) from None
            is_open = not frame.eof
            data = frame.unused_data
            if frame.eof:
                frame = decompressor.decompressobj()
        if sum(map(len, chunks)) >= CHUNK_BYTES:
            yield b"".join(chunks)
            chunks = []
    if is_open:
        raise EOFError("the last zstd frame has no end")
    yield b"".join(chunks)


def _read_parquet(path: str, column: str) -> Iterator[tuple[int, list[bytes | None], int]]:
    """Batches of rows of one column of strings.

    Raises:
        ValueError: the file is damaged, or has no such column.
    """
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
                # As bytes, because a row that is not UTF-8 should be reported by itself, not end the reading.
                data = values.cast(pa.large_binary()).to_pylist()
                row += len(data)
                # The position in the file is not known; take it to be in proportion to the rows.
                yield row - len(data) + 1, data, size_bytes * row // n_rows
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: damaged or cut off ({error})") from None


def records(batch: RecordBatch) -> Iterator[tuple[int, bytes | None]]:
    """The records of a batch, each as (line or row, raw bytes); blank lines between JSON objects are skipped."""
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
    """The parts of a text, each as (number of its first line, part). Joined, the parts are the text.

    Blank lines at the start of the text belong to the first part.

    Args:
        text: whole parts.
        line: number of the text's first line in its file.
    """
    blanks = len(text) - len(text.lstrip(b" \t\r\n"))
    starts = [0, *(start for start in _starts(text) if start > blanks), len(text)]
    for start, end in pairwise(starts):
        yield line, text[start:end]
        line += text.count(b"\n", start, end)


def document(record: bytes | None, number: int, kind: str, key: str) -> str:
    """The text in a record.

    Args:
        record: bytes of the record, or None for a null in parquet.
        number: line or row of the record.
        kind: one of KINDS.
        key: key of a JSON object, or parquet column, that holds the text.

    Raises:
        ValueError: the record is malformed; the message says how.
    """
    if record is None:
        raise ValueError(f"expected a string in '{key}', got null")
    # A byte order mark is dropped at the start of a .txt, and in any line of JSON: files that were concatenated have
    # one in the middle, and in JSON it is never text.
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
    value[key].encode()  # raises UnicodeEncodeError, a ValueError, for half a surrogate pair (\ud83d): JSON but no text
    return value[key]


def _likely(text: bytes) -> str:
    """The encodings to suggest for a text that is not UTF-8."""
    is_wide = text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in text[:1000]
    return "utf-16" if is_wide else "latin-1 or cp1252"
