"""Checks, before a run, that a scaled-down copy of the model has the same results over cp ranks as in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dtmega.interop.hf import context
from dtmega.interop.hf.tp import tiny
from dtmega.interop.hf.tp.verify import Verification, deviation, worst
from dtmega.models.model import consecutive

if TYPE_CHECKING:
    from dtmega.ops.context_parallel import ContextParallel

LEAST_TOKENS = 16  # minimum length of the copy's sequences; attention windows in the copy hold 6 tokens
# In fp32, correct gradients deviate by at most 6e-6, except in OPT: OPT's gradients are small differences of large
# numbers and deviate by up to 1e-5. Implementations that are known to be wrong deviate by at least 1e-2.
TOLERANCE = 1e-4


def prove(model: Any, ranks: ContextParallel, device: torch.device) -> None:
    """Compare a scaled-down copy of the model over the cp ranks with an equal copy that each rank computes alone.

    All ranks must call this function.

    Args:
        model: `transformers` model on meta, whole or one stage; only its class and its config are used.
        ranks: the cp ranks, over which the sequences are sharded.
        device: device of this rank.

    Raises:
        ValueError: no copy can be made, the copy raises an error, or the loss or a gradient deviates.
    """
    kind, size = model.config.model_type, ranks.group.size()
    # `slice` gives each rank two slices of equal length, one from each half of the sequence.
    length = 2 * size * -(-LEAST_TOKENS // (2 * size))
    try:
        # With `by_heads`, cp divides the heads among the ranks, as tp does.
        config = tiny.tiny_config(model.config, size if ranks.by_heads else 2, length)
        attention = model.config._attn_implementation
        truth, ours = (tiny.build(type(model), config, attention).to(device) for _ in range(2))
    except Exception as error:  # each family checks its sizes in its own way
        raise ValueError(
            f"cp={size} of '{kind}' cannot be proven ([mesh] cp), since no small copy can be made: "
            f"{type(error).__name__}: {error}"
        ) from None
    try:
        errors = _deviations(ours, truth, length, ranks, device)
    except Exception as error:  # attention raises ValueError for unknown arguments; family code may raise any error
        raise ValueError(
            f"cp={size} does not work with '{kind}' ([mesh] cp): its small copy raised {type(error).__name__}: {error}"
        ) from None
    of_case = {("plain", name): error for name, error in errors.items()}
    verification = Verification(worst(of_case, [ranks.group], device.type), tolerance=TOLERANCE)
    if not verification.ok:
        raise ValueError(f"'{kind}' over cp={size} is not what one process computes ([mesh] cp):\n{verification}")


def _deviations(ours: Any, truth: Any, length: int, ranks: ContextParallel, device: torch.device) -> dict[str, float]:
    """The relative deviations of the loss and of every gradient, keyed by tensor name."""
    batch = tiny.batch(truth, length, padded=False, rows=4)
    rows = [row.to(device) for row in (batch["input_ids"], batch["labels"], consecutive(batch["input_ids"]))]
    alone = tiny.summed_loss(truth, rows[0], rows[1])
    alone.backward()
    context.switch(ours)
    loss = torch.zeros_like(alone)
    for half in ([2, 0], [3, 1]):  # a row's results must not depend on the rows beside it
        tokens, labels, places = (ranks.slice(row[half], balanced=True) for row in rows)
        with context.at_hand(places, None, ranks, fused=False):
            of_half = tiny.summed_loss(ours, tokens, labels, position_ids=places)
        of_half.backward()
        loss += of_half.detach()
    dist.all_reduce(loss, group=ranks.group)
    of_truth = dict(truth.named_parameters())
    total = torch.stack([p.grad.norm() for p in of_truth.values() if p.grad is not None]).norm().item()
    errors = {"loss": deviation(loss, alone.detach(), total)}
    for name, parameter in ours.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(gradient, group=ranks.group)
        expected = of_truth[name].grad
        errors[name] = deviation(gradient, torch.zeros_like(gradient) if expected is None else expected, total)
    return errors
