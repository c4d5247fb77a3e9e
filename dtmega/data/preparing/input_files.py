"""Find the input files that patterns and folders select for `tokenize`. A file's suffix determines its kind:

.txt               one document per file, or per part if blank lines separate documents
.jsonl, .json      one JSON object per line; the value under a chosen key is one document
+ .gz, .zst        any of the kinds above, compressed
.parquet           one document per row of a chosen column
-                  standard input, read as .txt unless `--kind` says otherwise
"""

from __future__ import annotations

import glob
import os
from typing import NamedTuple

from dtmega.files import optional_imports
from dtmega.files.untrusted_json import dangling

KINDS = (".txt", ".jsonl", ".json", ".parquet")
LIBRARIES = {".zst": "zstandard", ".parquet": "pyarrow"}  # libraries of the optional extra dtmega[data]
STDIN = "-"


class File(NamedTuple):
    """An input file, or a range of lines in an input file.

    Attributes:
        path: path of the file; "-" is standard input.
        kind: one of KINDS.
        n_bytes: size of the file on disk, before decompression, or size of the range; 0 for standard input, because its
            size is unknown.
        first_byte: offset of the range's first byte; None for the whole file.
    """

    path: str
    kind: str
    n_bytes: int
    first_byte: int | None = None

    @property
    def label(self) -> str:
        """The file's name for messages with line numbers. For a range, the name gives the byte where line 1 starts."""
        return f"{self.path} from byte {self.first_byte}" if self.first_byte else self.path


def find_files(patterns: list[str], kind: str | None = None) -> list[File]:
    """Find the files that match glob patterns.

    The files are in pattern order, sorted within each pattern, without duplicates. A folder selects all files with a
    suffix in KINDS, in the folder and its subfolders. If `kind` is given, a folder selects files with any suffix.
    Hidden files and folders are left out.

    Args:
        patterns: paths, folders or glob patterns.
        kind: kind of all files, without the dot; None to take each file's kind from its suffix.

    Raises:
        ValueError: a pattern matches no file, a suffix is unknown, a link dangles, or a library is not installed.
    """
    paths: dict[str, None] = {}  # the keys are an ordered set of paths
    for pattern in patterns:
        paths.update(dict.fromkeys(_matching(pattern, of_any_kind=kind is not None)))
    return [_file(path, kind) for path in paths]


def _matching(pattern: str, *, of_any_kind: bool) -> list[str]:
    """The paths that a pattern selects.

    Raises:
        ValueError: the pattern selects no file.
    """
    if os.path.isdir(pattern):
        paths = _below(pattern, of_any_kind=of_any_kind)
        complaint = (
            f"no file in --input '{pattern}' ends in {', '.join(KINDS)}, .txt or JSON also + .gz or .zst; "
            f"--kind txt reads others as text"
        )
    else:
        # A pattern that is the path of an existing file selects that file, even if the path contains a star or
        # brackets.
        is_path = pattern == STDIN or os.path.exists(pattern)
        matches = [pattern] if is_path else sorted(glob.glob(pattern, recursive=True))
        paths = [path for path in matches if not os.path.isdir(path)]
        complaint = f"no file matches --input '{pattern}'"
    if not paths:
        raise ValueError(complaint)
    return paths


def _file(path: str, kind: str | None) -> File:
    """The input file at a path; `kind` is as in `find_files`.

    Raises:
        ValueError: the suffix is unknown, the link dangles, or a library is not installed.
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
    """Sorted paths of the visible files below a folder.

    Unless `of_any_kind` is True, files whose suffix is not in KINDS are left out.
    """
    paths: list[str] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]  # os.walk then skips the hidden folders
        for name in names:
            if not name.startswith(".") and (of_any_kind or _suffix(name) in KINDS):
                paths.append(os.path.join(parent, name))
    return sorted(paths)


def _suffix(path: str) -> str:
    """The suffix of a name, ignoring a final .gz or .zst.

    For .parquet.gz the suffix is .gz, which is refused later, because parquet files are compressed internally.
    """
    stem, suffix = os.path.splitext(path)
    inner = os.path.splitext(stem)[1]
    return inner if suffix in (".gz", ".zst") and inner != ".parquet" else suffix
