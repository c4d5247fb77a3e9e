"""recompute.py: what is computed again, counted operation by operation; the numbers are those of no recompute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtmega.recompute import recompute
from tests.operations import Operations
from tests.test_definition import EVERYTHING, batch, model_of

L = EVERYTHING["n_layers"]
# Of each block: the linears, attention (S = 77 is two chunks), and what is cheap.
COUNTED = {"addmm": 4 * L, "_scaled_dot_product_flash_attention_for_cpu": 2 * L, "gelu": L, "native_layer_norm": 2 * L}


def step(mode: str, keys: dict[str, Any], documents: bool) -> tuple[list[torch.Tensor], dict[str, int]]:
    """Loss and gradients, and how many operations backward did that belong to forward."""
    model, x = model_of(**keys), batch()
    if not documents:
        del x["document_ids"]
    if mode != "none":
        recompute(model.blocks(), selective=mode == "selective")
    loss = model(**x)["lm"]
    with Operations() as operations:
        loss.backward()
    again = {name: operations.counts[name] for name in COUNTED}
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)], again


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("keys", [{}, {"attention_dropout": 0.0}], ids=["attention dropout", "a kernel"])
def test_recompute_changes_no_bit_and_selective_keeps_products_and_attention(keys: dict[str, Any], documents: bool):
    plain, nothing = step("none", keys, documents)
    full, everything = step("full", keys, documents)
    selective, cheap = step("selective", keys, documents)
    for ours in (full, selective):
        assert len(ours) == len(plain) == 1 + 12 * L + 5
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    kernels = COUNTED["_scaled_dot_product_flash_attention_for_cpu"] if keys else 0
    assert nothing == dict.fromkeys(COUNTED, 0)
    assert everything == COUNTED | {"_scaled_dot_product_flash_attention_for_cpu": kernels}
    assert cheap == COUNTED | {"addmm": 0, "_scaled_dot_product_flash_attention_for_cpu": 0}
