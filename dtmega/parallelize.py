"""THE order: build on meta -> split -> plan -> recompute -> compile -> fsdp -> memory. Then values are loaded or drawn.

It knows no family: what a model is, and how it is cut, its record in families.py answers. `check` refuses, before
anything starts, what cannot be combined.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from dtmega import config, drift, families, optim, processor, softmax
from dtmega.data.objectives import Objective
from dtmega.data.sums import Tally
from dtmega.fsdp import apply_fsdp, keep_masters, keeps_masters, release, reshards, sync_gradients, wraps
from dtmega.fsdp.replicas import Replicas
from dtmega.linear_cpu import multiply_on_amx
from dtmega.mesh import World
from dtmega.models.initial import init_weights
from dtmega.models.model import Model
from dtmega.pipelining import schedule
from dtmega.pipelining.schedule import Pipeline
from dtmega.pipelining.split import Stages, plan_stages
from dtmega.pipelining.tied import Tied, shared
from dtmega.plans import keep_gathered, sum_partial_gradients
from dtmega.recompute import recompute
from dtmega.shards import boxes, local

LARGEST_FITTED = 4  # sequences; larger microbatches are for those who have measured them


class ShardedModel:
    """A model as this rank holds it: the pipeline stages that are its own, cut by tp and fsdp, and a step on them.

    Attributes:
        stages: by number; {0: the whole model} without a pipeline.
        partial: by stage, names of the parameters whose gradients are sums over tp.
        reshard: blocks are freed after forward and after each backward.
        objective: what it is trained for.
    """

    def __init__(
        self,
        world: World,
        stages: Mapping[int, Model],
        partial: Mapping[int, Sequence[str]],
        reshard: bool,
        objective: Objective,
    ) -> None:
        self.world, self.stages, self.partial, self.reshard = world, stages, partial, reshard
        self.objective = objective
        self.pipeline: Pipeline | None = None
        self.tied: list[Tied] = []
        self.replicas: list[Replicas] = []

    def draw(self, seed: int) -> None:
        """Give every parameter its initial values, a function of seed, name and place in the whole tensor."""
        for stage in self.stages.values():
            init_weights(stage, seed)

    def forward_backward(
        self, microbatches: Sequence[dict[str, Tensor]], counts: Mapping[str, float], scale: float | None = None
    ) -> Tensor:
        """The gradients of one step: of the weighted sum of all sums over the global batch, each divided by its count.

        Args:
            counts: of the global batch, by name.
            scale: float16's, by which all gradients are multiplied; each head knows it before its first rounding.

        Returns:
            [sums] fp64, in the order of the objective: this rank's part of each, which the `loss` group adds up.
        """
        tally = Tally(self.objective.sums, self.world.device, counts, 1.0 if scale is None else scale)
        if scale is not None:
            for model in self.stages.values():
                model.expect(tally.factors())
        if self.pipeline is not None:
            self.pipeline.step(microbatches, tally)
        else:
            (model,) = self.stages.values()
            for i, microbatch in enumerate(microbatches, start=1):
                last = i == len(microbatches)
                sync_gradients(model, last, reshard=self.reshard)
                for replicas in self.replicas if last else ():
                    replicas.expect()
                in_loss = tally.add_all(model(**microbatch))
                factors = [torch.full_like(total, factor) for total, factor in in_loss]
                torch.autograd.backward([total for total, _ in in_loss], factors)
            release(model)
        self._count_missing_gradients_as_zero()
        for replicas in self.replicas:
            replicas.finish()
        for number, model in self.stages.items():
            sum_partial_gradients(model, self.partial[number], self.world.tp)
        for tied in self.tied:
            tied.sum_gradients()
        for parameter, unseen in self._unseen:
            if parameter.grad is not None:
                local(parameter.grad).masked_fill_(unseen, 0.0)
        return tally.totals

    @functools.cached_property
    def _unseen(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameters with elements that no output depends on, and the marks of this rank's part: `Model.unseen`."""
        found = []
        for stage in self.stages.values():
            for name, unseen in stage.unseen().items():
                parameter = stage.get_parameter(name)
                for box in boxes(parameter.detach()):
                    found.append((parameter, unseen[box.where].to(box.part.device)))
        return found

    def _count_missing_gradients_as_zero(self) -> None:
        """Give a parameter that no token of this rank has used a gradient of zeros.

        Left without a gradient it would be skipped by AdamW, so that decay and moments depended on which tokens and
        layers a rank has. Frozen parameters stay without.
        """
        for _, parameter in self.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    @torch.no_grad()
    def losses(self, microbatches: Sequence[dict[str, Tensor]]) -> Tensor:
        """The same sums, forward only and without dropout."""
        for model in self.stages.values():
            model.eval()
        tally = Tally(self.objective.sums, self.world.device)
        if self.pipeline is not None:
            self.pipeline.evaluate(microbatches, tally)
        else:
            (model,) = self.stages.values()
            for microbatch in microbatches:
                tally.add_all(model(**microbatch))
        for model in self.stages.values():
            release(model)
            model.train()
        return tally.totals

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters by name in the whole model; one of several stages comes as often as this rank holds it."""
        for model in self.stages.values():
            for name, parameter in model.named_parameters():
                yield model.full_name(name), parameter

    def stored_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The same, and behind each stage's parameters its stored buffers: all that a checkpoint has of the model."""
        for model in self.stages.values():
            for name, tensor in model.stored_tensors():
                yield model.full_name(name), tensor

    def weights(self) -> list[Tensor]:
        """Local parts of parameters such that over the `shards` group each element comes once."""
        return [local(p.detach()) for p in self._counted()]

    def gradients(self, every: bool = False) -> list[Tensor]:
        """Local parts of gradients, by the same rule; `every` one that this rank holds, for clipping."""
        parameters = [p for _, p in self.named_parameters()] if every else self._counted()
        return [local(p.grad) for p in parameters if p.grad is not None]

    def statistics(self, num_zeros: bool, params_norm: bool) -> dict[str, float]:
        """The statistics that are asked for, of the last gradient and the parameters of the whole model."""
        device, group, found = self.world.device, self.world.groups["shards"], dict[str, float]()
        if num_zeros:
            found["num_zeros"] = optim.count_zeros(self.gradients(), device, group)
        if params_norm:
            found["params_norm"] = optim.total_norm(self.weights(), device, group)
        return found

    def _counted(self) -> list[nn.Parameter]:
        first_tp_rank = self.world.coordinate("tp") == 0
        parameters = [tensor for tensor in self.owned().values() if isinstance(tensor, nn.Parameter)]
        return [p for p in parameters if first_tp_rank or not _replicated_over_tp(p)]

    def owned(self) -> dict[str, Tensor]:
        """The stored tensors of this rank's stages, of parameters that several stages hold only the first one's."""
        duplicates = {id(copy) for tied in self.tied for copy in tied.duplicates}
        return {name: tensor for name, tensor in self.stored_tensors() if id(tensor) not in duplicates}

    def check_copies(self) -> None:
        """Check that stored tensors that should be equal on several ranks are equal to the bit.

        Raises:
            RuntimeError: names the tensor and the ranks.
        """
        tensors = self.owned()
        drift.check_equal(tensors, self.world.groups["dp_replicate"], "copies over dp_replicate")
        replicated = {n: t for n, t in tensors.items() if _replicated_over_tp(t)}
        drift.check_equal(replicated, self.world.groups["tp"], "copies over tp")
        for tied in self.tied:
            if not tied.equal():
                raise RuntimeError(f"the copies of '{tied.name}' on stages {tied.stages} are not equal any more")


