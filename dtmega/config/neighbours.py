"""The key that a wrong one may have meant: another trainer's name for it, its place in another section, or a typo."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from dtmega.config.synonyms import Synonym
from dtmega.declared import Kinds, which

# Likeness of two names from which one passes for a typo of the other (difflib's ratio). At 0.4, its value here before,
# `learning_rate` was answered with `clip_grad`; at 0.75 `hiden_size`, `sed` and `warm_up` still find theirs.
LIKENESS = 0.75
LISTED = 25  # keys of a section that are listed where none is near


class Neighbours:
    """Suggestions for keys that do not exist.

    Args:
        kind: the configuration, section by section.
        synonyms: names of other trainers.
        sections: names of other trainers' sections -> the section here.
    """

    def __init__(self, kind: type[BaseModel], synonyms: Sequence[Synonym], sections: Mapping[str, str]) -> None:
        self._kinds = {section: Kinds.of(info) for section, info in kind.model_fields.items()}
        self._sections = sections
        self._synonyms = {name: synonym for synonym in synonyms for name in synonym.names.split()}

    def of_key(self, section: str, key: str, families: Mapping[str, str], option: bool = False) -> str:
        """The end of a message about a key that does not exist, from its semicolon on.

        Args:
            section: the section that the key was written in, which may not exist; '' for none.
            key: the key as it was written.
            families: section -> which of its classes the configuration has, for sections of several classes.
            option: the key stood on the command line, so the answer is an option.
        """
        here = self.section(section)
        name = key.lower().replace("-", "_")
        if here and name in self._keys(here, families):
            return self._did_you_mean([f"{here}.{name}"], "", families, option)
        if synonym := self._synonyms.get(f"{here}.{name}") or self._synonyms.get(name):
            if synonym.keys:
                return self._did_you_mean(synonym.keys.split(), synonym.how, families, option)
            return f"; there is no key of that meaning: {synonym.how}"
        if elsewhere := [f"{other}.{name}" for other, kinds in self._kinds.items() if kinds.owners(name)]:
            return self._did_you_mean(elsewhere, "", families, option)
        if here and (typo := difflib.get_close_matches(name, self._keys(here, families), 1, LIKENESS)):
            return self._did_you_mean([f"{here}.{typo[0]}"], "", families, option)
        if typo := difflib.get_close_matches(name, self._synonyms, 1, LIKENESS):
            return self.of_key(section, typo[0].rpartition(".")[2], families, option)
        if not here:
            return f"; the sections are {', '.join(self._kinds)}"
        known = list(self._keys(here, families))
        listed = f"; [{here}] has {', '.join(known)}" if len(known) <= LISTED else ""
        return f"; no key has a name like it{listed}"

    def of_section(self, section: str) -> str:
        """The end of a message about a section that does not exist, from its semicolon on."""
        meant = self.section(section)
        return f"; did you mean [{meant}]?" if meant else f"; the sections are {', '.join(self._kinds)}"

    def section(self, written: str) -> str:
        """The section that is meant by a name: itself, another trainer's, a typo; '' if none is."""
        name = written.lower().replace("-", "_")
        if name in self._kinds:
            return name
        if name in self._sections:
            return self._sections[name]
        typo = difflib.get_close_matches(name, self._kinds, 1, LIKENESS)
        return typo[0] if typo else ""

    def _keys(self, section: str, families: Mapping[str, str]) -> Sequence[str]:
        kinds = self._kinds[section]
        kind = kinds.classes[families.get(section, kinds.default)]
        return list(kind.model_fields)

    def _did_you_mean(self, targets: Sequence[str], how: str, families: Mapping[str, str], option: bool) -> str:
        """Keys as a question; of those of several families only the ones that the chosen family has, if it has any."""
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
            remarks.append(f"for {which(kinds, list(kinds.owners(key)))}")
        written = []
        for target in fitting:
            section, _, key = target.partition(".")
            written.append(f"--{section}.{key}" if option else f"[{section}] {key}")
        remark = "; ".join(remarks)
        return f"; did you mean {' or '.join(written)}? {remark[:1].upper()}{remark[1:]}".rstrip()
