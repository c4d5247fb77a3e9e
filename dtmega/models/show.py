"""Samples for people to read: a model continues a prompt, or fills in the prompt's masks or hidden spans.

Each family has one kind of sample, which `dtmega generate` prints and each run prints at its end.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dtmega.data.objectives.denoising.sentinels import Marks, marks
from dtmega.data.tokenizers.tokenizer import MASK, Tokenizer
from dtmega.files.console import counted
from dtmega.models.generate import PADDING, Sampling, Settle, answer, generate_together, settle_alone
from dtmega.models.model import Model


class Show(NamedTuple):
    """The kind of sample that a family shows.

    Attributes:
        options: options of `dtmega generate` that `text` accepts. Each option has a default. The command's remaining
            options are not passed to `text`.
        text: function (model, tokenizer, prompt, **options) -> text to print. The options also include `multiple` and
            `settle` of `Sampling`, and the options that `families.sample_options` derives from the run. The function
            raises a ValueError if it cannot use the prompt.
        reads: [data] keys whose values in the run are also passed to `text` as options.
        together: function like `text`, but for several prompts that share each forward pass; None if prompts are
            processed one by one.
    """

    options: tuple[str, ...]
    text: Callable[..., str]
    reads: tuple[str, ...] = ()
    together: Callable[..., list[str]] | None = None

    def texts(self, model: Model, tokenizer: Tokenizer, prompts: Sequence[str], **options: Any) -> list[str]:
        """Return the text to print for each prompt."""
        if self.together is not None:
            return self.together(model, tokenizer, prompts, **options)
        return [self.text(model, tokenizer, prompt, **options) for prompt in prompts]


def continued(model: Model, tokenizer: Tokenizer, prompt: str, *, tokens: int = 128, **options: Any) -> str:
    """Continue a prompt with a decoder. Return the prompt and its continuation.

    Args:
        model: decoder that returns logits [B, S, V].
        tokenizer: tokenizer of the model.
        prompt: text to continue.
        tokens: maximum number of new tokens.
        options: fields of `Sampling`.

    Raises:
        ValueError: `generate` refuses the prompt.
    """
    (text,) = all_continued(model, tokenizer, [prompt], tokens=tokens, **options)
    return text


def all_continued(
    model: Model, tokenizer: Tokenizer, prompts: Sequence[str], *, tokens: int = 128, **options: Any
) -> list[str]:
    """Continue several prompts in one batch. Return each prompt and its continuation, as `continued` does."""
    sampling = Sampling(tokenizer.vocab_size, frozenset([tokenizer.eod_id]), **options)
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    continuations = generate_together(model, encoded, tokens, sampling)
    return [prompt + tokenizer.decode(new) for prompt, new in zip(prompts, continuations, strict=True)]


@torch.no_grad()
def filled(
    model: Model,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    top_k: int = 5,
    multiple: int = 1,
    settle: Settle = settle_alone,
) -> str:
    """Return the prompt, followed by one line per [MASK] with the most probable tokens for that mask.

    Args:
        model: encoder that returns the logits [B, S, V] under the key "logits".
        tokenizer: tokenizer of the model, which has [CLS], [MASK] and [SEP].
        prompt: text with at least one [MASK].
        top_k: number of tokens to list per mask; 0 to list all tokens.
        multiple: size of tp, which must divide the sequence length.
        settle: function that is called with the ids of the listed tokens, int64 [masks, top_k], and may overwrite the
            ids (`Sampling.settle`).

    Raises:
        ValueError: the prompt has no mask or has more tokens than the model has positions for.
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
    """Return a prompt's token ids, preceded by [CLS] and followed by [SEP], and the index of each mask in that list.

    Raises:
        ValueError: the prompt has no mask.
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


SENTINEL = re.compile(r"<extra_id_(\d+)>")


def answered(
    model: Model,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int = 128,
    objective: str = "auto",
    sentinels: int = 100,
    **options: Any,
) -> str:
    """Return the prompt, then the decoder's text for each hidden span <extra_id_0>, <extra_id_1>, ..., one per line.

    A prompt without any <extra_id_...> gets <extra_id_0> at its end.

    Args:
        model: model with an encoder and a decoder.
        tokenizer: tokenizer of the model.
        prompt: text in which <extra_id_0> and so on mark the hidden spans.
        tokens: maximum number of tokens in the answer, for all spans together.
        objective, sentinels: values of these [data] keys in training.
        options: fields of `Sampling`.

    Raises:
        ValueError: the prompt has a sentinel number that the model does not have, or `answer` refuses the prompt.
    """
    if not SENTINEL.search(prompt):
        prompt += "<extra_id_0>"
    known = marks(tokenizer, sentinels)
    read = with_sentinels(tokenizer, prompt, known)
    # In training, the encoder's text ends with the end token, unless spans are separate (`span_objectives.py`).
    if objective != "separate-spans":
        read = [*read, known.end]
    sampling = Sampling(tokenizer.vocab_size + known.n_added, frozenset([known.end]), **options)
    answer_ids = answer(model, read, tokens, sampling, start_id=known.start, pad_id=known.pad)
    numbers = [int(number) for number in SENTINEL.findall(prompt)]
    spans = by_sentinel(answer_ids, known, first=numbers[0])
    lines = [prompt]
    for number in numbers:
        text = [i for i in spans.get(number, []) if i < tokenizer.vocab_size]
        lines.append(f"<extra_id_{number}>: {tokenizer.decode(text)}")
    return "\n".join(lines)


def with_sentinels(tokenizer: Tokenizer, prompt: str, known: Marks) -> list[int]:
    """The token ids of a prompt, with the sentinels in place of <extra_id_0> and so on.

    Raises:
        ValueError: a sentinel number in the prompt exceeds the number of the last sentinel.
    """
    text, *others = SENTINEL.split(prompt)  # text, number, text, number, ..., text
    ids = tokenizer.encode(text)
    for number, after in zip(others[::2], others[1::2], strict=True):
        if int(number) >= len(known.sentinels):
            raise ValueError(
                f"<extra_id_{number}> does not exist: sentinels={len(known.sentinels)} have the numbers 0 to "
                f"{len(known.sentinels) - 1} (--prompt, [eval] prompt, [data] sentinels)"
            )
        ids += [known.sentinels[int(number)], *tokenizer.encode(after)]
    return ids


def by_sentinel(answer_ids: list[int], known: Marks, first: int) -> Mapping[int, list[int]]:
    """Map the number of each sentinel in a decoder's answer to the token ids that follow the sentinel.

    Tokens before the first sentinel, which a barely trained model may produce, count as part of span number `first`.
    """
    numbers = {sentinel: number for number, sentinel in enumerate(known.sentinels)}
    spans: dict[int, list[int]] = {}
    span = spans.setdefault(first, [])
    for token in answer_ids:
        if token in numbers:
            span = spans.setdefault(numbers[token], [])
        else:
            span.append(token)
    return spans


CONTINUATION = Show(("tokens", "temperature", "top_k", "top_p", "seed"), continued, together=all_continued)
FILLS = Show(("top_k",), filled)
ANSWERS = Show(CONTINUATION.options, answered, reads=("objective", "sentinels"))
