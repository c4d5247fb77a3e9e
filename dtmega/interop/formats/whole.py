"""Translate all tensors of a model into another program's format and back, using that format's rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtmega import config
from dtmega.checkpoint.sources import BY_TOKEN, Slices, Source
from dtmega.interop.formats.format import Format
from dtmega.interop.formats.rules import Directions, directions
from dtmega.interop.formats.sources import Translated
from dtmega.models.ties import aliases

Build = Callable[[config.Model], Any]  # returns a `models.model.Model`
SAME = "they are one parameter of this model"


class TensorNames(NamedTuple):
    """The names of one model's tensors, in our format and in the other program's format.

    Attributes:
        translation: recipes for assembling each side's tensors from the other side's. A tied parameter has an entry
            under each of its names.
        parameters: lists of names, one list per parameter or stored buffer; files use the first name in each list.
    """

    translation: Directions
    parameters: list[list[str]]

    def by_token(self, name: str) -> bool:
        """True if the other side's tensor `name` has one row per token, possibly followed by padding rows."""
        return any(run.tensor in BY_TOKEN for run in self.translation.theirs[name].runs)


def tensor_names(form: Format, model: config.Model, build: Build) -> TensorNames:
    """Find each tensor's names in our format and in the other program's format.

    Args:
        build: function that builds the whole model; called on the meta device, with an unpadded vocabulary.
    """
    with torch.device("meta"):
        whole = build(model.model_copy(update={"pad_vocab_to_multiple": 1}))
    tensors: list[tuple[Tensor, list[str]]] = [*aliases(whole)]
    tensors += [(buffer, [name]) for name, buffer in whole.stored_buffers()]
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor, known_as in tensors:
        shapes |= dict.fromkeys(known_as, tuple(tensor.shape))
    translation = directions((*form.rules, *form.rules_of(model)), shapes, form.heads(model))
    return TensorNames(translation, [known_as for _, known_as in tensors])


class Deduplicated:
    """A source that holds each parameter once, under our name, even if the files store several copies of the parameter.

    Attributes:
        tensors: dtype and shape of each tensor, keyed by tensor name; a tied parameter appears under its first name.
    """

    def __init__(self, weights: Source, copies: Mapping[str, Sequence[str]], where: str, otherwise: str) -> None:
        """Prepare to read each parameter from its first copy and to compare all further copies with the first.

        Args:
            weights: the stored tensors, with all copies.
            copies: names under which `weights` stores each parameter, keyed by parameter name.
            where: path of the source, for messages.
            otherwise: end of the message "... are stored with different values, but ...".
        """
        self._weights = weights
        self._copies = copies
        self._where = where
        self._otherwise = otherwise
        self.tensors = {name: weights.tensors[stored[0]] for name, stored in copies.items()}

    def read(self, name: str, index: Slices | None = None) -> Tensor:
        """Read the part `index` of a tensor, or the whole tensor if `index` is None, in the stored dtype.

        Raises:
            ValueError: the stored copies of a tied parameter differ in that part.
        """
        first, *others = self._copies[name]
        part = self._weights.read(first, index)
        for other in others:
            second = self._weights.read(other, index)
            dtype = torch.promote_types(part.dtype, second.dtype)
            if not torch.equal(part.to(dtype), second.to(dtype)):
                raise ValueError(
                    f"{self._where}: '{first}' and '{other}' are stored with different values, but {self._otherwise}"
                )
        return part


def stored_copies(names: TensorNames, stored: Collection[str], where: str) -> dict[str, list[str]]:
    """Map the first name of each parameter to the names under which the parameter is stored.

    Args:
        stored: the other program's names of the stored tensors.
        where: path of the source, for messages.

    Raises:
        ValueError: a parameter is stored under none of its names.
    """
    copies: dict[str, list[str]] = {}
    for known_as in names.parameters:
        parts = {name: [run.tensor for run in names.translation.ours[name].runs] for name in known_as}
        copies[known_as[0]] = [name for name in known_as if all(part in stored for part in parts[name])]
        if not copies[known_as[0]]:
            missing = next(part for part in parts[known_as[0]] if part not in stored)
            raise ValueError(f"{where} has no '{missing}'")
    return copies


