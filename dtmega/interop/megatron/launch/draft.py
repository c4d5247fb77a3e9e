"""A configuration that is built from a command's flags, and the decisions that the flags leave to the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tomli_w

from dtmega import config
from dtmega.config.schema import SectionClasses
from dtmega.interop.megatron.launch.command import Command
from dtmega.interop.megatron.launch.flags import by_name, first_name, row_of
from dtmega.interop.megatron.launch.row import Flag

# Family -> key in the table of flags -> name of the key in this family.
RENAMED = {
    "t5": {"model.layer_norm_eps": "model.norm_eps"},
    "llama": {"model.layer_norm_eps": "model.rms_norm_eps"},
    "moe": {"model.layer_norm_eps": "model.rms_norm_eps"},
}
# If one of these flags is missing, Megatron refuses to start or chooses a value that depends on the machine.
REQUIRED_FLAGS = (
    *("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length"),
    *("--micro-batch-size", "--global-batch-size", "--lr"),
)
# Flags for paths on the run's machine. If a part of such a path is unknown, dtmega's default is used instead.
PATHS = ("--save", "--load", "--tensorboard-dir", "--kill-switch-path", "--data-cache-path")


class Open(NamedTuple):
    """A decision that the user has to make before a run can start.

    Attributes:
        name: name of the flag or key, or the stray word.
        line: line number in the script; 0 if unknown.
        reason: reason why the user has to decide.
    """

    name: str
    line: int
    reason: str

    def __str__(self) -> str:
        where = f" (line {self.line})" if self.line else ""
        return f"{self.name}{where}: {self.reason}"


class Draft:
    """A configuration that is being built from the flags of a command.

    Attributes:
        command: the command to translate.
        original: Megatron fork that the command is for; '' to infer the fork from the flags.
        flags: table rows of Megatron's flags, keyed by flag name.
        family: family of the model.
        keys: values set so far, keyed by "section.key".
        lacking: description of each value that the user has to fill in, keyed by "section.key".
        notes: remarks on flags that are not carried over and do not change what a run computes, keyed by flag.
        open: decisions that are left to the user, keyed by flag, key or stray word.
        read: flags that are already accounted for, although no key holds the flags' values.
    """

    def __init__(self, command: Command, family: str, original: str = "") -> None:
        self.command = command
        self.original = original
        self.flags = by_name()
        self.family = family
        self.keys: dict[str, Any] = {}
        self.lacking: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        self.open: dict[str, Open] = {}
        self.read: set[str] = set()

    def has(self, name: str) -> bool:
        return f"--{name}" in self.command.values

    def value(self, name: str) -> str | None:
        """A flag's value on the command line, or Megatron's default; None if the flag has neither value nor default."""
        values = self.command.values.get(f"--{name}")
        return values[0] if values else self.flags[f"--{name}"].default

    def number(self, name: str) -> int | float | None:
        """The value of a flag as a number; None if there is no value, or if the value is not a number."""
        value = self.value(name)
        return None if value is None else as_number(value)

    def fields_of(self, section: str) -> Mapping[str, Any]:
        """A section's fields, keyed by name. The [model] section has the fields of the draft's family."""
        kinds = SectionClasses.of(config.Config.model_fields[section])
        return kinds.classes[self.family if kinds.discriminator else ""].model_fields

    def refuse(self, flag: str, reason: str) -> None:
        """Leave the decision about a flag to the user, because the flag changes what a run computes."""
        line = self.command.lines.get(flag, 0)
        values = " ".join(self.command.values.get(flag, []))
        name = self.command.names.get(flag, flag)
        self.open[flag] = Open(f"{name} {values}".strip(), line, reason)

    def lack(self, key: str, reason: str, flag: str = "") -> None:
        """Leave a key for the user to set.

        Args:
            key: name of the key, as "section.key".
            reason: description of the value, or reason why the value is missing.
            flag: flag that would give the value; '' if there is no such flag.
        """
        section, _, name = key.partition(".")
        self.lacking[key] = reason
        if flag in self.command.values:
            self.refuse(flag, reason)
        else:
            self.open[key] = Open(f"[{section}] {name}", 0, reason)

    def set_numbers(self, key: str, texts: Sequence[str], flag: str) -> None:
        """Set a key to a list of numbers. If a string is not a number, leave the key for the user to set."""
        numbers = [as_number(text) for text in texts]
        if self.unknown(flag) or None in numbers:
            self.lack(key, self.unknown(flag) or "expected numbers", flag)
        else:
            self.keys[key] = numbers

    def unknown(self, flag: str) -> str:
        """The reason why a flag's value is not known; '' if the value is known."""
        piece = self.command.unknown.get(flag)
        if piece is None:
            return ""
        options = " ".join(f"--set {name}=VALUE" for name in piece.name.split())
        place = f" of line {piece.line}" if piece.line and piece.line != self.command.lines.get(flag) else ""
        return f"{piece.text:.80}{place} is not known{f': {options}' if options else ''}"

    def copy_values(self) -> None:
        """Copy the values of all flags that correspond to a single key.

        If a flag is not given and dtmega's default differs from Megatron's, set the key to Megatron's default.
        """
        for name in REQUIRED_FLAGS:
            if name not in self.command.values:
                self.lack(self.flags[name].keys[0], name)
        for name, flag in self.flags.items():
            if flag.same and name not in flag.other_names:
                self._copy_value(name, flag)

    def _copy_value(self, name: str, flag: Flag) -> None:
        """Copy a flag's given or default value to the flag's key."""
        full_key = RENAMED.get(self.family, {}).get(flag.keys[0], flag.keys[0])
        section, _, key = full_key.partition(".")
        fields = self.fields_of(section)
        is_given = name in self.command.values
        if key not in fields:
            if is_given:
                self.refuse(name, f"a {self.family} has no {key}")
        elif is_given and self.unknown(name) and name in PATHS:
            self.notes[name] = self.unknown(name)
        elif is_given and flag.n_values == 0:
            self.keys[full_key] = True
        elif is_given or flag.default is not None:
            value = self._typed(fields[key].annotation, self.value(name.removeprefix("--")))
            if value is None or self.unknown(name):
                self.lack(full_key, self.unknown(name) or "expected a number", name)
            elif is_given or value != fields[key].default:
                self.keys[full_key] = value

    @staticmethod
    def _typed(kind: Any, value: str | None) -> Any:
        """Convert a value to the type of its key; None if the key needs a number and the value is not a number."""
        if kind is bool:
            return bool(value)  # as argparse does with `type=bool`: any word is true
        number = None if value is None else as_number(value)
        if kind is int and isinstance(number, float) and number.is_integer():
            return int(number)
        return number if kind in (int, float) else value

    def close(self, allowed: Sequence[str]) -> None:
        """Add a note or an open decision for every flag not carried over, then settle the decisions in `allowed`.

        Args:
            allowed: names of flags, keys and stray words that the user allows to be missing.

        Raises:
            ValueError: a name in `allowed` belongs to no open decision.
        """
        for name, values in self.command.values.items():
            flag = row_of(name)
            if flag is None:
                self.refuse(name, "unknown flag")
            elif len(values) < flag.n_values and not self.unknown(name):
                self.refuse(name, f"without its value: expected {flag.n_values}, got {len(values)}")
            elif name in self.open or name in self.notes or name in self.read:
                continue
            elif flag.changes and not (values and values[0] in flag.neutral):
                self.refuse(name, flag.why)
            elif flag.keys and self.unknown(name) and name in PATHS:
                self.notes[name] = self.unknown(name)
            elif flag.keys and self.unknown(name) and flag.keys[0] not in self.lacking:
                self.refuse(name, self.unknown(name))
            elif not flag.keys:
                self.notes[name] = flag.why
        for word in self.command.stray:
            reason = self.unknown(word) or "belongs to no flag"
            self.open[word] = Open(word, self.command.lines.get(word, 0), reason)
        for name in allowed:
            known_as = first_name(f"--{name.removeprefix('--')}")
            found = next((each for each in (name, known_as) if each in self.open), "")
            if not found:
                raise ValueError(f"--allow-missing {name}: nothing with this name is missing")
            self.lacking = {key: why for key, why in self.lacking.items() if key != found}
            self.notes[found] = f"{self.open.pop(found).reason} (allowed)"

    def left_out(self) -> list[str]:
        """A line for each flag that was not carried over, and for each word that belongs to no flag."""
        lines: list[str] = []
        for name, values in self.command.values.items():
            written = " ".join([self.command.names.get(name, name), *values])
            if name in self.notes:
                lines.append(f"{written}: {self.notes[name]}")
            elif name in self.open:
                lines.append(str(self.open[name]))
        return [*lines, *(str(self.open[word]) for word in self.command.stray if word in self.open)]

    def missing(self) -> list[str]:
        """A line for each key whose value the user has to fill in."""
        return [str(each) for each in self.open.values() if each.name.startswith("[")]

    def text(self, title: str) -> str:
        """Format the configuration as TOML.

        Args:
            title: text of the comment on the first line.
        """
        values = {key: value for key, value in self.keys.items() if key not in self.lacking}
        lines = [f"# {title}", *self._refusal(values)]
        for section in config.Config.model_fields:
            body = []
            if section == "run" and self.open:
                body += self._open_lines()
            for name in self.fields_of(section):
                key = f"{section}.{name}"
                if key in values:
                    body.append(f"{name} = {_toml(values[key])}")
                elif key in self.lacking:
                    body.append(f"# {name} =   # missing: {_one_line(self.lacking[key])}")
            if body:
                lines += ["", f"[{section}]", *body]
        return "\n".join(lines) + "\n"

    def _open_lines(self) -> list[str]:
        """The TOML lines for `[run] untranslated`, which makes a run refuse the configuration."""
        return [
            "# Decide about each line, change this file accordingly, and delete the line.",
            "untranslated = [",
            *(f"    {_toml(_one_line(str(each)))}," for each in self.open.values()),
            "]",
        ]

    def _refusal(self, values: Mapping[str, Any]) -> list[str]:
        """The error that a run would raise for the values, as comment lines; [] if values are missing."""
        if self.lacking:
            return []
        try:
            config.validate(by_section(values), "these flags")
        except config.ConfigError as error:
            return [f"# Not accepted as it stands: {line}" for line in str(error).splitlines()]
        return []


def by_section(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Convert values keyed by "section.key" to nested dicts: section -> key -> value."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    return sections


def as_number(text: str) -> int | float | None:
    """Convert a string to a number; None if the string is not a number."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _toml(value: Any) -> str:
    """Format a value as TOML, with each list on one line."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_toml, value))}]"
    return tomli_w.dumps({"key": value}).strip().removeprefix("key = ")
