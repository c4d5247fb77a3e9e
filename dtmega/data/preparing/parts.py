"""Split a text into parts, so that several machines can tokenise the text. `merge.py` joins the resulting files.

    dtmega tokenize --input big.jsonl --tokenizer gpt2 --output data/mine --part 3/12   # data/mine.part-3-of-12

A single uncompressed UTF-8 file of JSON lines is split by bytes: a line belongs to the part in which its first byte
lies. Every other input is split between files. Parts are consecutive, so joining the parts in order restores the order
of the text. A part of a short text may have no documents. The files of an empty part are written too, so that `merge`
can distinguish an empty part from a missing part.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import xxhash

from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.indexed_files.record import PartRecord, record_of
from dtmega.data.indexed_files.stored_output import is_there
from dtmega.data.preparing.input_files import STDIN, File
from dtmega.files.console import counted

BLOCK_BYTES, N_BLOCKS = 2**12, 64  # size and number of the blocks that `_input_digest` reads
SEARCH_BYTES = 1 << 20  # number of bytes read at a time when searching for the end of a line


class Part(NamedTuple):
    """Part `number`, counted from 0, of a text that is split into `of` parts."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


class Share(NamedTuple):
    """The text, or part of a text, that one `dtmega tokenize` command processes.

    Attributes:
        prefix: prefix of the output.
        files: files in reading order, or a single range of lines in a file.
        part: entry `part` of the output's .meta.json; None for a whole text.
        name: prefix of each message about a part; '' for a whole text.
    """

    prefix: str
    files: Sequence[File]
    part: PartRecord | None
    name: str

    def made(self, overwrite: bool) -> str:
        """A line for the user if this part already exists with matching input and settings; otherwise ''.

        Args:
            overwrite: whether to replace any existing output.

        Raises:
            ValueError: output from other input or settings has this prefix, and `overwrite` is False.
        """
        if overwrite or self.part is None:
            return ""
        # A killed task may leave a .bin without an .idx.
        if not is_there(f"{self.prefix}.idx"):
            return ""
        found = record_of(IndexedDataset(self.prefix))
        if found is None or found.part != self.part:
            got = found.part.model_dump() if found and found.part else "no record of a part"
            raise ValueError(
                f"{self.prefix}.idx is there, made from another input or with other settings: expected "
                f"{self.part.model_dump()} in {self.prefix}.meta.json, got {got}: take another --output, or "
                f"--overwrite to replace it"
            )
        return f"{self.name}skipped, because {self.prefix}.idx is there, of this input and these settings"


def share_of(
    prefix: str, files: Sequence[File], part: Part | None, *, encoding: str, settings: Mapping[str, Any]
) -> Share:
    """Find the files, or the lines of a file, that one command processes.

    Args:
        prefix: output prefix for the whole text.
        files: all files of the text.
        part: the part to tokenise; None for the whole text.
        encoding: name of the encoding of all text files; '' for UTF-8.
        settings: all settings that determine the tokens, as JSON values.

    Raises:
        ValueError: `part` is given, but one of the inputs is not a file.
    """
    if part is None:
        return Share(prefix, files, None, "")
    for file in files:
        if file.path == STDIN or not os.path.isfile(file.path):
            raise ValueError(f"--part {part}: expected --input of files, which all processes can read, got {file.path}")
    all_settings = json.dumps({**settings, "encoding": encoding}, sort_keys=True)
    digest = xxhash.xxh3_64_hexdigest(all_settings.encode())
    record = PartRecord(number=part.number, of=part.of, input=_input_digest(files), settings=digest)
    if _has_cuts(files, encoding):
        own = [_lines_of(files[0], part)]
        extent = f"{own[0].n_bytes:,} of {files[0].n_bytes:,} bytes"
    else:
        own = _files_of(files, part)
        extent = f"{len(own)} of {counted(len(files), 'file')}"
    name = f"part {part.number} of {part.of} ({extent}): "
    return Share(f"{prefix}.part-{part.number}-of-{part.of}", own, record, name)


def _has_cuts(files: Sequence[File], encoding: str) -> bool:
    """True if the text is a single file that can be split between lines.

    Only UTF-8 can be split so: in UTF-16, a byte that looks like a line end may be half a character.
    """
    is_plain = files[0].kind in (".jsonl", ".json") and not files[0].path.endswith((".gz", ".zst"))
    return len(files) == 1 and is_plain and not encoding


def _lines_of(file: File, part: Part) -> File:
    """Restrict a file to the byte range that holds exactly this part's lines."""
    start, stop = (line_start(file, file.n_bytes * number // part.of) for number in (part.number, part.number + 1))
    return file._replace(first_byte=start, n_bytes=stop - start)


def line_start(file: File, at: int) -> int:
    """Offset of the first line that begins at byte `at` or later; the file's size if no line begins there."""
    if at == 0:
        return 0
    with open(file.path, "rb") as raw:
        raw.seek(at - 1)  # if the byte before `at` is a line end, a line begins at `at`
        while chunk := raw.read(SEARCH_BYTES):
            end = chunk.find(b"\n")
            if end >= 0:
                return raw.tell() - len(chunk) + end + 1
    return file.n_bytes


def _files_of(files: Sequence[File], part: Part) -> list[File]:
    """The files whose middle byte falls into this part's byte range.

    Bytes are numbered consecutively across all files, as stored on disk.
    """
    total_bytes = sum(file.n_bytes for file in files)
    own: list[File] = []
    before_bytes = 0
    for file in files:
        twice_middle = 2 * before_bytes + file.n_bytes
        number = part.of * twice_middle // (2 * total_bytes) if total_bytes else 0
        if min(number, part.of - 1) == part.number:  # `number` is `part.of` for an empty file at the end
            own.append(file)
        before_bytes += file.n_bytes
    return own


def _input_digest(files: Sequence[File]) -> str:
    """Hash the order, kinds and sizes of the files, and some blocks of each file, including the last block.

    File names and times are not hashed, because other machines may have copies of the files. If a
    change between the blocks keeps the file's size, the change goes unnoticed.
    """
    digest = xxhash.xxh3_64()
    n_blocks = max(1, N_BLOCKS // len(files))
    for file in files:
        digest.update(f"{file.kind} {file.n_bytes} ".encode())
        last_start = max(0, file.n_bytes - BLOCK_BYTES)
        with open(file.path, "rb") as raw:
            for start in sorted({last_start * (i + 1) // n_blocks for i in range(n_blocks)}):
                raw.seek(start)
                digest.update(raw.read(BLOCK_BYTES))
    return digest.hexdigest()
