"""The form in which one program stores a family: its names of the tensors, and the configuration beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dtmega import config
from dtmega.formats.rules import Heads, Rule
from dtmega.formats.sources import Source


class Key(NamedTuple):
    """A key of [model] and what the other program calls it.

    Attributes:
        ours: the key.
        theirs: its names, today's last, which is the one that is written; the first that is there counts.
        default: theirs, where none is there. None: it has to be there, and is a count.
        free: weights mean the same whatever it is, so a run that starts from them may have another value.
        resolved: the property of the section that has its value, where the key itself may say 0 for the usual one.
    """

    ours: str
    theirs: tuple[str, ...]
    default: Any = None
    free: bool = False
    resolved: str = ""

    def of(self, model: config.Model) -> Any:
        return getattr(model, self.resolved or self.ours)


def _nothing(_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Format:
    """One program's form of one family.

    Attributes:
        rules: between our tensors and theirs.
        rules_of: further ones, where a name of theirs depends on the model.
        keys: of the configuration.
        fixed: what their configuration says of every model that is one here, model_type among it. All but the classes
            (architectures) is held against a configuration of theirs, where it says something of it.
        base: prefix of most of their names, without which the files of a bare base model have them.
        ignored: matches the end of names of what is stored and is no weight.
        older: ends of names in old files -> of today's.
        implied: keys of [model] with the values that every model of this form has; where a program has several forms of
            a family, one for each of these values.
        heads: of a model, for rules with that word.
        refuse: raises ValueError for a model that the format cannot express.
        to_section: further keys of [model], of their configuration; raises ValueError.
        of_tensors: further keys of [model] that no configuration of theirs tells, of the tensors stored beside it.
        from_section: further entries of their configuration, of [model].
    """

    rules: tuple[Rule, ...]
    keys: tuple[Key, ...]
    fixed: Mapping[str, Any]
    base: str = ""
    ignored: str = r"(?!)"
    older: Mapping[str, str] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)
    rules_of: Callable[[config.Model], tuple[Rule, ...]] = lambda model: ()
    heads: Callable[[config.Model], Heads] = lambda model: Heads(model.n_heads, model.n_heads)
    refuse: Callable[[config.Model], object] = _nothing
    to_section: Callable[[Mapping[str, Any]], dict[str, Any]] = _nothing
    of_tensors: Callable[[Source], dict[str, Any]] = _nothing
    from_section: Callable[[config.Model], dict[str, Any]] = _nothing

    @property
    def kind(self) -> str:
        """The other program's name for the family."""
        return self.fixed["model_type"]

    def fits(self, model: config.Model) -> bool:
        """Tell whether a model has what every model of this form has."""
        return not self.unfit(model)

    def unfit(self, model: config.Model) -> dict[str, Any]:
        """The values, by their keys of [model], that every model of this form has and this one has not."""
        return {key: value for key, value in self.implied.items() if getattr(model, key) != value}

    def section(self, theirs: Mapping[str, Any], file: str, stored: Source | None = None) -> dict[str, Any]:
        """The [model] section, but for its name, that a configuration of theirs describes.

        Args:
            file: for messages.
            stored: the tensors beside it, by their names; None where these are not known.

        Raises:
            ValueError: of another family, of what no model here is, or without a size.
        """
        for name, value in self.fixed.items():
            said = theirs.get(name)
            if said not in (None, value) and name != "architectures":
                keys = ", ".join(f"[model] {key}" for key in ("name", *self.implied))
                raise ValueError(f"{file} has {name}={said!r:.80}, expected {value!r} ({keys})")
        section = dict(self.implied)
        for key in self.keys:
            names = [name for name in key.theirs if theirs.get(name) is not None]
            value = theirs[names[0]] if names else key.default
            if value is None:
                raise ValueError(f"{file} has no '{key.theirs[-1]}' ([model] {key.ours})")
            if key.default is None and (type(value) is not int or value < 1):
                raise ValueError(f"{file} has {names[0]}={value!r:.80}, expected a number above 0 ([model] {key.ours})")
            section[key.ours] = value
        return section | self._more(theirs, stored)

    def described(self, model: config.Model) -> dict[str, Any]:
        """The configuration of theirs that describes a model.

        Raises:
            ValueError: the format cannot express it.
        """
        self.refuse(model)
        return {**self.fixed, **{key.theirs[-1]: key.of(model) for key in self.keys}, **self.from_section(model)}

    def check(self, theirs: Mapping[str, Any], file: str, model: config.Model, stored: Source | None = None) -> None:
        """Compare the model that a configuration of theirs describes with the one that [model] asks for.

        Raises:
            ValueError: as `section` and `described`, or names each key that differs, with both values.
        """
        self.refuse(model)
        there = config.model_section({"name": model.name, **self.section(theirs, file, stored)}, file)
        keys = [key for key in self.keys if not key.free] + [Key(ours, ()) for ours in self._more(theirs, stored)]
        values = {key.ours: (key.of(there), key.of(model)) for key in keys}
        wrong = [f"{key}={was}, not {asked} ([model] {key})" for key, (was, asked) in values.items() if was != asked]
        if wrong:
            raise ValueError(f"{file} is of a model with {'; '.join(wrong)}")

    def _more(self, theirs: Mapping[str, Any], stored: Source | None) -> dict[str, Any]:
        """The keys of [model] that follow from several entries of theirs, or from the tensors."""
        of_tensors = self.of_tensors(stored) if stored is not None else {}
        return {**self.to_section(theirs), **of_tensors}