def parallelize(cfg: config.Config, world: World) -> ShardedModel:
    """The model of the configuration on this rank, ready to be loaded, or to `draw` its initial values."""
    with torch.device("meta"):
        whole = families.build(cfg)
    cut = None
    stages = {0: whole}
    if world.sizes["pp"] > 1:
        cut = plan_stages(cfg, families.of(cfg.model).pieces(whole), world.sizes["pp"])
        stages = _split(cut, whole, cut.ranks[world.coordinate("pp")])
    reshard = reshards(cfg, world.sizes["pp"], world.sizes["dp_shard"])
    splits = schedule.splits_backward(cfg, world.sizes["pp"])
    partial = {number: _shard(cfg, world, stage, reshard) for number, stage in stages.items()}
    model = ShardedModel(world, stages, partial, reshard, families.objective(cfg))
    if world.sizes["dp_replicate"] > 1 and not wraps(cfg, world.sizes, splits):
        copies = world.groups["dp_replicate"]
        model.replicas = [Replicas(stage, stage.blocks(), copies) for stage in stages.values()]
    if cut is not None:
        model.tied = _tied(world, cut, whole, stages)
        boundaries = _boundaries(cfg, world, cut, whole)
        model.pipeline = Pipeline(cfg.pipeline, stages, world.groups["pp"], boundaries, world.device)
    return model


