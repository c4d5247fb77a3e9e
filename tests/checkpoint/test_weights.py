"""Claims about checkpoint/weights.py: what a run may start from, for each key of [model] that could differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtmega import config
from dtmega.checkpoint.weights import Weights, open_checkpoint_weights
from dtmega.config.families.bloom import BloomKeys
from dtmega.interop import stored
from dtmega.interop.formats.own import OwnFormats
from tests.checkpoint.test_reader import store

# Which weights there are does not say where they came from, how they were drawn, or what was added to the loss.
MAY_DIFFER = {
    "init_from": "elsewhere",
    "init_std": 0.5,
    "pad_vocab_to_multiple": 64,
    "hidden_dropout": 0.5,
    "attention_dropout": 0.5,
    "fp32_residual": True,
    "query_key_layer_scaling": True,
    "label_smoothing": 0.5,
    "z_loss": 0.5,
}
OTHER_MODEL = {
    "name": "hf",
    "vocab_size": 9,
    "hidden_size": 24,
    "n_layers": 3,
    "n_heads": 4,
    "ffn_hidden_size": 9,
    "layer_norm_eps": 0.5,
    "apply_residual_connection_post_layernorm": True,
    "glu": "swiglu",
}


def no_base(model: config.Model) -> None:
    """A family's `weights` that is never asked for the base of a checkpoint."""


def test_every_key_of_a_model_is_of_one_of_the_two_kinds():
    assert MAY_DIFFER.keys() | OTHER_MODEL.keys() == BloomKeys.model_fields.keys()
    assert not MAY_DIFFER.keys() & OTHER_MODEL.keys()


@pytest.mark.parametrize(("key", "value"), [*MAY_DIFFER.items(), *OTHER_MODEL.items()])
def test_weights_of_another_model_are_refused_with_the_key_and_of_the_same_one_taken(tmp_path, key: str, value: Any):
    model = BloomKeys(vocab_size=8, hidden_size=16, n_layers=2, n_heads=2)
    there = model.model_copy(update={key: value})
    path = store(f"{tmp_path}/w", {}, config={"model": there.model_dump()})
    asked = model.model_copy(update={"init_from": path})
    if key in MAY_DIFFER:
        assert open_checkpoint_weights(asked, no_base).tensors == {}
    else:
        was, now = there.model_dump()[key], model.model_dump()[key]
        with pytest.raises(ValueError) as refused:
            open_checkpoint_weights(asked, no_base)
        expected = f"{path} is of a model with {key}={was}, not {now} ([model] init_from, [model] {key})"
        assert str(refused.value) == expected


def test_weights_are_what_a_checkpoint_has_under_model_and_are_read_in_parts(tmp_path):
    whole = torch.arange(6.0).view(3, 2)
    stored = {"model/a": whole, "optimizer/exp_avg/a": whole + 1}
    source = open_checkpoint_weights(BloomKeys(init_from=store(f"{tmp_path}/w", stored)), no_base)
    assert isinstance(source, Weights)
    assert source.tensors == {"a": (torch.float32, (3, 2))}
    assert torch.equal(source.read("a", (slice(1, 3), slice(0, 1))), whole[1:3, :1])


@pytest.mark.parametrize("file", ["model.safetensors", "part.safetensors", "config.json"])
def test_a_folder_with_any_file_of_hugging_faces_is_theirs_and_is_checked(tmp_path, monkeypatch, file):
    opened: list[object] = []
    monkeypatch.setattr(OwnFormats, "folder", lambda family, path, model: opened.append((path, model)))
    (tmp_path / file).touch()
    model = BloomKeys(init_from=str(tmp_path))
    stored.weights(model)
    assert opened == [(tmp_path, model)]


@pytest.mark.parametrize("name", ["gpt2", "openai-community/gpt2"])
def test_an_id_of_the_hub_is_refused_with_the_command_that_downloads_it(name: str):
    with pytest.raises(ValueError, match=rf"init_from\); a model of .* hub .* hf download {name} --local-dir gpt2$"):
        open_checkpoint_weights(BloomKeys(init_from=name), no_base)
