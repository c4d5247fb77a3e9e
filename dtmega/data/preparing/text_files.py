"""Readers of input files: each file becomes batches of raw records (lines, rows, or texts).

One process reads all files, which is cheap; many workers then parse the records (`documents.py`). Text in an encoding
other than UTF-8 is converted here, so all later code sees only UTF-8.
"""

from __future__ import annotations

import codecs
import gzip
import os
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from dtmega.data.preparing.input_files import STDIN, File
from dtmega.files.confined import limited_memory

BLANK_LINES = "blank-lines"
# Matches the end of a line and the last blank line before the next text.
BETWEEN_PARTS = re.compile(rb"\n[ \t\r]*\n(?=[ \t\r]*[^ \t\r\n])")
CHUNK_BYTES = 1 << 20  # size of a batch of lines; a longer line or .txt file forms a batch by itself
MAX_RECORD_BYTES = 1 << 28  # limit for a record in a compressed file: 91 kB of zstd can hold a line of 3 GB
# Number of compressed bytes to decompress at a time. The result has at most 128 MiB, because a zstd block takes at
# least 4 bytes and holds up to 128 KiB.
ZSTD_BYTES = 4096
PARQUET_ROWS = 256  # maximum number of rows to read at a time
PARQUET_BYTES = 1 << 31  # limit for the memory that these rows take, which a file may understate


@dataclass(frozen=True)
class RecordBatch:
    """Consecutive records of one file.

    Attributes:
        path: path of the file, for messages (`File.label`).
        kind: one of KINDS.
        first: line number (in parquet: row number) of the first record, counted from 1.
        data: bytes of the records: whole lines of JSON, a whole .txt, or whole parts of a .txt. For parquet, a list of
            rows, with None for a null. The text is UTF-8 unless the file is faulty.
        is_cut: whether blank lines separate documents, which is possible only in a .txt.
        position_bytes: number of stored bytes read from all input files by the time this batch was complete.
    """

    path: str
    kind: str
    first: int
    data: bytes | list[bytes | None]
    is_cut: bool
    position_bytes: int


def read_batches(
    files: Sequence[File], column: str, *, at_blank_lines: bool = False, encoding: str = ""
) -> Iterator[RecordBatch]:
    """Read all files as batches.

    Args:
        files: the files in reading order.
        column: column of parquet files that holds the text.
        at_blank_lines: whether to cut each .txt at blank lines and make each part a separate document.
        encoding: name of the encoding of all text files; '' for UTF-8.

    Raises:
        ValueError: a file is damaged or cut off, is not in `encoding`, or has no string column `column`.
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
            chunks = _chunks(file.path, encoding) if file.first_byte is None else _range(file)
            batches = _read_lines(file.path, chunks)
        for first, data, position in batches:
            yield RecordBatch(file.label, file.kind, first, data, is_cut, before_bytes + position)
        before_bytes += file.n_bytes


# Each reader below yields (line or row of the first record, data of a batch, number of stored bytes read so far).


def _read_whole(path: str, encoding: str) -> Iterator[tuple[int, bytes, int]]:
    """Read a whole file as one batch."""
    chunks, position = [], 0
    for chunk, position in _chunks(path, encoding):  # noqa: B007
        chunks.append(chunk)
        _check_size(path, 1, chunks)
    yield 1, b"".join(chunks), position


def _read_lines(path: str, chunks: Iterator[tuple[bytes, int]]) -> Iterator[tuple[int, bytes, int]]:
    """Read batches of whole lines, about CHUNK_BYTES each; the last batch is the text after the last newline.

    Args:
        path: path of the file, for messages.
        chunks: text of the file, as `_chunks` yields it.
    """
    first, pending, position = 1, [], 0
    for chunk, position in chunks:
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
    """Read batches of whole parts; blank lines end a part."""
    first, pending, position = 1, [], 0
    # Blanks at the end of the text read so far. Only the next lines show whether these blanks end a part.
    blanks = b""
    for _, lines, position in _read_lines(path, _chunks(path, encoding)):
        read = blanks + lines
        text = read.rstrip(b" \t\r\n")
        blanks = read[len(text) :]
        starts = part_starts(text)
        data = b"".join([*pending, text[: starts[-1]]]) if starts else b""
        if data.strip():
            yield first, data, position
            first += data.count(b"\n")
            pending, text = [], text[starts[-1] :]
        pending.append(text)
        _check_size(path, first, pending)
    yield first, b"".join([*pending, blanks]), position


def part_starts(text: bytes) -> list[int]:
    """The offsets of the parts that follow blank lines in a text."""
    return [match.end() for match in BETWEEN_PARTS.finditer(text)]


def _check_size(path: str, line: int, pieces: list[bytes]) -> None:
    """Raise an error if a record in a compressed file is too large.

    A compressed file can expand to 30,000 times its size.

    Args:
        path: path of the file.
        line: line where the record starts, for the message.
        pieces: decompressed bytes of the record so far.
    """
    if path.endswith((".gz", ".zst")) and sum(map(len, pieces)) > MAX_RECORD_BYTES:
        raise ValueError(
            f"{path}: the document in line {line} has more than {MAX_RECORD_BYTES:,} bytes when decompressed; if that "
            f"is meant, decompress the file first"
        )


def _range(file: File) -> Iterator[tuple[bytes, int]]:
    """Read a range of an uncompressed UTF-8 file; yield chunks, each with the number of bytes read so far."""
    position = 0
    with open(file.path, "rb") as raw:
        raw.seek(file.first_byte or 0)
        while chunk := raw.read(min(CHUNK_BYTES, file.n_bytes - position)):
            position += len(chunk)
            yield chunk, position


def _chunks(path: str, encoding: str) -> Iterator[tuple[bytes, int]]:
    """Yield chunks of a file's text, each with the number of stored bytes read so far.

    The text is converted to UTF-8. Without an `encoding`, the file should be UTF-8 already; `document_text`
    checks the file.
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
    """Convert the next chunk of a text to UTF-8.

    Args:
        decoder: decoder of the file, which keeps the bytes of an incomplete character from chunk to chunk.
        chunk: decompressed bytes in `encoding`.
        path: path of the file, for messages.
        encoding: name of the encoding, for messages.
        before_bytes: number of decompressed bytes before this chunk.
        is_last: whether this is the last chunk.

    Raises:
        ValueError: the file is not in `encoding`.
    """
    kept_bytes = len(decoder.getstate()[0])
    try:
        return decoder.decode(chunk, is_last).encode()
    except UnicodeError as error:
        # Text in UTF-16 or UTF-32 without a byte order mark raises a bare UnicodeError, without a position.
        place, why = (error.start, error.reason) if isinstance(error, UnicodeDecodeError) else (0, str(error))
        at = before_bytes - kept_bytes + place
        raise ValueError(f"{path} is not in {encoding}: {why} at byte {at} (--encoding)") from None


