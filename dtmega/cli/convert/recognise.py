"""Recognise the family of a model that another program has stored; make the model's [model] section."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dtmega import config
from dtmega.checkpoint.sources import Source
from dtmega.interop import stored
from dtmega.interop.formats.whole import closest
from dtmega.interop.hf.files import config_json
from dtmega.interop.hf.files.tensors import TensorFiles


def open_folder(path: Path, model: config.Model | None) -> tuple[Source, config.Model]:
    """Open a directory saved by transformers, if its model belongs to a built-in family.

    Args:
        path: the directory, with config.json and safetensors.
        model: the [model] section that config.json must agree with; None to make the section from config.json.

    Returns:
        The weights under dtmega's names, and the [model] section.

    Raises:
        ValueError: the model belongs to no built-in family, or config.json does not agree with the section.
    """
    if model is None:
        file = f"{path}/{config_json.NAME}"
        theirs = config_json.read_plain(path)
        known = {}
        for family_name, record in stored.all_families().items():
            for form in record.formats.get("hf", ()):
                known[form.kind] = family_name, form
        kind = theirs["model_type"]
        if kind not in known:
            raise ValueError(
                f"{file} has model_type={kind!r:.80}, expected one of {', '.join(sorted(known))} ([model] name); a "
                f"model of transformers needs no conversion: name = 'hf' with path = '{path}' trains it as it is"
            )
        name, form = known[kind]
        model = config.model_section({"name": name, **form.section(theirs, file, TensorFiles(path))}, str(path))
    return stored.of(model).folder(path, model), model


def section_of(
    program: str,
    names: Collection[str],
    theirs: Mapping[str, Any],
    where: str,
    expected: config.Model | None = None,
) -> config.Model:
    """The [model] section for a model that another program has stored.

    Args:
        program: a key of `Stored.formats`.
        names: names of the stored tensors, used to recognise the family.
        theirs: configuration stored with the tensors.
        where: path of the tensors, for messages.
        expected: section that the configuration must agree with; None to make the section from the configuration.

    Raises:
        ValueError: the model belongs to no family, or the configuration does not agree with `expected`.
    """
    if expected is not None:
        record = stored.of(expected)
        if not record.formats:
            raise ValueError(f"{where}: {program} has no model of name = '{expected.name}' (--config)")
        record.form(expected, program).check(theirs, where, expected)
        return expected
    forms = {}
    for family_name, record in stored.all_families().items():
        of_program = record.formats.get(program)
        if of_program:
            forms[family_name] = of_program[0]
    name = closest(names, forms)
    return config.model_section({"name": name, **forms[name].section(theirs, where)}, where)
