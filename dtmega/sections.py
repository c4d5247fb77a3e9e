"""Typed, frozen sections from TOML and `--section.key value`: reading, errors in plain words, `--help`.

This file knows no key of dtmega: `config/` declares them, and says which one a wrong one may have meant. Reading is
strict: no string is taken for a number, and an error names where its value came from, the file or the option.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from dtmega.declared import Kinds, choices_of, which
from dtmega.strangers import parse_toml

SHOWN = 200  # characters of a wrong value in a message
REFUSALS = 50  # unknown keys of a file that are answered

Sections = TypeVar("Sections", bound=BaseModel)


class ConfigError(ValueError):
    """A refusal of a configuration; `train.py` prints it and exits with code 2."""


class Suggests(Protocol):
    """The ends of messages about keys and sections that do not exist (`config/neighbours.py`)."""

    def of_key(self, section: str, key: str, families: Mapping[str, str], option: bool = False) -> str: ...

    def of_section(self, section: str) -> str: ...


class Override(NamedTuple):
    """`--section.key text`, as it stands on the command line."""

    section: str
    key: str
    text: str

    @property
    def option(self) -> str:
        return f"--{self.section}.{self.key}"


class CommandLine(NamedTuple):
    """The arguments of a run, taken apart.

    Attributes:
        name: of the configuration.
        overrides: in order; later ones win.
    """

    name: str
    overrides: list[Override]


def read_argv(argv: Sequence[str], usage: str, suggests: Suggests) -> CommandLine:
    """`--config NAME` and overrides; `--key value` and `--key=value` are the same.

    Raises:
        ConfigError: an argument that is neither, an option without its value, no --config or two.
    """
    name, overrides, rest = "", list[Override](), list(argv)
    while rest:
        flag, eq, text = rest.pop(0).partition("=")
        if not flag.startswith("--"):
            raise ConfigError(f"cannot read argument '{flag}'; usage: {usage}")
        if flag != "--config" and "." not in flag:
            meant = suggests.of_key("", flag[2:], {}, option=True)
            raise ConfigError(f"cannot read argument '{flag}', which has no section{meant} (usage: {usage})")
        if not eq:
            if not rest:
                raise ConfigError(f"{flag} needs a value; usage: {usage}")
            text = rest.pop(0)
        if flag == "--config":
            if name:
                raise ConfigError(f"--config is given twice, '{name}' and '{text}'; a run has one (usage: {usage})")
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
        return parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}{_hint(text, str(error))}") from None


def _hint(text: str, error: str) -> str:
    """The end of a message about a text that is not TOML: how its line is written, where that is easily told."""
    if re.search(r"=\s*(True|False)\b", text):
        return "; TOML writes true and false in small letters"
    where = re.search(r"at line (\d+)", error)
    line = text.split("\n")[int(where[1]) - 1] if where else ""
    assignment = re.fullmatch(r"\s*([\w.-]+)\s*=\s*([^#]*?)\s*(#.*)?", line[:SHOWN])
    if assignment is None:
        return ""
    name, value, _ = assignment.groups()
    if re.match(r"[A-Za-z_./~]", value):
        return f"; a string stands in quotes: {name} = {json.dumps(value, ensure_ascii=False)}"
    if re.fullmatch(r"\[[^\[\]]*\]", value):
        return f"; strings of a list stand in quotes: {name} = {as_list(value)}"
    return ""


def validate(
    kind: type[Sections],
    values: Mapping[str, Any],
    source: str,
    suggests: Suggests,
    overrides: Sequence[Override] = (),
) -> Sections:
    """Typed sections from nested dicts and what overrides them; `source` names the file in messages.

    Raises:
        ConfigError: an unknown key, a wrong type, a value out of range, keys that contradict; a line for each.
    """
    refusals: list[str] = []
    tables: dict[str, dict[str, Any]] = {}
    for section, table in values.items():
        if isinstance(table, dict):
            tables[section] = table
        else:
            meant = suggests.of_key("", section, {})
            refusals.append(
                f"{source}: '{section:.{SHOWN}}' stands outside any section, expected [section] tables{meant}"
            )
    chosen = {
        section: _chosen(section, Kinds.of(info), tables.get(section, {}), source, overrides)
        for section, info in kind.model_fields.items()
    }
    merged: dict[str, Any] = {}
    for section, table in tables.items():
        merged[section] = {k: v for k, v in table.items() if not _says_nothing(chosen, section, k, v)}
        if section not in chosen and not table:
            refusals.append(f"{source}: unknown section [{section:.{SHOWN}}]{suggests.of_section(section)}")
        for k in merged[section]:
            # Looking for what was meant takes a millisecond or two, and a file of another hand may have any number.
            if len(refusals) < REFUSALS and (unknown := _unknown(chosen, section, k, source, suggests)):
                refusals.append(unknown)
    for override in overrides:
        section, k, text = override
        if unknown := _unknown(chosen, section, k, override.option, suggests, option=True):
            refusals.append(unknown)
        else:  # only a known key tells how to read its text
            merged.setdefault(section, {})[k] = _parse_text(_declaration(chosen, section, k), text)
    if refusals:
        raise ConfigError("\n".join(dict.fromkeys(refusals)))
    for section, (kinds, value) in chosen.items():
        if kinds.tells and section in merged:
            merged[section][kinds.tells] = value
    try:
        return kind.model_validate(merged)
    except ValidationError as error:
        lines = [_explain(e, chosen, source, overrides) for e in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None  # a union reports each of its types


def _parse_text(field: FieldInfo, text: str) -> Any:
    """A key of type str takes the text as it stands; any other is read as TOML (1e-3, true, [1, 2])."""
    if field.annotation is str:
        return text
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text


def _chosen(
    section: str, kinds: Kinds, table: Mapping[str, Any], source: str, overrides: Sequence[Override]
) -> tuple[Kinds, str]:
    """The classes of a section, and the value that tells the one it is."""
    if not kinds.tells:
        return kinds, ""
    value = table.get(kinds.tells, kinds.default)
    where = f"{source}: [{section}] {kinds.tells}"
    for override in overrides:
        if (override.section, override.key) == (section, kinds.tells):
            value = _parse_text(kinds.owners(kinds.tells)[kinds.default], override.text)
            where = override.option
    if value not in list(kinds.classes):
        raise ConfigError(f"{where}: expected {' or '.join(kinds.classes)}, got {value!r:.{SHOWN}}")
    return kinds, value


Chosen = Mapping[str, tuple[Kinds, str]]


def _unknown(chosen: Chosen, section: str, k: str, source: str, suggests: Suggests, option: bool = False) -> str:
    """Why there is no such key, and which one was meant; '' if there is one."""
    families = {name: value for name, (kinds, value) in chosen.items() if kinds.tells}
    if section not in chosen:
        meant = suggests.of_key(section, k, families, option)
        return f"{source}: unknown section [{section:.{SHOWN}}] of key '{k:.{SHOWN}}'{meant}"
    kinds, value = chosen[section]
    if k in kinds.classes[value].model_fields:
        return ""
    if owners := kinds.owners(k):
        return (
            f"{source}: key '{k}' in [{section}] is for {which(kinds, list(owners))}, not for '{value}' "
            f"([{section}] {kinds.tells})"
        )
    meant = suggests.of_key(section, k, families, option)
    return f"{source}: unknown key '{k:.{SHOWN}}' in [{section}]{meant}"


def _declaration(chosen: Chosen, section: str, k: str) -> FieldInfo:
    """The declaration of a key that exists."""
    kinds, value = chosen[section]
    return kinds.classes[value].model_fields[k]


def _says_nothing(chosen: Chosen, section: str, k: str, value: Any) -> bool:
    """True for a key of another class of the section with its default, as files once had them all."""
    if section not in chosen:
        return False
    kinds, own = chosen[section]
    owners = kinds.owners(k)
    return own not in owners and any(field.default == value for field in owners.values())


def as_list(text: str) -> str:
    """The list, as TOML has it, that was meant by a text such as `a,b` or `[a, b]`."""
    items = [item.strip().strip("\"'") for item in text.strip().strip("[]").split(",")]
    are_numbers = all(re.fullmatch(r"[+-]?[\d.]+([eE][+-]?\d+)?", item) for item in items)
    return f"[{', '.join(item if are_numbers else json.dumps(item, ensure_ascii=False) for item in items)}]"


def _explain(error: Any, chosen: Chosen, source: str, overrides: Sequence[Override]) -> str:
    """One of pydantic's errors in a line that begins with where it came from."""
    place = [str(part) for part in error["loc"]]
    section = place[0] if place else ""
    if section and chosen[section][0].tells:
        del place[1]  # pydantic names the class there
    k = place[1] if len(place) > 1 else ""
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
    field = _declaration(chosen, section, k)
    choices = choices_of(field)
    several = "a list of " if get_origin(field.annotation) is list else ""
    expected = f"expected {several}{' or '.join(choices)}" if choices else error["msg"]
    small = str(error["input"]).lower()
    is_flag = bool in (field.annotation, *get_args(field.annotation))
    hint = f"; write {small}" if is_flag and small in ("true", "false") else ""
    if error["type"] == "list_type" and isinstance(error["input"], str):
        listed = as_list(error["input"])
        hint = f"; write {option} '{listed}'" if where == option else f"; write {k} = {listed}"
        hint += f" ({field.description})"
    return f"{where}: {expected}, got {error['input']!r:.{SHOWN}}{hint}"
