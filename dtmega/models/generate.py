"""Generation: sample text from a model token by token, for one prompt or a small batch of prompts.

Keys and values of earlier tokens are kept (`dtmega/ops/key_value_cache.py`), so that each token is computed once.
Under tp they are not kept, because sequence parallelism cannot shard a single token over the ranks. The model then
recomputes all tokens for every new token, which does not change the result.

Prompts of different lengths are padded to a common length. If keys and values are kept, the padding is on the left, so
that the next tokens of all prompts form one column; the padding is a separate document, at negative positions. If keys
and values are not kept, the padding is on the right, where a causal model ignores it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from dtmega.files.console import counted
from dtmega.models.model import Model
from dtmega.ops.key_value_cache import KeyValueCache

PADDING = 64  # lengths are padded to a multiple of PADDING, because some kernels are recompiled for each length
Settle = Callable[[Tensor], bool]


def settle_alone(tokens: Tensor) -> bool:
    """The default `settle`, for a single process: keep the tokens as drawn."""
    return True


@dataclass(frozen=True)
class Sampling:
    """Sampling settings: how each token is drawn from its logits, and when a sample ends.

    Attributes:
        vocab_size: size of the tokenizer's vocabulary; the model's vocabulary may be larger.
        end_ids: tokens that end a sample; a sample does not include its end token.
        seed: seed for the random draws.
        temperature: temperature of the softmax; 0 to take the most probable token.
        top_k: number of most probable tokens to draw from; 0 to draw from all tokens.
        top_p: probability of the nucleus (Holtzman et al., arXiv:1904.09751): after top_k, draw from the smallest set
            of most probable tokens with a total probability of at least top_p; 1 to draw from all tokens.
        multiple: size of tp, which must divide the sequence length. With a size above 1, all tokens are recomputed for
            every new token.
        settle: function that is called with the tokens just drawn, int64 [B], and may overwrite the tokens, so that
            all ranks use the same tokens. If the function returns False, all samples end.
        uses_cache: whether to keep keys and values; if False, all tokens are recomputed for every new token.
        prompt_is_prefix: whether each token of the prompt attends to the whole prompt
            (`Objective.prompt_is_prefix`).
    """

    vocab_size: int
    end_ids: frozenset[int]
    seed: int = 0
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    multiple: int = 1
    settle: Settle = settle_alone
    uses_cache: bool = True
    prompt_is_prefix: bool = False

    def draw(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Draw a token, int64 [1], from fp32 logits [V]."""
        if self.temperature == 0:
            return logits.argmax(keepdim=True)
        if self.top_k:
            least = logits.topk(min(self.top_k, len(logits))).values[-1]
            logits = logits.masked_fill(logits < least, -torch.inf)
        probabilities = (logits / self.temperature).softmax(-1)
        if self.top_p < 1:
            ordered, ids = probabilities.sort(descending=True, stable=True)
            # `before` excludes each token's own probability, so the token that reaches top_p is kept.
            before = ordered.cumsum(-1) - ordered
            probabilities = probabilities.index_fill(0, ids[before >= self.top_p], 0.0)
        return torch.multinomial(probabilities, 1, generator=generator)


def generate(model: Model, tokens: list[int], n: int, sampling: Sampling) -> list[int]:
    """Sample up to `n` tokens that follow `tokens`.

    Sampling ends early if a token of `sampling.end_ids` is drawn, or if the model has no more positions.

    Raises:
        ValueError: the prompt is empty, or so long that the model has no position for a new token.
    """
    (new_tokens,) = generate_together(model, [tokens], n, sampling)
    return new_tokens


