"""recompute.py: what is computed again, counted operation by operation; the numbers are those of no recompute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtmega import config, families
from dtmega.interop.hf.model import HF
from dtmega.models.bloom import Bloom
from dtmega.ops import attention
from dtmega.ops.cpu.attention import attention_cpu
from dtmega.ops.cpu.linear import multiply_on_amx
from dtmega.training.recompute import recompute
from tests.models.test_bloom_definition import EVERYTHING, batch, model_of
from tests.operations import Operations, needs_onednn_bfloat16

L = EVERYTHING["n_layers"]
NONE, FULL = config.Recompute(), config.Recompute(mode="full")
# Of each block: the linears, attention (S = 77 is one chunk), and what is cheap.
COUNTED = {"addmm": 4 * L, "_scaled_dot_product_flash_attention_for_cpu": L, "gelu": L, "native_layer_norm": 2 * L}


def step(how: config.Recompute, keys: dict[str, Any], documents: bool) -> tuple[list[torch.Tensor], dict[str, int]]:
    """Loss and gradients, and how many operations backward did that belong to forward."""
    model, x = model_of(**keys), batch()
    if not documents:
        del x["document_ids"]
    if how.mode != "none":
        recompute(model, how)
    loss = model(**x)["lm"]
    with Operations() as operations:
        loss.backward()
    again = {name: operations.counts[name] for name in COUNTED}
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)], again


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("keys", [{}, {"attention_dropout": 0.0}], ids=["attention dropout", "a kernel"])
def test_recompute_changes_no_bit_and_selective_keeps_products_and_attention(keys: dict[str, Any], documents: bool):
    plain, nothing = step(NONE, keys, documents)
    full, everything = step(FULL, keys, documents)
    selective, cheap = step(config.Recompute(mode="selective"), keys, documents)
    for ours in (full, selective):
        assert len(ours) == len(plain) == 1 + 12 * L + 5
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    kernels = COUNTED["_scaled_dot_product_flash_attention_for_cpu"] if keys else 0
    assert nothing == dict.fromkeys(COUNTED, 0)
    assert everything == COUNTED | {"_scaled_dot_product_flash_attention_for_cpu": kernels}
    assert cheap == COUNTED | {"addmm": 0, "_scaled_dot_product_flash_attention_for_cpu": 0}


@needs_onednn_bfloat16
def test_selective_keeps_attention_and_products_in_bfloat16_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "attention_cpu", attention_cpu)
    counts = {}
    for mode in ("full", "selective"):
        model = model_of(attention_dropout=0.0).bfloat16()
        recompute(model, config.Recompute(mode=mode))
        multiply_on_amx(model)
        loss = model(**batch())["lm"]
        with Operations() as operations:
            loss.backward()
        names = "attention_by_products", "attention_by_products_backward", "biased_product"
        counts[mode] = tuple(operations.counts[name] for name in names)
    assert counts == {"full": (L, L, 4 * L), "selective": (0, L, 0)}


@pytest.mark.parametrize("n", [1, 2, L, L + 1])
def test_block_recomputes_so_many_layers_and_changes_no_bit(n: int):
    keys = {"attention_dropout": 0.0}
    plain, _ = step(NONE, keys, documents=False)
    ours, again = step(config.Recompute(mode="full", method="block", layers=n), keys, documents=False)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert again == {name: count // L * min(n, L) for name, count in COUNTED.items()}


class Kept:
    """Bytes that autograd saves of a forward."""

    def __init__(self) -> None:
        self.kept_bytes = 0

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        self.kept_bytes += tensor.numel() * tensor.element_size()
        return tensor


def kept_bytes(how: config.Recompute) -> int:
    model, x = model_of(n_layers=6, attention_dropout=0.0), batch()
    if how.mode != "none":
        recompute(model, how)
    kept = Kept()
    with torch.autograd.graph.saved_tensors_hooks(kept.save, lambda tensor: tensor):
        model(**x)
    return kept.kept_bytes


def test_uniform_recomputes_all_layers_and_keeps_the_input_of_each_unit_only():
    plain, _ = step(NONE, {}, documents=True)
    for n in (2, L, L + 1):
        ours, again = step(config.Recompute(mode="full", layers=n), {}, documents=True)
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
        assert again == COUNTED | {"_scaled_dot_product_flash_attention_for_cpu": 0}
    each, pairs, threes, one = (kept_bytes(config.Recompute(mode="full", layers=n)) for n in (1, 2, 3, 6))
    x = batch()["tokens"]
    hidden_bytes = 4 * x.numel() * EVERYTHING["hidden_size"]
    unit_bytes = threes - one
    assert (each - pairs, pairs - threes) == (3 * unit_bytes, unit_bytes)
    # With what all layers share: places, documents, slopes.
    assert hidden_bytes <= unit_bytes < 1.05 * hidden_bytes


def test_units_of_layers_are_refused_for_a_model_that_runs_its_layers_otherwise(monkeypatch):
    cfg = config.Config(train=config.Train(steps=1), recompute=config.Recompute(mode="full", layers=2))
    families.of(cfg.model).check(cfg, {"pp": 1, "tp": 1, "cp": 1})
    monkeypatch.setattr(Bloom, "runs_layers", HF.runs_layers)  # as a model of transformers
    with pytest.raises(ValueError, match="name='bloom' runs its layers in a way of its own: expected layers=1"):
        families.of(cfg.model).check(cfg, {"pp": 1, "tp": 1, "cp": 1})


def test_a_recompute_of_nothing_in_units_is_refused():
    with pytest.raises(ValueError, match="nothing is recomputed: expected method='uniform' and layers=1, got 'block'"):
        config.Recompute(method="block")
