"""Run the real `parallelize` and `train_step` of one rank on a fake device. Report the rank's memory and work.

A role is a group of ranks that do the same work, such as all ranks with the same pp rank. One rank represents them all.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from dtmega import config, families, mesh
from dtmega.data.loader import StepBatch
from dtmega.data.objectives.rows import IGNORED
from dtmega.fsdp.masters import Masters
from dtmega.mesh import World
from dtmega.ops import ranges
from dtmega.ops.optim import build_optimizer
from dtmega.ops.shards import local
from dtmega.planning.counting import compiled, kernels, masks
from dtmega.planning.counting.fake_device import FakeDevice, on_fake_device
from dtmega.planning.counting.ledger import Span
from dtmega.planning.counting.recorder import Recorder
from dtmega.planning.work import Work
from dtmega.training.loss_scale import LossScale
from dtmega.training.parallelize import parallelize
from dtmega.training.sharded_model import ShardedModel
from dtmega.training.step import train_step

ROWS = "rows of the batch"
PARAMETERS = "parameters"
FROZEN = "frozen parameters"
GRADIENTS = "gradients"
MOMENTS = "optimizer's moments"
COPIES = "weights for compute (gathered or cast)"
WHOLE_GRADIENTS = "gradients before their sum over ranks"


class Role(NamedTuple):
    """The plan of one rank for one step.

    Attributes:
        rank: number of the rank.
        n_microbatches: number of microbatches in the step.
        held: owner of memory, such as "parameters" or "gradients" -> bytes on the rank between two steps.
        spans: memory during each action of the step, in order.
        works: kernels and messages of the step, in the order in which the host launches them.
        shorter: plan of a shorter step, from which `extrapolation` computes the growth per microbatch; None if only one
            number of microbatches was run.
        repeated: number of microbatches that were not run, because each does the same work as a middle microbatch.
        skipped: sentences for the user, one about each check that was skipped because it compares values.
    """

    rank: int
    n_microbatches: int
    held: dict[str, int]
    spans: list[Span]
    works: list[Work]
    shorter: Role | None = None
    repeated: int = 0
    skipped: tuple[str, ...] = ()

    @property
    def peak(self) -> Span:
        """The action during which the rank holds the most memory."""
        return max(self.spans, key=lambda span: span.peak_bytes)


class _Step(NamedTuple):
    """The objects of a run that a step uses (`training.step.Stepping`)."""

    cfg: config.Config
    world: World
    model: ShardedModel
    optimizer: torch.optim.Optimizer
    phases: Recorder
    loss_scale: LossScale | None
    spikes: None = None


def plan_role(
    cfg: config.Config,
    sizes: Mapping[str, int],
    rank: int,
    device: torch.device,
    numbers: Sequence[int],
    imbalance: float = 1.0,
) -> Role:
    """Plan one rank: for each number of microbatches, run two steps and report the second step.

    The first of the two steps begins with what a step with another number of microbatches has left, and may set up
    FSDP, streams and pipelines. The second step begins as every later step of a run does.

    Args:
        cfg: configuration of the run, complete and checked for this layout.
        sizes: resolved size of each mesh axis.
        rank: number of the rank.
        device: fake device.
        numbers: numbers of microbatches in a step, in ascending order.
        imbalance: load of this rank's experts, as a multiple of the mean load in the rank's ep group.

    Returns:
        The plan of the last number of microbatches. `shorter` is the plan of the number before it.
    """
    role: Role | None = None
    recorder = Recorder(device)
    rows = families.objective(cfg).blank(cfg.data, cfg.batch.micro_batch_size)
    share = float((rows["labels"] != IGNORED).float().mean())
    n_ranks = math.prod(sizes.values())
    with (
        _keeping_circles(),
        on_fake_device(device, rank, n_ranks, recorder, true_share=share, imbalance=imbalance) as fake_device,
        compiled.counted(recorder),
        kernels.without_values(experts_over=sizes["tp"] if cfg.model.directory else 1),
        masks.of_rows(cfg),
        ranges.told_to(recorder.range),
        recorder.exchanges_of_fsdp(),
        recorder.waits_for_messages(),
    ):
        recorder.streams = fake_device.streams
        world = mesh.start(device, dict(sizes), ep=cfg.mesh.ep)
        recorder.name_groups(world.groups)
        with _allocating(cfg, fake_device):
            model = parallelize(cfg, world)
        recorder.name_groups(world.groups)
        optimizer = build_optimizer(model.named_parameters(), cfg.optim, cfg.run.exact, model.matrices)
        for stage in model.stages.values():
            recorder.watch_blocks(stage, stage.blocks())
        loss_scale = LossScale(cfg.precision, None) if cfg.precision.params == "float16" else None
        step = _Step(cfg, world, model, optimizer, recorder, loss_scale)
        # Find the elements that affect no output (`Model.unseen`) now, because this needs values, but a step's tensors
        # have no values.
        _ = model.unseen_elements
        recorder.name_storages = lambda: name_storages(recorder, model, optimizer)
        with fake_device.holding_everything() if device.type == "cpu" else contextlib.nullcontext():
            fake_device.stepping = device.type != "cpu"
            make_moments(model, optimizer)
            for n in numbers:
                for _ in range(2):
                    with recorder.owning(ROWS):
                        batch = _batch(cfg, rows, n)
                    recorder.begin()
                    train_step(step, batch)
                    recorder.enter("between steps")
                    del batch
                held = {owner: n_bytes for owner, n_bytes in recorder.ledger.owners.items() if n_bytes}
                role = Role(rank, n, held, recorder.ledger.spans, recorder.works, role)
        assert role is not None
        return role._replace(skipped=tuple(fake_device.skipped))


def make_moments(model: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer allocate its moments, which the first update creates. Gradients remain, as after a step."""
    for _, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def _batch(cfg: config.Config, rows: dict[str, Tensor], n_microbatches: int) -> StepBatch:
    microbatches = []
    for _ in range(n_microbatches):
        microbatches.append({name: tensor.clone() for name, tensor in rows.items()})
    return StepBatch(0, cfg.batch.global_batch_size, microbatches)


