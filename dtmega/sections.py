"""Typed, frozen sections from TOML and `--section.key value`: reading, errors in plain words, `--help`.

This file knows no key of dtmega: `config.py` declares them. Reading is strict: no string is taken for a number, an
unknown key names its neighbour, and an error names where its value came from, the file or the option.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import tomli
import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

COLUMNS = 80  # what --help fits into
SHOWN = 200  # characters of a wrong value in a message

Sections = TypeVar("Sections", bound=BaseModel)


class ConfigError(ValueError):
    """The user asked for what cannot be; `train.py` prints it and exits with code 2."""


def key(default: Any, line: str, **bounds: Any) -> Any:
    """A key of a section: its default, its line in `--help`, and pydantic's bounds."""
    return Field(default, description=line, **bounds)


class Section(BaseModel):
    """The keys of one [section]."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Override(NamedTuple):
    """`--section.key text`, as it stands on the command line."""

    section: str
    key: str
    text: str

    @property
    def option(self) -> str:
        return f"--{self.section}.{self.key}"


class CommandLine(NamedTuple):
    """Attributes:
    name: of the configuration.
    overrides: in order; later ones win.
    """

    name: str
    overrides: list[Override]


def fields_of(kind: type[BaseModel]) -> dict[str, dict[str, FieldInfo]]:
    """Section -> key -> its declaration."""
    found = {}
    for section, info in kind.model_fields.items():
        assert isinstance(info.annotation, type)
        assert issubclass(info.annotation, Section)
        found[section] = info.annotation.model_fields
    return found


def read_argv(argv: Sequence[str], usage: str) -> CommandLine:
    """`--config NAME` and overrides; `--key value` and `--key=value` are the same.

    Raises:
        ConfigError: an argument that is neither, an option without its value, no --config.
    """
    name, overrides, rest = "", list[Override](), list(argv)
    while rest:
        flag, eq, text = rest.pop(0).partition("=")
        if not flag.startswith("--") or (flag != "--config" and "." not in flag):
            raise ConfigError(f"cannot read argument '{flag}'; usage: {usage}")
        if not eq:
            if not rest:
                raise ConfigError(f"{flag} needs a value; usage: {usage}")
            text = rest.pop(0)
        if flag == "--config":
            name = text
        else:
            section, _, k = flag[2:].partition(".")
            overrides.append(Override(section, k, text))
    if not name:
        raise ConfigError(f"--config is missing; usage: {usage}")
    return CommandLine(name, overrides)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        ConfigError: no such file, one that cannot be read, or that is not TOML.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    try:
        return _parse(text)
    except ValueError as error:
        hint = "; TOML writes true and false in small letters" if re.search(r"=\s*(True|False)\b", text) else ""
        raise ConfigError(f"{path} is not TOML: {error}{hint}") from None


def validate(
    kind: type[Sections], values: Mapping[str, Any], source: str, overrides: Sequence[Override] = ()
) -> Sections:
    """Typed sections from nested dicts and what overrides them; `source` names the file in messages.

    Raises:
        ConfigError: an unknown key, a wrong type, a value out of range, keys that contradict; a line for each.
    """
    fields = fields_of(kind)
    merged: dict[str, Any] = {}
    for section, table in values.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{source}: '{section}' stands outside any section; expected [section] tables with keys")
        for k in table:
            _field(fields, section, k, source)
        merged[section] = dict(table)
    for override in overrides:
        # Checked before it is read, because only a known key tells how its text is to be read.
        field = _field(fields, override.section, override.key, override.option)
        merged.setdefault(override.section, {})[override.key] = _parse_text(field, override.text)
    try:
        return kind.model_validate(merged)
    except ValidationError as error:
        lines = [_explain(e, fields, source, overrides) for e in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None  # a union reports each of its types


def describe(kind: type[BaseModel]) -> str:
    """Every key with its default, its line, and what it may be where that is a choice."""
    lines: list[str] = []
    for section, fields in fields_of(kind).items():
        lines += ["", f"[{section}]"]
        for k, field in fields.items():
            default = tomli_w.dumps({k: field.default}, multiline_strings=False).strip().partition("= ")[2]
            lines.append(f"  --{section}.{k} {' '.join(default.split())}")
            choices = _choices(field)
            listed = f"; one of {', '.join(choices)}" if len(choices) > 1 else ""
            indent = " " * 6
            lines += textwrap.wrap(
                f"{field.description}{listed}",
                COLUMNS,
                initial_indent=indent,
                subsequent_indent=indent,
                break_on_hyphens=False,
            )
    return "\n".join(lines)


def _parse(text: str) -> dict[str, Any]:
    """Raises:
    ValueError: not TOML; a number of thousands of digits, tables nested by the hundred.
    """
    try:
        return tomli.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def _parse_text(field: FieldInfo, text: str) -> Any:
    """A key of type str takes the text as it stands; any other is read as TOML (1e-3, true, [1, 2])."""
    if field.annotation is str:
        return text
    try:
        return _parse(f"value = {text}")["value"]
    except ValueError:
        return text


def _field(fields: Mapping[str, Mapping[str, FieldInfo]], section: str, k: str, source: str) -> FieldInfo:
    if section not in fields:
        raise ConfigError(f"{source}: unknown section [{section:.{SHOWN}}]{_nearest(section, list(fields))}")
    if k not in fields[section]:
        raise ConfigError(f"{source}: unknown key '{k:.{SHOWN}}' in [{section}]{_nearest(k, list(fields[section]))}")
    return fields[section][k]


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(known)}"


def _choices(field: FieldInfo) -> list[str]:
    """The values of a key that is one of a few, as TOML has them but without quotes; [] for any other key."""
    kinds = get_args(field.annotation) if get_origin(field.annotation) is not Literal else (field.annotation,)
    literals = [str(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    return literals + (["true", "false"] if literals and bool in kinds else [])


def _explain(
    error: Any, fields: Mapping[str, Mapping[str, FieldInfo]], source: str, overrides: Sequence[Override]
) -> str:
    """One of pydantic's errors in a line that begins with where it came from."""
    section, k = (*(str(part) for part in error["loc"][:2]), "", "")[:2]
    if error["type"] == "value_error":  # of a section's own check, or of all sections': keys that contradict
        message = str(error["ctx"]["error"])
        options = [
            f"{o.option} {o.text:.{SHOWN}}"
            for o in overrides
            if section in ("", o.section) and re.search(rf"\b{re.escape(o.key)}\b", message)
        ]
        return f"{source}{' with ' if options else ''}{' '.join(options)}: {message}"
    option = f"--{section}.{k}"
    where = option if option in {o.option for o in overrides} else f"{source}: [{section}] {k}"
    field = fields[section][k]
    choices = _choices(field)
    expected = f"expected {' or '.join(choices)}" if choices else error["msg"]
    small = str(error["input"]).lower()
    is_flag = bool in (field.annotation, *get_args(field.annotation))
    hint = f"; write {small}" if is_flag and small in ("true", "false") else ""
    return f"{where}: {expected}, got {error['input']!r:.{SHOWN}}{hint}"
