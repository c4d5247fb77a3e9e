"""One optimizer step on one global batch: what the loop repeats, what a step's time is the time of."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtmega import drift, mesh, optim
from dtmega.checkpoint.run import Checkpoints
from dtmega.config import Config
from dtmega.data.loader import IGNORED, StepBatch, TrainBatches
from dtmega.data.text import Text
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
    digest: str = ""


def train_step(run: Run, batch: StepBatch) -> tuple[float, float, bool]:
    """One optimizer step on one global batch: loss and gradient norm, in which all ranks agree, and if it was skipped.

    The loss is the sum over all tokens divided by their number, so microbatches and layout cannot change it. A loss or
    gradient that is not finite, or a spike, changes no weight.
    """
    cfg, world, model = run.cfg, run.world, run.model
    run.watch.enter("forward")
    n_tokens = count_tokens(world, batch)
    run.optimizer.zero_grad()
    total = model.forward_backward(to(world.device, batch.microbatches), n_tokens)
    run.watch.enter("reduce")
    dist.all_reduce(total, group=world.groups["loss"])
    counted, gradients = model.gradients(), model.gradients(every=True)
    loss, grad_norm = total.item() / n_tokens, optim.total_norm(counted, world.device, world.groups["shards"])
    skip = not (math.isfinite(loss) and math.isfinite(grad_norm)) or run.spikes.is_spike(loss, grad_norm)
    run.watch.enter("optimizer")
    if not skip:
        optim.clip_gradients(gradients, grad_norm, cfg.optim.clip_grad)
        run.optimizer.step()
    mesh.synchronize(world.device)  # on a GPU the update has only been launched
    return loss, grad_norm, skip


def count_tokens(world: World, batch: StepBatch) -> float:
    """Tokens of the global batch that have a loss; at least 1, to divide by."""
    mine = sum(int((microbatch["labels"] != IGNORED).sum()) for microbatch in batch.microbatches)
    count = torch.tensor(float(mine), dtype=torch.float64, device=world.device)
    dist.all_reduce(count, group=world.groups["data"])
    return max(count.item(), 1.0)


def check_same_batch(batch: StepBatch, world: World) -> None:
    """Ranks that compute a microbatch together were given the same one."""
    tokens = torch.cat([microbatch["tokens"] for microbatch in batch.microbatches]).to(world.device)
    drift.check_equal({"tokens": tokens}, world.groups["model"], "the first batch, which tp and pp ranks must share")


def signalled(run: Run) -> bool:
    """Whether a signal has come, to any rank; all say the same."""
    seen = torch.tensor(len(run.watch.signals), device=run.world.device)
    dist.all_reduce(seen, dist.ReduceOp.MAX)
    return bool(seen.item())


def to(device: torch.device, microbatches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [{name: t.to(device, non_blocking=True) for name, t in m.items()} for m in microbatches]
