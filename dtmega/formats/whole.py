"""The tensors of a whole model here, under the names of another program, and back: by the rules of its format."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dtmega import config
from dtmega.formats.format import Format
from dtmega.formats.rules import Directions, directions
from dtmega.formats.sources import BY_TOKEN, Slices, Source, Translated

Build = Callable[[config.Model], nn.Module]
SAME = "they are one parameter of this model"
# Sizes up to here are not held against the stored tensors: what is built of them on meta takes no memory.
PLAUSIBLE_SIZE = 2**20
# Nor are lengths, as most models have no tensor that is so long.
PLAUSIBLE_LENGTH = 2**31
LENGTH = re.compile("max_position_embeddings|relative_max_distance|rope_original_length")


class Names(NamedTuple):
    """The tensors of one model on both sides.

    Attributes:
        translation: between ours, those that are tied under all their names, and theirs.
        parameters: names of each parameter; the first is the one it is saved under.
    """

    translation: Directions
    parameters: list[list[str]]

    def by_token(self, name: str) -> bool:
        """Tell whether a tensor of theirs has a row for each token, and perhaps rows of padding behind them."""
        return any(run.of in BY_TOKEN for run in self.translation.theirs[name].runs)


def aliases(model: nn.Module) -> list[tuple[nn.Parameter, list[str]]]:
    """Each parameter once, with all names it has."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return list(names.items())


def names(form: Format, model: config.Model, build: Build) -> Names:
    """The names on both sides of all tensors of a model.

    Args:
        build: makes the whole model; called on meta, and without padding of the vocabulary.
    """
    with torch.device("meta"):
        parameters = aliases(build(model.model_copy(update={"pad_vocab_to_multiple": 1})))
    shapes = {name: tuple(parameter.shape) for parameter, known_as in parameters for name in known_as}
    translation = directions((*form.rules, *form.rules_of(model)), shapes, form.heads(model))
    return Names(translation, [known_as for _, known_as in parameters])