@torch.no_grad()
def generate_together(model: Model, prompts: Sequence[list[int]], n: int, sampling: Sampling) -> list[list[int]]:
    """Sample up to `n` tokens that follow each prompt, with all prompts in one batch.

    Each prompt gets the tokens that `generate` would return, with one exception: products of larger matrices may add
    their terms in a different order. The logits may then differ in their last bits, and very rarely a sampled token
    may differ.

    Raises:
        ValueError: a prompt is empty, or so long that the model has no position for a new token.
    """
    longest = 0
    for prompt in prompts:
        longest = _longest(model, prompt, sampling.multiple, answer_is_separate=False)
    device = next(model.parameters()).device
    width = max(map(len, prompts), default=0)
    lengths = torch.tensor([[len(prompt)] for prompt in prompts], device=device)
    n_padding = width - lengths
    same_length = all(len(prompt) == width for prompt in prompts)

    def logits_of_all(texts: list[list[int]]) -> Tensor:
        """Run the model on all tokens, padded on the right, and return the next tokens' logits [B, V]."""
        padded = torch.tensor(_padded(texts, 0, sampling.multiple, longest), device=device)
        last = [len(text) - 1 for text in texts]
        rows = {}
        if sampling.prompt_is_prefix:
            rows["prefix"] = torch.arange(padded.shape[1], device=device) < lengths
        return model(padded, **rows)[torch.arange(len(texts)), last]

    def logits_of_new(texts: list[list[int]], cache: KeyValueCache) -> Tensor:
        """Run the model on the new tokens only, padded on the left, and return the next tokens' logits [B, V]."""
        new = _new_to_model(texts, cache, device)
        places = cache.length + torch.arange(new.shape[1], device=device) - n_padding
        rows = {"places": places}
        if sampling.prompt_is_prefix and cache.length == 0:
            rows["prefix"] = torch.ones_like(new, dtype=torch.bool)
        if not same_length:
            # Padding is a separate document, so no text attends to padding.
            rows["document_ids"] = (places < 0).long()
            # Clamp to the positions that the model has: padding is at negative ones, and a sample that has used all
            # positions stays in the batch until all samples have ended.
            rows["position_ids"] = places.clamp(0, longest - 1)
        return model(new, cache=cache, **rows)[:, -1]

    def next_logits(texts: list[list[int]], cache: KeyValueCache | None) -> Tensor:
        return logits_of_all(texts) if cache is None else logits_of_new(texts, cache)

    with _evaluating(model):
        limits = [min(n, longest - len(prompt)) for prompt in prompts]
        return _draw_tokens(model, next_logits, prompts, limits, sampling)


@torch.no_grad()
def answer(model: Model, tokens: list[int], n: int, sampling: Sampling, *, start_id: int, pad_id: int) -> list[int]:
    """Sample up to `n` tokens of the decoder's answer to the encoder's text. The encoder runs once.

    Args:
        model: model with an encoder and a decoder.
        tokens: tokens that the encoder reads.
        n: maximum number of tokens in the answer.
        sampling: sampling settings.
        start_id: token that the decoder starts from.
        pad_id: token that pads the encoder's text; no other token attends to the padding.

    Raises:
        ValueError: the list of tokens is empty or has more tokens than the model has positions for.
    """
    longest = _longest(model, tokens, sampling.multiple, answer_is_separate=True)
    device = next(model.parameters()).device
    read = torch.tensor(_padded([tokens], pad_id, sampling.multiple, longest), device=device)
    is_padding = (torch.arange(read.shape[1], device=device) >= len(tokens)).long().unsqueeze(0)

    def next_logits(texts: list[list[int]], cache: KeyValueCache | None) -> Tensor:
        if cache is None:
            last = len(texts[0]) - 1
            new = torch.tensor(_padded(texts, pad_id, sampling.multiple, longest), device=device)
            where = {}
        else:
            last = -1
            new = _new_to_model(texts, cache, device)
            places = cache.length + torch.arange(new.shape[1], device=device).unsqueeze(0)
            where = {"decoder_places": places, "cache": cache}
        # The decoder's tokens and the encoder's text are document 0, and the encoder's padding is document 1.
        documents = {"document_ids": is_padding, "decoder_document_ids": torch.zeros_like(new)}
        return model(read, new, encoded=encoded, **documents, **where)[:, last]

    with _evaluating(model):
        encoded = model(read, document_ids=is_padding)["encoded"]
        (new_tokens,) = _draw_tokens(model, next_logits, [[start_id]], [min(n, longest)], sampling)
        return new_tokens


