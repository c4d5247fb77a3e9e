"""Files of text, by suffix, as batches of raw records; and the document inside a record.

    .txt               the whole file is one document
    .jsonl, .json      one JSON object per line, whose value under a key is one document
    + .gz, .zst        either of them, compressed
    .parquet           each row of one column is one document

Reading cuts files into batches cheaply, in one process; what a record holds is found out later, in many.
"""

from __future__ import annotations

import glob
import gzip
import importlib.util
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

KINDS = (".txt", ".jsonl", ".json", ".parquet")
LIBRARIES = {".zst": "zstandard", ".parquet": "pyarrow"}  # of the optional extra dtmega[data]
CHUNK_BYTES = 1 << 20  # text per batch of lines; a line or a .txt file that is longer comes whole
MAX_RECORD_BYTES = 1 << 28  # of a compressed file: 22 kB of zstd can be one line of 3 GB
ZSTD_BYTES = 4096  # decompressed at a time, to 128 MiB at most: a block of 4 bytes holds up to 128 KiB
PARQUET_ROWS = 256  # the same for rows, whose size is known only after reading


@dataclass(frozen=True)
class Batch:
    """Records of one file, one after the other.

    Attributes:
        kind: one of KINDS.
        first: line (row) of the first record, from 1.
        data: whole lines; or one whole .txt; or rows, None where a row has no value. UTF-8 if the file is sound.
        position_bytes: in all files one after the other (compressed as they are), when this batch has been read.
    """

    path: str
    kind: str
    first: int
    data: bytes | list[bytes | None]
    position_bytes: int


def find(patterns: list[str]) -> list[str]:
    """Files in the order of the glob patterns, by name within each, none twice.

    Raises:
        ValueError: a pattern without a file, a suffix nobody reads, a library that is not installed.
    """
    paths: dict[str, None] = {}
    for pattern in patterns:
        found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        files = list(filter(os.path.isfile, found))
        if not files:
            raise ValueError(f"no file matches --input '{pattern}'")
        paths.update(dict.fromkeys(files))
    for path in paths:
        if _kind(path) not in KINDS:
            raise ValueError(
                f"{path}: expected a name that ends in {', '.join(KINDS)}, .txt or JSON also + .gz or .zst"
            )
        for suffix, library in LIBRARIES.items():
            if path.endswith(suffix) and importlib.util.find_spec(library) is None:
                raise ValueError(f"{path} needs the {library} library: pip install dtmega[data]")
    return list(paths)


def _kind(path: str) -> str:
    stem, suffix = os.path.splitext(path)
    inner = os.path.splitext(stem)[1]
    return inner if suffix in (".gz", ".zst") and inner != ".parquet" else suffix


def read(paths: list[str], column: str) -> Iterator[Batch]:
    """All files as batches; `column` is what to read of parquet files.

    Raises:
        ValueError: a file is damaged or cut off, or has no such column of strings.
    """
    before_bytes = 0
    for path in paths:
        kind = _kind(path)
        records = {".txt": _read_whole, ".parquet": _read_parquet}.get(kind, _read_lines)
        for first, data, position in records(path, column):
            yield Batch(path, kind, first, data, before_bytes + position)
        before_bytes += os.path.getsize(path)


def _read_whole(path: str, _: str) -> Iterator[tuple[int, bytes, int]]:
    parts: list[bytes] = []
    for chunk, _position in _chunks(path):
        parts.append(chunk)
        _check_size(path, 1, parts)
    yield 1, b"".join(parts), os.path.getsize(path)


def _read_lines(path: str, _: str) -> Iterator[tuple[int, bytes, int]]:
    first, parts = 1, []
    for chunk, position in _chunks(path):
        whole, newline, rest = chunk.rpartition(b"\n")
        if newline:
            data = b"".join([*parts, whole])
            yield first, data, position
            first += data.count(b"\n") + 1
            parts = []
        parts.append(rest)
        _check_size(path, first, parts)
    yield first, b"".join(parts), os.path.getsize(path)


def _check_size(path: str, line: int, parts: list[bytes]) -> None:
    """A plain file says by its size what it holds; a compressed one can hold a thousand times more, or a million."""
    if path.endswith((".gz", ".zst")) and sum(map(len, parts)) > MAX_RECORD_BYTES:
        raise ValueError(
            f"{path}: the document in line {line} has more than {MAX_RECORD_BYTES:,} bytes when decompressed; if that "
            f"is meant, decompress the file first"
        )


def _chunks(path: str) -> Iterator[tuple[bytes, int]]:
    """Decompressed bytes, and how many bytes of the file have been read for them."""
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
    """Like zstandard's own stream reader, which however takes a file that was cut off for a whole one."""
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


def records(batch: Batch) -> Iterator[tuple[int, bytes | None]]:
    """(line or row, raw bytes) of each record in a batch; a blank line is none."""
    if isinstance(batch.data, list):
        yield from enumerate(batch.data, batch.first)
    elif batch.kind == ".txt":
        yield 1, batch.data
    else:
        yield from ((n, line) for n, line in enumerate(batch.data.split(b"\n"), batch.first) if line.strip())


def document(record: bytes | None, kind: str, key: str) -> str:
    """The text in a record.

    Raises:
        ValueError: the record is malformed; says how.
    """
    if record is None:
        raise ValueError(f"expected a string in '{key}', got null")
    text = record.decode("utf-8-sig")
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