@contextlib.contextmanager
def _keeping_circles() -> Iterator[None]:
    """Inside the `with` block, keep tensors in reference cycles alive.

    Otherwise Python's garbage collector would free these tensors at moments that depend on the process's whole history.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _allocating(cfg: config.Config, fake_device: FakeDevice) -> Iterator[None]:
    """Inside the `with` block, make the model family allocate fake tensors, even on a fake CPU."""
    kind = type(families.of(cfg.model))
    allocate = kind.allocate

    def allocate_fake(*args: Any) -> None:
        with fake_device.holding_everything():
            allocate(*args)

    if fake_device.device.type != "cpu":
        yield
        return
    with patch.object(kind, "allocate", allocate_fake):
        yield


def name_storages(recorder: Recorder, model: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
    """Tell the ledger which storages hold weights, gradients and moments, which is unknown when they are allocated."""
    give = recorder.ledger.give
    for _, parameter in model.named_parameters():
        give(parameter, PARAMETERS if parameter.requires_grad else FROZEN)
        if parameter.grad is not None:
            give(parameter.grad, GRADIENTS)
    for copies in model.copies:
        if isinstance(copies, Masters):
            for copy in copies.copies:
                give(copy, COPIES)
    for stage in model.stages.values():
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                _name_fsdp(recorder, module)
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                give(value, MOMENTS)


def _name_fsdp(recorder: Recorder, module: nn.Module) -> None:
    """Tell the ledger which storages hold gathered weights, and unsharded gradients that are not yet reduced."""
    state: Any = fully_shard.state(module)  # pyright: ignore[reportFunctionMemberAccess]
    group = state._fsdp_param_group
    if group is None:
        return
    for parameter in group.fsdp_params:
        for gathered in parameter.all_gather_outputs:
            recorder.ledger.give(gathered, COPIES)
        sums = parameter.unsharded_accumulated_grad
        whole = getattr(parameter, "_unsharded_param", None)
        for gradient in (sums, None if whole is None else whole.grad):
            if gradient is not None:
                recorder.ledger.give(local(gradient), WHOLE_GRADIENTS)
        is_trained = parameter.sharded_param.requires_grad
        recorder.ledger.give(parameter._sharded_param_data, PARAMETERS if is_trained else FROZEN)