class Copies:
    """A source by our names, of which tied parameters may be stored more than once.

    Attributes:
        tensors: name -> dtype and shape; of tied parameters the first name.
    """

    def __init__(self, weights: Source, copies: Mapping[str, Sequence[str]], where: str, otherwise: str) -> None:
        """Read a source of which copies may differ.

        Args:
            weights: the tensors as ours.
            copies: name -> names in `weights`, several where tied ones are all stored.
            where: they are stored; for a message.
            otherwise: for a message, after "are stored with different values, but".
        """
        self._weights = weights
        self._copies = copies
        self._where = where
        self._otherwise = otherwise
        self.tensors = {name: weights.tensors[stored[0]] for name, stored in copies.items()}

    def read(self, name: str, index: Slices | None = None) -> Tensor:
        """Read a part (None: all) of a tensor, in the dtype in which it is stored.

        Raises:
            ValueError: parameters that the model ties are stored with other values in that part.
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


def stored_copies(made: Names, stored: Mapping[str, str], where: str) -> dict[str, list[str]]:
    """Name of each parameter -> those of its names under which it is stored.

    Args:
        stored: has the tensors of theirs that are there.

    Raises:
        ValueError: one is not, where it is said to be.
    """
    copies: dict[str, list[str]] = {}
    for known_as in made.parameters:
        parts = {name: [run.of for run in made.translation.ours[name].runs] for name in known_as}
        copies[known_as[0]] = [name for name in known_as if all(part in stored for part in parts[name])]
        if not copies[known_as[0]]:
            lost = next(part for part in parts[known_as[0]] if part not in stored)
            raise ValueError(f"{where} has no '{lost}'")
    return copies


def check_stored(model: config.Model, stored: Source, where: str) -> None:
    """Refuse a model that cannot be the one whose tensors are stored, before it is built.

    It would be built layer by layer until memory ends, or with more numbers in a tensor than torch can count.

    Args:
        stored: has the tensors, by anyone's names.
        where: they are; for messages.

    Raises:
        ValueError: more layers than tensors, or a size beyond every dimension that is stored.
    """
    if model.n_layers > len(stored.tensors):
        raise ValueError(f"{where} has n_layers={model.n_layers}, but {len(stored.tensors)} tensors")
    largest = max(size for _, shape in stored.tensors.values() for size in shape or (1,))
    for key, value in model.model_dump().items():
        plausible = PLAUSIBLE_LENGTH if LENGTH.fullmatch(key) else PLAUSIBLE_SIZE
        if type(value) is int and value > max(largest, plausible):
            raise ValueError(f"{where} has {key}={value}, but the largest dimension of its tensors is {largest}")


def as_ours(source: Source, form: Format, model: config.Model, build: Build, where: str) -> Copies:
    """Our tensors, made of a source by names of theirs. Rows of padding in it are left out.

    Args:
        build: as for `names`.
        where: the source is; for messages.

    Raises:
        ValueError: a tensor that is missing, has no place, or is of another shape. `read`: copies that differ.
    """
    made = names(form, model, build)
    theirs = made.translation.theirs
    if unknown := [name for name in source.tensors if name not in theirs]:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise ValueError(f"{where}: a model of name = '{model.name}' has no place for {', '.join(unknown[:3])}{more}")
    for name, (_, there) in source.tensors.items():
        expected = theirs[name].shape
        padded = made.by_token(name) and there[1:] == expected[1:] and there[0] > expected[0]
        if there != expected and not padded:
            raise ValueError(f"{where}: '{name}' is {list(there)}, expected {list(expected)} of this model ([model])")
    copies = stored_copies(made, {name: name for name in source.tensors}, where)
    wanted = {name: made.translation.ours[name] for stored in copies.values() for name in stored}
    return Copies(Translated(source, wanted), copies, where, SAME)


def as_theirs(source: Source, form: Format, model: config.Model, build: Build) -> Source:
    """Tensors of theirs, made of a source by our names: tied ones once, no padding of the vocabulary.

    Args:
        build: as for `names`.

    Raises:
        ValueError: the source does not have exactly the tensors of the model.
    """
    (ours, theirs), parameters = names(form, model, build)
    stored = {known_as[0]: ours[known_as[0]] for known_as in parameters}
    _check(source, {name: made.shape for name, made in stored.items()})
    written = {run.of for made in stored.values() for run in made.runs}
    return Translated(source, {name: made for name, made in theirs.items() if name in written})


def closest(names: Collection[str], forms: Mapping[str, Format]) -> str:
    """The key of the form whose modules differ from those with these names in the fewest.

    Args:
        forms: of one program, in any order; at least one.
    """
    there = {_module(name) for name in names}

    def difference(form: Format) -> int:
        theirs = [rule.theirs if isinstance(rule.theirs, tuple) else (rule.theirs,) for rule in form.rules]
        return len(there ^ {_module(name) for several in theirs for name in several})

    return min(forms, key=lambda key: difference(forms[key]))


def _module(name: str) -> str:
    """The module of a tensor, with `{}` for numbers; of a name that ends in a dot, that of a rule, the same."""
    return re.sub(r"\.\d+\.", ".{}.", name).rpartition(".")[0]


def _check(source: Source, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a source of another model.

    Raises:
        ValueError: a source does not have exactly these tensors; rows of padding may be more.
    """
    if wrong := sorted(shapes.keys() ^ source.tensors.keys()):
        raise ValueError(
            f"the weights are of another model: '{wrong[0]}' is {'missing' if wrong[0] in shapes else 'unknown'} "
            f"([model] n_layers)"
        )
    for name, (rows, *columns) in shapes.items():
        there, *their_columns = source.tensors[name][1]
        if columns != their_columns or there < rows or (there > rows and name not in BY_TOKEN):
            raise ValueError(
                f"'{name}' is {[there, *their_columns]}, expected {[rows, *columns]} "
                f"([model] vocab_size, [model] hidden_size)"
            )
