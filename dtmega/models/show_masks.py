"""The sample of a masked language model: the most probable tokens for each mask of a prompt."""

from __future__ import annotations

import math
import sys

import torch

from dtmega.data.tokenizers.tokenizer import MASK, Tokenizer
from dtmega.files.console import counted
from dtmega.models.generate import PADDING, Settle, settle_alone
from dtmega.models.model import Model
from dtmega.models.show import Show


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


FILLS = Show(("top_k",), filled)
