"""One plain single-device file per model; `build` finds it by name."""

from __future__ import annotations

from dtmega import config
from dtmega.models import hf_resolve
from dtmega.models.bloom import Bloom
from dtmega.models.hf import HF
from dtmega.models.hf_resolve import Described, describe
from dtmega.models.stage import Stage

__all__ = ["build", "described", "notes", "resolved"]


def build(model: config.Model) -> Stage:
    """The model of `[model] name`, on the current default device, with values not yet initialised."""
    return {"bloom": Bloom, "hf": HF}[model.name](model)


def resolved(cfg: config.Config) -> config.Config:
    """The configuration with what the directory of `[model] path` says, for the model that has one.

    Raises:
        ValueError: what `hf_resolve.resolve` refuses; keys that would not be read.
    """
    if cfg.model.name == "hf":
        return hf_resolve.resolve(cfg)
    if cfg.model.path:
        raise ValueError(f"path={cfg.model.path} is for name = 'hf' ([model] path; [model] init_from for weights)")
    if cfg.model.elements or cfg.model.digest:
        raise ValueError("[model] elements and digest are set by the trainer, for name = 'hf': leave them out")
    return cfg


def described(model: config.Model) -> Described:
    """What the directory of `[model] path` says, for the model that has one.

    Raises:
        ValueError: no such directory any more, or not the one that the section's digest is of.
    """
    return describe(model) if model.name == "hf" else Described(model, "BloomForCausalLM", {})


def notes(model: config.Model) -> list[str]:
    """What a user of the model should know, a line each."""
    return hf_resolve.notes(model) if model.name == "hf" else []
