"""Latent attention and the losses of routers over tp: every gradient is that of one process."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from dtmega import families, plans
from dtmega.config.families.moe import MoEKeys
from dtmega.models.moe import MoE
from dtmega.plans import moe
from tests import ranks
from tests.plans.test_plans import V, deviations, with_values

SIZES: dict[str, Any] = {
    **{"vocab_size": V, "hidden_size": 24, "n_layers": 2, "n_heads": 4, "ffn_hidden_size": 32, "dense_layers": 1},
    **{"n_experts": 4, "expert_ffn_hidden_size": 16, "balance_loss": 0.1, "router_z_loss": 0.1},
    **{"kv_latent_size": 12, "kv_channels": 8, "rotary_channels": 4, "v_channels": 6},
}


def small(q_latent_size: int) -> MoE:
    cfg = MoEKeys(**SIZES, q_latent_size=q_latent_size)
    model = families.of(cfg).build(cfg)
    assert isinstance(model, MoE)
    return with_values(model)  # pyright: ignore[reportArgumentType, reportReturnType]


def errors_by_case() -> dict[str, dict[str, float]]:
    """The errors of the loss and of gradients by case."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found = {}
    for sequence_parallel, q_latent_size in ((True, 10), (False, 10), (True, 0)):
        model = small(q_latent_size)
        partial = plans.apply_plan(model, mesh, moe.plan(model.cfg, sequence_parallel))
        case = f"sequence_parallel={sequence_parallel}, q_latent_size={q_latent_size}"
        found[case] = deviations(model, partial, mesh, small(q_latent_size))  # pyright: ignore[reportArgumentType]
    return found


def test_every_gradient_of_latent_attention_and_of_routers_over_tp_is_that_of_one_process():
    for found in ranks.run(2, errors_by_case):
        for case, errors in found.items():
            assert {name: e for name, e in errors.items() if not e < 1e-5} == {}, case
