"""Read untrusted JSON and TOML, with limits on size and depth. Malformed or oversized input raises a ValueError."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import tomli

from dtmega.files.regular import open_regular

MAX_JSON_BYTES = 64 * 2**20  # the index of a model with 140,000 tensors takes 14 MB
MAX_DEPTH = 64  # levels of nested objects and lists; a config.json has 5
LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # the first line of a pointer file, up to the version
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")  # gpt2, meta-llama/Llama-3.2-1B


def read_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        ValueError: the file is missing, larger than `max_bytes`, not JSON, nested too deeply, or not an object; the
            message names the file.
    """
    try:
        with open_regular(path) as file:
            raw = file.read(max_bytes + 1)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}{dangling(path)}") from None
    if len(raw) > max_bytes:
        raise ValueError(f"cannot read {path}: expected at most {max_bytes:,} bytes of JSON")
    check_not_a_pointer(raw, path)
    return parse_object(raw, str(path))


def check_not_a_pointer(start: bytes, path: str | Path) -> None:
    """Refuse a Git LFS pointer file. A clone made without git-lfs has pointer files in place of large files.

    Args:
        start: first bytes of the file, at least 64 bytes unless the file is shorter.
        path: name of the file, for the message.

    Raises:
        ValueError: the file is a Git LFS pointer file.
    """
    if start.startswith(LFS_POINTER):
        raise ValueError(
            f"{path} is a pointer of Git LFS, not the file: run `git lfs pull` in the folder that was cloned"
        )


def dangling(path: str | Path) -> str:
    """The end of an error message about a path: the target of a broken link; '' if the path is not a broken link."""
    if os.path.islink(path) and not os.path.exists(path):
        return f" (it is a link to {os.readlink(path)}, which is not there)"
    return ""


def download(name: str) -> str:
    """The end of an error message about a missing folder: the command that downloads model `name` from Hugging Face.

    Returns:
        The text; '' if a file or folder `name` exists, or if `name` cannot be a model's id on the Hugging Face hub.
    """
    if os.path.lexists(name) or not HUB_ID.fullmatch(name):
        return ""
    folder = name.rpartition("/")[2]
    return f"; a model of the Hugging Face hub is downloaded first: hf download {name} --local-dir {folder}"


def parse_object(raw: bytes, name: str) -> dict[str, Any]:
    """Parse the bytes of one JSON object.

    Args:
        name: name of the file with these bytes, for messages.

    Raises:
        ValueError: the bytes are not JSON, are nested too deeply, or are not an object.
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
    """Parse TOML text.

    Raises:
        ValueError: the text is not TOML, has a number with thousands of digits, or is nested too deeply.
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
    """True if objects and lists are nested more than MAX_DEPTH levels deep, which could overflow a recursive walk."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        if not level:
            return False
        next_level: list[Any] = []
        for node in level:
            children = node.values() if isinstance(node, dict) else node
            next_level += [child for child in children if isinstance(child, dict | list)]
        level = next_level
    return bool(level)
