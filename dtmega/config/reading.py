"""Convert TOML and `--section.key value` options into typed, frozen sections.

This file does not depend on dtmega's keys. Reading is strict: a string is never read as a number. Each error names the
source of the value, the file or the option. `refusals.py` has the words of the errors, and `suggestions.py` guesses
which key the user meant by an unknown key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from dtmega import rooms
from dtmega.config.schema import SHOWN, Excluded, Section, SectionClasses, condition
from dtmega.files import urls
from dtmega.files.untrusted_json import parse_toml

LARGEST = 2**53  # no size or length comes near; larger integers overflow in torch, and a browser rounds them
REFUSALS = 50  # maximum number of errors reported for a file; another program's file may have thousands of errors

Sections = TypeVar("Sections", bound=Section)


class ConfigError(ValueError):
    """An error for an invalid configuration. The message has one line per fault; `train.py` exits with code 2.

    Credentials in URLs are masked, because the message is written to `exit.json`.
    """

    def __init__(self, message: str) -> None:
        super().__init__(urls.masked(message))


class Suggester(Protocol):
    """Suggestions for unknown keys and sections, appended to error messages (implemented in `suggestions.py`)."""

    def of_key(self, section: str, key: str, families: Mapping[str, str], option: bool = False) -> str: ...

    def of_section(self, section: str) -> str: ...

    def section(self, written: str) -> str: ...


Suggestions = Callable[[], Suggester]


class Override(NamedTuple):
    """An option `--section.key text` on the command line."""

    section: str
    key: str
    text: str

    @property
    def option(self) -> str:
        return f"--{self.section}.{self.key}"


class CommandLine(NamedTuple):
    """The parsed command line of a run.

    Attributes:
        name: the value of `--config`.
        overrides: all other options, in order; later options win.
    """

    name: str
    overrides: list[Override]


def read_argv(argv: Sequence[str], usage: str, suggestions: Suggestions) -> CommandLine:
    """Parse `--config NAME` and overrides; `--key value` and `--key=value` are equivalent.

    Raises:
        ConfigError: an argument cannot be parsed, an option has no value, or --config is missing or given twice.
    """
    name = ""
    overrides: list[Override] = []
    words = list(argv)
    while words:
        flag, eq, text = words.pop(0).partition("=")
        if not flag.startswith("--"):
            raise ConfigError(f"cannot read argument '{flag}'; usage: {usage}")
        if flag != "--config" and "." not in flag:
            suggestion = suggestions().of_key("", flag[2:], {}, option=True)
            raise ConfigError(f"cannot read argument '{flag}', which has no section{suggestion} (usage: {usage})")
        if not eq:
            if not words:
                raise ConfigError(f"{flag} needs a value; usage: {usage}")
            text = words.pop(0)
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
    """Read the tables in the TOML file `path`.

    Raises:
        ConfigError: the file does not exist, cannot be read, or is not TOML.
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
        raise ConfigError(f"{path} is not TOML: {error}{rooms.refusals().hint(text, str(error))}") from None


class ChosenClass(NamedTuple):
    """The class that a configuration chooses for one section.

    Attributes:
        kinds: all classes that the section may have.
        value: the discriminator's value, which chooses the class; '' if the section has only one class.
    """

    kinds: SectionClasses
    value: str

    @property
    def fields(self) -> Mapping[str, FieldInfo]:
        """The keys of the chosen class."""
        return self.kinds.classes[self.value].model_fields


Chosen = Mapping[str, ChosenClass]  # section -> chosen class


def validate(
    kind: type[Sections],
    values: Mapping[str, Any],
    source: str,
    suggestions: Suggestions,
    overrides: Sequence[Override] = (),
) -> Sections:
    """Make typed sections from values and options. An option replaces keys of the file that exclude it (`Excluded`).

    Args:
        kind: class of the configuration, with one field per section.
        values: values in TOML's types, as section -> key -> value.
        source: name of the file that the values come from, for messages.
        suggestions: function that returns the source of suggestions, called if a key does not exist.
        overrides: options that replace values, in order; later options win.

    Raises:
        ConfigError: a key is unknown, a value has a wrong type or is out of range, or keys contradict each other; the
            message has a line for each fault.
    """
    refusals: list[str] = []
    tables: dict[str, dict[str, Any]] = {}
    for section, table in values.items():
        if isinstance(table, dict):
            tables[section] = table
        else:
            suggestion = suggestions().of_key("", section, {})
            refusals.append(
                f"{source}: '{section:.{SHOWN}}' stands outside any section, expected [section] tables{suggestion}"
            )
    chosen = {
        section: _choose_class(section, SectionClasses.of(info), tables.get(section, {}), source, overrides)
        for section, info in kind.model_fields.items()
    }
    merged = _known_keys(tables, chosen, source, suggestions, refusals)
    _apply_overrides(merged, overrides, chosen, suggestions, refusals)
    refusals += _unusable_values(merged, source, overrides)
    if refusals:
        raise ConfigError("\n".join(dict.fromkeys(refusals)))
    for section, (kinds, value) in chosen.items():
        if kinds.discriminator and section in merged:
            merged[section][kinds.discriminator] = value
    replacements: list[str] = []
    while True:
        try:
            sections = kind.model_validate(merged)
            sections.note_replaced(replacements)
            return sections
        except ValidationError as error:
            removed = _remove_excluded(merged, error, overrides, source)
            if not removed:
                declared = {section: chosen_class.fields for section, chosen_class in chosen.items()}
                explain, options = rooms.refusals().explain, _options(overrides)
                lines = [explain(e, declared, source, options) for e in error.errors()]
                # pydantic reports one error per type of a union
                raise ConfigError("\n".join(dict.fromkeys(lines))) from None
            replacements += removed


