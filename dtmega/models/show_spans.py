"""The sample of a model that restores hidden spans: the decoder's text for each span of a prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dtmega.data.objectives.denoising.sentinels import Marks, marks
from dtmega.data.tokenizers.tokenizer import Tokenizer
from dtmega.models.generate import Sampling, answer
from dtmega.models.model import Model
from dtmega.models.show import CONTINUATION, Show

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


ANSWERS = Show(CONTINUATION.options, answered, reads=("objective", "sentinels"))
