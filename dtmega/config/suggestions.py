"""Suggestions for unknown keys: other trainers' names (`synonyms.toml`), keys of other sections, and typos."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import tomli
from pydantic import BaseModel

from dtmega.config.schema import SectionClasses, condition

SYNONYMS = Path(__file__).with_name("synonyms.toml")

# An unknown name counts as a typo of a known name if difflib's ratio between them is at least LIKENESS. At 0.4, the
# suggestion for `learning_rate` was `clip_grad`; at 0.75, `hiden_size`, `sed` and `warm_up` still find the right keys.
LIKENESS = 0.75
LISTED = 25  # maximum number of a section's keys to list when no key resembles the unknown key


class Synonym(NamedTuple):
    """A setting of other trainers.

    Attributes:
        keys: dtmega's keys (`section.key`), separated by spaces; '' if dtmega has no key for the setting.
        names: other trainers' names, separated by spaces. A name with a section (`eval.freq`) counts only there.
        how: difference in meaning, or what dtmega has instead of a key; '' if there is nothing to say.
    """

    keys: str
    names: str
    how: str = ""


def read_synonyms() -> tuple[list[Synonym], dict[str, str]]:
    """Read `synonyms.toml`.

    Returns:
        The rows, and a mapping from other trainers' section names to dtmega's section names.
    """
    table = tomli.loads(SYNONYMS.read_text(encoding="utf-8"))
    sections = {name: section for section, names in table["sections"].items() for name in names.split()}
    return [Synonym(*row) for row in table["synonyms"]], sections


def closest(name: str, known: Iterable[str], n: int = 1) -> list[str]:
    """Up to `n` known names that `name` may be a typo of, the likeliest first: `dri` is `dir` with letters swapped."""
    known = list(known)
    swapped = [other for other in known if sorted(other) == sorted(name)]
    return (swapped + difflib.get_close_matches(name, known, n, LIKENESS))[:n]


class SimilarKeys:
    """Suggestions for keys and sections that do not exist.

    Args:
        kind: class of the configuration, with one field per section.
    """

    def __init__(self, kind: type[BaseModel]) -> None:
        self._kinds = {section: SectionClasses.of(info) for section, info in kind.model_fields.items()}
        synonyms, self._sections = read_synonyms()
        self._synonyms: dict[str, Synonym] = {}
        for synonym in synonyms:
            self._synonyms.update(dict.fromkeys(synonym.names.split(), synonym))

    def of_key(self, section: str, key: str, families: Mapping[str, str], option: bool = False) -> str:
        """The last part of the message about an unknown key, starting at the semicolon.

        The most certain explanations are tried first: the key itself with different capitals or hyphens, another
        trainer's name for a key, a key with this name in another section, a typo of a key, a typo of another trainer's
        name.

        Args:
            section: the section that the user wrote, which may not exist; '' if there was no section.
            key: the key as the user wrote it.
            families: the configuration's discriminator values, keyed by section, for the sections with several classes.
            option: whether the key comes from the command line; the suggestion is then written as an option too.
        """
        here = self.section(section)
        name = key.lower().replace("-", "_")
        if here and name in self._keys(here, families):
            return self._did_you_mean([f"{here}.{name}"], "", families, option)
        # A synonym with a section (`eval.freq`) is more specific than a synonym without a section.
        if synonym := self._synonyms.get(f"{here}.{name}") or self._synonyms.get(name):
            if synonym.keys:
                return self._did_you_mean(synonym.keys.split(), synonym.how, families, option)
            return f"; there is no key of that meaning: {synonym.how}"
        if elsewhere := [f"{other}.{name}" for other, kinds in self._kinds.items() if kinds.declarations(name)]:
            return self._did_you_mean(elsewhere, "", families, option)
        if here and (typo := closest(name, self._keys(here, families))):
            return self._did_you_mean([f"{here}.{typo[0]}"], "", families, option)
        if typo := closest(name, self._synonyms):
            return self.of_key(section, typo[0].rpartition(".")[2], families, option)
        if not here:
            return f"; the sections are {', '.join(self._kinds)}"
        known = list(self._keys(here, families))
        listed = f"; [{here}] has {', '.join(known)}" if len(known) <= LISTED else ""
        return f"; no key has a name like it{listed}"

    def of_section(self, section: str) -> str:
        """The last part of the message about an unknown section, starting at the semicolon."""
        meant = self.section(section)
        return f"; did you mean [{meant}]?" if meant else f"; the sections are {', '.join(self._kinds)}"

    def section(self, written: str) -> str:
        """The section that a name may mean, allowing for typos and other trainers' names; '' if no section fits."""
        name = written.lower().replace("-", "_")
        if name in self._kinds:
            return name
        if name in self._sections:
            return self._sections[name]
        typo = closest(name, self._kinds)
        return typo[0] if typo else ""

    def _keys(self, section: str, families: Mapping[str, str]) -> Sequence[str]:
        """The keys of the class that the configuration chooses for a section."""
        kinds = self._kinds[section]
        chosen = kinds.classes[families.get(section, kinds.default)]
        return list(chosen.model_fields)

    def _did_you_mean(self, targets: Sequence[str], how: str, families: Mapping[str, str], option: bool) -> str:
        """A "did you mean" question about the target keys, with remarks on differences in meaning.

        The question leaves out targets that the chosen family does not have. If that family has none of the targets,
        the question names all targets and the families that have the first target.

        Args:
            targets: suggested keys, as `section.key`.
            how: difference in meaning between the suggested keys and the user's key; '' if there is no difference.
        """
        fitting = []
        for target in targets:
            section, _, key = target.partition(".")
            if key in self._keys(section, families):
                fitting.append(target)
        remarks = [how] if how else []
        if not fitting:
            fitting = list(targets)
            section, _, key = targets[0].partition(".")
            kinds = self._kinds[section]
            remarks.append(f"for {condition(kinds, list(kinds.declarations(key)))}")
        written = []
        for target in fitting:
            section, _, key = target.partition(".")
            written.append(f"--{section}.{key}" if option else f"[{section}] {key}")
        remark = "; ".join(remarks)
        return f"; did you mean {' or '.join(written)}? {remark[:1].upper()}{remark[1:]}".rstrip()
