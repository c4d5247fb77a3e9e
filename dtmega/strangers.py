"""JSON objects and TOML tables from files of other people: within bounds, or one message."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import tomli

MAX_JSON_BYTES = 64 * 2**20  # the index of a model with 140,000 tensors has 14 MB
MAX_DEPTH = 64  # objects and lists inside each other; a config.json has 5


def read_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object that a file is.

    Raises:
        ValueError: no such file, too large, no JSON, nested too deeply, or no object; names the file.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1) if stat.S_ISREG(path.stat().st_mode) else None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    if raw is None:
        raise ValueError(f"cannot read {path}: expected a regular file")
    if len(raw) > max_bytes:
        raise ValueError(f"cannot read {path}: expected at most {max_bytes:,} bytes of JSON")
    return parse_object(raw, str(path))


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
