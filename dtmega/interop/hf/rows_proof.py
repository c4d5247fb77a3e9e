"""Checks, before a run, that the loss and gradients of a row are the same whatever stands beside it in a microbatch.

The check runs on a scaled-down copy of the model. A forward that reads a maximum, a sum or an `any` over its rows gives
other results if the rows of a microbatch are shuffled and split in two, as another layout does.

In packed rows, conversations cannot attend to each other. Without a mask, transformers restarts attention wherever
`position_ids` restart. A four-dimensional mask could have the same effect, but nine families silently drop their
sliding windows if they receive such a mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from dtmega.interop.hf import rope
from dtmega.interop.hf.tp import tiny
from dtmega.interop.hf.tp.verify import Verification, deviation

# Tokens per conversation of each packed row. The copy's attention windows hold 6 tokens, and longrope's original length
# is 6, too; some conversations exceed them.
PACKED = ((11, 3, 10), (24,), (2, 22), (5, 19))
LENGTH = 24
ONE_BY_ONE = ((0,), (1,), (2,), (3,))
HALVES = ((2, 0), (3, 1))  # rows of each microbatch
# In fp32, correct gradients deviate by at most 1e-5; if a family ignores the positions, gradients deviate by at least
# 1e-1.
TOLERANCE = 1e-4


def prove(model: Any, device: torch.device, packs: bool) -> None:
    """On a scaled-down copy, compare loss and gradients of a microbatch with those of its conversations one by one.

    Args:
        model: `transformers` model on meta; only its class and its config are used.
        device: device of this rank.
        packs: whether a row of the run may hold several conversations.

    Raises:
        ValueError: no copy can be made, the copy raises an error, a packed conversation attends to another one, or a
            row depends on other rows.
    """
    kind = model.config.model_type
    remedy = "; expected pack=false, one conversation in a row ([data] pack)" if packs else " ([model] path)"
    try:
        of_packed, of_halves = deviations(model, device, packs)
    except Exception as error:  # each family checks its sizes in its own way
        subject = "packed conversations" if packs else "rows"
        raise ValueError(
            f"{subject} cannot be proven for '{kind}': its small copy raised {type(error).__name__}: {error}{remedy}"
        ) from None
    if not of_packed.ok:
        raise ValueError(f"packed conversations of '{kind}' see each other{remedy}:\n{of_packed}")
    if not of_halves.ok:
        raise ValueError(
            f"'{kind}' computes a row differently beside other rows of a microbatch, so that each layout would have "
            f"other numbers: expected a model that computes each row by itself ([model] path):\n{of_halves}"
        )


def deviations(model: Any, device: torch.device, packs: bool) -> tuple[Verification, Verification]:
    """Compare rows one by one, and two microbatches of shuffled rows, with the conversations of these rows.

    Returns:
        The relative deviations of the loss and of each gradient in both comparisons; none in the first one if a row is
        a single conversation.
    """
    config = tiny.tiny_config(model.config, 1, LENGTH)
    copy = tiny.build(type(model), config, model.config._attn_implementation).to(device)
    lengths_of_rows = PACKED if packs else ((LENGTH,),) * len(PACKED)
    batch = tiny.batch(copy, LENGTH, padded=False, rows=len(PACKED))
    rows = {"tokens": batch["input_ids"].to(device), "labels": batch["labels"].to(device)}
    conversations = []
    for row, lengths in enumerate(lengths_of_rows):
        parts = (rows[name][row : row + 1].split(lengths, 1) for name in ("tokens", "labels"))
        conversations += [{"tokens": tokens, "labels": labels} for tokens, labels in zip(*parts, strict=True)]
    expected = _results(copy, conversations)
    rope.choose_by_conversation(copy)
    if packs:
        positions = [torch.cat([torch.arange(length) for length in lengths]) for lengths in lengths_of_rows]
        rows["position_ids"] = torch.stack(positions).to(device)
    total = torch.stack([tensor.norm() for name, tensor in expected.items() if name != "loss"]).norm().item()
    compared = [] if packs else [Verification({})]
    for case in (ONE_BY_ONE, HALVES)[not packs :]:
        found = _results(copy, [{name: tensor[[*numbers]] for name, tensor in rows.items()} for numbers in case])
        errors = {("", name): deviation(found[name], truth, total) for name, truth in expected.items()}
        compared.append(Verification(errors, tolerance=TOLERANCE))
    return compared[0], compared[1]


def _results(model: Any, microbatches: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The loss, summed over microbatches, and each gradient, keyed by parameter name."""
    model.zero_grad()
    losses = []
    for microbatch in microbatches:
        loss = tiny.summed_loss(model, **microbatch)
        loss.backward()
        losses.append(loss.detach())
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return {"loss": torch.stack(losses).sum(), **gradients}
