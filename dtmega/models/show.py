"""A look at what a model has learnt: how it goes on from a prompt, or how it fills the masks of one.

A family names one of them; the end of a run and `dtmega generate` show it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtmega.data.tokenizer import Tokenizer
from dtmega.data.wordpiece import MASK
from dtmega.models.generate import PADDING, generate
from dtmega.models.stage import Stage
from dtmega.output import counted


class Show(NamedTuple):
    """A kind of sample, which a family names.

    Attributes:
        options: those of `dtmega generate` that it reads; it has a default for each, and is called with no others.
        text: (model, tokenizer, prompt, **options) -> what to print; also takes `multiple` and `settle`, as `generate`
            has them. It raises a ValueError for a prompt that it can do nothing with.
    """

    options: tuple[str, ...]
    text: Callable[..., str]


def continued(
    model: Stage, tokenizer: Tokenizer, prompt: str, *, tokens: int = 128, seed: int = 0, **options: Any
) -> str:
    """The prompt and what a decoder draws to follow it; arguments and errors as of `generate`."""
    new = generate(
        model,
        tokenizer.encode(prompt),
        tokens,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        seed=seed,
        **options,
    )
    return prompt + tokenizer.decode(new)


@torch.no_grad()
def filled(
    model: Stage,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    top_k: int = 5,
    multiple: int = 1,
    settle: Callable[[Tensor], bool] = lambda ids: True,
) -> str:
    """The prompt, and a line for each [MASK] in it with the most probable tokens in its place.

    Args:
        top_k: how many; 0 = all.
        multiple: how many equal parts a sequence must divide into.
        settle: called with their ids, int64 [masks, top_k], which it may overwrite.

    Raises:
        ValueError: a prompt without a mask, or longer than the model has positions.
    """
    tokens, masks = masked(tokenizer, prompt)
    longest = (model.longest or sys.maxsize) // multiple * multiple
    if len(tokens) > longest:
        raise ValueError(f"the prompt has {counted(len(tokens), 'token')}, and the model positions for {longest}")
    n_padding = min(-len(tokens) % math.lcm(PADDING, multiple), longest - len(tokens))
    device = next(model.parameters()).device
    padded = torch.tensor([tokens + [tokenizer.pad_id] * n_padding], device=device)
    is_padding = torch.tensor([[0] * len(tokens) + [1] * n_padding], device=device)

    was_training = model.training
    model.eval()
    logits = model(padded, document_ids=is_padding)["logits"]
    model.train(was_training)
    probabilities = logits[0, masks, : tokenizer.vocab_size].float().softmax(-1)  # [masks, V]
    best = probabilities.topk(min(top_k or sys.maxsize, tokenizer.vocab_size)).indices
    settle(best)
    lines = [prompt]
    for likely, ids in zip(probabilities, best.tolist(), strict=True):
        lines.append(f"{MASK}: " + ", ".join(f"{tokenizer.decode([i])} {100 * likely[i]:.1f}%" for i in ids))
    return "\n".join(lines)


def masked(tokenizer: Tokenizer, prompt: str) -> tuple[list[int], list[int]]:
    """The ids of a prompt between [CLS] and [SEP], and the places of its masks.

    Raises:
        ValueError: there is none.
    """
    before, *after = prompt.split(MASK)
    if not after:
        raise ValueError(f"{prompt!r} has no {MASK} to fill (--prompt, [eval] prompt)")
    assert tokenizer.cls_id is not None
    assert tokenizer.mask_id is not None
    assert tokenizer.sep_id is not None
    tokens = [tokenizer.cls_id, *tokenizer.encode(before)]
    masks = []
    for text in after:
        masks.append(len(tokens))
        tokens += [tokenizer.mask_id, *tokenizer.encode(text)]
    return [*tokens, tokenizer.sep_id], masks


CONTINUATION = Show(("tokens", "temperature", "top_k", "seed"), continued)
FILLS = Show(("top_k",), filled)