def _split(cut: Stages, whole: Model, numbers: Sequence[int]) -> dict[int, Model]:
    """Copies of the meta model, each without what its stage does not hold."""
    stages = {number: copy.deepcopy(whole) for number in numbers}
    for number, stage in stages.items():
        stage.keep(cut.pieces[number])
    return stages


def _boundaries(cfg: config.Config, world: World, cut: Stages, whole: Model) -> list[dict[str, Tensor]]:
    """The tensors that each stage but the last hands on, on meta.

    A gradient of them is wanted once anything up to there is trained.
    """
    family, parts = families.of(cfg.model), whole.parts()
    trained = False
    found = []
    for pieces in cut.pieces[:-1]:
        modules = [module for piece in pieces for module in parts[piece]]
        trained |= any(p.requires_grad for module in modules for p in module.parameters(recurse=False))
        tensors = family.boundary(cfg, world.sizes, whole, pieces[-1])
        found.append({n: t.requires_grad_(trained and t.is_floating_point()) for n, t in tensors.items()})
    return found


def _tied(world: World, cut: Stages, whole: Model, stages: Mapping[int, Model]) -> list[Tied]:
    """The parameters that stages of this rank share with other stages. Every rank calls it: it makes groups."""
    rank_of = {number: rank for rank, numbers in enumerate(cut.ranks) for number in numbers}
    parameters = {}
    for number, stage in stages.items():
        parameters |= {(number, stage.full_name(name)): parameter for name, parameter in stage.named_parameters()}
    found = []
    for first_name, numbers in shared(whole, whole.parts(), cut.pieces).items():
        ranks = sorted({rank_of[number] for number in numbers})
        group = world.between(ranks) if len(ranks) > 1 else None
        name = whole.full_name(first_name)
        places = [[number for number in numbers if rank_of[number] == rank] for rank in ranks]
        copies = {number: parameters[number, name] for number in numbers if number in stages}
        if copies:
            found.append(Tied(name, copies, places, group))
    return found


def _shard(cfg: config.Config, world: World, stage: Model, reshard: bool) -> list[str]:
    """Plan, recompute, compile, fsdp and memory for one meta stage; returns `ShardedModel.partial` of it."""
    family = families.of(cfg.model)
    partial = family.cut(cfg, stage, world)
    blocks = stage.blocks()
    splits = schedule.splits_backward(cfg, world.sizes["pp"])
    if splits:
        keep_gathered(stage)
    if cfg.recompute.mode != "none":
        for block in recompute(stage, cfg.recompute):
            keep_gathered(block)
    if keeps_masters(cfg, world.sizes) and world.device.type == "cpu" and processor.HAS_TILES:
        multiply_on_amx(stage)
    if compiling(cfg, world.device):
        for block in blocks:
            block.compile()
        if world.device.type in softmax.COMPILED_ON:
            stage.compile_losses()
    if wraps(cfg, world.sizes, splits):
        apply_fsdp(stage, blocks, world.fsdp, cfg, reshard=reshard)
    elif keeps_masters(cfg, world.sizes):
        keep_masters(stage, cfg)
    family.allocate(cfg, stage, world, torch.device("cpu") if cfg.fsdp.cpu_offload else world.device)
    _move_buffers(stage, world.device)
    return partial


