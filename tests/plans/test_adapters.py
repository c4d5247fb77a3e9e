"""Claims about adapters over tp: gradients are those of one process, also where several ranks share a head of keys."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dtmega import config, families, mesh
from dtmega.models.lora import is_adapter
from dtmega.ops.shards import full_tensor
from dtmega.training import adapter_proof, parallelize
from tests import ranks

LLAMA = {"name": "llama", "hidden_size": 32, "n_heads": 4, "n_layers": 1, "vocab_size": 40, "ffn_hidden_size": 48}
ONE_HEAD = LLAMA | {"n_kv_heads": 1}
BLOOM = {"name": "bloom", "hidden_size": 32, "n_heads": 4, "n_layers": 1, "vocab_size": 40}


def gradients(n: int, models: list[dict[str, Any]], sequence_parallel: bool) -> list[dict[str, Tensor]]:
    """For each model the whole gradients of its adapters, none of which is zero."""
    found = []
    for model in models:
        sections = {
            "train": {"steps": 1},
            "model": model,
            "data": {"seq_len": 8, "tokenizer": "bytes"},
            "lora": {"rank": 3},
            "mesh": {"tp": n, "sequence_parallel": sequence_parallel},
        }
        cfg = families.resolve(config.validate(sections, "test"))
        world = mesh.start(torch.device("cpu"), mesh.resolve(cfg.mesh, n))
        with patch.object(adapter_proof, "prove"):
            sharded = parallelize.parallelize(cfg, world)
        sharded.draw(1)  # B, too, is not zero
        tokens = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(0))
        sharded.forward_backward([{"tokens": tokens, "labels": tokens.roll(1, 1)}], {"tokens": 16.0})
        adapters = {name: p.grad for name, p in sharded.named_parameters() if is_adapter(name)}
        found.append({name: full_tensor(grad) for name, grad in adapters.items() if grad is not None})
    return found


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_gradients_of_adapters_are_those_of_one_process(sequence_parallel: bool):
    models = [LLAMA, ONE_HEAD, BLOOM]
    (truth,) = ranks.run(1, gradients, 1, models, sequence_parallel)
    for ours in ranks.run(2, gradients, 2, models, sequence_parallel):
        for found, expected in zip(ours, truth, strict=True):
            assert found.keys() == expected.keys()
            for name in expected:
                assert expected[name].norm() > 0
                assert (found[name] - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
