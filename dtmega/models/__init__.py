"""One plain single-device file per model; `build` finds it by name."""

from __future__ import annotations

from dtmega import config
from dtmega.models.bloom import Bloom


def build(model: config.Model) -> Bloom:
    """The model of `[model] name`, on the current default device, with values not yet initialised."""
    return {"bloom": Bloom}[model.name](model)
