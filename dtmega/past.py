"""Keys and values of the tokens before, kept so that a decoder that makes one token at a time computes each token once.

    past = Past()
    model(prompt, past=past)                                    # [1, S]: attention keeps keys and values
    model(token, places=torch.tensor([[S]]), past=past)         # [1, 1]: and sees those of the prompt, too

A model knows nothing of it but that `attention_rule` takes it, as it takes places and documents; the rule brings it to
`attention`. Places are global, so masks and added numbers are right by the same formulas. A rank keeps what it made:
under tp the keys of its own heads, of a pipeline those of its own layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Past:
    """The keys and values of one model, or of a stage of it, for rows that grow; forward only.

    Attributes:
        places: [B, P] int, of the tokens before; None: there are none.
        documents: [B, P] int, their documents; None: one.
        theirs: the cache of a model that keeps its keys and values by itself, as those of transformers do.
    """

    def __init__(self) -> None:
        self.places: Tensor | None = None
        self.documents: Tensor | None = None
        self.theirs: Any = None
        self._kept: list[tuple[Tensor, Tensor]] = []  # by layer: [B, heads, P, K] each
        self._layer = 0

    @property
    def length(self) -> int:
        """The number of tokens before."""
        return 0 if self.places is None else self.places.shape[1]

    def begin(self, places: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Begin a forward of new tokens. Returns places and documents of all keys: those before, and these.

        Args:
            places, documents: [B, S] int, of the new tokens.
        """
        self._layer = 0
        self.places = _behind(self.places, places)
        self.documents = None if documents is None else _behind(self.documents, documents)
        return self.places, self.documents

    def with_new(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep keys and values of the next layer. Returns all of that layer's.

        Layers come in one order in each forward.

        Args:
            k, v: [B, heads, S, K], of the new tokens.
        """
        number = self._layer
        self._layer += 1
        if number == len(self._kept):
            self._kept.append((k, v))
        else:
            keys, values = self._kept[number]
            self._kept[number] = (torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2))
        return self._kept[number]


def _behind(before: Tensor | None, new: Tensor) -> Tensor:
    return new if before is None else torch.cat([before, new], dim=1)
