"""Tensor parallelism as a table: pattern of module names -> style that says how tp cuts these modules.

    table = plans.bloom.plan(cfg.model)            # styles.py lists the styles
    partial = apply_plan(model, mesh, table)       # on meta, before fully_shard; then to_empty, tie, initial values
    shard_buffers(model, mesh, table)              # once the buffers have values
    sum_partial_gradients(model, partial, mesh)    # after the last backward of a step, before the gradient norm

`check_plan` checks that a plan fits a model, before there is a mesh.
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
from dtmega.plans.base import Style, distribute
from dtmega.plans.styles import Enter, Plan, ShardBuffer

# Parameter of a model before the cut -> pairs of a module that holds the parameter and its name there. A tied parameter
# has several.
Owners = dict[nn.Parameter, list[tuple[nn.Module, str]]]


def apply_plan(model: nn.Module, mesh: DeviceMesh, plan: Plan) -> list[str]:
    """Cut the model over `mesh`: every parameter becomes a DTensor on it, and tied ones stay one parameter.

    Nothing is communicated: each rank takes its part of the parameters that it holds whole, or of meta tensors.

    Args:
        model: a whole model, or a pipeline stage, in which modules of other stages are None or missing from their
            ModuleDict.
        mesh: the 1-D tp mesh.
        plan: style for each pattern of names; `*` stands for one component of a name, "" for the model itself.

    Returns:
        Names of the parameters whose gradients `sum_partial_gradients` must sum.

    Raises:
        ValueError: a pattern that matches nothing; a matrix that no pattern names; a size that tp does not divide; a
            cut module whose input passes through no Enter, or through several.
    """
    # Styles replace parameters one by one, which unties them. So we note first which modules share a parameter, and tie
    # them again at the end.
    owners = _owners(model)
    partial: set[tuple[nn.Module, str]] = set()
    entered: list[str] = []
    inside: list[str] = []
    for pattern, style in plan.items():
        for name, match in _matches(model, pattern):
            if isinstance(style, ShardBuffer):
                _check_buffer(name, match, style, mesh.size())
                continue
            if match is None:  # another pipeline stage has it
                continue
            parallelize_module(match, mesh, style, src_data_rank=None)
            if isinstance(style, Style):
                partial |= {(match, p) for p in style.partial_gradients(match, mesh.size())}
            if isinstance(style, Style | Enter):
                entered += [name] * style.enters
                inside += [name] * style.inside
    # If a region has only one product, the product overlaps its communication in a compiled block too (products.py).
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
    """Replicate the vectors that no style has cut, and tie the parameters that were tied before.

    If a style has cut a tied parameter in one module, all modules that share it get the cut parameter.
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
    """The names in the whole model of parameters, each given as a module and a name in that module.

    They are in the order of the model, so that all ranks sum them in the same order. A tied parameter comes once.
    """
    prefixes = {module: f"{name}." if name else "" for name, module in model.named_modules()}
    full_names = {prefixes[module] + name for module, name in parameters}
    return [name for name, _ in model.named_parameters() if name in full_names]


def check_plan(model: nn.Module, plan: Plan, tp: int) -> None:
    """Refuse a plan that cannot cut the model over tp ranks. This needs no mesh, and the model may be on meta.

    Raises:
        ValueError: a pattern that matches nothing, a size that tp does not divide, or a style for a different kind of
            module.
    """
    for pattern, style in plan.items():
        for name, match in _matches(model, pattern):
            if isinstance(style, ShardBuffer):
                _check_buffer(name, match, style, tp)
            elif isinstance(style, Style) and match is not None:
                style.check(match, tp)


def keep_gathered(model: nn.Module) -> None:
    """Make regions keep their gathered input for backward. Call it if gathering again costs more than it saves.

    There are two such cases. If blocks are recomputed, the recomputed forward gathers the input just before backward
    needs it. If backward runs in two parts (zero-bubble schedules), only torch's own product can run them separately.
    """
    for module in model.modules():
        if hasattr(module, "gathers_again"):
            module.gathers_again = False  # pyright: ignore[reportArgumentType]


def shard_buffers(model: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
    """Replace each buffer that the plan cuts by this rank's part. Call it once, after the buffers have their values.

    Raises:
        ValueError: a buffer that is not whole, for instance because it was cut before.
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
    """Sum the gradients of these parameters over tp, all in one all-reduce (Megatron's `allreduce_layernorm_grads`).

    Args:
        model: a model cut by `apply_plan`, and perhaps also by FSDP2. Even then all ranks of the tp mesh hold the same
            part, so that local parts can be summed as they are.
        names: names that `apply_plan` returned; parameters without a gradient are left out.
        mesh: the 1-D tp mesh.
    """
    parameters = [model.get_parameter(name) for name in names]
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    if not grads or mesh.size() == 1:
        return
    # FSDP2's CPU offload leaves gradients in host memory, where the group of the mesh cannot reduce.
    flat = torch.cat([g.flatten() for g in grads]).to(mesh.device_type)
    dist.all_reduce(flat, group=mesh.get_group())
    for grad, total in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(total.view_as(grad))


def _matches(model: nn.Module, pattern: str) -> list[tuple[str, Any]]:
    """The modules or buffers that match a pattern, as (name, match), or (name, None) if another stage has them.

    The pattern is followed component by component, from the model down; `*` branches to all children.
    """
    matches: list[tuple[str, Any]] = [("", model)]
    for component in pattern.split(".") if pattern else []:
        children: list[tuple[str, Any]] = []
        for prefix, owner in matches:
            # On a pipeline stage without layers `*` finds an empty ModuleDict: all layers are on other stages.
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
    """Check that the input of each cut product passes exactly one Enter.

    The gradient of the input is summed over tp once for each Enter. Without an Enter it would be only this rank's part,
    and with two it would be tp times too large.

    Args:
        entered: names of the modules whose input enters a region.
        inside: names of the modules that compute on such an input.

    Returns:
        The name in `entered` for each name in `inside`.
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
