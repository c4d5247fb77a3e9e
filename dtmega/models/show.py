"""Samples for people to read, which `dtmega generate` prints and each run prints at its end: a continued prompt.

Each family has one kind of sample. `show_masks.py` and `show_spans.py` have those of models that are no decoders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dtmega.data.tokenizers.tokenizer import Tokenizer
from dtmega.models.generate import Sampling, generate_together
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


CONTINUATION = Show(("tokens", "temperature", "top_k", "top_p", "seed"), continued, together=all_continued)
