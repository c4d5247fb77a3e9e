"""The keys of BLOOM."""

from __future__ import annotations

from typing import Literal

from dtmega.config.model_keys import DropoutModel
from dtmega.config.schema import key


class BloomKeys(DropoutModel):
    """BLOOM: ALiBi, a LayerNorm after the embedding, and a tied head."""

    name: Literal["bloom"] = key("bloom", "the family of models")
    layer_norm_eps: float = key(1e-5, "epsilon of every LayerNorm", gt=0)
    apply_residual_connection_post_layernorm: bool = key(
        False, "take the residual after the LayerNorm instead of before it"
    )
