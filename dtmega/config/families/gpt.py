"""The keys of GPT-2 and GPT-3."""

from __future__ import annotations

from typing import Literal

from dtmega.config.model_keys import DropoutModel
from dtmega.config.schema import key


class GPTKeys(DropoutModel):
    """GPT-2 and GPT-3: learned positions."""

    name: Literal["gpt"] = key("gpt", "the family of models")
    layer_norm_eps: float = key(1e-5, "epsilon of every LayerNorm", gt=0)
    max_position_embeddings: int = key(1024, "number of learned positions: the longest sequence", ge=1)
    tied: bool = key(True, "share the weights of the embedding and the head")
