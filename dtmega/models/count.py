"""The pieces of a model on meta, counted: how many weights there are, and what multiplies."""

from __future__ import annotations

from collections import Counter

from torch import nn

from dtmega.cost import Piece
from dtmega.models.layers import LMHead
from dtmega.models.model import Model


def pieces(whole: Model) -> list[Piece]:
    """The pieces of a whole model, in the pipeline's order."""
    seen = set[int]()
    found = []
    works_per = {module: per for name, per in whole.works_per.items() for module in whole.get_submodule(name).modules()}
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
        found.append(Piece(name, elements, shared=shared, **flops, begins_decoder=begins_decoder))
    return found


def _multiplied(module: nn.Module, weight: nn.Parameter, experts_per_token: int | None) -> int:
    """Elements of a weight that a row, mostly of a token, is multiplied with."""
    if isinstance(module, nn.Embedding) or weight.ndim < 2:
        return 0
    if isinstance(module, LMHead):
        return module.vocab_size * weight.shape[1]  # rows beyond V are padding
    if weight.ndim == 3 and experts_per_token is not None:
        return weight.numel() // weight.shape[0] * experts_per_token  # [experts, rows, columns]
    return weight.numel()
