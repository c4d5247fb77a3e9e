"""Named tensors that are read in parts, of checkpoints and of other programs' files alike."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from dtmega import config

Slices = tuple[slice, ...]
# Our tensors that have one row (or one number) per vocabulary token. Only these tensors may have padding rows after the
# tokens' rows.
BY_TOKEN = ("embed.weight", "head.weight", "head.bias", "head.output.weight", "head.output.bias")
# A size above this limit is refused if it exceeds every dim of the stored tensors. Smaller sizes need no check, because
# they take no memory on the meta device.
PLAUSIBLE_SIZE = 2**20
# Limit for sequence lengths. PLAUSIBLE_SIZE is too small here, since most models have no tensor as long as a sequence.
PLAUSIBLE_LENGTH = 2**31
LENGTH = re.compile("max_position_embeddings|relative_max_distance|rope_original_length")


class Source(Protocol):
    """Named tensors that can be read in parts, wherever they are stored.

    Attributes:
        tensors: dtype and shape of each whole tensor, keyed by tensor name.
    """

    @property
    def tensors(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]: ...

    def read(self, name: str, index: Slices | None = None) -> Tensor:
        """Read the part `index` of a tensor, or the whole tensor if `index` is None, into host memory."""
        ...


def check_stored(model: config.Model, stored: Source, where: str) -> None:
    """Before building a model, refuse a [model] section whose sizes cannot match the stored tensors.

    A configuration may be damaged or malicious. Building the model, even on the meta device, could add layer after
    layer until memory runs out, or request a tensor with more elements than torch can count.

    Args:
        stored: the stored tensors, under any program's names.
        where: path of the source, for messages.

    Raises:
        ValueError: the model has more layers than there are stored tensors, or a size that exceeds both its plausible
            limit and every dim of the stored tensors.
    """
    if model.n_layers > len(stored.tensors):
        raise ValueError(f"{where} has n_layers={model.n_layers}, but {len(stored.tensors)} tensors")
    largest = 0
    for _, shape in stored.tensors.values():
        largest = max(largest, *(shape or (1,)))
    for key, value in model.model_dump().items():
        plausible = PLAUSIBLE_LENGTH if LENGTH.fullmatch(key) else PLAUSIBLE_SIZE
        if type(value) is int and value > max(largest, plausible):
            raise ValueError(f"{where} has {key}={value}, but the largest dimension of its tensors is {largest}")
