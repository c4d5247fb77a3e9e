"""One program's storage format for a model family: tensor names and configuration keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dtmega import config
from dtmega.checkpoint.sources import Source
from dtmega.interop.formats.rules import Heads, Rule


class Key(NamedTuple):
    """A key of [model], and the key's names in the other program's configuration.

    Attributes:
        ours: the key's name in [model].
        theirs: the other program's names for the key, oldest first. The first name that is present is read; the last
            name is written.
        default: the other program's default, used if none of the names is present; None if the key is required, in
            which case the value must be a positive integer.
        free: whether a run that starts from the weights may choose a different value, because the weights have
            the same meaning for every value.
        resolved: name of the `config.Model` property that gives the effective value, for a key whose value 0 stands
            for "the usual value"; '' if the key itself always holds the effective value.
    """

    ours: str
    theirs: tuple[str, ...]
    default: Any = None
    free: bool = False
    resolved: str = ""

    def value(self, model: config.Model) -> Any:
        return getattr(model, self.resolved or self.ours)


def _nothing(_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Format:
    """One program's storage format for one model family.

    Attributes:
        rules: rules that relate our tensors to theirs.
        rules_of: function that returns further rules for a model; needed if tensor names depend on the model's
            configuration.
        keys: keys of [model] that each correspond to a single key of the other program's configuration.
        fixed: entries that the other program's configuration has for every model of the family, including
            `model_type`. If a configuration has one of these keys, the key's value must equal the value here; only the
            class names (`architectures`) may differ.
        base: prefix that most of the other program's tensor names share. Names in the files of a bare base model lack
            this prefix.
        ignored: regular expression that matches the end of a stored tensor's name if the tensor is not a weight.
        older: map from each name suffix in old files to the current suffix.
        implied: [model] values shared by all models in this format. If a program stores a family in several formats,
            these values determine which format applies.
        heads: function that returns the model's head counts, for rules with the word "heads".
        refuse: function that raises ValueError for a model that the format cannot express.
        to_section: function that returns keys of [model] that follow from several entries of the other program's
            configuration, or raises ValueError.
        section_from_tensors: function that returns keys of [model] that follow from the stored tensors, not from the
            other program's configuration.
        from_section: function that returns entries of the other program's configuration that follow from [model], in
            addition to `fixed` and `keys`.
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
    section_from_tensors: Callable[[Source], dict[str, Any]] = _nothing
    from_section: Callable[[config.Model], dict[str, Any]] = _nothing

    @property
    def kind(self) -> str:
        """The other program's name for the family."""
        return self.fixed["model_type"]

    def fits(self, model: config.Model) -> bool:
        """True if a model has the [model] values that this format implies."""
        return not self.mismatches(model)

    def mismatches(self, model: config.Model) -> dict[str, Any]:
        """The entries of `implied` whose values differ from the model's values."""
        return {key: value for key, value in self.implied.items() if getattr(model, key) != value}

    def section(self, theirs: Mapping[str, Any], file: str, stored: Source | None = None) -> dict[str, Any]:
        """Translate the other program's configuration into a [model] section without the key `name`.

        Args:
            theirs: the other program's configuration.
            file: path of the configuration, for messages.
            stored: the tensors stored next to the configuration, under the other program's names; None if unknown.

        Raises:
            ValueError: the configuration lacks a size, describes another family, or describes a variant that dtmega
                does not support.
        """
        for name, expected in self.fixed.items():
            value = theirs.get(name)
            if value not in (None, expected) and name != "architectures":
                keys = ", ".join(f"[model] {key}" for key in ("name", *self.implied))
                raise ValueError(f"{file} has {name}={value!r:.80}, expected {expected!r} ({keys})")
        section = dict(self.implied)
        for key in self.keys:
            names = [name for name in key.theirs if theirs.get(name) is not None]
            value = theirs[names[0]] if names else key.default
            if value is None:
                raise ValueError(f"{file} has no '{key.theirs[-1]}' ([model] {key.ours})")
            if key.default is None and (type(value) is not int or value < 1):
                raise ValueError(f"{file} has {names[0]}={value!r:.80}, expected a number above 0 ([model] {key.ours})")
            section[key.ours] = value
        return section | self._further_keys(theirs, stored)

    def to_config(self, model: config.Model) -> dict[str, Any]:
        """Translate a [model] section into the other program's configuration.

        Raises:
            ValueError: the format cannot express the model.
        """
        self.refuse(model)
        values = {key.theirs[-1]: key.value(model) for key in self.keys}
        return {**self.fixed, **values, **self.from_section(model)}

    def check(self, theirs: Mapping[str, Any], file: str, model: config.Model, stored: Source | None = None) -> None:
        """Check that a [model] section agrees with the model that the other program's configuration describes.

        Args:
            theirs, file, stored: arguments for `section`.
            model: the [model] section that the user asks for.

        Raises:
            ValueError: `section` refuses the configuration, the format cannot express the model, or the two models
                differ. In the last case, the message names each differing key with both values.
        """
        self.refuse(model)
        described = config.model_section({"name": model.name, **self.section(theirs, file, stored)}, file)
        keys = [key for key in self.keys if not key.free]
        keys += [Key(ours, ()) for ours in self._further_keys(theirs, stored)]
        # A key that is both in `self.keys` and in `_further_keys` is compared once. The entry from `_further_keys`
        # wins, as in `section`.
        values = {key.ours: (key.value(described), key.value(model)) for key in keys}
        wrong = []
        for key, (stored_value, asked_value) in values.items():
            if stored_value != asked_value:
                wrong.append(f"{key}={stored_value}, not {asked_value} ([model] {key})")
        if wrong:
            raise ValueError(f"{file} is of a model with {'; '.join(wrong)}")

    def _further_keys(self, theirs: Mapping[str, Any], stored: Source | None) -> dict[str, Any]:
        """The keys of [model] that follow from several entries of `theirs`, or from the stored tensors."""
        from_tensors = self.section_from_tensors(stored) if stored is not None else {}
        return {**self.to_section(theirs), **from_tensors}
