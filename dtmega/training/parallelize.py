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

import copy
import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dtmega import config, families, mesh, rooms
from dtmega.fsdp import apply_fsdp, keep_masters, keeps_masters, reshards, wraps
from dtmega.fsdp.replicas import Replicas
from dtmega.fsdp.shard_sums import ShardSums
from dtmega.mesh import World
from dtmega.models.lora import attach, targets
from dtmega.models.lora import proof as lora_proof
from dtmega.models.model import Model
from dtmega.ops import host, optim, softmax
from dtmega.ops.context_parallel import ContextParallel
from dtmega.ops.cpu import features
from dtmega.ops.cpu.linear import multiply_on_amx
from dtmega.pipelining import schedule
from dtmega.pipelining.schedule import Pipeline
from dtmega.pipelining.split import Stages, plan_stages
from dtmega.pipelining.tied import copies_of_stages
from dtmega.plans import keep_gathered
from dtmega.plans.expert_parallel import divide
from dtmega.training.choices import accumulates, compiling
from dtmega.training.recompute import recompute
from dtmega.training.sharded_model import ShardedModel


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
        model.exact = rooms.exact().sums(world, whole, stages, partial)
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
    # Each rank has the clone's whole sequences and all its experts, so that the ranks need not have the same tokens.
    whole_of = {"data": cfg.data.model_copy(update=length), "mesh": cfg.mesh.model_copy(update={"cp": 1, "ep": 1})}
    with torch.device("meta"):
        small, clone = family.clone(cfg.model_copy(update=whole_of), tp)
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
