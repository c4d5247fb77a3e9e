"""The tensors of a batch ("rows"), made from a range of samples in a worker process.

Every microbatch of B sequences has

    tokens        int64 [B, S]
    labels        int64 [B, S]  token to predict at each position, or IGNORED
    sample_ids    int64 [B]     global sample indices, which dropout uses as keys
    places        int64 [B, S]  0, 1, ...: index of each token in its sample
    document_ids  int64 [B, S]  index of each token's document; a token sees only tokens of its own document. Present
                                only if rows may have several documents or padding

and the tensors that the objective adds. The rows of an objective stand in its file and hold plain data only, so that
they can be pickled.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Protocol

import torch
from torch import Tensor

IGNORED = -100  # the label of a token without a loss, as in torch's cross_entropy


class Rows(Protocol):
    """A mapping from a range of samples to their tensors; it is pickled and sent to worker processes.

    Attributes:
        is_stored: whether the tokens are in an object store, so that a range takes long.
    """

    is_stored: bool = False

    def __getitem__(self, indices: range) -> dict[str, Tensor]:
        """The tensors listed at the top of this file, with B = len(indices).

        A range may cover several microbatches, because a few large tensors travel between processes faster than many
        small tensors.
        """
        ...

    def in_turn(self, slices: Iterator[range]) -> Generator[dict[str, Tensor], None, None]:
        """Make the rows of each range in this process, in order."""
        for indices in slices:
            yield self[indices]


def blank_rows(n_rows: int, n_tokens: int) -> dict[str, Tensor]:
    """The tensors that all objectives have, with zeros instead of text; every token has a label."""
    tokens = torch.zeros(n_rows, n_tokens, dtype=torch.int64)
    return {"tokens": tokens, "labels": torch.zeros_like(tokens), **numbers(range(n_rows), tokens)}


def numbers(indices: range, tokens: Tensor) -> dict[str, Tensor]:
    """The tensors `sample_ids` and `places`, which all objectives have."""
    return {"sample_ids": torch.arange(indices.start, indices.stop), "places": places(tokens)}


def places(tokens: Tensor) -> Tensor:
    """The numbers 0 to S - 1 in each row, with the shape of `tokens`, [B, S]."""
    return torch.arange(tokens.shape[1]).repeat(len(tokens), 1)
