"""The input files of `tokenize`: the files that patterns and folders stand for, and their kinds. By suffix these are

.txt               the whole file is one document, or each part that ends with blank lines is one
.jsonl, .json      one JSON object per line, whose value under a key is one document
+ .gz, .zst        any of these, compressed
.parquet           each row of one column is one document
-                  standard input, a .txt unless `--kind` says otherwise
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
    """An input file.

    Attributes:
        path: path of the file; "-" is standard input.
        kind: one of KINDS.
        n_bytes: size on disk, still compressed; 0 for standard input, whose size is not known.
    """

    path: str
    kind: str
    n_bytes: int


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