def _options(overrides: Sequence[Override]) -> dict[str, str]:
    """The options on the command line, as `--section.key` -> text; the last one wins."""
    return {override.option: override.text for override in overrides}


def _unusable_values(
    merged: Mapping[str, Mapping[str, Any]], source: str, overrides: Sequence[Override]
) -> Iterator[str]:
    """Messages about values that no key may have: URLs that hold credentials, and integers above LARGEST."""
    for section, table in merged.items():
        for k, value in table.items():
            if urls.holds_credentials(repr(value)):
                where = rooms.refusals().where(section, k, source, _options(overrides))
                yield f"{where}: expected no URL with credentials, which belong in the environment"
            if type(value) is int and abs(value) > LARGEST:
                where = rooms.refusals().where(section, k, source, _options(overrides))
                yield f"{where}: expected an integer of at most {LARGEST}, got {value!r:.{SHOWN}}"


def _remove_excluded(
    merged: Mapping[str, dict[str, Any]], error: ValidationError, overrides: Sequence[Override], source: str
) -> list[str]:
    """Remove the file's keys that options exclude, unless options set these keys too.

    Returns:
        A line for each removed key.
    """
    given = {f"{override.section}.{override.key}": override for override in overrides}
    lines: list[str] = []
    for fault in error.errors():
        excluded = fault.get("ctx", {}).get("error")
        by_option = excluded.by_option if isinstance(excluded, Excluded) else {}
        for name in given:
            if name not in by_option or given.keys() & set(by_option[name]):
                continue
            for section, _, k in (other.partition(".") for other in by_option[name]):
                if value := merged.get(section, {}).pop(k, None):
                    was = f"{k} = {value!r:.{SHOWN}}"
                    lines.append(f"{given[name].option} replaces {was} of {source} ([{section}] {k})")
    return lines


def _choose_class(
    section: str, kinds: SectionClasses, table: Mapping[str, Any], source: str, overrides: Sequence[Override]
) -> ChosenClass:
    """Find the class of a section. The discriminator's last override takes precedence over its value in the file.

    Raises:
        ConfigError: no class has the discriminator's value.
    """
    if not kinds.discriminator:
        return ChosenClass(kinds, "")
    value = table.get(kinds.discriminator, kinds.default)
    where = f"{source}: [{section}] {kinds.discriminator}"
    for override in overrides:
        if (override.section, override.key) == (section, kinds.discriminator):
            value = _parse_text(kinds.classes[kinds.default].model_fields[kinds.discriminator], override.text)
            where = override.option
    try:
        kinds.chosen(value)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    return ChosenClass(kinds, value)


def _known_keys(
    tables: Mapping[str, dict[str, Any]], chosen: Chosen, source: str, suggestions: Suggestions, refusals: list[str]
) -> dict[str, dict[str, Any]]:
    """Copy the tables of a TOML file and append messages about unknown sections and keys to `refusals`."""
    merged: dict[str, dict[str, Any]] = {}
    for section, table in tables.items():
        merged[section] = dict(table)
        meant = section
        if section not in chosen and (not table or suggestions().section(section)):
            refusals.append(f"{source}: unknown section [{section:.{SHOWN}}]{suggestions().of_section(section)}")
            meant = suggestions().section(section)
        for k in merged[section]:
            # Finding a suggestion takes a millisecond or two, so the number of suggestions is limited.
            if len(refusals) < REFUSALS and (unknown := _unknown(chosen, meant, k, source, suggestions)):
                refusals.append(unknown)
    return merged


def _apply_overrides(
    merged: dict[str, dict[str, Any]],
    overrides: Sequence[Override],
    chosen: Chosen,
    suggestions: Suggestions,
    refusals: list[str],
) -> None:
    """Set the overridden keys in `merged` and append messages about unknown keys to `refusals`."""
    for override in overrides:
        section, k, text = override
        if unknown := _unknown(chosen, section, k, override.option, suggestions, option=True):
            refusals.append(unknown)
        else:  # the key's declaration is needed to parse the text
            merged.setdefault(section, {})[k] = _parse_text(chosen[section].fields[k], text)


def _parse_text(field: FieldInfo, text: str) -> Any:
    """The value of an option: the text itself if the key's type is str, otherwise the text parsed as TOML."""
    if field.annotation is str:
        return text
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text


def _unknown(chosen: Chosen, section: str, k: str, source: str, suggestions: Suggestions, option: bool = False) -> str:
    """An error message about a key that does not exist, with a suggestion; '' if the key exists."""
    families = {name: value for name, (kinds, value) in chosen.items() if kinds.discriminator}
    if section not in chosen:
        suggestion = suggestions().of_key(section, k, families, option)
        return f"{source}: unknown section [{section:.{SHOWN}}] of key '{k:.{SHOWN}}'{suggestion}"
    kinds, value = chosen[section]
    if k in chosen[section].fields:
        return ""
    if declarations := kinds.declarations(k):
        return (
            f"{source}: key '{k}' in [{section}] is for {condition(kinds, list(declarations))}, not for '{value}' "
            f"([{section}] {kinds.discriminator})"
        )
    suggestion = suggestions().of_key(section, k, families, option)
    return f"{source}: unknown key '{k:.{SHOWN}}' in [{section}]{suggestion}"
