"""The named tensors in a checkpoint: the weights, and the optimizer's state for each trained parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from dtmega.checkpoint.reader import Checkpoint
from dtmega.checkpoint.state import Base


def tensors_of(
    stored: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, base: Base | None = None
) -> dict[str, Tensor]:
    """The tensors to save: `model/NAME`, and the optimizer's, such as `optimizer/exp_avg/NAME`.

    Frozen parameters have no optimizer state. All parameters have had the same number of updates, which is saved once,
    in `State`.

    Args:
        stored: this rank's shards of the parameters and buffers, keyed by name.
        optimizer: optimizer of the trained parameters.
        base: base that holds the frozen parameters; None if the checkpoint holds all parameters.
    """
    elsewhere = base.digests if base else {}
    stored = {n: p for n, p in stored.items() if n not in elsewhere}
    trained = {n: p for n, p in stored.items() if p.requires_grad}
    # Fails if FSDP has left a module unsharded: the optimizer does not know the unsharded parameters in `stored`.
    assert not optimizer.state or all(p in optimizer.state for p in trained.values())
    counts = {int(state["step"]) for state in optimizer.state.values() if "step" in state}
    assert len(counts) <= 1, f"parameters have been updated {counts} times"
    tensors: dict[str, Tensor] = {f"model/{n}": p.detach() for n, p in stored.items()}
    for n, p in trained.items():
        tensors |= {f"optimizer/{key}/{n}": t for key, t in optimizer.state.get(p, {}).items() if key != "step"}
    return tensors


def targets_of(
    checkpoint: Checkpoint,
    stored: Iterable[tuple[str, Tensor]],
    optimizer: torch.optim.Optimizer,
    n_updates: int,
    base: Base | None = None,
) -> dict[str, list[Tensor]]:
    """List the tensors to fill, keyed by name in the checkpoint (see `tensors_of`).

    The function replaces the optimizer's state with zero tensors and includes these tensors in the result.

    Args:
        checkpoint: checkpoint to load.
        stored: (name, parameter) pairs of this rank; a name may appear twice.
        optimizer: optimizer of these parameters.
        n_updates: number of weight updates so far.
        base: base that holds the tensors that the checkpoint leaves out; None if the checkpoint holds all tensors.

    Raises:
        ValueError: the checkpoint lacks a tensor or holds a tensor in a different shape.
    """
    elsewhere = base.digests if base else {}
    saved = checkpoint.manifest.tensors
    kinds = sorted({n.split("/")[1] for n in saved if n.startswith("optimizer/")})
    targets: dict[str, list[Tensor]] = {}
    optimizer.state.clear()
    # Muon and AdamW keep different moments for their parameters.
    kinds_of: dict[Tensor, Sequence[str]] = {}
    for group in optimizer.param_groups if kinds else ():
        kinds_of |= dict.fromkeys(group["params"], group.get("moments", kinds))
    for n, p in stored:
        if n in elsewhere:
            if p.requires_grad:
                raise ValueError(_trained_now(checkpoint, n))
            continue
        targets.setdefault(f"model/{n}", []).append(p.detach())
        moments = {kind: torch.zeros_like(p) for kind in kinds_of.get(p, ()) if p.requires_grad}
        for kind, moment in moments.items():
            targets.setdefault(f"optimizer/{kind}/{n}", []).append(moment)
        if moments:
            # torch's Adam keeps the number of updates in its state; SGD does not.
            counted = {"step": torch.tensor(float(n_updates), device=p.device)} if "exp_avg" in moments else {}
            optimizer.state[p] = {**counted, **moments}
    for n, copies in targets.items():
        parameter = n.split("/")[-1]
        if n not in saved and n != f"model/{parameter}" and f"model/{parameter}" in saved:
            raise ValueError(_trained_now(checkpoint, parameter))
        if n not in saved:
            raise ValueError(f"{checkpoint.path} is of another model: it has no '{n}' ([model])")
        if saved[n].shape != tuple(copies[0].shape):
            raise ValueError(
                f"{checkpoint.path} is of another model: '{n}' is {list(saved[n].shape)} there, "
                f"{list(copies[0].shape)} here ([model])"
            )
    return targets


def _trained_now(checkpoint: Checkpoint, name: str) -> str:
    """The error message about a parameter that was frozen when the checkpoint was saved."""
    return (
        f"{checkpoint.path} has no moments of '{name}', which was frozen then and is trained now: freeze it, or start "
        f"a new run from these weights ([model] init_from, [checkpoint] resume = 'none')"
    )
