"""Files of dtmega's own models in other programs, by formats that describe them as data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtmega import config, families
from dtmega.checkpoint.sources import Source
from dtmega.data.tokenizers import exported
from dtmega.data.tokenizers.exported import ExportedTokenizer
from dtmega.data.tokenizers.tokenizer import Tokenizer
from dtmega.interop.formats.format import Format
from dtmega.interop.formats.whole import as_ours, as_theirs
from dtmega.interop.hf.files import config_json, export, ours, peft
from dtmega.interop.hf.files.peft import TheirModel
from dtmega.models.model import Model


@dataclass(frozen=True)
class OwnFormats:
    """The files of a family by its formats. `Stored` documents `formats` and all methods.

    Attributes:
        vocabulary_of: function that implements the method `vocabulary`.
    """

    formats: Mapping[str, Sequence[Format]]
    vocabulary_of: Callable[[Tokenizer, config.Data], ExportedTokenizer] = exported.of_documents

    def form(self, model: config.Model, program: str, kind: str = "") -> Format:
        forms = self.formats.get(program, ())
        fitting = [form for form in forms if form.fits(model)]
        if not fitting:
            wrong = forms[0].mismatches(model) if forms else {}
            expected = ", ".join(f"{key}={value!r}" for key, value in wrong.items()) or "another model"
            keys = ", ".join(f"[model] {key}" for key in ("name", *wrong))
            raise ValueError(
                f"{program} has no model like this one of name = '{model.name}': expected {expected} ({keys})"
            )
        return next((form for form in fitting if kind and form.kind == kind), fitting[0])

    def weights(self, model: config.Model) -> Source:
        return self.folder(Path(model.init_from), model)

    def folder(self, path: Path, model: config.Model) -> Source:
        kind = config_json.read_plain(path)["model_type"]
        return ours.open_weights(path, self.form(model, "hf", kind), model, _build)

    def their_model(self, model: config.Model, layers: Collection[str]) -> TheirModel:
        return peft.their_model(self.form(model, "hf"), model, _build, layers)

    def read(self, program: str, source: Source, model: config.Model, where: str) -> Source:
        return as_ours(source, self.form(model, program), model, _build, where)

    def vocabulary(self, tokenizer: Tokenizer, data: config.Data) -> ExportedTokenizer:
        return self.vocabulary_of(tokenizer, data)

    def as_stored(self, program: str, source: Source, model: config.Model) -> tuple[dict[str, Any], Source]:
        form = self.form(model, program)
        return form.to_config(model), as_theirs(source, form, model, _build)

    def export(self, source: Source, folder: Path, model: config.Model, tokenizer: str | None, **options: Any) -> None:
        plain_config, theirs = self.as_stored("hf", source, model)
        export.export(theirs, folder, plain_config, None, tokenizer, **options)


def _build(model: config.Model) -> Model:
    return families.of(model).build(model)
