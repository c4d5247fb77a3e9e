"""The attention masks that transformers makes in a run, also for tensors without values."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from unittest.mock import patch

from dtmega import config, families


@contextlib.contextmanager
def of_whole_rows(model: config.Model) -> Iterator[None]:
    """Tell transformers that each row is one sequence, as the trainer's rows are, inside the `with` block only.

    In a run, transformers reads the positions to see that no row holds several sequences, and then attends without a
    mask. If it cannot read them, it builds a mask [B, 1, S, S], which takes memory and rules out torch's flash kernel.
    """
    if "transformers" not in families.of(model).libraries:
        yield
        return
    masks = importlib.import_module("transformers.masking_utils")
    with patch.object(masks, "find_packed_sequence_indices", lambda position_ids: None):
        yield
