"""Verifies a plan on a small copy of the model: loss, logits and gradients must be the same sharded and unsharded.

A plausible plan can be wrong without raising any error. For example, gradients of per-head norms may not be summed, a
view may accept a wrong head count, a rank may use the slopes of other heads, a fused projection may be split in the
wrong way, or sharding may untie tied weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dtmega.interop.hf.tp import tiny
from dtmega.ops.shards import full_tensor

ODD = "odd length"  # the case in which the sharded copy gets the rows one by one, in another order
TOLERANCE = 2e-5  # in fp32, correct plans deviate by 1e-6 to 1e-8, and known wrong plans by at least 1e-2


@dataclass(frozen=True)
class Verification:
    """Deviations of a sharded model from an unsharded copy. Print the object to see a table.

    Attributes:
        errors: relative deviations from the unsharded copy, keyed by (case, tensor name); each value is the maximum
            over all ranks, or inf if the tensor is missing.
        raised: errors that the sharded model raised on this rank.
        tolerance: largest deviation at which a plan counts as correct.
    """

    errors: dict[tuple[str, str], float]
    raised: tuple[str, ...] = ()
    tolerance: float = TOLERANCE

    @property
    def ok(self) -> bool:
        return not self.wrong

    @property
    def wrong(self) -> dict[tuple[str, str], float]:
        return {key: error for key, error in self.errors.items() if not error <= self.tolerance}

    def __str__(self) -> str:
        """A table with each tensor's largest deviation over all cases."""
        worst: dict[str, float] = {}
        for (_, name), error in self.errors.items():
            worst[name] = max(worst.get(name, error), error)
        width = max(len(name) for name in worst)
        rows = [f"{name:<{width}}  {e:8.1e}  {'ok' if e <= self.tolerance else 'WRONG'}" for name, e in worst.items()]
        count = f"{len(self.errors) - len(self.wrong)} of {len(self.errors)} comparisons within {self.tolerance:.0e}"
        return "\n".join([*rows, *self.raised, count])


def verify(
    model: Any, mesh: DeviceMesh, parallelize: Callable[[Any, DeviceMesh], Any], own_batches: bool = False
) -> Verification:
    """Compare a small sharded copy of the model with an unsharded copy. All ranks must call this function.

    Args:
        model: `transformers` model, real or on meta, with all layers or those of one pipeline stage; only the config
            and the module classes are used.
        mesh: mesh over which the small copy is sharded.
        parallelize: function that shards the small copy.
        own_batches: whether each rank has its own batch, as with ep; if so, the gradients of sharded tensors are sums
            over the batches of all ranks.

    Raises:
        ValueError: `parallelize` refuses the small copy, no small copy can be built, or the small copy would prove
            nothing because it lacks a module class that the model has.
    """
    tp = mesh["tp"].size() if mesh.ndim > 1 else mesh.size()
    try:
        config, attention = tiny.tiny_config(model.config, tp), model.config._attn_implementation
        tiny.build(type(model), config, attention)
    except Exception as error:  # each family checks its sizes in its own way
        raise ValueError(
            f"the plan of '{model.config.model_type}' cannot be proven, since no small copy can be made: "
            f"{type(error).__name__}: {error}"
        ) from None
    seed = 3 + (mesh.get_local_rank() if own_batches else 0)
    summed_over = mesh.get_group() if own_batches else None
    errors: dict[tuple[str, str], float] = {}
    raised: list[str] = []
    for case, length, padded in (("plain", 4 * tp, False), ("padded", 4 * tp, True), (ODD, 4 * tp + 1, False)):
        truth, ours = (tiny.build(type(model), config, attention).to(mesh.device_type) for _ in range(2))
        if missing := sorted(_classes(model) - _classes(truth)):
            raise ValueError(
                f"the plan of '{model.config.model_type}' cannot be proven: its small copy has no {', '.join(missing)}"
            )
        inputs = {k: v.to(mesh.device_type) for k, v in tiny.batch(truth, length, padded, seed=seed).items()}
        ours = parallelize(ours, mesh)
        try:
            case_errors = deviations(ours, truth, inputs, summed_over, splits=case == ODD)
        except Exception as error:  # a plan is wrong if the sharded model raises any error
            raised.append(f"{case}: the cut model raised {type(error).__name__}: {error}")
            names = (name for name, _ in truth.named_parameters(remove_duplicate=False))
            case_errors = dict.fromkeys(("loss", "logits", *names), float("inf"))
        errors |= {(case, name): error for name, error in case_errors.items()}
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    return Verification(worst(errors, groups, mesh.device_type), tuple(raised))


