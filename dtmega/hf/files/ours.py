"""Models that are written here, as directories of transformers have them: by the rules of the family's format."""

from __future__ import annotations

import re
from pathlib import Path

from dtmega import config
from dtmega.formats.format import Format
from dtmega.formats.sources import Renamed, Translated
from dtmega.formats.whole import SAME, Build, check_stored, stored_copies, tensor_names
from dtmega.hf.files import config_json
from dtmega.hf.files.folder import Folder, keys_of
from dtmega.hf.files.tensors import TensorFiles


def open_weights(path: Path, form: Format, model: config.Model, build: Build) -> Folder:
    """The weights of a directory, by our names. Of tied parameters all that are stored have to be equal.

    Args:
        build: makes the whole model; called on meta, and without padding of the vocabulary, as others store it.

    Raises:
        ValueError: its config.json does not agree with [model]; what `TensorFiles` refuses; a tensor that is not there,
            there twice, of another shape, of no dtype of weights, or of another model.
    """
    theirs = config_json.read_plain(path)
    files = TensorFiles(path)
    form.check(theirs, f"{path}/{config_json.NAME}", model, files)
    check_stored(model, files, str(path))
    names = tensor_names(form, model, build)
    places = names.translation.theirs
    ignored = re.compile(f"({form.ignored})$")

    def name_of(key: str) -> str | None:
        old = next((end for end in form.older if key.endswith(end)), None)
        today = key if old is None else key.removesuffix(old) + form.older[old]
        for name in (today, form.base + today):
            if name in places:
                return name
        return "" if ignored.search(key) else None

    keys = keys_of(files, name_of, model.name)
    for name, key in keys.items():
        files.check_weight(key, places[name].shape)
    try:
        copies = stored_copies(names, keys, str(path))
    except ValueError as error:
        raise ValueError(f"{error} in its safetensors files") from None
    wanted = {name: names.translation.ours[name] for stored in copies.values() for name in stored}
    return Folder(files, Translated(Renamed(files, keys), wanted), copies, SAME)
