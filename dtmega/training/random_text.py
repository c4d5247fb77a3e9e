"""Random text for the proofs at the start of a run."""

from __future__ import annotations

import torch
from torch import Tensor

SEED = 1


def blank_to_text(rows: dict[str, Tensor], vocab: int) -> dict[str, Tensor]:
    """Fill a microbatch with random tokens and labels, which are equal on every rank.

    Every token has a label, because a rank whose tokens have no labels would have no gradient.

    Args:
        rows: tensors of a microbatch without text, from `Objective.blank`.
        vocab: size of the vocabulary.
    """
    generator = torch.Generator().manual_seed(SEED)
    for name in ("tokens", "decoder_tokens", "labels"):
        if name in rows:
            rows[name] = torch.randint(3, vocab, rows[name].shape, generator=generator)
    return rows