def _decompressed(path: str) -> Iterator[tuple[bytes, int]]:
    """Yield chunks of decompressed bytes, each with the number of stored bytes read so far.

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
    """Decompress a zstd file. zstandard's own stream reader is not used, because it accepts a truncated file silently.

    Raises:
        EOFError: the file is damaged or cut off.
    """
    import zstandard

    # Allow windows of 2 GiB: archives made with `zstd --long=31` are common among text corpora. zstd allocates only as
    # much of a window as the text fills.
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
    """Read one column of strings in batches of rows.

    Strings are read as indices into a dictionary, because a file of a few bytes can hold the same long string in every
    row. The strings of a batch take about CHUNK_BYTES, unless a single string is longer.

    Raises:
        ValueError: the file is damaged, has no string column `column`, or needs too much memory.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    pa.set_memory_pool(pa.system_memory_pool())  # the usual pool reserves a GiB in advance, which no limit reaches
    try:
        names = pq.read_schema(path).names
        if column not in names:
            raise ValueError(f"{path}: expected a column '{column}' (--json-key), got {names}")
        with pq.ParquetFile(path, read_dictionary=[column]) as file:
            row, n_rows, size_bytes = 0, file.metadata.num_rows, os.path.getsize(path)
            batches = file.iter_batches(batch_size=_rows_at_a_time(file.metadata, column), columns=[column])
            while True:
                with limited_memory(PARQUET_BYTES):
                    rows = next(batches, None)
                if rows is None:
                    return
                values = rows.column(0)
                kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
                if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                    raise ValueError(f"{path}: expected strings in '{column}' (--json-key), got {kind}")
                for part in _parts_of(values, path, row + 1):
                    # Read strings as bytes, so that a row that is not UTF-8 can be reported while all other rows are
                    # read.
                    data = part.dictionary_decode().cast(pa.large_binary()).to_pylist()
                    row += len(data)
                    # The position in the file is not known; estimate it from the share of rows read so far.
                    yield row - len(data) + 1, data, size_bytes * row // n_rows
    except MemoryError:
        raise ValueError(f"{path}: some rows of '{column}' need more than {PARQUET_BYTES:,} bytes of memory") from None
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: damaged or cut off ({error})") from None


def _rows_at_a_time(metadata: Any, column: str) -> int:
    """The number of rows to read at a time, so that they take about CHUNK_BYTES if the file's own sizes are true."""
    n_bytes = 0
    for group in range(metadata.num_row_groups):
        chunks = [metadata.row_group(group).column(i) for i in range(metadata.num_columns)]
        n_bytes += sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == column)
    return max(1, min(PARQUET_ROWS, CHUNK_BYTES * metadata.num_rows // max(n_bytes, 1)))


def _parts_of(values: Any, path: str, first: int) -> Iterator[Any]:
    """Cut a dictionary array of strings into parts of about CHUNK_BYTES.

    Args:
        values: the array.
        path: path of the file, for messages.
        first: row number of the first string, for messages.

    Raises:
        ValueError: a string has more than MAX_RECORD_BYTES.
    """
    import pyarrow.compute as pc

    sizes = pc.call_function("binary_length", [values.dictionary]).take(values.indices).to_pylist()
    start = part_bytes = 0
    for i, n_bytes in enumerate(size or 0 for size in sizes):
        if n_bytes > MAX_RECORD_BYTES:
            raise ValueError(f"{path}: expected at most {MAX_RECORD_BYTES:,} bytes in row {first + i}, got {n_bytes:,}")
        if part_bytes and part_bytes + n_bytes > CHUNK_BYTES:
            yield values.slice(start, i - start)
            start, part_bytes = i, 0
        part_bytes += n_bytes
    yield values.slice(start)
