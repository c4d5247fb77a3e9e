"""Refuses models with a gated feed-forward, for formats whose transformers class has no gate."""

from __future__ import annotations

from dtmega import config


def refuse_gated(model: config.Model) -> None:
    """Raise an error if a model has a gated feed-forward. Formats whose transformers class has no gate use this check.

    Raises:
        ValueError: the model has a gated feed-forward.
    """
    assert isinstance(model, config.DropoutModel)
    if model.glu != "none":
        raise ValueError(
            f"Hugging Face's class has no gated feed-forward: expected glu='none', got '{model.glu}' ([model] glu)"
        )
