"""Claims about the parameters that a run trains."""

from __future__ import annotations

from typing import Any

import pytest

from dtmega import config, families


def build(freeze: list[str], **model: Any):
    small = {"hidden_size": 16, "n_heads": 2, "n_layers": 2, "vocab_size": 32} | model
    cfg = config.validate({"train": {"steps": 1, "freeze": freeze}, "model": small}, "test")
    return families.build(cfg)


def test_a_pattern_freezes_the_parameters_of_its_names_and_no_others():
    model = build(["embed*", "layers.1.mlp.*"])
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    mlp = {f"layers.1.mlp.{name}" for name in ("up.weight", "up.bias", "down.weight", "down.bias")}
    assert frozen == {"embed.weight", "embed_norm.weight", "embed_norm.bias"} | mlp


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match=r"no parameter has a name like 'layers\.7\.\*'.* \(\[train\] freeze\)"):
        build(["embed*", "layers.7.*"])


def test_a_model_with_nothing_left_to_train_is_refused():
    with pytest.raises(ValueError, match=r"nothing is left to train.* \(\[train\] freeze\)"):
        build(["*"])
