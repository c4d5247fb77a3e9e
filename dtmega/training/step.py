"""One optimizer step on one global batch. The training loop repeats the step and reports the time of each step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dtmega import mesh
from dtmega.checkpoint.run import Checkpoints
from dtmega.config import Config
from dtmega.data.loader import StepBatch, TrainBatches
from dtmega.data.objectives.objective import Objective
from dtmega.data.objectives.sums import divisors, loss_of, means_of
from dtmega.data.text import Text
from dtmega.distributed import replica_check
from dtmega.distributed.exit_codes import ExitStatus
from dtmega.distributed.watchdog import Watch
from dtmega.mesh import World
from dtmega.ops import host, optim
from dtmega.training import phases
from dtmega.training.health import Health
from dtmega.training.metrics import Metrics
from dtmega.training.pace import Pace
from dtmega.training.phases import Phases
from dtmega.training.sharded_model import ShardedModel

if TYPE_CHECKING:
    from dtmega.fsdp.digests import StepDigests
    from dtmega.ops.optim.spikes import Spikes
    from dtmega.training.exact.record import Record
    from dtmega.training.loss_scale import LossScale
    from dtmega.training.records.rank_log import RankLog


class Run(NamedTuple):
    """The objects that a run's training loop and evaluation use.

    Attributes:
        saved_cfg: configuration that config.toml and checkpoints store. Values that the user left open, such as the
            microbatch size, stay open here, because a different layout may need different values.
        cfg: copy of `saved_cfg` with all open values filled in for this layout and machine.
        world: processes, mesh and process groups.
        text: data of the run (splits, samples and tokenizer).
        model: this rank's shard of the model.
        optimizer: optimizer of `model`.
        batches: this rank's share of the training batches, beginning with the next step's batch.
        checkpoints: writer of the run's checkpoints.
        metrics: reporter that prints each step's metrics and writes them to files.
        watch: watchdog that receives signals and ends a run that hangs.
        phases: phase timer, which also reports each phase to the watchdog and the profiler.
        health: counters of high losses; too many high losses end the run.
        pace: monitor of the tokens per second, and of each rank's own time.
        exit_status: record of how the run ends.
        digest: digest of the directory from which the model is read; '' if the model is not read from a directory.
        loss_scale: dynamic loss scale for float16; None in other precisions.
        spikes: detector of spikes; None without [train] skip_spikes.
        digests: writer of each step's digests; None without [run] exact, and in an evaluation.
        log: text log of this rank; None unless [log] ranks is "all".
    """

    saved_cfg: Config
    cfg: Config
    world: World
    text: Text
    model: ShardedModel
    optimizer: torch.optim.Optimizer
    batches: TrainBatches
    checkpoints: Checkpoints
    metrics: Metrics
    watch: Watch
    phases: Phases
    health: Health
    pace: Pace
    exit_status: ExitStatus
    digest: str = ""
    loss_scale: LossScale | None = None
    spikes: Spikes | None = None
    digests: Record | None = None
    log: RankLog | None = None


class EnterPhase(Protocol):
    """An object that receives the name of each phase of a step when the phase begins."""

    def enter(self, name: str) -> None: ...


class Stepping(Protocol):
    """The part of a `Run` that `train_step` uses. The planner runs real steps with this part (`planning/counting`)."""

    @property
    def cfg(self) -> Config: ...

    @property
    def world(self) -> World: ...

    @property
    def model(self) -> ShardedModel: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def phases(self) -> EnterPhase: ...

    @property
    def loss_scale(self) -> LossScale | None: ...

    @property
    def spikes(self) -> Spikes | None: ...


class StepResult(NamedTuple):
    """The result of a step, equal on all ranks.

    Attributes:
        loss: weighted sum of `means`.
        grad_norm: L2 norm of the whole model's gradient, before clipping and without the loss scale.
        skipped: whether the weights stayed the same because the loss or gradient norm was not finite or was a spike.
        means: name of an objective sum -> mean over the global batch.
        loss_scale: loss scale of the step's float16 gradients; None in other precisions.
        overflowed: whether the step was skipped because a float16 gradient is not finite.
        beyond_grid: names of the parameters whose gradients were too large for the fixed-point numbers of [run] exact.
            If there are any, the step was skipped.
        digests: digests of the step's gradients and weights; None without [run] exact.
    """

    loss: float
    grad_norm: float
    skipped: bool
    means: dict[str, float]
    loss_scale: float | None = None
    overflowed: bool = False
    beyond_grid: tuple[str, ...] = ()
    digests: StepDigests | None = None


def train_step(run: Stepping, batch: StepBatch) -> StepResult:
    """Take one optimizer step on one global batch.

    The loss is computed from sums and counts over the global batch, so neither the microbatch size nor the layout
    changes it.
    """
    cfg, world, model = run.cfg, run.world, run.model
    run.phases.enter("counts")
    sums = model.objective.sums
    # The counts are needed before forward, because backward computes gradients that are already divided by the counts.
    counts = divisors(count(world, model.objective, batch))
    run.optimizer.zero_grad()
    scale = None if run.loss_scale is None else run.loss_scale.scale
    run.phases.enter(phases.COMPUTING)
    totals = model.forward_backward(to(world.device, batch.microbatches), counts, scale)
    # The norm counts each element of the model once; clipping scales every copy of an element.
    counted, gradients = model.gradients(), model.gradients(every=True)
    beyond_grid: list[str] = []
    if model.exact is None:
        if scale is not None:
            optim.unscale(gradients, scale)
        totals, squared_norm = over_ranks(world, totals, optim.squared_norm(counted))
    else:
        totals, _ = over_ranks(world, totals, optim.squared_norm([]))
        totals = model.exact.exact_or_infinite(totals)
        squared_norm = model.exact.squared_norm(model.counted_once(), world.groups["shards"])
        beyond_grid = model.exact.overflowed
    means = means_of(sums, totals, counts)
    loss = loss_of(sums, means)
    # An infinity or NaN on any rank makes this norm infinite or NaN on all ranks, so all ranks skip the step together.
    grad_norm = math.sqrt(squared_norm)
    overflowed = run.loss_scale is not None and not math.isfinite(grad_norm) and not beyond_grid
    if run.loss_scale is not None:
        run.loss_scale.update(overflowed)
    skip = not (math.isfinite(loss) and math.isfinite(grad_norm))
    if run.spikes is not None and not skip:
        skip = run.spikes.is_spike(loss, grad_norm)
    run.phases.enter(phases.OPTIMIZER)
    if not skip:
        optim.clip_gradients(gradients, grad_norm, cfg.optim.clip_grad)
        run.optimizer.step()
    model.settle_counts(skip)
    # On a GPU the update has only been launched. Wait for the update, so that the step time includes it.
    mesh.synchronize(world.device)
    digests = None
    if model.exact is not None:
        model.exact.settle(skip)
        digests = model.exact.digests_of_step(model.counted_once(), world, len(batch.microbatches))
    return StepResult(loss, grad_norm, skip, means, scale, overflowed, tuple(beyond_grid), digests)


def over_ranks(world: World, totals: Tensor, squared_norm: Tensor) -> tuple[Tensor, float]:
    """Add up the objective's sums over the `loss` group and the squared norms over the `shards` group.

    Each rank sends its totals and its norm in one message, so the host waits for the device only once. Every rank adds
    the same numbers in rank order, so the results are bit-identical on all ranks.

    Args:
        totals: this rank's contribution to each sum, fp64 [sums].
        squared_norm: squared norm of the gradients that this rank counts, fp64 scalar.

    Returns:
        The totals of the global batch, and the squared norm of the whole gradient; both on the host.
    """
    everyone = dist.group.WORLD
    assert everyone is not None
    mine = torch.cat([totals, squared_norm.to(totals.device).view(1)])
    gathered = host.read(replica_check.gather_vectors(mine, everyone))  # [ranks, sums + 1]
    of_loss = dist.get_process_group_ranks(world.groups["loss"])
    of_shards = dist.get_process_group_ranks(world.groups["shards"])
    return gathered[of_loss, :-1].sum(0), gathered[of_shards, -1].sum().item()


def count(world: World, objective: Objective, batch: StepBatch) -> dict[str, float]:
    """Count the divisors of the objective's sums (tokens, sequences) over the global batch. A count may be 0."""
    mine: dict[str, float] = {}
    for microbatch in batch.microbatches:
        for name, n in objective.counts(microbatch).items():
            mine[name] = mine.get(name, 0) + n
    counts = torch.tensor([*mine.values()], dtype=torch.float64, device=world.device)
    dist.all_reduce(counts, group=world.groups["data"])
    return dict(zip(mine, host.read(counts).tolist(), strict=True))


def check_same_batch(batch: StepBatch, world: World) -> None:
    """Check that the pp, cp and tp ranks that compute a microbatch together have read identical tokens.

    Raises:
        RuntimeError: the tokens of pp, cp or tp ranks differ.
    """
    tokens = torch.cat([microbatch["tokens"] for microbatch in batch.microbatches]).to(world.device)
    replica_check.check_equal(
        {"tokens": tokens}, world.groups["model"], "the first batch, which tp and pp ranks must share"
    )


def signalled(run: Run) -> bool:
    """True on all ranks if any rank has received a signal to stop."""
    n_signals = torch.tensor(len(run.watch.signals), device=run.world.device)
    dist.all_reduce(n_signals, dist.ReduceOp.MAX)
    return bool(n_signals.item())


def to(device: torch.device, microbatches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Copy the microbatches to the device."""
    copies = []
    for microbatch in microbatches:
        copies.append({name: tensor.to(device, non_blocking=True) for name, tensor in microbatch.items()})
    return copies
