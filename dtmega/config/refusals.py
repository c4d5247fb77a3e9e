"""Error messages for an invalid configuration: the file or option with the value, the expected value, and a hint.

`reading.py` opens this file when it has refused something.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from dtmega.config.schema import SHOWN, choices_of


def hint(text: str, error: str) -> str:
    """A hint to append to the message about invalid TOML; '' if the mistake is not a common one."""
    if re.search(r"=\s*(True|False)\b", text):
        return "; TOML writes true and false in small letters"
    line_number = re.search(r"at line (\d+)", error)
    line = text.split("\n")[int(line_number[1]) - 1] if line_number else ""
    assignment = re.fullmatch(r"\s*([\w.-]+)\s*=\s*([^#]*?)\s*(#.*)?", line[:SHOWN])
    if assignment is None:
        return ""
    name, value, _ = assignment.groups()
    if re.match(r"[A-Za-z_./~]", value):
        return f"; a string stands in quotes: {name} = {json.dumps(value, ensure_ascii=False)}"
    if re.fullmatch(r"\[[^\[\]]*\]", value):
        return f"; strings of a list stand in quotes: {name} = {as_list(value)}"
    return ""


def as_list(text: str) -> str:
    """The TOML list that the user meant by writing `a,b` or `[a, b]`."""
    items = [item.strip().strip("\"'") for item in text.strip().strip("[]").split(",")]
    are_numbers = all(re.fullmatch(r"[+-]?[\d.]+([eE][+-]?\d+)?", item) for item in items)
    if not are_numbers:
        items = [json.dumps(item, ensure_ascii=False) for item in items]
    return f"[{', '.join(items)}]"


def where(section: str, k: str, source: str, options: Mapping[str, str]) -> str:
    """The source of a key's value: the option, or the file with the key.

    Args:
        section, k: names of the section and of the key.
        source: name of the file.
        options: the options on the command line, as `--section.key` -> text.
    """
    option = f"--{section}.{k}"
    return option if option in options else f"{source}: [{section}] {k}"


def explain(
    error: Any, declared: Mapping[str, Mapping[str, FieldInfo]], source: str, options: Mapping[str, str]
) -> str:
    """Turn a pydantic error into a line that begins with the source of the value: the file or the option.

    Args:
        error: an element of `ValidationError.errors()`.
        declared: the declarations of the keys that the configuration may have, as section -> key -> declaration.
        source, options: arguments of `where`.
    """
    location = [str(part) for part in error["loc"]]
    section = location[0] if location else ""
    k = location[1] if len(location) > 1 else ""
    if error["type"] == "value_error" and not k:  # a validator of a section or of the whole configuration
        return _contradiction(str(error["ctx"]["error"]), section, source, options)
    option = f"--{section}.{k}"
    place = where(section, k, source, options)
    if error["type"] == "value_error":
        return f"{place}: {error['ctx']['error']}"
    field = declared[section][k]
    choices = choices_of(field)
    several = "a list of " if get_origin(field.annotation) is list else ""
    expected = f"expected {several}{' or '.join(choices)}" if choices else error["msg"]
    lowered = str(error["input"]).lower()
    is_flag = bool in (field.annotation, *get_args(field.annotation))
    hint = f"; write {lowered}" if is_flag and lowered in ("true", "false") else ""
    if error["type"] == "list_type":
        expected = "expected a list"
        if isinstance(error["input"], str):
            listed = as_list(error["input"])
            hint = f"; write {option} '{listed}'" if place == option else f"; write {k} = {listed}"
        hint += f" ({field.description})"
    return f"{place}: {expected}, got {error['input']!r:.{SHOWN}}{hint}"


def _contradiction(message: str, section: str, source: str, options: Mapping[str, str]) -> str:
    """Prefix a validator's message with the file name, and with the options whose keys occur in the message.

    Args:
        message: the validator's message.
        section: section that the validator checks; '' if the validator compares several sections.
        source, options: arguments of `where`.
    """
    written = []
    for option, text in options.items():
        of, _, k = option[2:].partition(".")
        if section in ("", of) and re.search(rf"\b{re.escape(k)}\b", message):
            written.append(f"{option} {text:.{SHOWN}}")
    return f"{source}{' with ' if written else ''}{' '.join(written)}: {message}"
