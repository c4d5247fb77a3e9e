"""models/gpt.py against transformers' GPT2LMHeadModel: numbers, positions, dropout, files in both directions."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel

from dtmega import families
from dtmega.__main__ import main as command
from dtmega.checkpoint.weights import load_weights
from dtmega.cli.convert import recognise
from dtmega.config.families.gpt import GPTKeys
from dtmega.interop import stored
from dtmega.interop.formats import gpt as gpt_names
from dtmega.interop.formats.whole import as_theirs
from dtmega.models import gpt
from dtmega.models.generate import Sampling, generate
from dtmega.models.initial import init_weights
from tests import plain_bloom
from tests.interop.hf.files.test_ours import Memory

V, S, POSITIONS = 131, 29, 40
SEED = 7


def theirs_in(folder: Path, **keys: Any) -> Any:
    """A GPT-2 with no value of a default and no vector of zeros or ones, and its directory."""
    sizes = {"vocab_size": V, "n_positions": POSITIONS, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_inner": 100}
    drops = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": V - 1, "eos_token_id": V - 1}
    model = GPT2LMHeadModel(GPT2Config(**{**sizes, **drops, **ends, "layer_norm_epsilon": 0.1, **keys}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.1)
    model.save_pretrained(folder)
    return model


def ours_in(folder: Path, **keys: Any) -> gpt.GPT:
    """The model of ours that a directory describes, with its weights."""
    _, section = recognise.open_folder(folder, None)
    section = section.model_copy(update=keys)
    assert isinstance(section, GPTKeys)
    model = gpt.GPT(section)
    load_weights(stored.of(section).folder(folder, section), model.named_parameters(), V)
    model.init_buffers(SEED)
    return model


def batch(n: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(V, (n, S), generator=generator)
    return {"tokens": tokens, "labels": tokens.roll(-1, dims=1), "sample_ids": torch.tensor([5, 2**33 + 5])}


def summed_loss(theirs: Any, x: dict[str, Tensor]) -> Tensor:
    logits = theirs(x["tokens"]).logits
    return F.cross_entropy(logits.flatten(0, 1), x["labels"].flatten(), reduction="sum")


def errors(ours: gpt.GPT, theirs: nn.Module) -> dict[str, float]:
    """Relative errors of the gradients, by their names and in their form."""
    gradients = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    source = as_theirs(Memory(gradients), gpt_names.HF, ours.cfg, families.of(ours.cfg).build)
    truth = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    assert source.tensors.keys() == truth.keys()
    return {name: ((source.read(name) - g).norm() / g.norm()).item() for name, g in truth.items()}


@pytest.mark.parametrize("tied", [True, False])
def test_logits_and_every_gradient_equal_hugging_face(tmp_path: Path, tied: bool):
    theirs, x = theirs_in(tmp_path, tie_word_embeddings=tied), batch()
    ours = ours_in(tmp_path)
    truth = theirs(x["tokens"]).logits
    assert ((ours(x["tokens"]) - truth).norm() / truth.norm()).item() < 1e-5
    ours(**x)["lm"].backward()
    summed_loss(theirs, x).backward()
    assert {name: e for name, e in errors(ours, theirs).items() if e > 1e-5} == {}


class Masked(nn.Module):
    """Dropout by its definition, at a site."""

    def __init__(self, p: float, site: str, sample_ids: Tensor) -> None:
        super().__init__()
        self.p, self.site, self.sample_ids = p, site, sample_ids

    def forward(self, x: Tensor) -> Tensor:
        keep = plain_bloom.kept(self.p, SEED, self.site, self.sample_ids, *x.shape[1:])
        return torch.where(keep, x / (1 - self.p), 0.0)


def masked_attention(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    allowed = torch.ones(S, S, dtype=torch.bool).tril()
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~allowed, -math.inf)
    return (module.masked(scores.softmax(-1)) @ v).transpose(1, 2), None


def test_dropout_in_training_is_of_the_same_sites_and_keys_as_blooms(tmp_path: Path):
    AttentionInterface.register("masked", masked_attention)
    theirs, x = theirs_in(tmp_path), batch()
    theirs.config._attn_implementation = "masked"
    theirs.transformer.drop = Masked(0.1, "embed_dropout", x["sample_ids"])
    for i, block in enumerate(theirs.transformer.h):
        block.attn.masked = Masked(0.2, f"layers.{i}.attn.dropout", x["sample_ids"])
        block.attn.resid_dropout = Masked(0.1, f"layers.{i}.attn_dropout", x["sample_ids"])
        block.mlp.dropout = Masked(0.1, f"layers.{i}.mlp_dropout", x["sample_ids"])
    ours = ours_in(tmp_path, hidden_dropout=0.1, attention_dropout=0.2)
    loss, truth = ours(**x)["lm"], summed_loss(theirs, x)
    assert loss.item() == pytest.approx(truth.item(), rel=1e-6)
    loss.backward()
    truth.backward()
    assert {name: e for name, e in errors(ours, theirs).items() if e > 1e-5} == {}
    with pytest.raises(ValueError, match="sample_ids"):
        ours(x["tokens"])


def test_positions_are_those_that_the_batch_says(tmp_path: Path):
    theirs, x = theirs_in(tmp_path), batch()
    ours, tokens = ours_in(tmp_path), x["tokens"]
    positions = torch.randint(POSITIONS, tokens.shape, generator=torch.Generator().manual_seed(1))
    truth = theirs(tokens, position_ids=positions).logits
    torch.testing.assert_close(ours(tokens, position_ids=positions), truth, rtol=1e-5, atol=1e-5)
    truth = theirs(tokens, position_ids=torch.arange(S)[None] + 3).logits
    torch.testing.assert_close(ours(tokens, places=torch.arange(S).expand(2, S) + 3), truth, rtol=1e-5, atol=1e-5)


def test_a_document_that_begins_again_gives_the_logits_that_it_gives_alone(tmp_path: Path):
    theirs_in(tmp_path)
    ours, tokens = ours_in(tmp_path), batch()["tokens"]
    documents = (torch.arange(S) >= 12).long().expand(2, S)
    restarted = torch.where(documents == 1, torch.arange(S) - 12, torch.arange(S))
    packed = ours(tokens, position_ids=restarted, document_ids=documents)
    torch.testing.assert_close(packed[:, 12:], ours(tokens[:, 12:]), rtol=1e-5, atol=1e-5)


def test_initial_values_are_megatrons():
    model = gpt.GPT(GPTKeys(vocab_size=V, hidden_size=48, n_layers=8, n_heads=6, init_std=0.3))
    init_weights(model, SEED)
    std = {"embed": 0.3, "positions": 0.3, "attn.qkv": 0.3, "attn.out": 0.075, "mlp.up": 0.3, "mlp.down": 0.075}
    for name, p in model.named_parameters():
        owner, _, kind = name.removeprefix("layers.3.").rpartition(".")
        if kind == "weight" and owner in std:
            truth = plain_bloom.normal(SEED, name, tuple(p.shape)) * std[owner]
            torch.testing.assert_close(p.detach(), truth.float(), rtol=1e-6, atol=1e-6, msg=name)
        if p.ndim == 1:
            assert torch.equal(p, torch.full_like(p, float(kind == "weight"))), name


def test_greedy_samples_are_those_of_hugging_face_and_end_where_positions_do(tmp_path: Path):
    theirs, ours = theirs_in(tmp_path).eval(), ours_in(tmp_path)
    prompt = [1, 2, 3]
    new = generate(ours, prompt, 100, Sampling(V, frozenset([V - 1]), temperature=0))
    assert len(new) == POSITIONS - len(prompt)
    truth = theirs.generate(torch.tensor([prompt]), max_length=POSITIONS, do_sample=False, pad_token_id=0)
    assert [*prompt, *new] == truth[0].tolist()


@pytest.mark.parametrize("tied", [True, False])
def test_there_and_back_gives_transformers_its_weights_and_sizes(tmp_path: Path, tied: bool, capsys):
    drops = {"embd_pdrop": 0.3, "resid_pdrop": 0.3, "attn_pdrop": 0.2}
    theirs = theirs_in(tmp_path / "theirs", tie_word_embeddings=tied, initializer_range=0.05, **drops)
    assert command(["convert", "--from", "hf", str(tmp_path / "theirs"), "--to", "dtmega", str(tmp_path / "w")]) == 0
    assert command(["convert", "--from", "dtmega", str(tmp_path / "w"), "--to", "hf", str(tmp_path / "back")]) == 0
    loaded: Any = GPT2LMHeadModel.from_pretrained(tmp_path / "back", output_loading_info=True)
    again, info = loaded
    assert not any(info.values())
    tokens = batch()["tokens"]
    assert torch.equal(again.eval()(tokens).logits, theirs.eval()(tokens).logits)
    for name in ("n_positions", "n_inner", "layer_norm_epsilon", "initializer_range", "tie_word_embeddings", *drops):
        assert getattr(again.config, name) == getattr(theirs.config, name), name


@pytest.mark.parametrize(
    "key",
    [
        {"activation_function": "relu"},
        {"scale_attn_by_inverse_layer_idx": True},
        {"scale_attn_weights": False},
        {"add_cross_attention": True},
    ],
    ids=lambda key: next(iter(key)),
)
def test_a_gpt2_that_computes_something_else_is_refused(tmp_path: Path, key: dict[str, Any]):
    ((name, value),) = key.items()
    (tmp_path / "config.json").write_text(json.dumps(GPT2Config(**key).to_dict()))
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name}={value!r}, expected"):
        recognise.open_folder(tmp_path, None)