def _classes(model: nn.Module) -> set[str]:
    """Class names of the modules that have parameters."""
    with_parameters = [module for module in model.modules() if list(module.parameters(recurse=False))]
    return {type(module).__name__ for module in with_parameters}


def deviations(
    ours: Any,
    truth: Any,
    inputs: dict[str, Tensor],
    summed_over: dist.ProcessGroup | None = None,
    splits: bool = False,
) -> dict[str, float]:
    """Run forward and backward in both models and compare loss, logits and every gradient.

    Args:
        ours: the sharded model.
        truth: the unsharded model.
        inputs: batch for both models.
        summed_over: group of ranks with different batches; the gradients of sharded tensors are sums over this group.
            None if all ranks have the same batch.
        splits: whether the sharded model gets the rows of the batch one by one, the last one first.

    Returns:
        The relative deviation of each tensor, keyed by tensor name.
    """
    results: list[dict[str, Any]] = []
    n_rows = len(inputs["input_ids"])
    one_by_one = [{name: row[i : i + 1] for name, row in inputs.items()} for i in range(n_rows)]
    for model, parts in ((truth, [inputs]), (ours, one_by_one[::-1] if splits else [inputs])):
        loss, logits = torch.zeros((), device=inputs["input_ids"].device), list[Tensor]()
        for part in parts:
            mean, outputs = tiny.outcome(model, part)
            logits.append(outputs.clone())
            (mean / len(parts)).backward()
            loss += mean.detach() / len(parts)
        grads = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
        results.append({"loss": loss, "logits": torch.cat(logits[::-1]), **grads})
    if summed_over is not None:
        for name, parameter in ours.named_parameters(remove_duplicate=False):
            if isinstance(parameter, DTensor):
                dist.all_reduce(results[0][name], group=summed_over)
    total = torch.stack([p.grad.norm() for p in truth.parameters() if p.grad is not None]).norm().item()
    return {name: deviation(results[1].get(name), x, total) for name, x in results[0].items()}


def deviation(ours: Tensor | None, truth: Tensor | None, of_all: float) -> float:
    """The relative deviation |ours - truth| / |truth|; inf if one tensor is missing or the shapes differ.

    If a gradient is only rounding noise, its deviation is divided by the norm of all gradients instead. For example, a
    key bias has only noise as its gradient, because softmax cancels the bias.

    Args:
        ours: tensor of the sharded model; None if that model lacks this tensor.
        truth: corresponding tensor of the unsharded model; None if that model lacks this tensor.
        of_all: norm of all gradients together.
    """
    if ours is None or truth is None:
        return 0.0 if ours is truth else float("inf")
    ours = full_tensor(ours)
    if ours.shape != truth.shape:
        return float("inf")
    size = truth.norm().item()
    is_noise = size < 1e-5 * of_all
    return (ours - truth).norm().item() / (of_all if is_noise else max(size, 1e-30))


def worst(
    errors: dict[tuple[str, str], float], groups: Sequence[dist.ProcessGroup], device_type: str
) -> dict[tuple[str, str], float]:
    """The largest deviations over all ranks of the groups; NaN counts as inf."""
    local = torch.tensor(list(errors.values()), dtype=torch.float64, device=device_type)
    largest = local.nan_to_num(torch.inf, torch.inf)
    for group in groups:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return dict(zip(errors, largest.tolist(), strict=True))