def as_ours(source: Source, form: Format, model: config.Model, build: Build, where: str) -> Deduplicated:
    """Assemble our tensors from another program's tensors, whose names `form` describes. Padding rows are left out.

    Args:
        build: function that builds the whole model, as in `tensor_names`.
        where: path of the source, for messages.

    Raises:
        ValueError: a tensor is missing, is not part of the model, or has a different shape. The result's `read` also
            raises ValueError if copies of a tied parameter differ.
    """
    names = tensor_names(form, model, build)
    theirs = names.translation.theirs
    if unknown := [name for name in source.tensors if name not in theirs]:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise ValueError(f"{where}: a model of name = '{model.name}' has no place for {', '.join(unknown[:3])}{more}")
    for name, (_, stored_shape) in source.tensors.items():
        expected = theirs[name].shape
        padded = names.by_token(name) and stored_shape[1:] == expected[1:] and stored_shape[0] > expected[0]
        if stored_shape != expected and not padded:
            raise ValueError(
                f"{where}: '{name}' is {list(stored_shape)}, expected {list(expected)} of this model ([model])"
            )
    copies = stored_copies(names, source.tensors.keys(), where)
    assemblies = {}
    for stored_names in copies.values():
        for name in stored_names:
            assemblies[name] = names.translation.ours[name]
    return Deduplicated(Translated(source, assemblies), copies, where, SAME)


def as_theirs(source: Source, form: Format, model: config.Model, build: Build) -> Source:
    """The other program's tensors, assembled from a source with our names.

    Each tied tensor occurs once, and padding rows are left out.

    Args:
        build: function that builds the whole model, as in `tensor_names`.

    Raises:
        ValueError: the source's tensors do not match the model's tensors.
    """
    (ours, theirs), parameters = tensor_names(form, model, build)
    stored = {known_as[0]: ours[known_as[0]] for known_as in parameters}
    _check_tensors(source, {name: assembly.shape for name, assembly in stored.items()})
    # A tied parameter has several names in the other program too. Write only the counterpart of our first name.
    written = set()
    for assembly in stored.values():
        written |= {run.tensor for run in assembly.runs}
    return Translated(source, {name: assembly for name, assembly in theirs.items() if name in written})


def closest(names: Collection[str], forms: Mapping[str, Format]) -> str:
    """Return the key of the format that fits the tensor names best, with the fewest missing and unknown modules.

    Args:
        names: names of the tensors.
        forms: all formats of one program, keyed by any name; at least one format.
    """
    stored_modules = {_module(name) for name in names}

    def difference(form: Format) -> int:
        modules = set()
        for rule in form.rules:
            names_of_rule = rule.theirs if isinstance(rule.theirs, tuple) else (rule.theirs,)
            modules |= {_module(name) for name in names_of_rule}
        return len(stored_modules ^ modules)

    return min(forms, key=lambda key: difference(forms[key]))


def _module(name: str) -> str:
    """The name of the module that holds a tensor, with `{}` in place of layer numbers.

    Args:
        name: name of a tensor, or a name from a rule (such a name may end in a dot).
    """
    return re.sub(r"\.\d+\.", ".{}.", name).rpartition(".")[0]


def _check_tensors(source: Source, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a source whose tensors do not match the model's tensors.

    Args:
        shapes: tensor shapes of the model, keyed by tensor name. BY_TOKEN tensors in the source may have padding rows.

    Raises:
        ValueError: a tensor is missing, is unknown, or has a different shape.
    """
    if wrong := sorted(shapes.keys() ^ source.tensors.keys()):
        raise ValueError(
            f"the weights are of another model: '{wrong[0]}' is {'missing' if wrong[0] in shapes else 'unknown'} "
            f"([model] n_layers)"
        )
    for name, (rows, *columns) in shapes.items():
        stored_rows, *stored_columns = source.tensors[name][1]
        has_padding = stored_rows > rows and name in BY_TOKEN
        if columns != stored_columns or (stored_rows != rows and not has_padding):
            raise ValueError(
                f"'{name}' is {[stored_rows, *stored_columns]}, expected {[rows, *columns]} "
                f"([model] vocab_size, [model] hidden_size)"
            )
