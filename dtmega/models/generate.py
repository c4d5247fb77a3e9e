"""Sampling from a model, token by token: to look at what it says, and to use it on a few prompts at a time.

Keys and values of the tokens before are kept (`dtmega/past.py`), so that each token is computed once. A model whose
sequence is cut over tp, where one token cannot be shared, computes all of them again for each: it says the same.

Prompts of several lengths are filled up: on the left where a past is kept, so that their next tokens stand below each
other, as a document of its own before place 0; else on the right, where nothing before sees it.
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


def settled(tokens: Tensor) -> bool:
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
        settle: called with the tokens as they are drawn, int64 [B], which it may overwrite; False ends the samples.
        keeps_past: False computes every token again for each.
        prompt_is_prefix: each token of the prompt sees all of the prompt (`Objective.prompt_is_prefix`).
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
    prompt_is_prefix: bool = False

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


def generate(model: Model, tokens: list[int], n: int, drawing: Drawing) -> list[int]:
    """Up to `n` tokens that follow `tokens`; ends early before an end, and where positions end.

    Raises:
        ValueError: an empty prompt, or one that leaves no position.
    """
    (said,) = generate_together(model, [tokens], n, drawing)
    return said


@torch.no_grad()
def generate_together(model: Model, prompts: Sequence[list[int]], n: int, drawing: Drawing) -> list[list[int]]:
    """Up to `n` tokens that follow each prompt, as `generate` has them but for the last bits of their logits.

    Raises:
        ValueError: as `generate`, of one of the prompts.
    """
    longest = 0
    for prompt in prompts:
        longest = _longest(model, prompt, drawing.multiple, answered_elsewhere=False)
    device = next(model.parameters()).device
    width = max(map(len, prompts), default=0)
    lengths = torch.tensor([[len(prompt)] for prompt in prompts], device=device)
    n_padding = width - lengths
    of_one_length = all(len(prompt) == width for prompt in prompts)

    def logits(texts: list[list[int]], past: Past | None) -> Tensor:
        if past is None:
            # What fills up a shorter text stands behind it, and changes nothing before it.
            padded = torch.tensor(_padded(texts, 0, drawing.multiple, longest), device=device)
            last = [len(text) - 1 for text in texts]
            rows = {}
            if drawing.prompt_is_prefix:
                rows["prefix"] = torch.arange(padded.shape[1], device=device) < lengths
            return model(padded, **rows)[torch.arange(len(texts)), last]
        new = _unseen(texts, past, device)
        places = past.length + torch.arange(new.shape[1], device=device) - n_padding
        rows = {"places": places}
        if drawing.prompt_is_prefix and past.length == 0:
            rows["prefix"] = torch.ones_like(new, dtype=torch.bool)
        if not of_one_length:
            rows["document_ids"] = (places < 0).long()
            # Clamped also for a sample that has ended where positions end.
            rows["position_ids"] = places.clamp(0, longest - 1)
        return model(new, past=past, **rows)[:, -1]

    with _evaluating(model):
        rooms = [min(n, longest - len(prompt)) for prompt in prompts]
        return _drawn(model, logits, prompts, rooms, drawing)


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
    read = torch.tensor(_padded([tokens], pad_id, drawing.multiple, longest), device=device)
    is_padding = (torch.arange(read.shape[1], device=device) >= len(tokens)).long().unsqueeze(0)

    def logits(texts: list[list[int]], past: Past | None) -> Tensor:
        if past is None:
            last = len(texts[0]) - 1
            new = torch.tensor(_padded(texts, pad_id, drawing.multiple, longest), device=device)
            where = {}
        else:
            last = -1
            new = _unseen(texts, past, device)
            places = past.length + torch.arange(new.shape[1], device=device).unsqueeze(0)
            where = {"decoder_places": places, "past": past}
        documents = {"document_ids": is_padding, "decoder_document_ids": torch.zeros_like(new)}
        return model(read, new, encoded=encoded, **documents, **where)[:, last]

    with _evaluating(model):
        encoded = model(read, document_ids=is_padding)["encoded"]
        (said,) = _drawn(model, logits, [[start_id]], [min(n, longest)], drawing)
        return said


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


def _padded(texts: Sequence[list[int]], pad_id: int, multiple: int, longest: int) -> list[list[int]]:
    """The texts filled up on the right to one length, of which there are few, but not beyond `longest`."""
    width = max(map(len, texts))
    width = min(width + -width % math.lcm(PADDING, multiple), longest)
    return [text + [pad_id] * (width - len(text)) for text in texts]


def _unseen(texts: Sequence[list[int]], past: Past, device: torch.device) -> Tensor:
    """The tokens [B, S] that a model has not been given yet: the texts filled up on the left, then the last of each."""
    if past.length:
        return torch.tensor([text[-1:] for text in texts], device=device)
    width = max(map(len, texts))
    return torch.tensor([[0] * (width - len(text)) + text for text in texts], device=device)


@contextmanager
def _evaluating(model: Model) -> Iterator[None]:
    was_training = model.training
    model.eval()
    yield
    model.train(was_training)


def _drawn(
    model: Model,
    next_logits: Callable[[list[list[int]], Past | None], Tensor],
    prompts: Sequence[list[int]],
    rooms: Sequence[int],
    drawing: Drawing,
) -> list[list[int]]:
    """The tokens that follow each prompt, up to its room.

    Args:
        next_logits: gives [B, V] after all tokens so far; of those before only what `Past` has not taken in is new to
            it. A text that has ended grows no more, and what it gives there is not looked at.
    """
    keeps = drawing.keeps_past and model.has_past and drawing.multiple == 1
    past = Past() if keeps else None
    generators: list[torch.Generator] = []
    texts = [[*prompt] for prompt in prompts]
    going = [room > 0 for room in rooms]
    while any(going):
        logits = next_logits(texts, past)[:, : drawing.vocab_size].float()
        if not generators:  # parameters that FSDP keeps in host memory do not tell where logits are
            generators = [torch.Generator(logits.device).manual_seed(drawing.seed) for _ in prompts]
        tokens = torch.cat([drawing.of(*one) for one in zip(logits, generators, strict=True)])
        if not drawing.settle(tokens):
            break
        for i, token in enumerate(tokens.tolist()):
            going[i] = going[i] and token not in drawing.end_ids
            if going[i]:
                texts[i].append(token)
                going[i] = len(texts[i]) < len(prompts[i]) + rooms[i]
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
