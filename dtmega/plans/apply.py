"""Tensor parallelism as a table: pattern of module names -> style that defines how tp shards these modules.

    table = plans.bloom.plan(cfg.model)            # styles.py lists the styles
    partial = apply_plan(model, mesh, table)       # on meta, before fully_shard; then to_empty, tie, initial values
    shard_buffers(model, mesh, table)              # after the buffers get their values
    sum_partial_gradients(model, partial, mesh)    # after the last backward of a step, before the gradient norm

`check_plan` checks that a plan fits a model, and needs no mesh.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import parallelize_module

from dtmega.ops.shards import local
from dtmega.plans.base import Style, distribute, has_adapter
from dtmega.plans.styles import Enter, Plan, ShardBuffer

# Unsharded parameter -> (module that holds the parameter, name of the parameter in that module). A tied parameter has
# several such pairs.
Owners = dict[nn.Parameter, list[tuple[nn.Module, str]]]


def apply_plan(model: nn.Module, mesh: DeviceMesh, plan: Plan) -> list[str]:
    """Shard the model over `mesh`: every parameter becomes a DTensor on the mesh, and tied parameters stay tied.

    The ranks do not communicate: each rank starts with full parameters, or meta tensors, and keeps only its own shards.

    Args:
        model: whole model or pipeline stage. In a stage, modules of other stages are None or missing from their
            ModuleDict.
        mesh: 1-D tp mesh.
        plan: pattern of module or buffer names -> style. `*` matches one component of a name; "" matches the model.

    Returns:
        Names of the parameters whose gradients `sum_partial_gradients` must all-reduce.

    Raises:
        ValueError: a pattern matches nothing; a matrix matches no pattern; tp does not divide a size; or the input of a
            sharded module passes through no Enter, or through several Enters.
    """
    # Styles replace parameters one by one, which unties tied parameters. Therefore, record first which modules share a
    # parameter, and tie the parameters again at the end.
    owners = _owners(model)
    partial: set[tuple[nn.Module, str]] = set()
    entered: list[str] = []
    inside: list[str] = []
    for pattern, style in plan.items():
        for name, match in _matches(model, pattern):
            if isinstance(style, ShardBuffer):
                _check_buffer(name, match, style, mesh.size())
                continue
            if match is None:  # the module belongs to a different pipeline stage
                continue
            parallelize_module(match, mesh, style, src_data_rank=None)
            if isinstance(style, Style):
                partial |= {(match, p) for p in style.partial_gradients(match, mesh.size())}
            if isinstance(style, Style | Enter):
                entered += [name] * style.enters
                inside += [name] * (style.inside * (1 + has_adapter(match)))
    # With only one product in a region, communication and computation overlap in compiled blocks too (products.py).
    n_products = Counter(_check_regions(entered, inside))
    for name in entered:
        model.get_submodule(name).has_one_product = n_products[name] == 1  # pyright: ignore[reportArgumentType]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.ndim >= 2 and not isinstance(parameter, DTensor):
            raise ValueError(f"no row of the plan cuts {name} {list(parameter.shape)}: a matrix needs a style")
    _distribute_rest(owners, mesh)
    return _full_names(model, partial)


def _owners(model: nn.Module) -> Owners:
    owners: Owners = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(parameter, []).append((module, name))
    return owners


def _distribute_rest(owners: Owners, mesh: DeviceMesh) -> None:
    """Replicate the vectors that no style has distributed, and tie again the parameters that were tied before.

    If a style has distributed a tied parameter in one module, all modules that share the parameter get that DTensor.
    """
    for parameter, places in owners.items():
        now = [module.get_parameter(name) for module, name in places]
        cut = [p for p in now if isinstance(p, DTensor)]
        if len({p.placements for p in cut}) > 1:
            raise ValueError(
                f"a tied parameter {list(parameter.shape)} is cut in two ways: {[p.placements for p in cut]}"
            )
        shared = cut[0] if cut else distribute(parameter, mesh, Replicate())
        for module, name in places:
            module.register_parameter(name, shared)


def _full_names(model: nn.Module, parameters: set[tuple[nn.Module, str]]) -> list[str]:
    """The full names of parameters that are given as pairs (module, name in the module).

    The names are in the order of the model, so that all ranks sum the gradients in the same order. A tied parameter
    appears once.
    """
    prefixes = {module: f"{name}." if name else "" for name, module in model.named_modules()}
    full_names = {prefixes[module] + name for module, name in parameters}
    return [name for name, _ in model.named_parameters() if name in full_names]


def check_plan(model: nn.Module, plan: Plan, tp: int) -> None:
    """Raise an error if the plan cannot shard the model over tp ranks. The model may be on meta; no mesh is needed.

    Raises:
        ValueError: a pattern matches nothing, tp does not divide a size, or a style does not fit a module.
    """
    for pattern, style in plan.items():
        for name, match in _matches(model, pattern):
            if isinstance(style, ShardBuffer):
                _check_buffer(name, match, style, tp)
            elif isinstance(style, Style) and match is not None:
                style.check(match, tp)


def keep_gathered(model: nn.Module) -> None:
    """Make regions save their gathered input for backward, instead of gathering the input again.

    Saving the input is better in two cases. If blocks are recomputed, the recomputed forward gathers the input anyway,
    just before backward needs the input. If backward runs in two parts (zero-bubble schedules), only torch's own
    `F.linear` can run the two parts separately.
    """
    for module in model.modules():
        if hasattr(module, "gathers_again"):
            module.gathers_again = False  # pyright: ignore[reportArgumentType]


def shard_buffers(model: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
    """Replace each buffer in the plan with this rank's shard. Call this function after the buffers get their values.

    Raises:
        ValueError: a buffer does not have its full size, for example because the function was called twice.
    """
    for pattern, style in plan.items():
        if isinstance(style, ShardBuffer):
            for name, buffer in _matches(model, pattern):
                _check_buffer(name, buffer, style, mesh.size())
                owner, _, attribute = name.rpartition(".")
                part = buffer.chunk(mesh.size(), style.dim)[mesh.get_local_rank()].clone()
                setattr(model.get_submodule(owner), attribute, part)


@torch.no_grad()
def sum_partial_gradients(model: nn.Module, names: Iterable[str], mesh: DeviceMesh) -> None:
    """Sum the gradients of the named parameters over tp in one all-reduce (Megatron's `allreduce_layernorm_grads`).

    Args:
        model: model that `apply_plan` has sharded, and perhaps FSDP2 too. The ranks of the tp mesh hold corresponding
            FSDP2 shards of a parameter, so the local shards can be summed directly.
        names: names that `apply_plan` returned; parameters without a gradient are left out.
        mesh: 1-D tp mesh.
    """
    parameters = [model.get_parameter(name) for name in names]
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    if not grads or mesh.size() == 1:
        return
    # FSDP2's CPU offload leaves gradients in host memory, where the mesh's process group cannot reduce tensors.
    flat = torch.cat([g.flatten() for g in grads]).to(mesh.device_type)
    dist.all_reduce(flat, group=mesh.get_group())
    for grad, total in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(total.view_as(grad))


def _matches(model: nn.Module, pattern: str) -> list[tuple[str, Any]]:
    """The modules or buffers that match a pattern, as (name, match); `match` is None for a module on a different stage.

    The search follows the pattern component by component, from the model down, and branches to all children at `*`.
    """
    matches: list[tuple[str, Any]] = [("", model)]
    for component in pattern.split(".") if pattern else []:
        children: list[tuple[str, Any]] = []
        for prefix, owner in matches:
            # On a pipeline stage without layers, `*` finds an empty ModuleDict: all layers are on other stages.
            if owner is None or (component == "*" and isinstance(owner, nn.ModuleDict) and not owner):
                children.append((prefix, None))
                continue
            names = [name for name, _ in owner.named_children()] if component == "*" else [component]
            for name in names:
                if hasattr(owner, name):
                    children.append((f"{prefix}.{name}".lstrip("."), getattr(owner, name)))
        matches = children
    if not matches:
        names_in_model = [name for name, _ in [*model.named_modules(), *model.named_buffers()]]
        possible = {re.sub(r"\b\d+\b", "*", name) for name in names_in_model}
        near = difflib.get_close_matches(pattern, possible, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ValueError(f"'{pattern}' of the plan matches nothing in {type(model).__name__}{hint}")
    return matches


def _check_regions(entered: list[str], inside: list[str]) -> list[str]:
    """Check that the input of each sharded matrix product passes through exactly one Enter.

    Each Enter sums the gradient of the input over tp once. Without an Enter, the gradient would be only this rank's
    contribution. With two Enters, the gradient would be tp times too large.

    Args:
        entered: names of the modules whose input passes through an Enter.
        inside: names of the modules that compute on the input of a region.

    Returns:
        One name from `entered` for each name in `inside`: the module whose region contains the inner module.
    """
    regions = []
    for name in inside:
        around = [e for e in entered if e in ("", name) or name.startswith(f"{e}.")]
        if len(around) != 1:
            raise ValueError(
                f"the input of {name} passes {len(around)} Enters of the plan {around}, expected one: an Enter on a "
                f"module around it, or Column(...).entering()"
            )
        regions += around
    return regions


def _check_buffer(name: str, buffer: Any, style: ShardBuffer, tp: int) -> None:
    if not isinstance(buffer, Tensor) or buffer.shape[style.dim] != style.size:
        what = list(buffer.shape) if isinstance(buffer, Tensor) else type(buffer).__name__
        raise ValueError(f"'{name}' of the plan: expected a buffer with {style.size} in dim {style.dim}, got {what}")
    if style.size % tp:
        raise ValueError(f"tp={tp} does not divide {style.size}, dim {style.dim} of buffer '{name}' ([mesh] tp)")
