"""JSON objects and TOML tables from files of other people: within bounds, or one message."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import tomli

MAX_JSON_BYTES = 64 * 2**20  # the index of a model with 140,000 tensors has 14 MB
MAX_DEPTH = 64  # objects and lists inside each other; a config.json has 5
LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # its first line, up to the version
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")  # gpt2, meta-llama/Llama-3.2-1B


def read_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object that a file is.

    Raises:
        ValueError: no such file, too large, no JSON, nested too deeply, or no object; names the file.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1) if stat.S_ISREG(path.stat().st_mode) else None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error}{dangling(path)}") from None
    if raw is None:
        raise ValueError(f"cannot read {path}: expected a regular file")
    if len(raw) > max_bytes:
        raise ValueError(f"cannot read {path}: expected at most {max_bytes:,} bytes of JSON")
    check_not_a_pointer(raw, path)
    return parse_object(raw, str(path))


def check_not_a_pointer(start: bytes, path: str | Path) -> None:
    """Refuse what a clone without git-lfs has in the place of each large file.

    Args:
        start: the file's first bytes, 64 at least if it has as many.
        path: for the message.

    Raises:
        ValueError: the file is a pointer of Git LFS.
    """
    if start.startswith(LFS_POINTER):
        raise ValueError(
            f"{path} is a pointer of Git LFS, not the file: run `git lfs pull` in the folder that was cloned"
        )


def dangling(path: str | Path) -> str:
    """The end of a message about a path that cannot be opened: the place that a link names; '' for what is no link."""
    if os.path.islink(path) and not os.path.exists(path):
        return f" (it is a link to {os.readlink(path)}, which is not there)"
    return ""


def download(name: str) -> str:
    """The end of a message about a folder that is not there: the command to run if an id of the hub was meant.

    Returns:
        '' where there is something of that name, or where no id of the Hugging Face hub can have it.
    """
    if os.path.lexists(name) or not HUB_ID.fullmatch(name):
        return ""
    folder = name.rpartition("/")[2]
    return f"; a model of the Hugging Face hub is downloaded first: hf download {name} --local-dir {folder}"


def parse_object(raw: bytes, name: str) -> dict[str, Any]:
    """The JSON object that these bytes are; `name` is for messages.

    Raises:
        ValueError: no JSON, nested too deeply, or no object.
    """
    too_deep = f"cannot read {name}: expected JSON of at most {MAX_DEPTH} levels"
    try:
        value = json.loads(raw.decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"cannot read {name}: {error}") from None
    except RecursionError:
        raise ValueError(too_deep) from None
    if not isinstance(value, dict):
        raise ValueError(f"cannot read {name}: expected a JSON object, got {type(value).__name__}")
    if _is_too_deep(value):
        raise ValueError(too_deep)
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text.

    Raises:
        ValueError: no TOML, a number of thousands of digits, or nested too deeply.
    """
    too_deep = f"expected at most {MAX_DEPTH} levels"
    try:
        tables = tomli.loads(text)
    except RecursionError:
        raise ValueError(too_deep) from None
    if _is_too_deep(tables):
        raise ValueError(too_deep)
    return tables


def _is_too_deep(value: dict[str, Any]) -> bool:
    """True if objects and lists stand inside each other in more levels than whoever walks through them may recurse."""
    nested: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        if not nested:
            return False
        inside = (child for node in nested for child in (node.values() if isinstance(node, dict) else node))
        nested = [child for child in inside if isinstance(child, dict | list)]
    return bool(nested)