def _move_buffers(stage: Model, device: torch.device) -> None:
    """Move the buffers to the computing device. FSDP brings only parameters there when they are needed."""
    for module in stage.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _replicated_over_tp(tensor: Tensor) -> bool:
    """True if every tp rank has the whole tensor: `apply_plan` makes tp the last mesh axis of a DTensor.

    Buffers are not cut.
    """
    if not isinstance(tensor, nn.Parameter):
        return True
    if not isinstance(tensor, DTensor) or "tp" not in (tensor.device_mesh.mesh_dim_names or ()):
        return False
    return tensor.placements[-1] == Replicate()


def compiling(cfg: config.Config, device: torch.device) -> bool:
    return cfg.compile.enable is True or (cfg.compile.enable == "auto" and device.type == "cuda")


def fitted(cfg: config.Config, sizes: Mapping[str, int]) -> config.Config:
    """The configuration with a microbatch for this layout, if [batch] micro_batch_size = 0 leaves it open.

    The largest one up to LARGEST_FITTED that divides every rank's share of every step and leaves a pipeline as many
    microbatches as its schedule needs. Where not even 1 does, `check` and the loader say why.
    """
    if cfg.batch.micro_batch_size:
        return cfg
    data_size = sizes["dp_replicate"] * sizes["dp_shard"]

    def fits(micro_batch_size: int) -> bool:
        unit = data_size * micro_batch_size
        return all(
            size % unit == 0 and (sizes["pp"] == 1 or not schedule.broken_rule(cfg.pipeline, sizes["pp"], size // unit))
            for size in cfg.batch.sizes
        )

    found = next((size for size in range(LARGEST_FITTED, 1, -1) if fits(size)), 1)
    return cfg.model_copy(update={"batch": cfg.batch.model_copy(update={"micro_batch_size": found})})


def decided(cfg: config.Config, params: str) -> config.Config:
    """The configuration with this [precision] params, which `auto` has left open."""
    return cfg.model_copy(update={"precision": cfg.precision.model_copy(update={"params": params})})


def check(cfg: config.Config, sizes: Mapping[str, int], device: torch.device) -> None:
    """Refuse combinations that cannot work, with the reason.

    Raises:
        ValueError: sizes that tp does not divide, schedules that do not fit, features that exclude each other.
    """
    pp = sizes["pp"]
    family = families.of(cfg.model)
    if cfg.precision.params not in (*family.dtypes, "auto"):  # which is bfloat16 or float32: every family has them
        raise ValueError(
            f"params = '{cfg.precision.params}' is not for name = '{cfg.model.name}', expected one of "
            f"{', '.join(family.dtypes)} ([precision] params, [model] name)"
        )
    family.check(cfg, sizes)
    if cfg.optim.lr_factors:
        optim.check_factors(cfg.optim, families.shapes(cfg.model))
    idle = [key for key, field in config.Pipeline.model_fields.items() if getattr(cfg.pipeline, key) != field.default]
    if pp == 1 and idle:
        raise ValueError(f"there is no pipeline for [pipeline] {', '.join(idle)}: expected pp > 1, got 1 ([mesh] pp)")
    if pp > 1 and cfg.fsdp.reshard_after_forward is True:
        raise ValueError(
            "under a pipeline weights stay gathered between microbatches ([fsdp] reshard_after_forward, [mesh] pp)"
        )
    if pp > 1 and cfg.recompute.mode == "selective" and compiling(cfg, device):
        raise ValueError(
            "selective recompute of compiled blocks under a pipeline breaks in torch (pytorch#166926) "
            "([recompute] mode, [compile] enable, [mesh] pp)"
        )
    if pp > 1:
        pieces = families.pieces(cfg.model)
        schedule.check_schedule(cfg, pieces, pp, sizes["dp_replicate"] * sizes["dp_shard"], compiling(cfg, device))
