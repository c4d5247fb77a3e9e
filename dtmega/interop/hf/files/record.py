"""The files of a model that transformers implements: read as they are, and written as `save_pretrained` does."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dtmega import config
from dtmega.checkpoint.sources import Source
from dtmega.data.tokenizers import exported
from dtmega.data.tokenizers.exported import ExportedTokenizer
from dtmega.data.tokenizers.tokenizer import Tokenizer
from dtmega.interop.formats.format import Format
from dtmega.interop.hf.files import export, theirs
from dtmega.interop.hf.files.peft import CAUSAL_LM, TheirLayer, TheirModel
from dtmega.interop.hf.files.write import widest
from dtmega.interop.hf.model import HF
from dtmega.models.lora import linears


class TransformersFiles:
    """The files of all unmodified transformers decoders, which have no format of another program. See `Stored`."""

    formats: Mapping[str, Sequence[Format]] = {}

    def form(self, model: config.Model, program: str, kind: str = "") -> Format:
        raise ValueError(f"{program} has no model of name = '{model.name}' ([model] name)")

    def weights(self, model: config.Model) -> Source:
        key = "init_from" if model.init_from else "path"
        try:
            with torch.device("meta"):
                return theirs.open_weights(model.init_from or model.directory, HF(model).hf)
        except (ValueError, OSError) as error:
            raise ValueError(f"{error} ([model] {key})") from None

    def folder(self, path: Path, model: config.Model) -> Source:
        raise ValueError(f"--from hf reads a model that is written here, not name = '{model.name}' (--config)")

    def their_model(self, model: config.Model, layers: Collection[str]) -> TheirModel:
        with torch.device("meta"):
            whole = HF(model)
        known = linears(whole)
        theirs = {name: TheirLayer(name, transposed=known[name].transposed) for name in layers}
        modules = [name for name, _ in whole.hf.named_modules()]
        return TheirModel(whole.hf.config.model_type, CAUSAL_LM, theirs, modules)

    def read(self, program: str, source: Source, model: config.Model, where: str) -> Source:
        raise ValueError(f"{where}: {program} has no model of name = '{model.name}' (--config)")

    def vocabulary(self, tokenizer: Tokenizer, data: config.Data) -> ExportedTokenizer:
        return exported.of_documents(tokenizer, data)

    def as_stored(self, program: str, source: Source, model: config.Model) -> tuple[dict[str, Any], Source]:
        raise ValueError(f"{program} has no model of name = '{model.name}' (--to)")

    def export(self, source: Source, folder: Path, model: config.Model, tokenizer: str | None, **options: Any) -> None:
        with torch.device("meta"):
            built = HF(model)
        tensors = {built.full_name(name): tensor.detach() for name, tensor in built.stored_tensors()}
        as_saved = theirs.as_saved(source, built.hf, tensors)
        # Only parameters decide the dtype: an fp32 buffer must not make from_pretrained load a bfloat16 model in fp32.
        dtype = widest(source.tensors[built.full_name(name)][0] for name, _ in built.named_parameters())
        config_values = {"architectures": [type(built.hf).__name__], "dtype": dtype}
        export.export(as_saved, folder, config_values, Path(model.directory), tokenizer, **options)


STORED = TransformersFiles()
