"""Models that are written here, as directories of transformers have them: by the rules of the family's format."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from dtmega import config
from dtmega.formats.format import Format
from dtmega.formats.rules import Translation, translate
from dtmega.formats.sources import BY_TOKEN, Renamed, Source, Translated
from dtmega.hf import config_json
from dtmega.hf.files import TensorFiles
from dtmega.hf.folder import Folder, aliases, keys_of

Build = Callable[[config.Model], nn.Module]


class Names(NamedTuple):
    """The tensors of one model on both sides.

    Attributes:
        translation: between ours, those that are tied under all their names, and theirs.
        parameters: names of each parameter; the first is the one it is saved under.
    """

    translation: Translation
    parameters: list[list[str]]


def names(form: Format, model: config.Model, build: Build) -> Names:
    """Args:
    build: makes the whole model; called on meta, and without padding of the vocabulary, as others store it.
    """
    with torch.device("meta"):
        parameters = aliases(build(model.model_copy(update={"pad_vocab_to_multiple": 1})))
    shapes = {name: tuple(parameter.shape) for parameter, known_as in parameters for name in known_as}
    translation = translate((*form.rules, *form.rules_of(model)), shapes, form.heads(model))
    return Names(translation, [known_as for _, known_as in parameters])


def opened(path: Path, form: Format, model: config.Model, build: Build) -> Folder:
    """The weights of a directory, by our names. Of tied parameters all that are stored have to be equal.

    Args:
        build: as for `names`.

    Raises:
        ValueError: its config.json does not agree with [model]; what `TensorFiles` refuses; a tensor that is not there,
            there twice, of another shape, of no dtype of weights, or of another model.
    """
    form.check(config_json.read_plain(path), f"{path}/{config_json.NAME}", model)
    files = TensorFiles(path)
    if model.n_layers > len(files.tensors):  # before so many are built
        raise ValueError(f"{path} has n_layers={model.n_layers} by its config.json, but {len(files.tensors)} tensors")
    (ours, theirs), parameters = names(form, model, build)
    ignored = re.compile(f"({form.ignored})$")

    def name_of(key: str) -> str | None:
        old = next((end for end in form.older if key.endswith(end)), None)
        today = key if old is None else key.removesuffix(old) + form.older[old]
        for name in (today, form.base + today):
            if name in theirs:
                return name
        return "" if ignored.search(key) else None

    keys = keys_of(files, name_of, model.name)
    for name, key in keys.items():
        files.check_weight(key, theirs[name].shape)
    copies: dict[str, list[str]] = {}
    for known_as in parameters:
        parts = {name: [run.of for run in ours[name].runs] for name in known_as}
        copies[known_as[0]] = [name for name in known_as if all(part in keys for part in parts[name])]
        if not copies[known_as[0]]:
            lost = next(part for part in parts[known_as[0]] if part not in keys)
            raise ValueError(f"{path} has no '{lost}' in its safetensors files")
    made = {name: ours[name] for stored in copies.values() for name in stored}
    return Folder(files, Translated(Renamed(files, keys), made), copies, "they are one parameter of this model")


def translated(source: Source, form: Format, model: config.Model, build: Build) -> Source:
    """Our tensors by their names, as a directory has them: tied ones once, no padding of the vocabulary.

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


def _check(source: Source, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises:
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
