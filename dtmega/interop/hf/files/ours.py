"""Reads weights for one of dtmega's own models from a transformers directory, by the rules of the model's format."""

from __future__ import annotations

import re
from pathlib import Path

from dtmega import config
from dtmega.checkpoint.sources import check_stored
from dtmega.interop.formats.format import Format
from dtmega.interop.formats.rules import Assembly
from dtmega.interop.formats.sources import Renamed, Translated
from dtmega.interop.formats.whole import SAME, Build, stored_copies, tensor_names
from dtmega.interop.hf.files import config_json
from dtmega.interop.hf.files.folder import Folder, keys_of
from dtmega.interop.hf.files.tensors import TensorFiles


def open_weights(path: Path, form: Format, model: config.Model, build: Build) -> Folder:
    """Open a directory's weights under our names. All stored copies of a tied parameter must be equal.

    Args:
        path: path of the directory.
        form: format, with the rules that translate between our tensors and the stored tensors.
        model: the [model] section; config.json must agree with this section.
        build: function that builds the whole model. The function is called on meta, with an unpadded vocabulary,
            because other programs store no padding.

    Raises:
        ValueError: config.json does not agree with [model]; `TensorFiles` refuses the files; a tensor is missing,
            occurs twice, has the wrong shape or dtype, or belongs to another model.
    """
    config_values = config_json.read_plain(path)
    files = TensorFiles(path)
    form.check(config_values, f"{path}/{config_json.NAME}", model, files)
    check_stored(model, files, str(path))
    names = tensor_names(form, model, build)
    stored_tensors = names.translation.theirs
    ignored = re.compile(f"({form.ignored})$")

    def name_of(key: str) -> str | None:
        old_ending = next((ending for ending in form.older if key.endswith(ending)), None)
        name = key if old_ending is None else key.removesuffix(old_ending) + form.older[old_ending]
        # If a directory holds only the base model, without a head, the stored names lack the prefix `form.base`.
        for candidate in (name, form.base + name):
            if candidate in stored_tensors:
                return candidate
        return "" if ignored.search(key) else None

    keys = keys_of(files, name_of, model.name)
    for name, key in keys.items():
        files.check_weight(key, stored_tensors[name].shape)
    try:
        copies = stored_copies(names, keys, str(path))
    except ValueError as error:
        raise ValueError(f"{error} in its safetensors files") from None
    assemblies: dict[str, Assembly] = {}
    for stored_names in copies.values():
        assemblies |= {name: names.translation.ours[name] for name in stored_names}
    return Folder(files, Translated(Renamed(files, keys), assemblies), copies, SAME)
