"""Low-rank adapters (LoRA, arXiv:2106.09685): linear layers compute with W + (alpha / r) B A, and W stays frozen.

An adapter consists of three attributes of the linear layer's module:

    lora_a      A, [r, in]
    lora_b      B, [out, r]; zero at first, so that the adapter has no effect yet
    lora_scale  alpha / r

All code that shards, gathers, saves or copies the layer's parameters therefore handles the adapter too.
`plans/adapters.py` describes how tp shards an adapter. Without tp, `forward` below replaces the layer's forward.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtmega import config
from dtmega.models.initial import draw
from dtmega.models.model import Model

A, B = ".lora_a", ".lora_b"  # suffixes of the parameters' names
LINEARS = "linears"


class Linear(NamedTuple):
    """A linear layer that can have an adapter.

    Attributes:
        module: linear layer.
        outputs: number of output features.
        inputs: number of input features.
        transposed: whether the weight is stored as [in, out], as in transformers' Conv1D.
    """

    module: Any
    outputs: int
    inputs: int
    transposed: bool


def is_adapter(name: str) -> bool:
    """Return True if a parameter with this name is part of an adapter."""
    return name.endswith((A, B))


def attach(model: Model, lora: config.Lora) -> None:
    """Give each target layer an adapter and freeze all other parameters. The model is changed in place.

    Call this function on a whole model on the meta device, before the model is split into pipeline stages.

    Args:
        model: whole model.
        lora: [lora] section of the configuration, which must set `rank`.

    Raises:
        ValueError: a pattern matches no linear layer in the blocks.
    """
    dtype = getattr(torch, lora.base)
    frozen: dict[nn.Parameter, nn.Parameter] = {}  # trained parameter -> its single frozen copy, so that ties are kept
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in frozen:
                frozen[parameter] = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
            module.register_parameter(name, frozen[parameter])
    for linear in targets(model, lora.targets).values():
        module = linear.module
        device = module.weight.device
        module.register_parameter("lora_a", nn.Parameter(torch.empty(lora.rank, linear.inputs, device=device)))
        module.register_parameter("lora_b", nn.Parameter(torch.empty(linear.outputs, lora.rank, device=device)))
        module.lora_scale = lora.alpha / lora.rank
        module.forward = types.MethodType(forward, module)


def forward(module: Any, x: Tensor) -> Tensor:
    """Run the forward of a linear layer whose adapter is not sharded over tp."""
    update = F.linear(F.linear(x, module.lora_a), module.lora_b)
    return type(module).forward(module, x) + module.lora_scale * update


def linears(model: Model) -> dict[str, Linear]:
    """The linear layers in the model's blocks, keyed by each layer's name in checkpoints."""
    inside: set[nn.Module] = set()
    for block in model.blocks():
        inside.update(block.modules())
    found: dict[str, Linear] = {}
    for name, module in model.named_modules():
        if module not in inside:
            continue
        weight = model.full_name(f"{name}.weight").removesuffix(".weight")
        if isinstance(module, nn.Linear):
            found[weight] = Linear(module, module.out_features, module.in_features, False)
        elif type(module).__name__ == "Conv1D":
            inputs, outputs = module.get_parameter("weight").shape
            found[weight] = Linear(module, outputs, inputs, True)
    return found


def targets(model: Model, patterns: str | Sequence[str]) -> dict[str, Linear]:
    """The linear layers that get adapters, keyed by name.

    Args:
        model: whole model.
        patterns: value of [lora] targets. A pattern matches a layer's whole name, or the part of the name after a dot.

    Raises:
        ValueError: a pattern matches no linear layer in the blocks.
    """
    known = linears(model)
    if patterns == LINEARS:
        patterns = ["*"]
    chosen: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matching = [name for name in known if _matches(name, pattern)]
        if not matching:
            raise ValueError(f"{_why_none(model, known, pattern)} ([lora] targets)")
        chosen.update(matching)
    return {name: linear for name, linear in known.items() if name in chosen}


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _why_none(model: Model, known: dict[str, Linear], pattern: str) -> str:
    """The reason why a pattern matches no linear layer in the blocks."""
    for name, module in model.named_modules():
        name = model.full_name(name)
        if not name or not _matches(name, pattern):
            continue
        kind = type(module).__name__
        stacked = [list(p.shape) for p in module.parameters(recurse=False) if p.ndim == 3]
        if stacked:
            return f"'{pattern}' matches {name}, a {kind} with weights {stacked[0]}: experts have no adapters"
        if isinstance(module, nn.Linear) or list(module.parameters(recurse=False)):
            return f"'{pattern}' matches {name}, a {kind}: expected linear layers inside the blocks"
    if not known:
        return f"no linear layer has a name like '{pattern}': {type(model).__name__} has none inside its blocks"
    endings = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in known))
    return f"no linear layer has a name like '{pattern}'; expected {endings}, or a name such as '{next(iter(known))}'"


def adapters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the name and the parameter of each adapter matrix in a model or stage."""
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            yield name, parameter


def transposed_layers(model: Model) -> tuple[str, ...]:
    """The names of the layers that have an adapter and store their weight as [in, out]."""
    layers = linears(model).items()
    return tuple(name for name, layer in layers if layer.transposed and hasattr(layer.module, "lora_a"))


@torch.no_grad()
def draw_adapters(model: Model, seed: int) -> None:
    """Set the initial values of the adapters, or of this rank's shards: B to 0, and A to values drawn from the seed.

    A has the same standard deviation as in peft, which draws from a uniform distribution between -1 / sqrt(in) and
    1 / sqrt(in).
    """
    for name, parameter in adapters(model):
        std = 1 / math.sqrt(3 * parameter.shape[1]) if name.endswith(A) else None
        draw(parameter, model.full_name(name), seed, std, 0.0)
