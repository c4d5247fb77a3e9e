"""Turn the whole model into one rank's shard of it. `parallelize` and `_shard` take these steps in THIS order:

    build      the whole model on the meta device, which costs no memory
    split      keep only this rank's pipeline stages (pp)
    plan       shard matrices over tp and experts over ep, and insert the collectives into the modules
    recompute  wrap blocks so that the backward pass recomputes them, including tp's collectives
    compile    compile each block together with its recomputation
    fsdp       shard each tp rank's parameters over the fsdp ranks; FSDP's hooks stay outside the compiled blocks
    memory     allocate only this rank's shard; the parameter values are loaded or drawn later

Nothing in this file depends on a model family: families.py defines how each model is built and sharded. Before
anything starts, `checks.py` refuses combinations that cannot work.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from dtmega import config, families, mesh
from dtmega.checkpoint import starting
from dtmega.checkpoint.base import Base, location
from dtmega.data.objectives.objective import Objective
from dtmega.data.objectives.sums import Tally
from dtmega.distributed import replica_check
from dtmega.formats.sources import Source
from dtmega.fsdp import apply_fsdp, keep_masters, keeps_masters, release, reshards, sync_gradients, wraps
from dtmega.fsdp.exact import ExactSums
from dtmega.fsdp.replicas import Replicas
from dtmega.fsdp.shard_sums import ShardSums
from dtmega.mesh import World
from dtmega.models.initial import init_weights
from dtmega.models.lora import attach, draw_adapters, is_adapter, targets, transposed_layers
from dtmega.models.lora import proof as lora_proof
from dtmega.models.model import Model
from dtmega.models.routing import Loads
from dtmega.ops import host, optim, ranges, softmax
from dtmega.ops.context_parallel import ContextParallel
from dtmega.ops.cpu import features
from dtmega.ops.cpu.linear import multiply_on_amx
from dtmega.ops.shards import boxes, local
from dtmega.pipelining import schedule
from dtmega.pipelining.schedule import Pipeline
from dtmega.pipelining.split import Stages, plan_stages
from dtmega.pipelining.tied import Tied, copies_of_stages
from dtmega.plans import keep_gathered, sum_partial_gradients
from dtmega.plans.expert_parallel import divide
from dtmega.training import exact
from dtmega.training.accumulation import accumulates
from dtmega.training.recompute import recompute

LARGEST_FITTED = 4  # largest microbatch size, in sequences, that is chosen automatically


class ShardedModel:
    """This rank's part of a model: its pipeline stages, sharded over tp and fsdp, and methods to train the stages.

    Attributes:
        stages: stage index -> model of the stage; {0: the whole model} without a pipeline.
        partial: stage index -> names of the parameters whose gradients must be all-reduced over tp.
        reshard: whether FSDP frees a block's gathered weights after the block's forward and after each backward.
        objective: objective for which the model is trained.
        sharded: whether each microbatch's gradients are reduce-scattered, so that only shards of them accumulate.
        pipeline: schedule over all stages; None without a pipeline.
        tied: parameters that this rank's stages share with other stages. Each of these stages holds a copy.
        replicas: objects that all-reduce gradients over dp_replicate, one per stage; [] if dp_replicate is 1, or if
            FSDP or `exact` reduces these gradients.
        context: cp ranks, over which each sequence is sharded; None if cp is 1.
        exact: gradients, added up as fixed-point integers ([run] exact); None if they are reduced in floating point.
        matrices: weights that Muon trains; None if the optimizer is not Muon.
        loads: loads of the model's experts.
        on_reduce: function called after backward, before the remaining gradients are reduced over ranks.
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
        self.sharded = False
        self.pipeline: Pipeline | None = None
        self.tied: list[Tied] = []
        self.replicas: list[Replicas] = []
        self.exact: ExactSums | None = None
        self.matrices: optim.Matrices | None = None
        self.on_reduce: Callable[[], object] = _do_nothing
        self.context: ContextParallel | None = None
        self.loads = Loads()

    def draw(self, seed: int) -> None:
        """Draw the initial values of all parameters.

        A value depends only on the seed, the parameter's name, and the value's index in the unsharded parameter.
        """
        for stage in self.stages.values():
            init_weights(stage, seed)

    def load_beside(
        self, source: Source, cfg: config.Config, was: Base | None, with_heartbeats: Callable[[Any], Any]
    ) -> Base | None:
        """Load the weights that the checkpoint leaves out, and draw the adapters of a new run.

        `checkpoint/starting.py` describes these weights.

        Returns:
            A description of the weights that the run's checkpoints leave out; None if they hold all weights.
        """
        stored = [(name, tensor) for name, tensor in self.stored_tensors() if not is_adapter(name)]
        counted = [name for name, parameter in self.counted_once().items() if not parameter.requires_grad]
        together = self.world.groups["shards"]
        digests = starting.load_beside(source, with_heartbeats(stored), counted, together, cfg.model, was)
        path = location(cfg.model, source)
        if was is not None:
            return was._replace(path=path)
        for stage in self.stages.values():
            draw_adapters(stage, cfg.run.seed)
        with torch.device("meta"):
            transposed = transposed_layers(families.build(cfg))
        elements = sum(math.prod(source.tensors[name][1]) for name in digests)
        return Base(path, digests, transposed, elements) if digests else None

    def forward_backward(
        self, microbatches: Sequence[dict[str, Tensor]], counts: Mapping[str, float], scale: float | None = None
    ) -> Tensor:
        """Compute the gradients of one step. The loss is a weighted sum of the objective's means over the batch.

        Each mean is a sum over the global batch, divided by a count over the global batch. Every rank, microbatch and
        stage divides its contribution to the sum by this global count, so the layout does not change the loss.

        Args:
            microbatches: microbatches that the ranks of this rank's `model` group compute together.
            counts: divisors of the sums, keyed by name and counted over the global batch.
            scale: loss scale for float16, which multiplies all gradients; None in other precisions.

        Returns:
            This rank's contribution to each sum, fp64 [sums] in the objective's order. The contributions of all ranks
            in the `loss` group add up to the sums over the global batch.
        """
        factor = 1.0 if scale is None else scale
        tally = Tally(self.objective.sums, self.world.device, counts, factor, exact=self.exact is not None)
        if self.exact is not None:
            self.exact.begin(len(microbatches) * self.world.data_size, factor)
        if scale is not None:
            for model in self.stages.values():
                model.expect(tally.factors())
        with self._shared(microbatches) as parts:
            if self.pipeline is not None:
                self.pipeline.step(parts, tally)
            else:
                self._run_microbatches(parts, tally)
        self.on_reduce()
        if self.exact is not None:
            self.exact.finish(self.tied)
        else:
            self._sum_gradients()
        for parameter, mask in self.unseen_elements:
            if parameter.grad is not None:
                local(parameter.grad).masked_fill_(mask, 0.0)
        return tally.totals

    def _sum_gradients(self) -> None:
        """All-reduce gradients over dp_replicate, tp and tied stages, except what FSDP reduced in the last backward."""
        # Fill in zeros first, because the code below expects a gradient for every trained parameter on every rank.
        self._fill_missing_gradients()
        for replicas in self.replicas:
            replicas.finish()
        for number, model in self.stages.items():
            sum_partial_gradients(model, self.partial[number], self.world.tp)
        # Sum tied gradients last. After the reductions over dp and tp, a copy's gradient lacks only the contributions
        # of the other stages that use the parameter.
        for tied in self.tied:
            tied.sum_gradients()

    @contextlib.contextmanager
    def _shared(self, microbatches: Sequence[dict[str, Tensor]]) -> Iterator[Sequence[dict[str, Tensor]]]:
        """Inside the `with` block, shard each sequence over the cp ranks.

        Outside the block, for example when the trained model generates samples, every rank computes whole sequences.
        """
        if self.context is None:
            yield microbatches
            return
        first, *_ = self.stages.values()
        parts = [first.part_of(rows, self.context) for rows in microbatches]
        for model in self.stages.values():
            model.context = self.context
        try:
            yield parts
        finally:
            for model in self.stages.values():
                model.context = None

    def _run_microbatches(self, microbatches: Sequence[dict[str, Tensor]], tally: Tally) -> None:
        """Run forward and backward for all microbatches, without a pipeline, and accumulate the gradients."""
        (model,) = self.stages.values()
        for i, microbatch in enumerate(microbatches):
            # Unless gradients accumulate as shards, the data ranks reduce gradients once per step, in the last
            # microbatch. Before the last microbatch, each rank accumulates its gradients locally.
            last = i == len(microbatches) - 1
            sums_here = last and self.exact is None
            sync_gradients(model, sums_here, reshard=self.reshard, sharded=self.sharded)
            if last:
                for replicas in self.replicas:
                    replicas.expect()
            with ranges.named("forward", stage=0, microbatch=i):
                in_loss = tally.add_all(model(**microbatch))
            # The loss itself is never computed. Backward starts from each sum, with the derivative of the loss with
            # respect to that sum.
            factors = [torch.full_like(total, factor) for total, factor in in_loss]
            with ranges.named("backward", stage=0, microbatch=i):
                torch.autograd.backward([total for total, _ in in_loss], factors)
            if self.exact is not None:
                self.exact.of_stage[0].swept(i)
        release(model)

    @functools.cached_property
    def unseen_elements(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Pairs (parameter, mask of this rank's shard). The mask marks elements that affect no output of the model."""
        masked = []
        for stage in self.stages.values():
            for name, mask in stage.unseen().items():
                parameter = stage.get_parameter(name)
                for box in boxes(parameter.detach()):
                    masked.append((parameter, mask[box.where].to(box.part.device)))
        return masked

    def _fill_missing_gradients(self) -> None:
        """Give a zero gradient to each parameter that none of this rank's tokens has used.

        AdamW would skip a parameter without a gradient. The parameter's decay and moments would then depend on which
        tokens and layers the rank has. Frozen parameters remain without a gradient.

        Raises:
            RuntimeError: an adapter has no gradient, because nothing calls its linear layer.
        """
        for name, parameter in self.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                if is_adapter(name):
                    raise RuntimeError(f"no gradient has come to '{name}', so that it would not learn ([lora] targets)")
                parameter.grad = torch.zeros_like(parameter)

    @torch.no_grad()
    def losses(self, microbatches: Sequence[dict[str, Tensor]]) -> Tensor:
        """Compute this rank's contribution to each sum, like `forward_backward`, but without gradients and dropout."""
        for model in self.stages.values():
            model.eval()
        tally = Tally(self.objective.sums, self.world.device, exact=self.exact is not None)
        with self._shared(microbatches) as parts:
            if self.pipeline is not None:
                self.pipeline.evaluate(parts, tally)
            else:
                (model,) = self.stages.values()
                for part in parts:
                    tally.add_all(model(**part))
        for model in self.stages.values():
            release(model)
            model.train()
        return tally.totals

    @torch.no_grad()
    def settle_counts(self, skipped: bool) -> None:
        """All-reduce a step's counts, such as the loads of experts, and pass the totals to the model.

        Args:
            skipped: whether the step was skipped, so that no weight has changed.
        """
        mine = [counts for stage in self.stages.values() if (counts := stage.counts_of_step()) is not None]
        if not mine:
            return
        total = torch.stack(mine).sum(0)
        dist.all_reduce(total, group=self.world.groups["loss"])
        self.loads.add(total)
        for stage in self.stages.values():
            stage.after_step(total, skipped)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters, with their names in the whole model.

        If several of this rank's stages hold copies of a parameter, each copy is yielded, under the same name.
        """
        for model in self.stages.values():
            for name, parameter in model.named_parameters():
                yield model.full_name(name), parameter

    def stored_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's tensors for a checkpoint, with names: each stage's parameters, then its stored buffers."""
        for model in self.stages.values():
            for name, tensor in model.stored_tensors():
                yield model.full_name(name), tensor

    def weights(self) -> list[Tensor]:
        """Local shards of parameters. The ranks of a `shards` group together return each element exactly once."""
        return [local(p.detach()) for p in self.counted_once().values()]

    def gradients(self, every: bool = False) -> list[Tensor]:
        """Local shards of the parameters' gradients.

        Args:
            every: whether to return all gradients that this rank holds, as clipping requires. If False, only the
                parameters in `weights` count, so that a norm over the `shards` group counts each element once.
        """
        parameters = [p for _, p in self.named_parameters()] if every else self.counted_once().values()
        return [local(p.grad) for p in parameters if p.grad is not None]

    def statistics(self, num_zeros: bool, params_norm: bool) -> dict[str, float]:
        """Statistics of the last step: zeros in the gradient, norm of the parameters, extreme loads of experts."""
        device = self.world.device
        group = self.world.groups["shards"]
        values = self.loads.numbers()
        if num_zeros:
            values["num_zeros"] = optim.count_zeros(self.gradients(), device, group)
        if params_norm and self.exact is not None:
            values["params_norm"] = exact.weights_norm(self.exact, self.counted_once(), group)
        elif params_norm:
            values["params_norm"] = optim.total_norm(self.weights(), device, group)
        return values

    def counted_once(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank counts in sums over the `shards` group, keyed by name.

        If tp ranks hold copies of a parameter, only the first tp rank counts it. If several stages hold copies, only
        the first of these stages counts it.
        """
        first_tp_rank = self.world.coordinate("tp") == 0
        counted: dict[str, nn.Parameter] = {}
        for name, tensor in self.owned().items():
            if isinstance(tensor, nn.Parameter) and (first_tp_rank or not _replicated_over_tp(tensor)):
                counted[name] = tensor
        return counted

    def owned(self) -> dict[str, Tensor]:
        """The stored tensors of this rank's stages, keyed by name, without copies of an earlier stage's parameters."""
        duplicates = set[int]()
        for tied in self.tied:
            duplicates.update(map(id, tied.duplicates))
        return {name: tensor for name, tensor in self.stored_tensors() if id(tensor) not in duplicates}

    def check_copies(self) -> None:
        """Check that copies of a stored tensor on different ranks are bit-identical.

        Raises:
            RuntimeError: copies of a tensor differ. The message names the tensor and the ranks.
        """
        tensors = self.owned()
        replica_check.check_equal(tensors, self.world.groups["dp_replicate"], "copies over dp_replicate")
        replicated = {n: t for n, t in tensors.items() if _replicated_over_tp(t)}
        replica_check.check_equal(replicated, self.world.groups["tp"], "copies over tp")
        for tied in self.tied:
            if not tied.equal():
                raise RuntimeError(f"the copies of '{tied.name}' on stages {tied.stages} are not equal any more")


def _do_nothing() -> None:
    """Do nothing. This function is the default of `on_reduce`."""


def parallelize(cfg: config.Config, world: World) -> ShardedModel:
    """Build this rank's shard of the configured model. The parameter values are loaded or drawn later."""
    with torch.device("meta"):
        whole = families.build(cfg)
    if cfg.lora.rank and not host.must_skip("that every adapter learns is verified at the start of a run, not here"):
        _prove_adapters(cfg, world, whole)
    matrices = None
    if cfg.optim.name == "muon":
        sizes = world.sizes["dp_replicate"], world.sizes["dp_shard"] * world.sizes["cp"], world.sizes["tp"]
        matrices = optim.Matrices(whole.matrices(), world.at_place(), sizes)
    cut = None
    stages = {0: whole}
    if world.sizes["pp"] > 1:
        cut = plan_stages(cfg, families.of(cfg.model).pieces(whole), world.sizes["pp"])
        stages = _split(cut, whole, cut.ranks[world.coordinate("pp")])
    reshard = reshards(cfg, world.sizes["pp"], world.sizes["dp_shard"] * world.sizes["cp"])
    splits = schedule.splits_backward(cfg, world.sizes["pp"])
    partial = {number: _shard(cfg, world, stage, reshard) for number, stage in stages.items()}
    model = ShardedModel(world, stages, partial, reshard, families.objective(cfg))
    model.matrices = matrices
    if cfg.run.exact:
        model.exact = exact.sums(world, whole, stages, partial)
    else:
        model.sharded = accumulates(cfg, world.sizes, mesh.memory_bytes(world.device)) == "sharded"
    if world.sizes["cp"] > 1:
        by_heads = families.of(cfg.model).attends_by_heads(cfg, world.sizes)
        recomputes = cfg.recompute.mode != "none"
        model.context = ContextParallel(world.groups["cp"], by_heads, keeps_gathered=recomputes)
    # Create `Replicas` after `_shard` has replaced parameters, because `Replicas` puts hooks on the final parameters.
    if world.sizes["dp_replicate"] > 1 and not cfg.run.exact and not wraps(cfg, world.sizes, splits):
        copies = world.groups["dp_replicate"]
        model.replicas = [Replicas(stage, stage.blocks(), copies) for stage in stages.values()]
    if cut is not None:
        model.tied = copies_of_stages(world, cut, whole, stages)
        boundaries = _boundaries(cfg, world, cut, whole)
        sums: dict[int, Any] = {}
        if model.exact is not None:
            sums |= model.exact.of_stage
        elif model.sharded:
            sums |= {number: ShardSums(stage) for number, stage in stages.items()}
        model.pipeline = Pipeline(cfg.pipeline, stages, world.groups["pp"], boundaries, world.device, sums)
    return model


def _prove_adapters(cfg: config.Config, world: World, whole: Model) -> None:
    """Verify that every adapter learns. The check uses a small copy of the model, sharded over tp like the model.

    Raises:
        ValueError: an adapter of the copy does not learn.
    """
    family, tp = families.of(cfg.model), world.tp.size()
    lora = cfg.lora.model_copy(update={"targets": lora_proof.everywhere(targets(whole, cfg.lora.targets))})
    length = {"seq_len": 8 * tp, "decoder_seq_len": 8 * tp}
    with torch.device("meta"):
        small, clone = family.clone(cfg.model_copy(update={"data": cfg.data.model_copy(update=length)}), tp)
        attach(clone, lora.model_copy(update={"base": "float32"}))
    alone = dataclasses.replace(world, sizes={**world.sizes, "cp": 1})
    family.cut(small, clone, alone)
    if multiplies_on_amx(cfg, world):
        multiply_on_amx(clone)
    family.allocate(small, clone, alone, world.device)
    _move_buffers(clone, world.device)
    rows = families.objective(cfg).blank(small.data, 2)
    text = lora_proof.blank_to_text(rows, small.model.vocab_size)
    missing = lora_proof.unlearning(clone, {name: row.to(world.device) for name, row in text.items()})
    if missing:
        raise ValueError(lora_proof.refusal(missing))


def _split(cut: Stages, whole: Model, numbers: Sequence[int]) -> dict[int, Model]:
    """Copy the meta model once per stage index, and keep in each copy only the modules of its stage."""
    stages = {number: copy.deepcopy(whole) for number in numbers}
    for number, stage in stages.items():
        stage.keep(cut.pieces[number])
    return stages


def _boundaries(cfg: config.Config, world: World, cut: Stages, whole: Model) -> list[dict[str, Tensor]]:
    """For each stage except the last, make meta tensors shaped like the tensors that the stage passes on.

    A stage's tensors require gradients if any parameter of this stage, or of an earlier stage, is trained. Otherwise
    backward never reaches the tensors.
    """
    family, parts = families.of(cfg.model), whole.parts()
    trained = False
    boundaries = []
    for pieces in cut.pieces[:-1]:
        parameters: list[nn.Parameter] = []
        for piece in pieces:
            for module in parts[piece]:
                parameters += module.parameters(recurse=False)
        trained |= any(parameter.requires_grad for parameter in parameters)
        tensors = family.boundary(cfg, world.sizes, whole, pieces[-1])
        for tensor in tensors.values():
            tensor.requires_grad_(trained and tensor.is_floating_point())
        boundaries.append(tensors)
    return boundaries


def _shard(cfg: config.Config, world: World, stage: Model, reshard: bool) -> list[str]:
    """Apply five steps to one stage on the meta device: plan, recompute, compile, fsdp and memory.

    Returns:
        Names of the parameters whose gradients must be all-reduced over tp (`ShardedModel.partial`).
    """
    # Step 1, plan. If tp > 1, parameters are DTensors on the tp mesh from here on.
    family = families.of(cfg.model)
    partial = family.cut(cfg, stage, world)
    experts, of_experts = [], None
    if world.experts is not None:
        experts, of_experts = stage.experts(), world.experts.sharded
        for module in experts:
            divide(module, world.experts.held)

    # Step 2, recompute. By default, tp frees the gathered input of a matrix product after forward, and gathers the
    # input again in backward. tp saves the gathered input in two cases. In recomputed blocks, the recomputation has
    # just gathered the input when backward needs it. A backward that is split in two requires torch's own matrix
    # product, which saves its input.
    blocks = stage.blocks()
    splits = schedule.splits_backward(cfg, world.sizes["pp"])
    if splits:
        keep_gathered(stage)
    if cfg.recompute.mode != "none":
        for block in recompute(stage, cfg.recompute):
            keep_gathered(block)

    # Step 3, compile. Blocks are compiled one by one, so that one compiled graph serves all blocks. On a CPU with AMX
    # tiles, first give the linear layers faster bfloat16 matrix products.
    if multiplies_on_amx(cfg, world):
        multiply_on_amx(stage)
    if compiling(cfg, world.device):
        # If a policy selects the tensors that a checkpointed region saves, torch warns that in-place operations in
        # the region might give wrong results. A compiled block has no in-place operations left.
        log = logging.getLogger("torch._higher_order_ops.wrap")
        log.addFilter(lambda record: "context_fn" not in str(record.msg))
        for block in blocks:
            block.compile()
        if world.device.type in softmax.COMPILED_ON:
            stage.compile_losses()

    # Step 4, fsdp. If each rank holds the whole model and weights only need a cast, set up master weights instead. FSDP
    # comes after compile, so that FSDP's hooks, which gather and free weights, stay outside the compiled graphs.
    if wraps(cfg, world.sizes, splits):
        apply_fsdp(stage, blocks, world.fsdp, cfg, reshard=reshard, experts=experts, of_experts=of_experts)
    elif keeps_masters(cfg, world.sizes):
        keep_masters(stage, cfg)

    # Step 5, memory. Allocate the tensors only now, when each tensor has the size of this rank's shard.
    family.allocate(cfg, stage, world, torch.device("cpu") if cfg.fsdp.cpu_offload else world.device)
    _move_buffers(stage, world.device)
    return partial


def multiplies_on_amx(cfg: config.Config, world: World) -> bool:
    """True if linear layers use the faster bfloat16 products of a CPU with AMX."""
    on_cpu = world.device.type == "cpu" and features.HAS_TILES
    return keeps_masters(cfg, world.sizes) and on_cpu and not cfg.run.exact


def _move_buffers(stage: Model, device: torch.device) -> None:
    """Move the buffers to the compute device, because FSDP with CPU offload moves only parameters to this device."""
    for module in stage.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _replicated_over_tp(tensor: Tensor) -> bool:
    """True if every tp rank has the whole tensor."""
    # Stored buffers are never sharded.
    if not isinstance(tensor, nn.Parameter):
        return True
    if not isinstance(tensor, DTensor) or "tp" not in (tensor.device_mesh.mesh_dim_names or ()):
        return False
    # FSDP puts its mesh axes before the existing axes of a DTensor, so tp is the last axis.
    return tensor.placements[-1] == Replicate()


def compiling(cfg: config.Config, device: torch.device) -> bool:
    """True if blocks are compiled; 'auto' compiles on GPUs."""
    return cfg.compile.enable is True or (cfg.compile.enable == "auto" and device.type == "cuda")


def with_micro_batch_size(cfg: config.Config, sizes: Mapping[str, int]) -> config.Config:
    """Choose a microbatch size for this layout if the configuration leaves it open ([batch] micro_batch_size = 0).

    The chosen size is the largest size up to LARGEST_FITTED that divides a rank's share of every global batch and gives
    a pipeline the number of microbatches that its schedule needs. If not even size 1 fits, the chosen size is 1, and
    `check` and the loader report the reason.
    """
    if cfg.batch.micro_batch_size:
        return cfg
    data_size = sizes["dp_replicate"] * sizes["dp_shard"]

    def fits(micro_batch_size: int) -> bool:
        unit = data_size * micro_batch_size
        for batch_size in cfg.batch.sizes:
            if batch_size % unit:
                return False
            if sizes["pp"] > 1 and schedule.broken_rule(cfg.pipeline, sizes["pp"], batch_size // unit):
                return False
        return True

    largest = next((size for size in range(LARGEST_FITTED, 1, -1) if fits(size)), 1)
    return cfg.model_copy(update={"batch": cfg.batch.model_copy(update={"micro_batch_size": largest})})


def with_params_dtype(cfg: config.Config, params: str) -> config.Config:
    """Return a copy of the configuration with [precision] params set to `params`."""
    return cfg.model_copy(update={"precision": cfg.precision.model_copy(update={"params": params})})
