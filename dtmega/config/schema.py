"""Tools for declaring keys: sections, and the classes that a section may have.

A section has one class or several. If a section has several classes, the value of one of its keys chooses the class:
[model] has a class for each family, chosen by `name`, its discriminator. This file does not depend on dtmega's keys:
`keys.py`, `model_keys.py` and `families/` declare the keys, and `reading.py` reads their values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr
from pydantic.fields import FieldInfo

from dtmega.files import urls

LocalPath = Annotated[str, AfterValidator(partial(urls.check, local=True))]
PathOrUrl = Annotated[str, AfterValidator(urls.check)]
SHOWN = 200  # a message shows at most this many characters of a wrong value


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
    """The classes that a section may have. A section that has several is declared with this object as an annotation.

    Attributes:
        discriminator: name of the key whose value chooses the class; '' if there is only one class.
        default: default value of the discriminator.
        classes: mapping from each value of the discriminator to its class, which may load the class when it is asked.
        others: remark about other values, for the message that a value chooses no class; '' if there is none.
    """

    discriminator: str
    default: str
    classes: Mapping[str, type[Section]]
    others: str = ""

    @classmethod
    def of(cls, info: FieldInfo) -> SectionClasses:
        """Read a section's classes from the section's declaration in the configuration class."""
        for annotation in info.metadata:
            if isinstance(annotation, cls):
                return annotation
        assert isinstance(info.annotation, type)
        assert issubclass(info.annotation, Section)
        return cls("", "", {"": info.annotation})

    def chosen(self, value: Any) -> type[Section]:
        """The class that a value of the discriminator chooses.

        Raises:
            ValueError: no class has this value, or the class cannot be loaded.
        """
        if not isinstance(value, str) or value not in self.classes:
            others = f"; {self.others}" if self.others else ""
            raise ValueError(f"expected {' or '.join(self.classes)}, got {value!r:.{SHOWN}}{others}")
        return self.classes[value]

    def declarations(self, k: str) -> dict[str, FieldInfo]:
        """The declarations of key `k`, keyed by the discriminator's value. Classes without this key are left out."""
        return {value: cls.model_fields[k] for value, cls in self.classes.items() if k in cls.model_fields}


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
