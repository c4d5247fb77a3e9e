"""The list of keys that `--help` and docs/configuration.md print: each with its default, its line and its choices."""

from __future__ import annotations

import textwrap
from typing import Any, Literal, NamedTuple, get_origin

import tomli_w
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dtmega.config.schema import SectionClasses, choices_of, condition

COLUMNS = 80  # width of `--help`
HELP = """usage: python train.py --config NAME.toml [--section.key value ...]

Train a model. NAME.toml is a path, or the name of a file in configs/.
Several processes: torchrun --nproc-per-node N train.py --config NAME.toml ...
Installed, from any folder: dtmega train --config NAME.toml ..., or
    torchrun --nproc-per-node N -m dtmega train --config NAME.toml ...

--dry-run [--world N] [--memory SIZE] starts nothing: it refuses what a start
would refuse, and tells the memory of each rank.

Every key with its default and its meaning follows; -h SECTION prints one
section only."""


class Group(NamedTuple):
    """A heading in `--help`, with keys of one section. All classes that have these keys declare them identically.

    Attributes:
        section: the section's name.
        title: heading in the help: the section, with the names of the classes if only some classes have these keys.
        fields: mapping from each key to its declaration.
    """

    section: str
    title: str
    fields: dict[str, FieldInfo]


def text(kind: type[BaseModel], section: str = "") -> str:
    """The text of `--help`, or of `--help SECTION` if a section is given.

    Args:
        kind: class of the configuration, with one field per section.
        section: name of the section to describe; '' for all sections.
    """
    return _described(kind, section).lstrip() if section else f"{HELP}\n{_described(kind)}"


def groups_of(kind: type[BaseModel]) -> list[Group]:
    """The keys of all sections, in groups. Within a section, keys shared by all classes come first.

    Args:
        kind: class of the configuration, with one field per section.
    """
    groups: list[Group] = []
    for section, info in kind.model_fields.items():
        fields_by_title = _fields_by_title(section, SectionClasses.of(info))
        groups += [Group(section, title, fields) for title, fields in fields_by_title.items()]
    return groups


def _fields_by_title(section: str, kinds: SectionClasses) -> dict[str, dict[str, FieldInfo]]:
    """Group a section's keys by title: title -> key -> declaration."""
    every = f"[{section}]"
    groups: dict[str, dict[str, FieldInfo]] = {every: {}}
    if kinds.discriminator:
        # Each class declares the discriminator with only its own value; the help lists all values.
        declaration = kinds.declarations(kinds.discriminator)[kinds.default]
        choices: Any = Literal[tuple(kinds.classes)]
        groups[every][kinds.discriminator] = FieldInfo(
            annotation=choices, default=kinds.default, description=declaration.description
        )
    all_keys: dict[str, None] = {}  # keys in the order in which the classes first declare them
    for section_class in kinds.classes.values():
        all_keys.update(dict.fromkeys(section_class.model_fields))
    all_keys.pop(kinds.discriminator, None)
    for k in all_keys:
        # Two families may declare a key with different defaults. The key is then listed in two groups.
        declarations = kinds.declarations(k)
        values_by_declaration: dict[str, list[str]] = {}
        for value, field in declarations.items():
            values_by_declaration.setdefault(repr(field), []).append(value)
        for values in values_by_declaration.values():
            title = every if len(values) == len(kinds.classes) else f"{every}, {condition(kinds, values)}"
            groups.setdefault(title, {})[k] = declarations[values[0]]
    return groups


def _described(kind: type[BaseModel], only: str = "") -> str:
    """The list of keys, each with its default, description and allowed values; '' describes all sections."""
    lines: list[str] = []
    for section, title, fields in groups_of(kind):
        if only not in ("", section):
            continue
        lines += ["", title]
        for k, field in fields.items():
            default = tomli_w.dumps({k: field.default}, multiline_strings=False).strip().partition("= ")[2]
            lines.append(f"  --{section}.{k} {' '.join(default.split())}")
            choices = choices_of(field)
            quantity = "any of" if get_origin(field.annotation) is list else "one of"
            listed = f"; {quantity} {', '.join(choices)}" if len(choices) > 1 else ""
            indent = " " * 6
            lines += textwrap.wrap(
                f"{field.description}{listed}",
                COLUMNS,
                initial_indent=indent,
                subsequent_indent=indent,
                break_on_hyphens=False,
            )
    return "\n".join(lines)
