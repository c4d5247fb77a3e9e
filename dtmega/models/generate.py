"""Sampling from a model, token by token: to look at what it says, and to use it on one sequence at a time.

Keys and values of the tokens before are kept (`dtmega/past.py`), so that each token is computed once. A model whose
sequence is cut over tp, where one token cannot be shared, computes all of them again for each: it says the same.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from dtmega.models.model import Model
from dtmega.output import counted
from dtmega.past import Past

PADDING = 64  # lengths come in few sizes, as some kernels are made for one
Settle = Callable[[Tensor], bool]


def settled(token: Tensor) -> bool:
    """A `settle` for one process, which has nobody to agree with."""
    return True


@dataclass(frozen=True)
class Drawing:
    """How tokens are drawn from what a model says of them, and when that ends.

    Attributes:
        vocab_size: of the tokenizer; the model's may be larger.
        end_ids: tokens that end the sample, and are not in it.
        seed: of the draws.
        temperature: of the softmax; 0 takes the most probable token.
        top_k: only the k most probable tokens are drawn from; 0 = all.
        top_p: only the most probable tokens that together have this probability, and the one that reaches it, are drawn
            from (Holtzman et al., arXiv:1904.09751); 1 = all. Of those that top_k has left.
        multiple: how many equal parts a sequence must divide into; more than 1 computes every token again for each.
        settle: called with each token as it is drawn, int64 [1], which it may overwrite; False ends the sample.
        keeps_past: False computes every token again for each.
    """

    vocab_size: int
    end_ids: frozenset[int]
    seed: int = 0
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    multiple: int = 1
    settle: Settle = settled
    keeps_past: bool = True

    def of(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """A token, int64 [1], by fp32 logits [V]."""
        if self.temperature == 0:
            return logits.argmax(keepdim=True)
        if self.top_k:
            least = logits.topk(min(self.top_k, len(logits))).values[-1]
            logits = logits.masked_fill(logits < least, -torch.inf)
        probabilities = (logits / self.temperature).softmax(-1)
        if self.top_p < 1:
            ordered, ids = probabilities.sort(descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered  # what the more probable ones have together
            probabilities = probabilities.index_fill(0, ids[before >= self.top_p], 0.0)
        return torch.multinomial(probabilities, 1, generator=generator)


@torch.no_grad()
def generate(model: Model, tokens: list[int], n: int, drawing: Drawing) -> list[int]:
    """Up to `n` tokens that follow `tokens`; ends early before an end, and where positions end.

    Raises:
        ValueError: an empty prompt, or one that leaves no position.
    """
    longest = _longest(model, tokens, drawing.multiple, answered_elsewhere=False)
    device = next(model.parameters()).device

    def logits(said: list[int], past: Past | None) -> Tensor:
        if past is None:
            padded = _padded(said, 0, drawing.multiple, longest)  # changes nothing before it
            return model(torch.tensor([padded], device=device))[0, len(said) - 1]
        new, places = _unseen(said, past, device)
        return model(new, places=places, past=past)[0, -1]

    with _evaluating(model):
        room = min(n, longest - len(tokens))
        return _drawn(model, logits, tokens, room, drawing)


@torch.no_grad()
def answer(model: Model, tokens: list[int], n: int, drawing: Drawing, *, start_id: int, pad_id: int) -> list[int]:
    """Up to `n` tokens that a decoder says of what its encoder reads, which it does once.

    Args:
        tokens: what the encoder reads.
        start_id: the token that the decoder begins after.
        pad_id: fills up what the encoder reads; nothing attends to it.

    Raises:
        ValueError: as `generate`.
    """
    longest = _longest(model, tokens, drawing.multiple, answered_elsewhere=True)
    device = next(model.parameters()).device
    padded = _padded(tokens, pad_id, drawing.multiple, longest)
    read = torch.tensor([padded], device=device)
    is_padding = (torch.arange(len(padded), device=device) >= len(tokens)).long().unsqueeze(0)

    def logits(said: list[int], past: Past | None) -> Tensor:
        if past is None:
            last = len(said) - 1
            new = torch.tensor([_padded(said, pad_id, drawing.multiple, longest)], device=device)
            where = {}
        else:
            last = -1
            new, places = _unseen(said, past, device)
            where = {"decoder_places": places, "past": past}
        documents = {"document_ids": is_padding, "decoder_document_ids": torch.zeros_like(new)}
        return model(read, new, encoded=encoded, **documents, **where)[0, last]

    with _evaluating(model):
        encoded = model(read, document_ids=is_padding)["encoded"]
        return _drawn(model, logits, [start_id], min(n, longest), drawing)


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


def _unseen(said: list[int], past: Past, device: torch.device) -> tuple[Tensor, Tensor]:
    """The tokens [1, S] that a model has not been given yet, and their places [1, S]."""
    places = torch.arange(past.length, len(said), device=device).unsqueeze(0)
    return torch.tensor([said[past.length :]], device=device), places


@contextmanager
def _evaluating(model: Model) -> Iterator[None]:
    was_training = model.training
    model.eval()
    yield
    model.train(was_training)


def _drawn(
    model: Model,
    next_logits: Callable[[list[int], Past | None], Tensor],
    said: list[int],
    n: int,
    drawing: Drawing,
) -> list[int]:
    """Up to n tokens that follow what is `said`.

    Args:
        next_logits: gives [V] after all tokens so far; of those before only what `Past` has not taken in is new to it.
    """
    keeps = drawing.keeps_past and model.has_past and drawing.multiple == 1
    past = Past() if keeps else None
    generator: torch.Generator | None = None
    new: list[int] = []
    while len(new) < n:
        logits = next_logits([*said, *new], past)[: drawing.vocab_size].float()
        if generator is None:  # parameters that FSDP keeps in host memory do not tell where logits are
            generator = torch.Generator(logits.device).manual_seed(drawing.seed)
        token = drawing.of(logits, generator)
        if not drawing.settle(token) or token.item() in drawing.end_ids:
            break
        new.append(int(token))
    return new
