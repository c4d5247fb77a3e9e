"""Sharding plans for unmodified models of `transformers`.

print(plan_for(model, tp=2))                  # the table first
mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp_shard", "tp"))
model = parallelize_hf(model, mesh)           # then train it as you would: loss, backward, clip_grad_norm_, AdamW
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from dtmega import drift
from dtmega.plans.apply import apply_plan
from dtmega.plans.hf import families, plan
from dtmega.plans.hf.plan import HFPlan
from dtmega.plans.styles import Style

__all__ = ["HFPlan", "parallelize_hf", "plan_for"]


def plan_for(model: Any, tp: int = 2, sequence_parallel: bool = True, loss_parallel: bool = True) -> HFPlan:
    """What `parallelize_hf` would do to a model, to be printed; nothing is done.

    Args:
        model: of `transformers`, real or on meta.

    Raises:
        ValueError: a model that has no plan, or sizes that tp cannot share.
    """
    plan.check(model, "meta")
    if model.config.model_type not in families.FAMILIES:
        raise ValueError(
            f"no plan for model_type '{model.config.model_type}'; known are {', '.join(families.FAMILIES)}"
        )
    return plan.family_plan(model, tp, sequence_parallel, loss_parallel)


def parallelize_hf(
    model: Any, mesh: DeviceMesh, sequence_parallel: bool = True, loss_parallel: bool = True
) -> Any:
    """Cut an unmodified model of `transformers` over tp, and with FSDP2 over what else the mesh has. In place.

    Every parameter becomes a DTensor, tied ones stay one parameter. The model is called as before: `model(input_ids,
    attention_mask=..., labels=...)` has the loss, `generate` works with its cache. Gradients are those of one process
    after each backward (under FSDP2: of the mean of the data ranks' losses).

    Args:
        model: real (then the same on every rank, which is checked) or on meta.
        mesh: 1-D, or with dims named "tp" and "dp_shard", "dp_replicate" before it (HSDP).
        sequence_parallel: between attention and feed-forward a rank has S/tp of the tokens, in every forward whose S tp
            divides; the others, and all forwards with output_hidden_states, are plain tensor parallel.
        loss_parallel: with labels, the loss is made of each rank's part of the logits; `out.logits` are then computed
            when they are first used, by all ranks of tp together.

    Returns:
        The model.

    Raises:
        ValueError: a model that has no plan, sizes that tp cannot share, weights that differ between ranks, a mesh with
            other dims. Nothing is changed then.
    """
    tp, data = meshes(mesh)
    plan.check(model, mesh.device_type)
    made = plan_for(model, tp.size(), sequence_parallel, loss_parallel)
    for pattern, style in made.table.items():
        for _, module in plan.matching(model, pattern):
            style.check(module, tp.size())  # pyright: ignore[reportAttributeAccessIssue]
    check_copies(model, mesh)
    apply_plan(model, tp, made.table)
    if made.head is not None:
        watch_labels(model, made)
    if data is not None:
        shard_over_data(model, made.blocks, data)
    return model


def meshes(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh | None]:
    """(tp, the mesh of FSDP2 or None)"""
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 1 and names in ((), ("tp",)):
        return mesh, None
    if names not in (("dp_shard", "tp"), ("dp_replicate", "dp_shard", "tp")):
        raise ValueError(
            f"expected a mesh ('tp'), ('dp_shard', 'tp') or ('dp_replicate', 'dp_shard', 'tp'), got {names} of sizes "
            f"{tuple(mesh.shape)}"
        )
    data = mesh[names[:-1]] if len(names) == 3 else mesh["dp_shard"]
    return mesh["tp"], data if data.size() > 1 else None


def check_copies(model: nn.Module, mesh: DeviceMesh) -> None:
    """A rank's part is taken from what that rank has, so all must have the same.

    Raises:
        ValueError: names a parameter that differs, and the ranks.
    """
    real = {name: p for name, p in model.named_parameters() if not p.is_meta}
    for dim in range(mesh.ndim):
        try:
            drift.check_equal(real, mesh.get_group(dim), "the model before it is cut")
        except RuntimeError as error:
            raise ValueError(f"{error}: load the same weights on every rank, or seed all alike") from None


def watch_labels(model: nn.Module, made: HFPlan) -> None:
    def look(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        assert made.head is not None
        made.head.labelled = kwargs.get("labels") is not None

    model.register_forward_pre_hook(look, with_kwargs=True)


def shard_over_data(model: nn.Module, blocks: list[str], mesh: DeviceMesh) -> None:
    """FSDP2 (or HSDP) of each block, then of the rest, so that tied weights are in one group."""

    def dim(parameter: nn.Parameter) -> Shard | None:
        # A dim that is cut in parts already cannot be put together after a second cut.
        placement = parameter.placements[0]  # pyright: ignore[reportAttributeAccessIssue]
        return Shard(1) if not placement.is_shard() and not placement.is_replicate() and placement.dim == 0 else None

    for module in (*(model.get_submodule(name) for name in blocks), model):
        fully_shard(module, mesh=mesh, shard_placement_fn=dim)
