"""BLOOM with all that training adds to it, dropout first, against its definitions: `plain_bloom.py`.

Layouts are compared with one process elsewhere; here is what one process is compared with.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dtmega.config.families.bloom import BloomKeys
from dtmega.data.objectives.prefixes import prefixes
from dtmega.models.bloom import Bloom
from dtmega.models.initial import init_weights
from dtmega.models.layers import KeyedDropout
from dtmega.ops import attention
from dtmega.ops.attention_rule import attention_rule
from dtmega.training.sharded_model import ShardedModel
from tests import plain_bloom
from tests.layouts import DEBUG, write_text
from tests.resumed import Record
from tests.test_faults import alone, replaced

SEED, B, S, V = 7, 3, 77, 131
# No value is a default, and no two sizes are the same.
EVERYTHING: dict[str, Any] = {
    "vocab_size": V,
    "pad_vocab_to_multiple": 50,
    "hidden_size": 48,
    "ffn_hidden_size": 100,
    "n_layers": 3,
    "n_heads": 6,
    "init_std": 0.3,
    "layer_norm_eps": 0.1,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.2,
    "label_smoothing": 0.15,
    "z_loss": 0.01,
}


def model_of(seed: int = SEED, **keys: Any) -> Bloom:
    model = Bloom(BloomKeys(**EVERYTHING | keys))
    init_weights(model, seed)
    model.init_buffers(seed)
    return model


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(V, (B, S), generator=generator)
    labels = tokens.roll(-1, dims=1)
    labels[:, ::7] = -100
    documents = (torch.rand(B, S, generator=generator) < 0.04).long().cumsum(1)
    return {
        "tokens": tokens,
        "labels": labels,
        "sample_ids": torch.tensor([0, 5, 2**33 + 5]),
        "document_ids": documents,
    }


def error(ours: Tensor, truth: Tensor) -> float:
    return ((ours - truth).norm() / truth.norm()).item()


def leaves(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.detach().double().requires_grad_() for name, weight in weights.items()}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "keys",
    [{}, {"apply_residual_connection_post_layernorm": True}, {"hidden_dropout": 0.0}, {"attention_dropout": 0.0}],
    ids=lambda keys: ", ".join(keys) or "everything",
)
def test_loss_and_every_gradient_are_those_of_the_definition(keys: dict[str, Any], training: bool):
    model, x = model_of(**keys).train(training), batch()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1:  # else a missing or doubled one would not show
                p += 0.3 * plain_bloom.normal(1, name, tuple(p.shape)).float()
    weights = leaves(dict(model.named_parameters()))
    loss, truth = model(**x)["lm"], plain_bloom.loss(model.cfg, weights, x, SEED, training)
    loss.backward()
    truth.backward()
    assert loss.item() == pytest.approx(truth.item(), rel=1e-6)
    errors = {name: error(p.grad, weights[name].grad) for name, p in model.named_parameters()}
    assert {name: e for name, e in errors.items() if not e < 1e-5} == {}


@pytest.mark.parametrize("documents", [True, False])
def test_in_a_prefix_a_token_sees_those_behind_it_and_weighted_losses_are_those_of_the_definition(documents: bool):
    model, x = model_of().train(), batch()
    if not documents:
        del x["document_ids"]
    ends = x["document_ids"].diff(dim=1, append=torch.full((B, 1), -1)) != 0 if documents else torch.zeros(B, S).bool()
    x["prefix"] = torch.from_numpy(prefixes(ends.numpy(), np.arange(B, dtype=np.uint64)))
    x["label_weights"] = torch.linspace(0.1, 2, B * S).view(B, S)
    weights = leaves(dict(model.named_parameters()))
    loss, truth = model(**x)["lm"], plain_bloom.loss(model.cfg, weights, x, SEED, True)
    loss.backward()
    truth.backward()
    assert loss.item() == pytest.approx(truth.item(), rel=1e-6)
    errors = {name: error(p.grad, weights[name].grad) for name, p in model.named_parameters()}
    assert {name: e for name, e in errors.items() if not e < 1e-5 and "bias" not in name} == {}


def test_without_documents_a_token_sees_all_before_it():
    model, x = model_of().eval(), batch()
    ours = model(x["tokens"])
    assert error(ours, plain_bloom.logits(model.cfg, leaves(dict(model.named_parameters())), x["tokens"])) < 1e-5


@pytest.mark.parametrize("seed", [0, 7])
def test_initial_values_are_those_of_the_definition(seed: int):
    model = model_of(seed)
    truth = plain_bloom.initial(model.cfg, seed)
    assert {name for name, _ in model.named_parameters()} == truth.keys()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), truth[name], rtol=1e-6, atol=1e-6, msg=name)


def test_a_parameter_that_is_filled_piece_by_piece_has_the_values_of_the_definition():
    model = model_of(vocab_size=2**15 + 100, n_layers=1)
    embedding = model.get_parameter("embed.weight")
    assert embedding.numel() > 2**20
    truth = plain_bloom.normal(SEED, "embed.weight", tuple(embedding.shape)).float() * 0.3
    torch.testing.assert_close(embedding.detach(), truth, rtol=1e-6, atol=1e-6)


def check_independent(masks: Tensor, p: float) -> None:
    """Masks [n, elements] are as n independent ones of this probability: each share and correlation, to 5 sigma."""
    dropped = masks.double()
    sigma = 1 / math.sqrt(masks.shape[1])
    assert (dropped.mean(1) - p).abs().max() < 5 * sigma * math.sqrt(p * (1 - p))
    correlations = dropped.corrcoef().fill_diagonal_(0)
    assert correlations.abs().max() < 5 * sigma


def places(rows: int) -> Tensor:
    return torch.arange(S).repeat(rows, 1)


def dropped_hidden(model: Bloom, sample_ids: Tensor) -> Tensor:
    """[sites, B, S, D]: what each of the sites drops of the hidden state."""
    sites = [
        m for name, m in model.named_modules() if isinstance(m, KeyedDropout) and not name.endswith("attn.dropout")
    ]
    ones = torch.ones(len(sample_ids), S, 48)
    return torch.stack([site(ones, sample_ids, places(len(sample_ids))) == 0 for site in sites])


def dropped_probabilities(model: Bloom, sample_ids: Tensor) -> Tensor:
    """[layers, B, H, 37, 40]: what is dropped of the probabilities of the last 37 queries for the first 40 keys."""
    nothing = torch.zeros(len(sample_ids), 6, S, 1)
    identity = torch.eye(S).expand(len(sample_ids), 6, S, S)  # as values: the output is the probabilities
    rule = attention_rule(places(len(sample_ids)), causal=True)
    found = []
    for i in range(model.cfg.n_layers):
        site = model.get_submodule(f"layers.{i}.attn.dropout")
        assert isinstance(site, KeyedDropout)
        dropout = attention.Dropout(site.p, site.key, model.head_ids, sample_ids)
        found.append(attention.attention(nothing, nothing, identity, rule, dropout)[..., 40:, :40] == 0)
    return torch.stack(found)


def test_dropout_masks_are_independent_over_seeds_sites_samples_heads_positions_and_channels():
    sample_ids = torch.tensor([0, 1, 2**33 + 1])
    drawn = [model_of(seed) for seed in (7, 8)]
    hidden = torch.stack([dropped_hidden(model, sample_ids) for model in drawn])
    assert hidden.shape == (2, 1 + 2 * 3, 3, S, 48)
    check_independent(hidden.flatten(0, 2).flatten(1), 0.1)
    for dim in (3, 4):
        check_independent(hidden.movedim(dim, 0).flatten(1), 0.1)
    probabilities = torch.stack([dropped_probabilities(model, sample_ids) for model in drawn])
    assert probabilities.shape == (2, 3, 3, 6, 37, 40)
    check_independent(probabilities.flatten(0, 3).flatten(1), 0.2)
    for dim in (4, 5):
        check_independent(probabilities.movedim(dim, 0).flatten(1), 0.2)


RUN = DEBUG | {
    "model.n_layers": 2,
    "model.n_heads": 6,
    "model.pad_vocab_to_multiple": 48,
    "model.init_std": 0.1,
    "model.layer_norm_eps": 0.01,
    "model.attention_dropout": 0.2,
    "model.label_smoothing": 0.15,
    "model.z_loss": 0.01,
    "data.reset_attention_mask": True,
    "optim.warmup": 2,
    "batch.micro_batch_size": 4,
    "train.steps": 3,
    "eval.interval": 3,
    "eval.prompt": "",
    "log.num_zeros": False,
}


def train(folder: Path, keys: dict[str, Any]) -> tuple[Record, list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """A run of train.py: what it reports, and the whole batches of its steps and of its evaluations."""
    steps, evaluations = [], []

    def noted(batches: list[dict[str, Tensor]], microbatches: list[dict[str, Tensor]]) -> None:
        batches.append({name: torch.cat([m[name] for m in microbatches]) for name in microbatches[0]})

    def forward_backward(
        self: ShardedModel, microbatches: list[dict[str, Tensor]], counts: dict[str, float], scale: float | None
    ) -> Tensor:
        noted(steps, microbatches)
        return honest_step(self, microbatches, counts, scale)

    def losses(self: ShardedModel, microbatches: list[dict[str, Tensor]]) -> Tensor:
        noted(evaluations, microbatches)
        return honest_losses(self, microbatches)

    honest_step, honest_losses = ShardedModel.forward_backward, ShardedModel.losses
    with replaced(ShardedModel, "forward_backward", forward_backward), replaced(ShardedModel, "losses", losses):
        assert alone(keys, folder) == 0
    return Record(folder), steps, evaluations


def plain_loop(
    cfg: BloomKeys, seed: int, rates: list[float], steps: list[dict[str, Tensor]]
) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """AdamW on the definition in fp64: the loss and the gradient norm of each step, and the weights at the end."""
    weights = leaves(plain_bloom.initial(cfg, seed))
    decayed = [w for w in weights.values() if w.ndim == 2]
    others = [w for w in weights.values() if w.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-6)
    found = []
    for rate, batch in zip(rates, steps, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss = plain_bloom.loss(cfg, weights, batch, seed, training=True) / (batch["labels"] != -100).sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found, weights


def test_a_run_has_the_losses_gradient_norms_and_weights_of_a_plain_loop_for_each_seed(tmp_path: Path):
    keys = RUN | write_text(tmp_path)
    cfg = BloomKeys(**{name.removeprefix("model."): v for name, v in keys.items() if name.startswith("model.")})
    tokens = []
    for seed in (0, 7):
        record, steps, evaluations = train(tmp_path / str(seed), keys | {"run.seed": seed})
        truth, weights = plain_loop(cfg, seed, record.series("lr"), steps)
        assert record.series("loss") == pytest.approx([loss for loss, _ in truth], rel=1e-5)
        assert record.series("grad_norm") == pytest.approx([norm for _, norm in truth], rel=1e-5)
        assert {name: e for name, w in weights.items() if not (e := error(record.final[name], w)) < 1e-4} == {}
        ids = [batch["sample_ids"].tolist() for batch in steps]
        assert ids == [list(range(8 * n, 8 * n + 8)) for n in range(3)]
        # Before the first step, after the last one, and of the test split: without all that belongs to training.
        states = [plain_bloom.initial(cfg, seed), weights, weights]
        means = []
        for state, batch in zip(states, evaluations, strict=True):
            total = plain_bloom.loss(cfg, leaves(state), batch, seed, training=False)
            means.append((total / (batch["labels"] != -100).sum()).item())
        reported = [line[key] for line in record.lines for key in ("val_loss", "test_loss") if key in line]
        assert reported == pytest.approx(means, rel=1e-5)
        tokens.append([batch["tokens"] for batch in steps])
    assert not any(torch.equal(a, b) for a, b in zip(*tokens, strict=True))
