"""A look at what a model has learnt: how it goes on from a prompt, or how it fills the masks or hidden spans of one.

A family names one of them; the end of a run and `dtmega generate` show it.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dtmega.data.denoising.sentinels import Marks, marks
from dtmega.data.tokenizer import Tokenizer
from dtmega.data.wordpiece import MASK
from dtmega.models.generate import PADDING, Drawing, Settle, answer, generate_together, settled
from dtmega.models.model import Model
from dtmega.output import counted


class Show(NamedTuple):
    """A kind of sample, which a family names.

    Attributes:
        options: those of `dtmega generate` that it reads; it has a default for each, and is called with no others.
        text: (model, tokenizer, prompt, **options) -> what to print; also takes `multiple` and `settle`, as `generate`
            has them, and what `families.sample_options` says of the run. It raises a ValueError for a prompt that it
            can do nothing with.
        reads: keys of [data], as the run had them.
        together: the same as `text` for several prompts, which share each forward; None: there is only one by one.
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
    """The prompt and what a decoder draws to follow it; options as of `Drawing`, errors as of `generate`."""
    (text,) = all_continued(model, tokenizer, [prompt], tokens=tokens, **options)
    return text


def all_continued(
    model: Model, tokenizer: Tokenizer, prompts: Sequence[str], *, tokens: int = 128, **options: Any
) -> list[str]:
    """The same for each of several prompts."""
    drawing = Drawing(tokenizer.vocab_size, frozenset([tokenizer.eod_id]), **options)
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    said = generate_together(model, encoded, tokens, drawing)
    return [prompt + tokenizer.decode(new) for prompt, new in zip(prompts, said, strict=True)]


@torch.no_grad()
def filled(
    model: Model,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    top_k: int = 5,
    multiple: int = 1,
    settle: Settle = settled,
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
    """The prompt, and a line for each <extra_id_0>, <extra_id_1>, ... in it with what a decoder says in its place.

    A prompt without one gets <extra_id_0> at its end.

    Args:
        tokens: of the answer, at most.
        objective, sentinels: of [data].

    Raises:
        ValueError: a mark whose number is none of those, and as of `answer`; the other options are of `Drawing`.
    """
    if not SENTINEL.search(prompt):
        prompt += "<extra_id_0>"
    known = marks(tokenizer, sentinels)
    read = with_sentinels(tokenizer, prompt, known)
    if objective != "separate-spans":  # as the rows of each have it
        read = [*read, known.end]
    drawing = Drawing(tokenizer.vocab_size + known.n_added, frozenset([known.end]), **options)
    said = answer(model, read, tokens, drawing, start_id=known.start, pad_id=known.pad)
    numbers = [int(number) for number in SENTINEL.findall(prompt)]
    spans = by_sentinel(said, known, first=numbers[0])
    lines = [prompt]
    for number in numbers:
        text = [i for i in spans.get(number, []) if i < tokenizer.vocab_size]
        lines.append(f"<extra_id_{number}>: {tokenizer.decode(text)}")
    return "\n".join(lines)


def with_sentinels(tokenizer: Tokenizer, prompt: str, known: Marks) -> list[int]:
    """The ids of a prompt, in which <extra_id_0> and so on are the sentinels.

    Raises:
        ValueError: there are not so many of them.
    """
    text, *others = SENTINEL.split(prompt)  # text, number, text, number, ..., text
    ids = tokenizer.encode(text)
    for number, after in zip(others[::2], others[1::2], strict=True):
        if int(number) >= len(known.sentinels):
            raise ValueError(
                f"<extra_id_{number}> is not there: sentinels={len(known.sentinels)} have the numbers from 0 to "
                f"{len(known.sentinels) - 1} (--prompt, [eval] prompt, [data] sentinels)"
            )
        ids += [known.sentinels[int(number)], *tokenizer.encode(after)]
    return ids


def by_sentinel(said: list[int], known: Marks, first: int) -> Mapping[int, list[int]]:
    """The ids that a decoder has said behind each sentinel, by its number.

    One that has learnt little says something before any sentinel: that counts for the `first` number.
    """
    numbers = {i: number for number, i in enumerate(known.sentinels)}
    spans: dict[int, list[int]] = {}
    span = spans.setdefault(first, [])
    for i in said:
        if i in numbers:
            span = spans.setdefault(numbers[i], [])
        else:
            span.append(i)
    return spans


CONTINUATION = Show(("tokens", "temperature", "top_k", "top_p", "seed"), continued, together=all_continued)
FILLS = Show(("top_k",), filled)
ANSWERS = Show(CONTINUATION.options, answered, reads=("objective", "sentinels"))
