"""Tools for declaring keys: sections, the classes that a section may have, and the `--help` text about the keys.

A section has one class or several. If a section has several classes, the value of one of its keys chooses the class:
[model] has a class for each family, chosen by `name` (pydantic calls this key the discriminator of a union). This file
does not depend on dtmega's keys: `keys.py` and `model_keys.py` declare the keys, and `reading.py` reads their values.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import tomli_w
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr
from pydantic.fields import FieldInfo

from dtmega.files import urls

LocalPath = Annotated[str, AfterValidator(partial(urls.check, local=True))]
PathOrUrl = Annotated[str, AfterValidator(urls.check)]
COLUMNS = 80  # width of `--help`


def key(default: Any, line: str, **bounds: Any) -> Any:
    """Declare a key of a section.

    Args:
        default: the key's default value.
        line: the key's description in `--help` and docs/configuration.md.
        **bounds: pydantic's constraints, such as `ge=0`.
    """
    return Field(default, description=line, **bounds)


class Excluded(ValueError):
    """Keys exclude each other. If the command line has one of them, it replaces those of the file (`reading.validate`).

    Args:
        message: message for a configuration that has the keys in one place.
        by_option: mapping from a key that may be on the command line to the file's keys that it replaces. All keys are
            written as `section.key`.
    """

    def __init__(self, message: str, by_option: Mapping[str, Sequence[str]]) -> None:
        super().__init__(message)
        self.by_option = by_option


class Section(BaseModel):
    """Base class of all sections: frozen, with no unknown keys, no type conversion, and no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    _replaced: tuple[str, ...] = PrivateAttr(())

    @property
    def replaced(self) -> tuple[str, ...]:
        """A line for each key of the file that an option with another name has replaced (`reading.validate`)."""
        return self._replaced

    def note_replaced(self, lines: Sequence[str]) -> None:
        """Set the lines of `replaced`."""
        self._replaced = tuple(lines)


@dataclass(frozen=True)
class SectionClasses:
    """The classes that a section may have.

    Attributes:
        discriminator: name of the key whose value chooses the class; '' if there is only one class.
        default: default value of the discriminator.
        classes: mapping from each value of the discriminator to its class.
    """

    discriminator: str
    default: str
    classes: Mapping[str, type[Section]]

    @classmethod
    def of(cls, info: FieldInfo) -> SectionClasses:
        """Read a section's classes from the section's declaration in the configuration class."""
        if info.discriminator is None:
            assert isinstance(info.annotation, type)
            assert issubclass(info.annotation, Section)
            return cls("", "", {"": info.annotation})
        discriminator = str(info.discriminator)
        classes: dict[str, type[Section]] = {}
        for section_class in get_args(info.annotation):
            classes[section_class.model_fields[discriminator].default] = section_class
        return cls(discriminator, getattr(info.default, discriminator), classes)

    def declarations(self, k: str) -> dict[str, FieldInfo]:
        """The declarations of key `k`, keyed by the discriminator's value. Classes without this key are left out."""
        return {value: cls.model_fields[k] for value, cls in self.classes.items() if k in cls.model_fields}


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


def describe_keys(kind: type[BaseModel], only: str = "") -> str:
    """The list of keys that `--help` prints, with each key's default, description and allowed values.

    Args:
        kind: class of the configuration, with one field per section.
        only: name of the section to describe; '' for all sections.
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


def choices_of(field: FieldInfo) -> list[str]:
    """The allowed words, without quotes, for a key that takes one word or a list of words; [] for any other key."""
    kinds = (field.annotation,) if get_origin(field.annotation) is Literal else get_args(field.annotation)
    words: list[str] = []
    for kind in kinds:
        if get_origin(kind) is Literal:
            words += [str(value) for value in get_args(kind)]
    if words and bool in kinds:  # such as "auto" | bool
        words += ["true", "false"]
    return words


def condition(kinds: SectionClasses, values: Sequence[str]) -> str:
    """The condition under which a section has one of these classes, as text: `name = 'bloom' or 'gpt'`."""
    return f"{kinds.discriminator} = {' or '.join(repr(value) for value in values)}"
