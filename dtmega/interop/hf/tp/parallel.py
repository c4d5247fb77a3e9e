"""Shards a `transformers` model: checks the model, makes a plan, shards the model over tp, then applies FSDP2."""

from __future__ import annotations

import functools
import warnings
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from dtmega.distributed import replica_check
from dtmega.interop.hf import families
from dtmega.interop.hf.directory import allow_views
from dtmega.interop.hf.logits import watch_labels
from dtmega.interop.hf.tp import plan
from dtmega.interop.hf.tp.generic import COST, generic_plan
from dtmega.interop.hf.tp.native import native_plan
from dtmega.interop.hf.tp.plan import HFPlan, family_plan
from dtmega.interop.hf.tp.verify import verify
from dtmega.ops import host
from dtmega.ops.shards import dim_to_cut
from dtmega.plans.apply import apply_plan


def plan_for(
    model: Any, tp: int = 2, sequence_parallel: bool = True, loss_parallel: bool = True, *, generic: bool = False
) -> HFPlan:
    """The plan that `parallelize_hf` would carry out. Print the plan to see a table. The model is not changed.

    Args:
        model: `transformers` model, real or on meta.
        tp: number of tensor-parallel ranks.
        sequence_parallel: argument of `parallelize_hf`.
        loss_parallel: argument of `parallelize_hf`.
        generic: whether to accept any model: a module is replicated if no way to shard it is known, and a model without
            any plan computes on DTensors.

    Raises:
        ValueError: the model has no plan, or tp does not divide the model's sizes.
    """
    plan.check(model, "meta")
    family = model.config.model_type
    with_styles = [name for name, facts in families.KNOWN.items() if facts.styles]
    if family in with_styles:
        hf_plan = family_plan(model, tp, sequence_parallel, loss_parallel)
    elif tp == 1 or getattr(model.config, "base_model_tp_plan", None):
        hf_plan = native_plan(model, tp, loss_parallel, rest_whole=generic or tp == 1)
    elif generic:
        hf_plan = generic_plan(model, tp, loss_parallel)
    else:
        raise ValueError(
            f"no plan for model_type '{family}': it is none of {', '.join(with_styles)}, and its config has no "
            f"base_model_tp_plan; parallelize_hf(..., generic=True) computes any model on DTensors, slowly"
        )
    hf_plan.parameters = plan.parameters(hf_plan, model)
    if drops := plan.dropouts(model):
        hf_plan.notes.append(f"dropout ({', '.join(drops)}): its masks are not those of one process")
    return hf_plan


def parallelize_hf(
    model: Any,
    mesh: DeviceMesh,
    sequence_parallel: bool = True,
    loss_parallel: bool = True,
    *,
    generic: bool = False,
    verify_native: bool = True,
) -> Any:
    """Shard an unmodified `transformers` model in place: over tp, and with FSDP2 over the other dims of the mesh.

    Every parameter becomes a DTensor, and tied parameters stay one parameter. The model is called as before:
    `model(input_ids, attention_mask=..., labels=...)` computes the loss, and `generate` works with its cache. After
    each backward, the gradients equal the gradients that one process would compute from the same loss. (Under FSDP2,
    this loss is the mean of the data ranks' losses.)

    Args:
        model: `transformers` model, on meta or with weights. The weights must be the same on all ranks; this function
            compares them.
        mesh: 1-D mesh, or a mesh with dims ("dp_shard", "tp") or ("dp_replicate", "dp_shard", "tp") for HSDP.
        sequence_parallel: whether to give each rank S/tp of the tokens between attention and feed-forward. Plain
            tensor parallelism is still used for forwards whose S is not divisible by tp, for forwards with
            output_hidden_states, and for models with transformers' own plan.
        loss_parallel: whether to compute the loss from each rank's columns of the logits if there are labels. The tp
            ranks then compute `out.logits` together when it is first used.
        generic: whether to accept a model without any plan; such a model computes on DTensors, with a warning. The
            flag also replicates a module on every rank if transformers' own plan has an unknown string for the module.
        verify_native: whether to verify transformers' own plan on a small copy of the model first, as `verify_plan`
            does. The check takes about a second.

    Returns:
        `model` itself.

    Raises:
        ValueError: the model has no plan, tp does not divide the model's sizes, weights differ between ranks, the mesh
            has unsupported dims, or transformers' own plan is wrong. After an error, the model is unchanged.
    """
    tp, _ = meshes(mesh)
    plan.check(model, mesh.device_type)
    hf_plan = plan_for(model, tp.size(), sequence_parallel, loss_parallel, generic=generic)
    check_modules(model, tp, hf_plan)
    check_copies(model, mesh)
    if hf_plan.native and verify_native:
        prove(model, mesh, hf_plan, loss_parallel=loss_parallel, generic=generic)
    if generic and COST.format(family=hf_plan.family) in hf_plan.notes:
        warnings.warn(COST.format(family=hf_plan.family), stacklevel=2)
    return cut(model, mesh, hf_plan)


