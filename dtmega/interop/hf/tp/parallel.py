"""Cut a model of `transformers`: refuse, plan, cut over tp, then FSDP2."""

from __future__ import annotations

import functools
import warnings
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from dtmega.distributed import replica_check
from dtmega.interop.hf import families
from dtmega.interop.hf.tp import plan
from dtmega.interop.hf.tp.generic import COST, generic_plan
from dtmega.interop.hf.tp.native import native_plan
from dtmega.interop.hf.tp.plan import HFPlan, family_plan
from dtmega.interop.hf.tp.verify import verify
from dtmega.interop.hf.tp.vocab import LogitsHead
from dtmega.ops.shards import dim_to_cut
from dtmega.plans.apply import apply_plan


def plan_for(
    model: Any, tp: int = 2, sequence_parallel: bool = True, loss_parallel: bool = True, *, generic: bool = False
) -> HFPlan:
    """The plan that `parallelize_hf` would carry out, to be printed; nothing is done.

    Args:
        model: of `transformers`, real or on meta.
        generic: plan any model: what nobody knows how to cut stays whole, or computes on DTensors where there is no
            plan at all.

    Raises:
        ValueError: a model that has no plan, or sizes that tp cannot share.
    """
    plan.check(model, "meta")
    family = model.config.model_type
    with_styles = [name for name, known in families.KNOWN.items() if known.styles]
    if family in with_styles:
        made = family_plan(model, tp, sequence_parallel, loss_parallel)
    elif tp == 1 or getattr(model.config, "base_model_tp_plan", None):
        made = native_plan(model, tp, loss_parallel, rest_whole=generic or tp == 1)
    elif generic:
        made = generic_plan(model, tp, loss_parallel)
    else:
        raise ValueError(
            f"no plan for model_type '{family}': it is none of {', '.join(with_styles)}, and its config has no "
            f"base_model_tp_plan; parallelize_hf(..., generic=True) computes any model on DTensors, slowly"
        )
    made.parameters = plan.parameters(made, model)
    if drops := plan.dropouts(model):
        made.notes.append(f"dropout ({', '.join(drops)}): its masks are not those of one process")
    return made


def parallelize_hf(
    model: Any,
    mesh: DeviceMesh,
    sequence_parallel: bool = True,
    loss_parallel: bool = True,
    *,
    generic: bool = False,
    verify_native: bool = True,
) -> Any:
    """Cut an unmodified model of `transformers` over tp, and with FSDP2 over what else the mesh has. In place.

    Every parameter becomes a DTensor, tied ones stay one parameter. The model is called as before: `model(input_ids,
    attention_mask=..., labels=...)` has the loss, `generate` works with its cache. Gradients are those of one process
    after each backward (under FSDP2: of the mean of the data ranks' losses).

    Args:
        model: real (then the same on every rank, which is checked) or on meta.
        mesh: 1-D, or with dims named "tp" and before it "dp_shard", or "dp_replicate" and "dp_shard" (HSDP).
        sequence_parallel: between attention and feed-forward a rank has S/tp of the tokens, in every forward whose S tp
            divides; others, forwards with output_hidden_states, and models with a plan of transformers' own are plain
            tensor parallel.
        loss_parallel: with labels, the loss is made of each rank's part of the logits; `out.logits` are then computed
            when they are first used, by all ranks of tp together.
        generic: a model without any plan computes on DTensors, with a warning; what a plan of transformers' own says
            and we have no word for (experts) is whole on every rank.
        verify_native: prove a plan that transformers brings on a small clone first, as `verify_plan` does (a second).

    Returns:
        The model.

    Raises:
        ValueError: a model that has no plan, sizes that tp cannot share, weights that differ between ranks, a mesh with
            other dims, a plan of transformers' own that is wrong. Nothing is changed then.
    """
    tp, _ = meshes(mesh)
    plan.check(model, mesh.device_type)
    made = plan_for(model, tp.size(), sequence_parallel, loss_parallel, generic=generic)
    check_modules(model, tp, made)
    check_copies(model, mesh)
    if made.native and verify_native:
        prove(model, mesh, made, loss_parallel=loss_parallel, generic=generic)
    if generic and COST.format(family=made.family) in made.notes:
        warnings.warn(COST.format(family=made.family), stacklevel=2)
    return cut(model, mesh, made)


def cut_stage(stage: nn.Module, model: Any, tp: DeviceMesh, sequence_parallel: bool) -> None:
    """Cut, for the trainer, the model in `stage` over tp only, with a fused loss on one rank too.

    Args:
        stage: what is called with labels or without.
        model: of `transformers`, on meta, whole or one stage of a pipeline.

    Raises:
        ValueError: as `parallelize_hf`.
    """
    if tp.size() > 1:
        made = plan_for(model, tp.size(), sequence_parallel)
        check_modules(model, tp, made)
        if made.native:
            prove(model, tp, made)
        apply_plan(model, tp, made.table)
        head = made.head
    else:
        module = model.get_output_embeddings()
        head = LogitsHead(fused=True) if isinstance(module, nn.Linear) else None
        if head is not None:
            head.fuse(module)
    if head is not None:
        watch_labels(stage, head)
    allow_views()


def check_modules(model: Any, tp: DeviceMesh, made: HFPlan) -> None:
    for pattern, style in made.table.items():
        for _, module in plan.matching(model, pattern):
            style.check(module, tp.size())  # pyright: ignore[reportAttributeAccessIssue]


def prove(model: Any, mesh: DeviceMesh, made: HFPlan, **options: bool) -> None:
    """Cut a small clone with the same options, which is not proven in turn, and compare.

    Raises:
        ValueError: it computes something else than one process.
    """
    proof = verify(model, mesh, functools.partial(parallelize_hf, verify_native=False, **options))
    if not proof.ok:
        raise ValueError(f"the plan that transformers brings for '{made.family}' is wrong:\n{proof}")


def cut(model: Any, mesh: DeviceMesh, made: HFPlan) -> Any:
    """Cut a model by its plan."""
    tp, data = meshes(mesh)
    apply_plan(model, tp, made.table)
    if made.head is not None:
        watch_labels(model, made.head)
        made.head.gathered_by_fsdp = data is not None
    if data is not None:
        shard_over_data(model, made.blocks, data)
    return model


def meshes(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The mesh of tp, and that of FSDP2 or None."""
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
    """Check that all ranks have the same weights, since each takes its part from its own.

    Raises:
        ValueError: names a parameter that differs, and the ranks.
    """
    real = {name: p for name, p in model.named_parameters() if not p.is_meta}
    for dim in range(mesh.ndim):
        try:
            replica_check.check_equal(real, mesh.get_group(dim), "the model before it is cut")
        except RuntimeError as error:
            raise ValueError(f"{error}: load the same weights on every rank, or seed all alike") from None


def watch_labels(model: nn.Module, head: LogitsHead) -> None:
    def look(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        head.labelled = kwargs.get("labels") is not None

    model.register_forward_pre_hook(look, with_kwargs=True)


def shard_over_data(model: nn.Module, blocks: list[str], mesh: DeviceMesh) -> None:
    """Apply FSDP2 (or HSDP) to each block, then to the rest, so that tied weights are in one group."""
    allow_views()
    for module in (*(model.get_submodule(name) for name in blocks), model):
        fully_shard(module, mesh=mesh, shard_placement_fn=dim_to_cut)


def allow_views() -> None:
    """Silence FSDP2's warning of blocks that return a view, as OPT's do: no family changes one in place."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
