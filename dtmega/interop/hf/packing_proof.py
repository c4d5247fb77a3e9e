"""Checks, before a run, that conversations packed into one row cannot attend to each other.

The check runs on a scaled-down copy of the model.

Without a mask, transformers restarts attention wherever `position_ids` restart. A four-dimensional mask could have the
same effect, but nine families silently drop their sliding windows if they receive such a mask.
"""

from __future__ import annotations

from typing import Any

import torch

from dtmega.interop.hf.tp import tiny
from dtmega.interop.hf.tp.verify import Verification, deviation

LENGTHS = (11, 3, 10)  # tokens per conversation; two conversations exceed the copy's attention windows of 6 tokens
# In fp32, correct gradients deviate by at most 1e-5; if a family ignores the positions, gradients deviate by at least
# 1e-1.
TOLERANCE = 1e-4


def prove(model: Any, device: torch.device) -> None:
    """On a scaled-down copy, compare loss and gradients of a packed row with those of the separate conversations.

    Args:
        model: `transformers` model on meta; only its class and its config are used.
        device: device of this rank.

    Raises:
        ValueError: no copy can be made, the copy raises an error, or a packed conversation attends to another one.
    """
    kind = model.config.model_type
    remedy = "expected pack=false, one conversation in a row ([data] pack)"
    try:
        errors = deviations(model, device)
    except Exception as error:  # each family checks its sizes in its own way
        raise ValueError(
            f"packed conversations cannot be proven for '{kind}': its small copy raised {type(error).__name__}: "
            f"{error}; {remedy}"
        ) from None
    of_case = {("packed", name): error for name, error in errors.items()}
    verification = Verification(of_case, tolerance=TOLERANCE)
    if not verification.ok:
        raise ValueError(f"packed conversations of '{kind}' see each other; {remedy}:\n{verification}")


def deviations(model: Any, device: torch.device) -> dict[str, float]:
    """The relative deviations of the packed row's loss and of each gradient, keyed by tensor name."""
    config = tiny.tiny_config(model.config, 1, sum(LENGTHS))
    attention = model.config._attn_implementation
    alone, packed = (tiny.build(type(model), config, attention).to(device) for _ in range(2))
    rows = {name: row[:1].to(device) for name, row in tiny.batch(alone, sum(LENGTHS), padded=False).items()}
    tokens, labels = rows["input_ids"].split(LENGTHS, 1), rows["labels"].split(LENGTHS, 1)
    losses = [tiny.summed_loss(alone, ids, targets) for ids, targets in zip(tokens, labels, strict=True)]
    expected = torch.stack(losses).sum()
    expected.backward()
    positions = torch.cat([torch.arange(length, device=device) for length in LENGTHS])
    loss = tiny.summed_loss(packed, rows["input_ids"], rows["labels"], position_ids=positions[None])
    loss.backward()
    of_alone = dict(alone.named_parameters())
    total = torch.stack([p.grad.norm() for p in of_alone.values() if p.grad is not None]).norm().item()
    errors = {"loss": deviation(loss.detach(), expected.detach(), total)}
    for name, parameter in packed.named_parameters():
        ours, theirs = (torch.zeros_like(p) if p.grad is None else p.grad for p in (parameter, of_alone[name]))
        errors[name] = deviation(ours, theirs, total)
    return errors
