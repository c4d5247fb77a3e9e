"""The refusal of a gated feed-forward, which most classes of transformers for our families have no names for."""

from __future__ import annotations

from dtmega import config


def refuse_gated(model: config.Model) -> None:
    """Refuse to store a gated feed-forward in a format of transformers whose class has none.

    Raises:
        ValueError: the model has a gated feed-forward.
    """
    assert isinstance(model, config.DropoutModel)
    if model.glu != "none":
        raise ValueError(
            f"Hugging Face's class has no gated feed-forward: expected glu='none', got '{model.glu}' ([model] glu)"
        )
