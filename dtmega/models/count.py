"""Parameter and FLOP counts of a model's pieces, computed from modules that may be on the meta device."""

from __future__ import annotations

from collections import Counter

from torch import nn

from dtmega.models.layers import LMHead
from dtmega.models.model import Model, Per
from dtmega.ops.cost import Piece


def pieces(whole: Model) -> list[Piece]:
    """The pieces of a whole model with their costs, in the pipeline's order."""
    seen = set[int]()
    costed = []
    works_per: dict[nn.Module, Per] = {}
    for name, per in whole.works_per.items():
        works_per |= dict.fromkeys(whole.get_submodule(name).modules(), per)
    for name, modules in whole.parts().items():
        elements = shared = 0
        multiplied = Counter[str]()
        for module in modules:
            for parameter in module.parameters(recurse=False):
                if id(parameter) in seen:
                    shared += parameter.numel()
                else:
                    elements += parameter.numel()
                seen.add(id(parameter))
                per = works_per.get(module, "token")
                multiplied[per] += _multiplied(module, parameter, whole.experts_per_token)
        of_decoder, across = whole.decoder_attention_flops(name)
        # 2 FLOPs per element in forward, and 4 in backward: 2 each for the gradients of the input and the weight.
        flops = {
            "matmul_flops": 6 * multiplied["token"],
            "attention_flops": whole.attention_flops(name),
            "label_flops": 6 * multiplied["label"],
            "sequence_flops": 6 * multiplied["sequence"],
            "decoder_flops": 6 * multiplied["decoder"],
            "decoder_attention_flops": of_decoder,
            "cross_attention_flops": across,
        }
        begins_decoder = name == whole.decoder_begins
        costed.append(Piece(name, elements, shared=shared, **flops, begins_decoder=begins_decoder))
    return costed


def _multiplied(module: nn.Module, weight: nn.Parameter, experts_per_token: int | None) -> int:
    """The number of weight elements that each row of activations is multiplied by. A row usually holds one token."""
    # Look-ups, biases and scales are not matrix products.
    if isinstance(module, nn.Embedding) or weight.ndim < 2:
        return 0
    if isinstance(module, LMHead):
        return module.vocab_size * weight.shape[1]  # rows beyond V are padding
    if weight.ndim == 3 and experts_per_token is not None:
        return weight.numel() // weight.shape[0] * experts_per_token  # [experts, rows, columns]
    return weight.numel()
