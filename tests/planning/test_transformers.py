"""Plans of transformers' models, on CPUs and on fake GPUs, against the same ranks that really run over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtmega.planning.counting.role import Role
from dtmega.planning.plan import totals
from tests import hf_models, ranks
from tests.hf_models import Case
from tests.planning import real_step
from tests.planning.test_counts import CPU, SMALL, TIMEOUT_S, assert_alike, messages

GPU = torch.device("cuda", 0)
HOST_BYTES = 16  # what a run on CPUs holds in the same memory as its tensors: a few numbers of the host
OF_TRAINER = ("data.", "batch.", "train.", "precision.", "compile.")
TRAINED = {key: value for key, value in SMALL.items() if key.startswith(OF_TRAINER)}
TRAINED |= {"data.tokenizer": "bytes", "batch.global_batch_size": 4}

# Name -> processes, model, keys.
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "llama, tp 2": (2, "llama", {"mesh.tp": 2}),
    "llama, tp 2, no sequence parallel": (2, "llama", {"mesh.tp": 2, "mesh.sequence_parallel": False}),
    "llama, dp_shard 2": (2, "llama", {"mesh.dp_shard": 2}),
    "llama, cp 2": (2, "llama", {"mesh.cp": 2}),
    "bloom, tp 2 x dp_shard 2": (4, "bloom", {"mesh.tp": 2, "mesh.dp_shard": 2}),
    "gpt2, pp 2 x tp 2": (4, "gpt2", {"mesh.pp": 2, "mesh.tp": 2}),
    "qwen2, pp 2": (2, "qwen2", {"mesh.pp": 2}),
    "mixtral, tp 2": (2, "mixtral", {"mesh.tp": 2}),
    "gemma3_text, packed": (2, "gemma3_text", {"mesh.dp_replicate": 2, "data.objective": "conversations"}),
}
ALWAYS = ("llama, tp 2",)


def run(name: str, device: torch.device, compiled: bool = False) -> tuple[list[real_step.Measured], list[Role]]:
    """The ranks of a layout that run, and their plans, whose blocks may be compiled."""
    n, model, keys = LAYOUTS[name]
    case = Case(model, vocab=512)
    directory = hf_models.saved([case])[case]
    eager = TRAINED | {"model.name": "hf", "model.path": directory} | keys
    planned = real_step.nested(eager | {"compile.enable": compiled})
    roles = ranks.run(n, real_step.planned, planned, device, timeout_s=TIMEOUT_S)
    return ranks.run(n, real_step.measured, real_step.nested(eager), timeout_s=TIMEOUT_S), roles


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.full) for name in LAYOUTS]
)
def test_a_fake_gpu_holds_and_sends_what_a_real_rank_does(name: str):
    reals, roles = run(name, GPU, compiled=name not in ALWAYS)
    _, _, keys = LAYOUTS[name]
    for rank, (real, role) in enumerate(zip(reals, roles, strict=True)):
        assert 0 <= real.held_bytes - sum(role.held.values()) <= HOST_BYTES, f"rank {rank}"
        # Over gloo, FSDP gathers weights and sums gradients by sends.
        if keys.get("mesh.dp_shard", 1) * keys.get("mesh.cp", 1) == 1:
            assert messages(role) == real.messages, f"rank {rank}"


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_fake_cpu_holds_sends_and_peaks_as_a_real_rank(name: str):
    reals, roles = run(name, CPU)
    _, _, keys = LAYOUTS[name]
    assert_alike(reals, roles, keys)


@pytest.mark.full
def test_ranks_share_the_products_of_experts():
    case = Case("mixtral", vocab=512)
    keys = TRAINED | {"model.name": "hf", "model.path": hf_models.saved([case])[case]}
    of_grouped: list[int] = []
    for n in (1, 2):
        values = real_step.nested(keys | {"mesh.tp": n})
        first, *_ = ranks.run(n, real_step.planned, values, GPU, timeout_s=TIMEOUT_S)
        of_grouped.append(totals(first).flops["aten._grouped_mm"])
    one, two = of_grouped
    assert one == 2 * two
