"""The keys of BERT."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from dtmega.config.model_keys import DropoutModel
from dtmega.config.schema import key


class BertKeys(DropoutModel):
    """BERT, with LayerNorms in Megatron's order or in the original order."""

    name: Literal["bert"] = key("bert", "the family of models")
    layer_norm_eps: float = key(1e-5, "epsilon of every LayerNorm", gt=0)
    norm: Literal["pre", "post"] = key(
        "pre", "pre: LayerNorms before attention and feed-forward, as in Megatron; post: after them, as in the paper"
    )
    apply_residual_connection_post_layernorm: bool = key(
        False, "take the residual after the LayerNorm instead of before it"
    )
    gelu: Literal["erf", "tanh"] = key(
        "erf", "GELU of the feed-forward: exact (erf), or the tanh approximation, as in Megatron's fused kernel"
    )
    head_gelu: Literal["erf", "tanh"] = key("erf", "GELU in the head; Megatron always uses erf here")
    max_position_embeddings: int = key(512, "number of learned positions: the longest sequence", ge=1)

    @model_validator(mode="after")
    def _check_norm(self) -> BertKeys:
        if self.norm == "post" and self.apply_residual_connection_post_layernorm:
            raise ValueError(
                "norm='post' has a LayerNorm's output for its residual already: expected "
                "apply_residual_connection_post_layernorm=false, got true "
                "([model] norm, [model] apply_residual_connection_post_layernorm)"
            )
        return self
