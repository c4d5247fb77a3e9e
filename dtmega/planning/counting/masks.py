"""The attention masks that transformers makes in a run, also for tensors without values."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from unittest.mock import patch

from dtmega import config, families


@contextlib.contextmanager
def of_rows(cfg: config.Config) -> Iterator[None]:
    """Tell transformers whether a row is one sequence, inside the `with` block only.

    In a run, transformers reads the positions. If no row holds several sequences, it attends without a mask. Otherwise,
    and if it cannot read the positions, it builds a mask [B, 1, S, S], which takes memory and rules out torch's flash
    kernel. Packed conversations are such sequences.
    """
    packed = families.objective(cfg).conversations and cfg.data.pack
    if packed or "transformers" not in families.of(cfg.model).libraries:
        yield
        return
    masks = importlib.import_module("transformers.masking_utils")
    with patch.object(masks, "find_packed_sequence_indices", lambda position_ids: None):
        yield
