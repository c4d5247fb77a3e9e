"""Sampling from a model, token by token without a cache of keys and values: to look at a model, not to serve it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dtmega.models.model import Model
from dtmega.output import counted

PADDING = 64  # lengths come in few sizes, as some kernels are made for one
Settle = Callable[[Tensor], bool]


def settled(token: Tensor) -> bool:
    """A `settle` for one process, which has nobody to agree with."""
    return True


@torch.no_grad()
def generate(
    model: Model,
    tokens: list[int],
    n: int,
    *,
    vocab_size: int,
    eod_id: int,
    seed: int,
    temperature: float = 0.8,
    top_k: int = 50,
    multiple: int = 1,
    settle: Settle = settled,
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
    longest = _longest(model, tokens, multiple, answered_elsewhere=False)
    device = next(model.parameters()).device

    def logits(new: list[int]) -> Tensor:
        sequence = [*tokens, *new]
        padded = _padded(sequence, eod_id, multiple, longest)  # changes nothing before it
        return model(torch.tensor([padded], device=device))[0, len(sequence) - 1, :vocab_size]

    with _evaluating(model):
        room = min(n, longest - len(tokens))
        return _drawn(logits, room, eod_id, seed, temperature, top_k, settle)


@torch.no_grad()
def answer(
    model: Model,
    tokens: list[int],
    n: int,
    *,
    vocab_size: int,
    start_id: int,
    end_id: int,
    pad_id: int,
    seed: int,
    temperature: float = 0.8,
    top_k: int = 50,
    multiple: int = 1,
    settle: Settle = settled,
) -> list[int]:
    """Up to `n` tokens that a decoder says of what its encoder reads, which it does once.

    Args:
        tokens: what the encoder reads.
        start_id: the token that the decoder begins after.
        end_id: ends the answer early, and is not in it.
        pad_id: fills up what the encoder reads; nothing attends to it.

    The others, and what is raised, are as for `generate`.
    """
    longest = _longest(model, tokens, multiple, answered_elsewhere=True)
    device = next(model.parameters()).device
    padded = _padded(tokens, pad_id, multiple, longest)
    read = torch.tensor([padded], device=device)
    is_padding = (torch.arange(len(padded), device=device) >= len(tokens)).long().unsqueeze(0)

    def logits(new: list[int]) -> Tensor:
        said = torch.tensor([_padded([start_id, *new], pad_id, multiple, longest)], device=device)
        both = {"document_ids": is_padding, "decoder_document_ids": torch.zeros_like(said)}
        return model(read, said, encoded=encoded, **both)[0, len(new), :vocab_size]

    with _evaluating(model):
        encoded = model(read, document_ids=is_padding)["encoded"]
        return _drawn(logits, min(n, longest), end_id, seed, temperature, top_k, settle)


def _longest(model: Model, tokens: Sequence[int], multiple: int, *, answered_elsewhere: bool) -> int:
    """The longest sequence that the model has positions for and that divides: padding must end there.

    Args:
        answered_elsewhere: a prompt may fill it.

    Raises:
        ValueError: an empty prompt, or one that is too long.
    """
    longest = (model.longest or sys.maxsize) // multiple * multiple
    if not tokens:
        raise ValueError("the prompt has no tokens; give at least one character (--prompt)")
    if len(tokens) >= longest + answered_elsewhere:
        raise ValueError(f"the prompt has {counted(len(tokens), 'token')}, and the model positions for {longest}")
    return longest


def _padded(tokens: Sequence[int], pad_id: int, multiple: int, longest: int) -> list[int]:
    return [*tokens, *[pad_id] * (-len(tokens) % math.lcm(PADDING, multiple))][:longest]


@contextmanager
def _evaluating(model: Model) -> Iterator[None]:
    was_training = model.training
    model.eval()
    yield
    model.train(was_training)


def _drawn(
    next_logits: Callable[[list[int]], Tensor],
    n: int,
    end_id: int,
    seed: int,
    temperature: float,
    top_k: int,
    settle: Settle,
) -> list[int]:
    """Up to n tokens, each drawn by the logits [V] that `next_logits` gives after those before it."""
    generator: torch.Generator | None = None
    new: list[int] = []
    while len(new) < n:
        logits = next_logits(new).float()
        if generator is None:  # parameters that FSDP keeps in host memory do not tell where logits are
            generator = torch.Generator(logits.device).manual_seed(seed)
        if temperature == 0:
            token = logits.argmax(keepdim=True)
        else:
            if top_k:
                logits[logits < logits.topk(min(top_k, len(logits))).values[-1]] = -torch.inf
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        if not settle(token) or token.item() == end_id:
            break
        new.append(int(token))
    return new
