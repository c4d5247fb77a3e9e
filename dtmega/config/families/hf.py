"""The keys of a model that transformers implements."""

from __future__ import annotations

from typing import Literal

from dtmega.config.model_keys import Model
from dtmega.config.schema import LocalPath, key


class TransformersKeys(Model):
    """A model that transformers implements, with sizes from `config.json` in the model's directory."""

    name: Literal["hf"] = key("hf", "the family of models")
    n_heads: int = key(8, "H: attention heads; 0 = none, as in Mamba", ge=0)  # its config.json sets the number
    path: LocalPath = key(
        "", "local directory of the model: config.json, weights, tokenizer.json; its config.json sets the sizes"
    )

    @property
    def directory(self) -> str:
        return self.path
