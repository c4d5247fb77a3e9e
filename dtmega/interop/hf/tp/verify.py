"""The proof of a plan: a small clone of the model, cut, against one process: loss, logits, every gradient.

Plausible plans can be wrong without any error: per-head norms whose gradients nobody sums, head counts that a view
absorbs elsewhere, slopes of the wrong heads, fused projections cut in the wrong place, ties that sharding undid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dtmega.interop.hf.tp import tiny
from dtmega.ops.shards import full_tensor

TOLERANCE = 2e-5  # fp32 gives 1e-6 to 1e-8, the wrong plans we know 1e-2 and more


@dataclass(frozen=True)
class Verification:
    """
    Attributes:
        errors: case and name -> relative deviation from one process, the largest over all ranks; inf: missing.
        raised: what the cut model raised on this rank.
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
        """The worst of all cases for each name."""
        names = dict.fromkeys(name for _, name in self.errors)
        worst = {name: max(e for (_, n), e in self.errors.items() if n == name) for name in names}
        width = max(len(name) for name in names)
        rows = [f"{name:<{width}}  {e:8.1e}  {'ok' if e <= self.tolerance else 'WRONG'}" for name, e in worst.items()]
        count = f"{len(self.errors) - len(self.wrong)} of {len(self.errors)} comparisons within {self.tolerance:.0e}"
        return "\n".join([*rows, *self.raised, count])


def verify(model: Any, mesh: DeviceMesh, parallelize: Callable[[Any, DeviceMesh], Any]) -> Verification:
    """Compare a small clone of the model that `parallelize` cuts over `mesh` with one process. All ranks call it.

    Args:
        model: of `transformers`, real or on meta, whole or a stage; only the classes of its modules and its config are
            used.

    Raises:
        ValueError: what `parallelize` refuses; a clone that has not all that the model has, and so would prove nothing.
    """
    tp = mesh["tp"].size() if mesh.ndim > 1 else mesh.size()
    try:
        config, attention = tiny.tiny_config(model.config, tp), model.config._attn_implementation
        tiny.build(type(model), config, attention)
    except Exception as error:  # each family checks its sizes in its own way
        raise ValueError(
            f"the plan of '{model.config.model_type}' cannot be proven, since no small clone can be made: "
            f"{type(error).__name__}: {error}"
        ) from None
    errors: dict[tuple[str, str], float] = {}
    raised: list[str] = []
    for case, length, padded in (("plain", 4 * tp, False), ("padded", 4 * tp, True), ("odd length", 4 * tp + 1, False)):
        truth, ours = (tiny.build(type(model), config, attention).to(mesh.device_type) for _ in range(2))
        if lost := sorted(_classes(model) - _classes(truth)):
            raise ValueError(
                f"the plan of '{model.config.model_type}' cannot be proven: its small clone has no {', '.join(lost)}"
            )
        inputs = {k: v.to(mesh.device_type) for k, v in tiny.batch(truth, length, padded).items()}
        ours = parallelize(ours, mesh)
        try:
            found = deviations(ours, truth, inputs)
        except Exception as error:  # whatever it is, the plan is not right
            raised.append(f"{case}: the cut model raised {type(error).__name__}: {error}")
            names = (name for name, _ in truth.named_parameters(remove_duplicate=False))
            found = dict.fromkeys(("loss", "logits", *names), float("inf"))
        errors |= {(case, name): e for name, e in found.items()}
    return Verification(_worst(errors, mesh), tuple(raised))


def _classes(model: nn.Module) -> set[str]:
    """Names of the classes that have parameters."""
    return {type(module).__name__ for module in model.modules() if any(True for _ in module.parameters(recurse=False))}


def deviations(ours: Any, truth: Any, inputs: dict[str, Tensor]) -> dict[str, float]:
    """The relative deviations of loss, logits and every gradient, after a forward and backward of both."""
    results: list[dict[str, Any]] = []
    for model in (truth, ours):
        loss, logits = tiny.outcome(model, inputs)
        logits = logits.clone()
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
        results.append({"loss": loss.detach(), "logits": logits, **grads})
    total = torch.stack([p.grad.norm() for p in truth.parameters() if p.grad is not None]).norm().item()
    return {name: deviation(results[1].get(name), x, total) for name, x in results[0].items()}


def deviation(ours: Tensor | None, truth: Tensor | None, of_all: float) -> float:
    """|ours - truth| / |truth|; or of all gradients, if this one is 0 but for rounding.

    Softmax does not see a bias of the keys: its gradient is such noise.
    """
    if ours is None or truth is None:
        return 0.0 if ours is truth else float("inf")
    found = full_tensor(ours)
    if found.shape != truth.shape:
        return float("inf")
    size = truth.norm().item()
    return (found - truth).norm().item() / (of_all if size < 1e-5 * of_all else max(size, 1e-30))


def _worst(errors: dict[tuple[str, str], float], mesh: DeviceMesh) -> dict[tuple[str, str], float]:
    worst = torch.tensor(list(errors.values()), dtype=torch.float64, device=mesh.device_type).nan_to_num(
        torch.inf, torch.inf
    )
    for dim in range(mesh.ndim):
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    return dict(zip(errors, worst.tolist(), strict=True))
