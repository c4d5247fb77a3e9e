"""Check that every adapter learns: in a small copy of the model when a run starts, and in the run's first steps.

If a model uses a layer's weight without calling the layer, or replaces the layer's forward, the layer's adapter does
not train, and no error occurs. These checks detect such adapters. B starts at zero, so A has no gradient in the first
step. Each B must have a nonzero gradient in the first step, and each A in the second step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtmega import config
from dtmega.models.initial import draw
from dtmega.models.lora import A, B, adapters, draw_adapters, is_adapter
from dtmega.models.model import Model
from dtmega.ops import host
from dtmega.ops.shards import local

HEAD_DIM = 8  # size of the small copy's attention heads
SEED = 1
RATE = 0.1  # learning rate of the small copy's first step


def everywhere(names: Iterable[str]) -> list[str]:
    """Patterns that match the given names with any layer numbers."""
    return sorted({re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name in names})


def small_section(model: config.NativeModel, tp: int) -> config.NativeModel:
    """Make the [model] section for a small two-layer copy of the run's model, which tp shards in the same way.

    Args:
        model: [model] section of the run.
        tp: number of tensor-parallel ranks.
    """
    kv_heads = getattr(model, "n_kv_heads", 0)
    few_kv = tp if kv_heads % tp == 0 else kv_heads
    heads = max(2 * tp, 2 * few_kv) if kv_heads else 2 * tp
    hidden = heads * HEAD_DIM
    sizes = {
        "n_layers": 2,
        "n_decoder_layers": min(2, getattr(model, "n_decoder_layers", 0)),
        "n_heads": heads,
        "n_kv_heads": few_kv if kv_heads else 0,
        "hidden_size": hidden,
        "ffn_hidden_size": 2 * hidden,
        "expert_ffn_hidden_size": hidden if getattr(model, "expert_ffn_hidden_size", 0) else 0,
        "dense_layers": min(1, getattr(model, "dense_layers", 0)),  # so that at least one layer has experts
        "rotary_channels": 2 if getattr(model, "rotary_channels", 0) else 0,
        "v_channels": 0,
        "kv_channels": HEAD_DIM if getattr(model, "kv_channels", 0) else 0,
        "vocab_size": 64,
        "pad_vocab_to_multiple": 1,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "inner_dropout": 0.0,
    }
    return model.model_copy(update={key: size for key, size in sizes.items() if key in type(model).model_fields})


def unlearning(clone: Model, rows: Mapping[str, Tensor]) -> list[str]:
    """Train a small copy of the model for two steps. Return the names of this rank's adapters that do not learn.

    Args:
        clone: small copy with adapters, sharded and allocated. This function sets the initial values of its parameters.
        rows: tensors of one microbatch, keyed by name.
    """
    _draw(clone)
    missing: list[str] = []
    for ending in (B, A):
        clone.zero_grad()
        totals = [total for total in clone(**rows).values() if total.requires_grad]
        torch.autograd.backward(totals, [torch.ones_like(total) for total in totals])  # routers have one for each layer
        for name, parameter in adapters(clone):
            gradient = parameter.grad
            if name.endswith(ending) and (gradient is None or not bool(local(gradient).any())):
                missing.append(clone.full_name(name))
            elif gradient is not None:
                with torch.no_grad():
                    local(parameter).sub_(local(gradient), alpha=RATE)
    return missing


def without_gradient(
    names: Sequence[str],
    parameters: Mapping[str, nn.Parameter],
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
) -> list[str]:
    """Check, in a step of a run, that adapters get gradients. A parameter that nothing uses has a gradient of zeros.

    Args:
        names: names of the adapters' matrices to check, the same on all ranks of the groups.
        parameters: this rank's parameters with their gradients, keyed by name.
        groups: groups over which the parameters are sharded.
        device: device of the groups' collectives.

    Returns:
        The names of the matrices A that have no gradient, because their B is still zero.

    Raises:
        RuntimeError: an adapter gets no gradient. All ranks of the groups raise the error.
    """
    if host.must_skip("that every adapter gets a gradient is checked in a run, not here"):
        return []
    gets, is_set = [], []
    for name in names:
        gradient = parameters[name].grad
        assert gradient is not None
        gets.append(local(gradient).any())
        is_set.append(local(parameters[name.removesuffix(A).removesuffix(B) + B].detach()).any())
    found = torch.stack([*gets, *is_set]).to(device, torch.int32).view(2, -1)
    for group in groups:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    unproven = []
    for name, got, b_is_set in zip(names, *host.read(found).tolist(), strict=True):
        if not got and (b_is_set or name.endswith(B)):
            raise RuntimeError(f"no gradient has come to '{name}', so that it would not learn ([lora] targets)")
        if not got:
            unproven.append(name)
    return unproven


@torch.no_grad()
def _draw(clone: Model) -> None:
    for name, parameter in clone.named_parameters():
        if not is_adapter(name):
            draw(parameter, name, SEED, 0.2 if parameter.ndim > 1 else None, 1.0)
    draw_adapters(clone, SEED)


def refusal(missing: list[str]) -> str:
    """The error message about adapters that do not learn."""
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return (
        f"no gradient comes to {', '.join(missing[:3])}{more} of a small copy of the model: expected one for every "
        f"adapter, got none, so that these layers would not learn ([lora] targets)"
    )