def cut_stage(stage: nn.Module, model: Any, tp: DeviceMesh, sequence_parallel: bool, *, proven: bool = False) -> None:
    """Shard the model in `stage` over tp for the trainer, which applies FSDP2 itself.

    Args:
        stage: the module that the trainer calls, with or without labels.
        model: the `transformers` model in `stage`, on the meta device: all layers, or those of one pipeline stage.
        tp: 1-D mesh.
        sequence_parallel: argument of `parallelize_hf`.
        proven: whether transformers' own plan has been verified already.

    Raises:
        ValueError: the model has no plan, tp does not divide the model's sizes, or transformers' own plan is wrong.
    """
    hf_plan = plan_for(model, tp.size(), sequence_parallel)
    check_modules(model, tp, hf_plan)
    unproven = f"the plan that transformers brings for '{hf_plan.family}' is verified at the start of a run, not here"
    if hf_plan.native and not proven and not host.must_skip(unproven):
        prove(model, tp, hf_plan)
    apply_plan(model, tp, hf_plan.table)
    if hf_plan.head is not None:
        watch_labels(stage, hf_plan.head)


def check_modules(model: Any, tp: DeviceMesh, hf_plan: HFPlan) -> None:
    """Raise a ValueError if a style cannot split its module across the ranks of `tp`."""
    modules = list(model.named_modules())
    for pattern, style in hf_plan.table.items():
        for _, module in plan.matching(modules, pattern):
            style.check(module, tp.size())  # pyright: ignore[reportAttributeAccessIssue]


def prove(model: Any, mesh: DeviceMesh, hf_plan: HFPlan, **options: bool) -> None:
    """Verify transformers' own plan: shard a small copy of the model by it, and compare with an unsharded copy.

    Raises:
        ValueError: the sharded copy's results differ from the unsharded copy's results.
    """
    # By default, `parallelize_hf` would verify the small copy's plan on yet another small copy.
    verification = verify(model, mesh, functools.partial(parallelize_hf, verify_native=False, **options))
    if not verification.ok:
        raise ValueError(f"the plan that transformers brings for '{hf_plan.family}' is wrong:\n{verification}")


def cut(model: Any, mesh: DeviceMesh, hf_plan: HFPlan) -> Any:
    """Shard a model according to its plan, first over tp, then over the data ranks."""
    tp, data = meshes(mesh)
    apply_plan(model, tp, hf_plan.table)
    if hf_plan.head is not None:
        watch_labels(model, hf_plan.head)
        hf_plan.head.gathered_by_fsdp = data is not None
    if data is not None:
        shard_over_data(model, hf_plan.blocks, data)
    return model


def meshes(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The tp mesh, and the mesh of the data ranks (None if there is only one data rank).

    Raises:
        ValueError: the mesh has dims that `parallelize_hf` does not accept.
    """
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
    """Check that all ranks have the same weights, because each rank takes its shards from its own copy of them.

    Raises:
        ValueError: a parameter differs between ranks; the message names the parameter and the ranks.
    """
    real = {name: p for name, p in model.named_parameters() if not p.is_meta}
    for dim in range(mesh.ndim):
        try:
            replica_check.check_equal(real, mesh.get_group(dim), "the model before it is cut")
        except RuntimeError as error:
            raise ValueError(f"{error}: load the same weights on every rank, or seed all alike") from None


def shard_over_data(model: nn.Module, blocks: list[str], mesh: DeviceMesh) -> None:
    """Apply FSDP2 (or HSDP) to each block, then to all other modules as one unit, so tied weights stay together."""
    allow_views()
    for module in (*(model.get_submodule(name) for name in blocks), model):
        fully_shard(module, mesh=mesh, shard_placement_fn=dim_to_cut)
