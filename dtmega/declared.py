"""Keys as they are declared: sections, the classes that a section may have, and all of it as `--help`.

A section is a class, or one of several as pydantic's union with a discriminator: one of its keys tells which. This file
knows no key of dtmega: `config/` declares them, `sections.py` reads them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

COLUMNS = 80  # what --help fits into


def key(default: Any, line: str, **bounds: Any) -> Any:
    """A key of a section: its default, its line in `--help`, and pydantic's bounds."""
    return Field(default, description=line, **bounds)


class Section(BaseModel):
    """The keys of one [section]."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Kinds:
    """The classes that a section may have.

    Attributes:
        tells: the key that tells which; '' where there is one class only.
        default: the value of that key where it is left out.
        classes: value -> class.
    """

    tells: str
    default: str
    classes: Mapping[str, type[Section]]

    @classmethod
    def of(cls, info: FieldInfo) -> Kinds:
        """The classes that a section is declared to be one of."""
        if info.discriminator is None:
            assert isinstance(info.annotation, type)
            assert issubclass(info.annotation, Section)
            return cls("", "", {"": info.annotation})
        tells = str(info.discriminator)
        classes: dict[str, type[Section]] = {}
        for kind in get_args(info.annotation):
            classes[kind.model_fields[tells].default] = kind
        return cls(tells, getattr(info.default, tells), classes)

    def owners(self, k: str) -> dict[str, FieldInfo]:
        """Value of the key that tells -> the declaration of `k`, of the classes that have it."""
        return {value: kind.model_fields[k] for value, kind in self.classes.items() if k in kind.model_fields}


class Group(NamedTuple):
    """Keys of a section that the same of its classes declare alike.

    Attributes:
        title: the section, and where not all of its classes have these keys, which do.
        fields: key -> its declaration.
    """

    section: str
    title: str
    fields: dict[str, FieldInfo]


def groups_of(kind: type[BaseModel]) -> list[Group]:
    """All keys in order; in a section of several classes those of all of them first."""
    found: list[Group] = []
    for section, info in kind.model_fields.items():
        kinds = Kinds.of(info)
        every = f"[{section}]"
        groups: dict[str, dict[str, FieldInfo]] = {every: {}}
        if kinds.tells:
            one = kinds.owners(kinds.tells)[kinds.default]
            choices: Any = Literal[tuple(kinds.classes)]
            groups[every][kinds.tells] = FieldInfo(
                annotation=choices, default=kinds.default, description=one.description
            )
        for k in dict.fromkeys(k for each in kinds.classes.values() for k in each.model_fields if k != kinds.tells):
            alike: dict[str, list[str]] = {}
            declared = kinds.owners(k)
            for value, field in declared.items():
                alike.setdefault(repr(field), []).append(value)
            for values in alike.values():
                title = every if len(values) == len(kinds.classes) else f"{every}, {which(kinds, values)}"
                groups.setdefault(title, {})[k] = declared[values[0]]
        found += [Group(section, title, fields) for title, fields in groups.items()]
    return found


def describe_keys(kind: type[BaseModel], only: str = "") -> str:
    """Every key with its default, its line, and what it may be where that is a choice.

    Args:
        only: the section to describe; '' describes all.
    """
    lines: list[str] = []
    for section, title, fields in groups_of(kind):
        if only not in ("", section):
            continue
        lines += ["", title]
        for k, field in fields.items():
            default = tomli_w.dumps({k: field.default}, multiline_strings=False).strip().partition("= ")[2]
            lines.append(f"  --{section}.{k} {' '.join(default.split())}")
            choices = choices_of(field)
            some = "any of" if get_origin(field.annotation) is list else "one of"
            listed = f"; {some} {', '.join(choices)}" if len(choices) > 1 else ""
            indent = " " * 6
            lines += textwrap.wrap(
                f"{field.description}{listed}",
                COLUMNS,
                initial_indent=indent,
                subsequent_indent=indent,
                break_on_hyphens=False,
            )
    return "\n".join(lines)


def choices_of(field: FieldInfo) -> list[str]:
    """The values of a key that is one of a few, or a list of them, without quotes; [] for any other key."""
    kinds = get_args(field.annotation) if get_origin(field.annotation) is not Literal else (field.annotation,)
    literals = [str(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    return literals + (["true", "false"] if literals and bool in kinds else [])


def which(kinds: Kinds, values: Sequence[str]) -> str:
    """`name = 'bloom' or 'gpt'`"""
    return f"{kinds.tells} = {' or '.join(repr(value) for value in values)}"
