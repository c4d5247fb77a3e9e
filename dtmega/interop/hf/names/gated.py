"""Refuses a gated feed-forward, for which most of the classes in transformers that match our families have no names."""

from __future__ import annotations

from dtmega import config


def refuse_gated(model: config.Model) -> None:
    """Refuse a model with a gated feed-forward, for a format whose class in transformers has none.

    Raises:
        ValueError: the model has a gated feed-forward.
    """
    assert isinstance(model, config.DropoutModel)
    if model.glu != "none":
        raise ValueError(
            f"Hugging Face's class has no gated feed-forward: expected glu='none', got '{model.glu}' ([model] glu)"
        )