def _longest(model: Model, tokens: Sequence[int], multiple: int, *, answer_is_separate: bool) -> int:
    """The largest sequence length that is divisible by `multiple` and for which the model has positions.

    Args:
        model: model whose `longest` limits the sequence.
        tokens: tokens of the prompt.
        multiple: number that must divide the sequence length.
        answer_is_separate: whether the answer is a separate sequence, so that the prompt may occupy all positions.

    Raises:
        ValueError: the prompt is empty or too long.
    """
    longest = (model.longest or sys.maxsize) // multiple * multiple
    if not tokens:
        raise ValueError("the prompt has no tokens; give at least one character (--prompt)")
    longest_prompt = longest if answer_is_separate else longest - 1
    if len(tokens) > longest_prompt:
        raise ValueError(f"the prompt has {counted(len(tokens), 'token')}, and the model positions for {longest}")
    return longest


def _padded(texts: Sequence[list[int]], pad_id: int, multiple: int, longest: int) -> list[list[int]]:
    """The texts, padded on the right to a common multiple of PADDING and `multiple`, but not beyond `longest`."""
    width = max(map(len, texts))
    width = min(width + -width % math.lcm(PADDING, multiple), longest)
    return [text + [pad_id] * (width - len(text)) for text in texts]


def _new_to_model(texts: Sequence[list[int]], cache: KeyValueCache, device: torch.device) -> Tensor:
    """The tokens [B, S] that are not in `cache` yet: in the first step the padded texts, then the last tokens."""
    if cache.length:
        return torch.tensor([text[-1:] for text in texts], device=device)
    width = max(map(len, texts))
    return torch.tensor([[0] * (width - len(text)) + text for text in texts], device=device)


@contextmanager
def _evaluating(model: Model) -> Iterator[None]:
    was_training = model.training
    model.eval()
    yield
    model.train(was_training)


def _draw_tokens(
    model: Model,
    next_logits: Callable[[list[list[int]], KeyValueCache | None], Tensor],
    prompts: Sequence[list[int]],
    limits: Sequence[int],
    sampling: Sampling,
) -> list[list[int]]:
    """Draw the tokens that follow each prompt: in each step, one token for every unfinished text.

    Args:
        model: model that `next_logits` calls.
        next_logits: function (texts so far, key/value cache) -> logits [B, V] of each text's next token. The cache is
            None if keys and values are not kept. Texts that have ended remain in the batch unchanged, and their logits
            are ignored.
        prompts: tokens of each prompt.
        limits: maximum number of new tokens for each prompt.
        sampling: sampling settings.
    """
    keeps = sampling.uses_cache and model.has_cache and sampling.multiple == 1
    cache = KeyValueCache() if keeps else None
    generators: list[torch.Generator] = []
    texts = [[*prompt] for prompt in prompts]
    going = [limit > 0 for limit in limits]
    while any(going):
        logits = next_logits(texts, cache)[:, : sampling.vocab_size].float()
        # Each prompt has its own generator, so that a prompt's tokens do not depend on the rest of the batch. Make the
        # generators here, on the device of the logits, because FSDP may offload the parameters to the host.
        if not generators:
            generators = [torch.Generator(logits.device).manual_seed(sampling.seed) for _ in prompts]
        drawn = []
        for logits_of_one, generator in zip(logits, generators, strict=True):
            drawn.append(sampling.draw(logits_of_one, generator))
        tokens = torch.cat(drawn)
        if not sampling.settle(tokens):
            break
        for i, token in enumerate(tokens.tolist()):
            going[i] = going[i] and token not in sampling.end_ids
            if going[i]:
                texts[i].append(token)
                going[i] = len(texts[i]) < len(prompts[i]) + limits[i]
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
