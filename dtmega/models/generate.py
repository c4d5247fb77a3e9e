"""Sampling from a model, token by token without a cache of keys and values: to look at a model, not to serve it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from dtmega.models.stage import Stage
from dtmega.output import counted

PADDING = 64  # lengths come in few sizes, as some kernels are made for one


@torch.no_grad()
def generate(
    model: Stage,
    tokens: list[int],
    n: int,
    *,
    vocab_size: int,
    eod_id: int,
    seed: int,
    temperature: float = 0.8,
    top_k: int = 50,
    multiple: int = 1,
    settle: Callable[[Tensor], bool] = lambda token: True,
) -> list[int]:
    """Up to `n` tokens that follow `tokens`; ends early before an end-of-document, and where positions end.

    Args:
        vocab_size: of the tokenizer; the model's may be larger.
        temperature: of the softmax; 0 takes the most probable token.
        top_k: only the k most probable tokens are drawn from; 0 = all.
        multiple: how many equal parts a sequence must divide into.
        settle: called with each token as it is drawn, int64 [1], which it may overwrite; False ends the sample.

    Raises:
        ValueError: an empty prompt, or one that leaves no position.
    """
    if not tokens:
        raise ValueError("the prompt has no tokens; give at least one character (--prompt)")
    longest = (model.longest or sys.maxsize) // multiple * multiple  # padding must end there, and divide
    if len(tokens) >= longest:
        raise ValueError(f"the prompt has {counted(len(tokens), 'token')}, and the model positions for {longest}")
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    unit = math.lcm(PADDING, multiple)
    generator: torch.Generator | None = None
    new: list[int] = []
    while len(new) < min(n, longest - len(tokens)):
        sequence = [*tokens, *new]
        # Padding behind the last token changes nothing before it.
        padded = (sequence + [eod_id] * (-len(sequence) % unit))[:longest]
        logits = model(torch.tensor([padded], device=device))[0, len(sequence) - 1, :vocab_size].float()
        if generator is None:  # parameters that FSDP keeps in host memory do not tell where logits are
            generator = torch.Generator(logits.device).manual_seed(seed)
        if temperature == 0:
            token = logits.argmax(keepdim=True)
        else:
            if top_k:
                logits[logits < logits.topk(min(top_k, len(logits))).values[-1]] = -torch.inf
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        if not settle(token) or token.item() == eod_id:
            break
        new.append(int(token))
    model.train(was_training)
    return new
