"""A key/value cache for decoders that generate token by token, so that each token is computed only once.

    cache = KeyValueCache()
    model(prompt, cache=cache)                                  # [1, S]: attention stores keys and values
    model(token, places=torch.tensor([[S]]), cache=cache)       # [1, 1]: attention also sees the prompt's keys

A model only passes the cache to `attention_rule`, with positions and documents; the rule passes the cache on to
`attention`. Positions are global, so masks and biases have the same formulas with a cache. Each rank stores the keys
and values that it computes: only for its own heads under tp, and only for its own layers in a pipeline.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class KeyValueCache:
    """The keys and values of one model, or of one pipeline stage, for growing sequences. For inference only.

    Attributes:
        places: positions of the cached tokens, [B, P] int; None if no token is cached.
        documents: documents of the cached tokens, [B, P] int; None if all tokens belong to one document.
        inner: cache of a model that stores keys and values in its own way, namely transformers' `past_key_values` or,
            in a pipeline, a dict that maps each stage index to the stage's cache.
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
        """Add a forward pass's tokens to the cache. `append` then adds the tokens' keys and values, layer by layer.

        Args:
            places, documents: positions and documents of the new tokens, [B, S] int.

        Returns:
            Positions and documents of all keys, [B, P + S], with cached keys before new keys.
        """
        self._next_layer = 0
        self.places = _joined(self.places, places)
        self.documents = None if documents is None else _joined(self.documents, documents)
        return self.places, self.documents

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the new tokens' keys and values, [B, heads, S, K], to the next layer of the cache.

        The cache numbers the layers in the order of the calls, so this order must not change between forward passes.

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
