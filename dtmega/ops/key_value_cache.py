"""The cache of keys and values, with which a decoder that generates token by token computes each token only once.

    cache = KeyValueCache()
    model(prompt, cache=cache)                                  # [1, S]: attention stores keys and values
    model(token, places=torch.tensor([[S]]), cache=cache)       # [1, 1]: attention also sees those of the prompt

A model only passes the cache to `attention_rule`, as it does with places and documents; the rule passes it on to
`attention`. Places are global, so masks and biases follow from the same formulas as without a cache. A rank stores the
keys and values that it computes: under tp those of its own heads, in a pipeline those of its own layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class KeyValueCache:
    """The keys and values of one model, or of one pipeline stage, for a batch whose rows grow. It has no backward.

    Attributes:
        places: [B, P] int, places of the cached tokens; None: no token is cached.
        documents: [B, P] int, documents of the cached tokens; None: all tokens are of one document.
        inner: the cache of a model that stores keys and values itself: transformers' `past_key_values`, or for a
            pipeline one cache for each stage, by its number.
    """

    def __init__(self) -> None:
        self.places: Tensor | None = None
        self.documents: Tensor | None = None
        self.inner: Any = None
        self._layers: list[tuple[Tensor, Tensor]] = []  # keys and values of each layer, [B, heads, P, K]
        self._next_layer = 0

    @property
    def length(self) -> int:
        """The number of cached tokens."""
        return 0 if self.places is None else self.places.shape[1]

    def begin_forward(self, places: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Add the tokens of a new forward pass; their keys and values follow, layer by layer.

        Args:
            places, documents: [B, S] int, places and documents of the new tokens.

        Returns:
            Places and documents [B, P + S] of all keys: the cached ones, then the new ones.
        """
        self._next_layer = 0
        self.places = _joined(self.places, places)
        self.documents = None if documents is None else _joined(self.documents, documents)
        return self.places, self.documents

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [B, heads, S, K] of the new tokens in the next layer.

        Layers are not named: they must come in the same order in every forward pass.

        Returns:
            All keys and values of that layer, [B, heads, P + S, K].
        """
        number = self._next_layer
        self._next_layer += 1
        if number == len(self._layers):
            self._layers.append((k, v))
        else:
            keys, values = self._layers[number]
            self._layers[number] = (torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2))
        return self._layers[number]


def _joined(cached: Tensor | None, new: Tensor) -> Tensor:
    return new if cached is None else torch.cat([cached, new], dim=1)
