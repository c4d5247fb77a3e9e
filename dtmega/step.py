"""One optimizer step on one global batch: the loop repeats it, and the time of a step is its time."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtmega import drift, mesh, optim
from dtmega.checkpoint.run import Checkpoints
from dtmega.config import Config
from dtmega.data.loader import StepBatch, TrainBatches
from dtmega.data.objectives import Objective
from dtmega.data.sums import divisors, loss_of, means_of
from dtmega.data.text import Text
from dtmega.job import Ending
from dtmega.loss_scale import LossScale
from dtmega.mesh import World
from dtmega.metrics import Metrics
from dtmega.optim import Spikes
from dtmega.parallelize import ShardedModel
from dtmega.watch import Watch


class Run(NamedTuple):
    """All that the loop works with.

    Attributes:
        asked: the configuration as it was given, which config.toml and checkpoints keep: what it leaves open is decided
            on another layout otherwise.
        cfg: the same, decided.
        digest: of the directory that the model is read from; '' where there is none.
        loss_scale: float16's; None in another precision.
        ending: the record of the run's end.
    """

    asked: Config
    cfg: Config
    world: World
    text: Text
    model: ShardedModel
    optimizer: torch.optim.Optimizer
    batches: TrainBatches
    spikes: Spikes
    checkpoints: Checkpoints
    metrics: Metrics
    watch: Watch
    ending: Ending
    digest: str = ""
    loss_scale: LossScale | None = None


class Outcome(NamedTuple):
    """The result of a step; all ranks agree in it.

    Attributes:
        loss: the weighted sum of the means.
        skipped: no weight was changed, because of a loss or gradient that is not finite, or a spike.
        means: of each sum, by name.
        loss_scale: that float16's gradients were computed with; None in another precision.
        overflowed: skipped because one of these was not finite.
    """

    loss: float
    grad_norm: float
    skipped: bool
    means: dict[str, float]
    loss_scale: float | None = None
    overflowed: bool = False


def train_step(run: Run, batch: StepBatch) -> Outcome:
    """One optimizer step on one global batch.

    Each sum over the whole batch is divided by its count, so microbatches and layout cannot change the loss.
    """
    cfg, world, model = run.cfg, run.world, run.model
    run.watch.enter("forward")
    sums = model.objective.sums
    counts = divisors(count(world, model.objective, batch))
    run.optimizer.zero_grad()
    scale = None if run.loss_scale is None else run.loss_scale.scale
    totals = model.forward_backward(to(world.device, batch.microbatches), counts, scale)
    run.watch.enter("reduce")
    counted, gradients = model.gradients(), model.gradients(every=True)
    if scale is not None:
        optim.unscale(gradients, scale)
    totals, squared_norm = over_ranks(world, totals, optim.squared_norm(counted))
    means = means_of(sums, totals, counts)
    loss = loss_of(sums, means)
    grad_norm = math.sqrt(squared_norm)
    # What is not finite on one rank is not in the norm, which all ranks share.
    overflowed = run.loss_scale is not None and not math.isfinite(grad_norm)
    if run.loss_scale is not None:
        run.loss_scale.update(overflowed)
    skip = not (math.isfinite(loss) and math.isfinite(grad_norm)) or run.spikes.is_spike(loss, grad_norm)
    run.watch.enter("optimizer")
    if not skip:
        optim.clip_gradients(gradients, grad_norm, cfg.optim.clip_grad)
        run.optimizer.step()
    mesh.synchronize(world.device)  # on a GPU the update has only been launched
    return Outcome(loss, grad_norm, skip, means, scale, overflowed)


def over_ranks(world: World, totals: Tensor, squared_norm: Tensor) -> tuple[Tensor, float]:
    """Add up the totals over the `loss` group and the squares over `shards`, in the order of ranks.

    All ranks tell all others both, in one message that the host waits for once.

    Args:
        totals: [sums] fp64, of this rank.
        squared_norm: fp64 scalar, of this rank's gradients.

    Returns:
        The same of the whole, on the host.
    """
    everyone = dist.group.WORLD
    assert everyone is not None
    mine = torch.cat([totals, squared_norm.to(totals.device).view(1)])
    found = drift.gather_vectors(mine, everyone).cpu()
    of_loss = dist.get_process_group_ranks(world.groups["loss"])
    of_shards = dist.get_process_group_ranks(world.groups["shards"])
    return found[of_loss, :-1].sum(0), found[of_shards, -1].sum().item()


def count(world: World, objective: Objective, batch: StepBatch) -> dict[str, float]:
    """Count over the global batch what each divisor of the objective counts; 0 where there is none of it."""
    found = [objective.counts(microbatch) for microbatch in batch.microbatches]
    mine = {name: sum(counts[name] for counts in found) for name in found[0]}
    counts = torch.tensor([*mine.values()], dtype=torch.float64, device=world.device)
    dist.all_reduce(counts, group=world.groups["data"])
    return dict(zip(mine, counts.tolist(), strict=True))


def check_same_batch(batch: StepBatch, world: World) -> None:
    """Ranks that compute a microbatch together were given the same one."""
    tokens = torch.cat([microbatch["tokens"] for microbatch in batch.microbatches]).to(world.device)
    drift.check_equal({"tokens": tokens}, world.groups["model"], "the first batch, which tp and pp ranks must share")


def signalled(run: Run) -> bool:
    """Tell whether a signal has come, to any rank; all say the same."""
    seen = torch.tensor(len(run.watch.signals), device=run.world.device)
    dist.all_reduce(seen, dist.ReduceOp.MAX)
    return bool(seen.item())


def to(device: torch.device, microbatches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [{name: t.to(device, non_blocking=True) for name, t in m.items()} for m in microbatches]
