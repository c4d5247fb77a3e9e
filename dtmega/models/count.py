"""Parameter and FLOP counts of a model's pieces (embedding, each layer, head), which may be on the meta device."""

from __future__ import annotations

from collections import Counter

from torch import nn

from dtmega.models.layers import LMHead
from dtmega.models.model import Model, Per
from dtmega.ops.cost import Piece


def pieces(whole: Model) -> list[Piece]:
    """List a whole model's pieces (embedding, each layer, head) in pipeline order, with the costs of each piece.

    A frozen weight needs no matrix product for its own gradient. The gradient of the weight's input needs no product
    either, unless an earlier weight is trained.
    """
    seen = set[int]()
    has_backward = False
    costed = []
    works_per: dict[nn.Module, Per] = {}
    for name, per in whole.works_per.items():
        works_per |= dict.fromkeys(whole.get_submodule(name).modules(), per)
    for name, modules in whole.parts().items():
        elements = shared = of_experts = 0
        flops_of_products = Counter[str]()
        for module in modules:
            for parameter in module.parameters(recurse=False):
                if id(parameter) in seen:
                    shared += parameter.numel()
                else:
                    elements += parameter.numel()
                seen.add(id(parameter))
                if _is_stacked(parameter, whole.experts_per_token):
                    of_experts += parameter.numel()
                per = works_per.get(module, "token")
                # 2 FLOPs per element for the output, 2 for the input's gradient, and 2 for the weight's gradient.
                per_element = 2 + 2 * has_backward + 2 * parameter.requires_grad
                flops_of_products[per] += per_element * _multiplied(module, parameter, whole.experts_per_token)
                has_backward |= parameter.requires_grad
        of_decoder, across = whole.decoder_attention_flops(name)
        # Backward takes two thirds of attention's FLOPs.
        passes = 3 if has_backward else 1
        flops = {
            "matmul_flops": flops_of_products["token"],
            "attention_flops": whole.attention_flops(name) * passes // 3,
            "label_flops": flops_of_products["label"],
            "sequence_flops": flops_of_products["sequence"],
            "decoder_flops": flops_of_products["decoder"],
            "decoder_attention_flops": of_decoder * passes // 3,
            "cross_attention_flops": across * passes // 3,
            "window": whole.attention_window(name),
            "expert_elements": of_experts,
            "experts_per_token": (whole.experts_per_token or 0) if of_experts else 0,
        }
        begins_decoder = name == whole.decoder_begins
        costed.append(Piece(name, elements, shared=shared, **flops, begins_decoder=begins_decoder))
    return costed


def _multiplied(module: nn.Module, weight: nn.Parameter, experts_per_token: int | None) -> int:
    """Count the weight elements that multiply each row of activations. A row usually holds one token."""
    # Look-ups, biases and scales are not matrix products.
    if isinstance(module, nn.Embedding) or weight.ndim < 2:
        return 0
    if isinstance(module, LMHead):
        return module.vocab_size * weight.shape[1]  # rows beyond V are padding
    if experts_per_token is not None and _is_stacked(weight, experts_per_token):
        return weight.numel() // weight.shape[0] * experts_per_token
    return weight.numel()


def _is_stacked(weight: nn.Parameter, experts_per_token: int | None) -> bool:
    """Return True if the weight stacks the matrices of all experts, [experts, rows, columns]."""
    return weight.ndim == 3 and experts_per_token is not None
