"""Make transformers build the same attention masks in a plan as in a run. A plan's tensors have no values."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from unittest.mock import patch

from dtmega import config, families


@contextlib.contextmanager
def of_rows(cfg: config.Config) -> Iterator[None]:
    """Inside the `with` block, make transformers treat each row as one sequence, unless conversations are packed.

    In a run, transformers reads the positions. If no row holds several sequences, transformers attends without a mask.
    If a row holds several sequences, or if the positions cannot be read, transformers builds a mask [B, 1, S, S], which
    takes memory and rules out torch's flash kernel. Packed conversations are rows with several sequences.
    """
    packed = families.objective(cfg).conversations and cfg.data.pack
    if packed or "transformers" not in families.of(cfg.model).libraries:
        yield
        return
    masks = importlib.import_module("transformers.masking_utils")
    with patch.object(masks, "find_packed_sequence_indices", lambda position_ids: None):
        yield
