"""Tensor parallelism as a table: pattern of names -> how that module is cut over the tp axis.

table = plans.bloom.plan(cfg.model)              # styles.py has the words
partial = apply_plan(model, mesh, table)       # on meta, before fully_shard; then to_empty, tie, initial values
shard_buffers(model, mesh, table)              # once the buffers have values
sum_partial_gradients(model, partial, mesh)    # after the last backward of a step, before the gradient norm
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

from dtmega.plans.base import Style, distribute
from dtmega.plans.styles import Enter, Plan, ShardBuffer
from dtmega.shards import local


def apply_plan(model: nn.Module, mesh: DeviceMesh, plan: Plan) -> list[str]:
    """Cut the model over `mesh`: every parameter becomes a DTensor on it, and tied ones stay one parameter.

    Nothing is communicated: each rank takes its part of what it holds whole, or of meta tensors.

    Args:
        model: a whole model, or a pipeline stage, where modules of other stages are None or not in their ModuleDict.
        mesh: the 1-D tp mesh.
        plan: names, with `*` for one component and "" for the model itself, to styles.

    Returns:
        Names of the parameters whose gradients `sum_partial_gradients` must sum.

    Raises:
        ValueError: a pattern that matches nothing, a matrix in no pattern, a size that the axis does not divide, an
            input that is taken in twice or not at all.
    """
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(parameter, []).append((module, name))
    partial: set[tuple[nn.Module, str]] = set()
    entered: list[str] = []
    inside: list[str] = []
    for pattern, style in plan.items():
        for name, found in _matches(model, pattern):
            if isinstance(style, ShardBuffer):
                _check_buffer(name, found, style, mesh.size())
            elif found is not None:
                parallelize_module(found, mesh, style, src_data_rank=None)
                if isinstance(style, Style):
                    partial |= {(found, p) for p in style.partial_gradients(found, mesh.size())}
                if isinstance(style, Style | Enter):
                    entered += [name] * style.enters
                    inside += [name] * style.inside
    n_products = Counter(_check_regions(entered, inside))
    for name in entered:
        model.get_submodule(name).alone = n_products[name] == 1  # pyright: ignore[reportArgumentType]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.ndim >= 2 and not isinstance(parameter, DTensor):
            raise ValueError(f"no row of the plan cuts {name} {list(parameter.shape)}: a matrix needs a style")
    for parameter, places in owners.items():
        cut = [p for p in (module.get_parameter(name) for module, name in places) if isinstance(p, DTensor)]
        if len({p.placements for p in cut}) > 1:
            raise ValueError(
                f"a tied parameter {list(parameter.shape)} is cut in two ways: {[p.placements for p in cut]}"
            )
        one = cut[0] if cut else distribute(parameter, mesh, Replicate())
        for module, name in places:
            module.register_parameter(name, one)
    prefixes = {module: f"{name}." if name else "" for name, module in model.named_modules()}
    summed = {prefixes[module] + name for module, name in partial}
    return [name for name, _ in model.named_parameters() if name in summed]


def check_plan(model: nn.Module, plan: Plan, tp: int) -> None:
    """Refuse what a plan cannot share among tp ranks; before there is a mesh, and a whole model on meta is enough.

    Raises:
        ValueError: as `apply_plan`, of a size that tp does not divide, or a style on what it is not for.
    """
    for pattern, style in plan.items():
        for name, found in _matches(model, pattern):
            if isinstance(style, ShardBuffer):
                _check_buffer(name, found, style, tp)
            elif isinstance(style, Style) and found is not None:
                style.check(found, tp)


def keep_gathered(model: nn.Module) -> None:
    """Let regions keep their gathered input for backward, where gathering it again would cost more than it saves.

    That is in blocks that are computed again, where backward has gathered it just now; and where backward runs in two
    parts, of which only torch's own product can run one without the other.
    """
    for module in model.modules():
        if hasattr(module, "gathers_again"):
            module.gathers_again = False  # pyright: ignore[reportArgumentType]


def shard_buffers(model: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
    """Keep this rank's part of each buffer the plan cuts; once, after the buffers have their values.

    Raises:
        ValueError: a buffer that is not whole (any more).
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
        model: cut by `apply_plan`, also if FSDP2 cut it again: a rank's tp peers hold the same part over dp.
        names: what `apply_plan` returned; parameters without a gradient are left out.
        mesh: the 1-D tp mesh.
    """
    grads = [local(grad) for grad in (model.get_parameter(name).grad for name in names) if grad is not None]
    if not grads or mesh.size() == 1:
        return
    # FSDP2's CPU offload leaves gradients in host memory, where the group of the mesh cannot reduce.
    flat = torch.cat([g.flatten() for g in grads]).to(mesh.device_type)
    dist.all_reduce(flat, group=mesh.get_group())
    for grad, total in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(total.view_as(grad))


def _matches(model: nn.Module, pattern: str) -> list[tuple[str, Any]]:
    """(name, module or buffer) of all that a pattern names; (name, None) where another pipeline stage has it."""
    found: list[tuple[str, Any]] = [("", model)]
    for part in pattern.split(".") if pattern else []:
        step: list[tuple[str, Any]] = []
        for prefix, owner in found:
            if owner is None or (part == "*" and isinstance(owner, nn.ModuleDict) and not owner):
                step.append((prefix, None))
                continue
            names = [name for name, _ in owner.named_children()] if part == "*" else [part]
            step += [(f"{prefix}.{n}".lstrip("."), getattr(owner, n)) for n in names if hasattr(owner, n)]
        found = step
    if not found:
        have = {re.sub(r"\b\d+\b", "*", name) for name, _ in [*model.named_modules(), *model.named_buffers()]}
        near = difflib.get_close_matches(pattern, have, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ValueError(f"'{pattern}' of the plan matches nothing in {type(model).__name__}{hint}")
    return found


def _check_regions(entered: list[str], inside: list[str]) -> list[str]:
    """Check that a rank's features come from an input that was taken in once: any other gives wrong gradients.

    Returns:
        Of each name in `inside` where that was.
    """
    found = []
    for name in inside:
        around = [e for e in entered if e in ("", name) or name.startswith(f"{e}.")]
        if len(around) != 1:
            raise ValueError(
                f"the input of {name} is taken in by {around or 'nothing'} of the plan, expected one: an Enter on a "
                f"module around it, or Column(...).entering()"
            )
        found += around
    return found


def _check_buffer(name: str, buffer: Any, style: ShardBuffer, tp: int) -> None:
    if not isinstance(buffer, Tensor) or buffer.shape[style.dim] != style.size:
        what = list(buffer.shape) if isinstance(buffer, Tensor) else type(buffer).__name__
        raise ValueError(f"'{name}' of the plan: expected a buffer with {style.size} in dim {style.dim}, got {what}")
    if style.size % tp:
        raise ValueError(f"tp={tp} does not divide {style.size}, dim {style.dim} of buffer '{name}' ([mesh] tp)")
