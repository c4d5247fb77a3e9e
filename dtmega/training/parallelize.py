"""Turn the whole model into one rank's shard of it. `parallelize` and `_shard` take these steps in THIS order:

    build      the whole model on the meta device, which costs no memory
    split      keep only this rank's pipeline stages (pp)
    plan       shard matrices over tp and experts over ep, and insert the collectives into the modules
    recompute  wrap blocks so that the backward pass recomputes them, including tp's collectives
    compile    compile each block together with its recomputation
    fsdp       shard each tp rank's parameters over the fsdp ranks; FSDP's hooks stay outside the compiled blocks
    memory     allocate only this rank's shard; the parameter values are loaded or drawn later

Nothing in this file depends on a model family: its record (`families/`) tells how a model is built and sharded. Before
anything starts, `checks.py` refuses combinations that cannot work.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from dtmega import config, families, mesh, rooms
from dtmega.mesh import World
from dtmega.models.model import Model
from dtmega.ops import host, softmax
from dtmega.training import choices
from dtmega.training.choices import accumulates, compiling, keeps_masters, reshards, wraps
from dtmega.training.sharded_model import Copies, ShardedModel

if TYPE_CHECKING:
    from dtmega.ops.optim.muon import Matrices


def parallelize(cfg: config.Config, world: World) -> ShardedModel:
    """Build this rank's shard of the configured model. The parameter values are loaded or drawn later."""
    sizes = world.sizes
    with torch.device("meta"):
        whole = families.build(cfg)
    if cfg.lora.rank and not host.must_skip("that every adapter learns is verified at the start of a run, not here"):
        rooms.adapter_proof().prove(cfg, world, whole)
    matrices = _matrices(whole, world) if cfg.optim.name == "muon" else None
    cut = None
    stages, splits = {0: whole}, False
    if sizes["pp"] > 1:
        cut = rooms.pipelined().cut(cfg, whole, sizes["pp"])
        stages = rooms.pipelined().split(cut, whole, cut.ranks[world.coordinate("pp")])
        splits = rooms.schedule().splits_backward(cfg, sizes["pp"])
    model = ShardedModel(world, stages, families.objective(cfg))
    model.matrices = matrices
    for number, stage in stages.items():
        model.partial[number], copies = _shard(cfg, world, stage, splits)
        model.copies += copies
    if sizes["tp"] > 1:
        model.sum_over_tp = rooms.plans().sum_partial_gradients
    if cfg.run.exact:
        model.exact = rooms.exact().sums(world, whole, stages, model.partial)
    else:
        model.sharded = accumulates(cfg, sizes, mesh.memory_bytes(world.device)) == "sharded"
    if sizes["cp"] > 1:
        by_heads = families.of(cfg.model).attends_by_heads(cfg, sizes)
        recomputes = cfg.recompute.mode != "none"
        ranks = rooms.context_parallel().ContextParallel
        model.context = ranks(world.groups["cp"], by_heads, keeps_gathered=recomputes)
    # Create `Replicas` after `_shard` has replaced parameters, because `Replicas` puts hooks on the final parameters.
    if sizes["dp_replicate"] > 1 and not cfg.run.exact and not wraps(cfg, sizes, splits):
        copies = world.groups["dp_replicate"]
        model.replicas = [rooms.replicas().Replicas(stage, stage.blocks(), copies) for stage in stages.values()]
    if cut is not None:
        rooms.pipelined().schedule(cfg, model, cut, whole)
    if whole.counts_of_step() is not None:
        model.loads = rooms.routing().Loads()
    if cfg.lora.rank:
        model.unproven = [name for name, _ in model.named_parameters() if rooms.lora().is_adapter(name)]
    return model


def _matrices(whole: Model, world: World) -> Matrices:
    """The weights that Muon trains. Every rank must call this function, because it makes a process group."""
    muon = rooms.muon()
    cuts = {name: muon.Cut(*fused) for name, fused in whole.matrices().items()}
    sizes = world.sizes["dp_replicate"], world.sizes["dp_shard"] * world.sizes["cp"], world.sizes["tp"]
    return muon.Matrices(cuts, world.at_place(), sizes)


def _shard(cfg: config.Config, world: World, stage: Model, splits: bool) -> tuple[list[str], list[Copies]]:
    """Apply five steps to one stage on the meta device: plan, recompute, compile, fsdp and memory.

    Args:
        cfg: configuration of the run.
        world: processes and mesh.
        stage: model of the stage.
        splits: whether the schedule splits the backward pass in two.

    Returns:
        Two attributes of `ShardedModel` for this stage: `partial` and `copies`.
    """
    # Step 1, plan. If tp > 1, parameters are DTensors on the tp mesh from here on.
    family = families.of(cfg.model)
    partial = family.cut(cfg, stage, world)
    experts, of_experts = [], None
    if world.experts is not None:
        experts, of_experts = stage.experts(), world.experts.sharded
        for module in experts:
            rooms.expert_parallel().divide(module, world.experts.held)

    # Step 2, recompute. By default, tp frees the gathered input of a matrix product after forward, and gathers the
    # input again in backward. tp saves the gathered input in two cases. In recomputed blocks, the recomputation has
    # just gathered the input when backward needs it. A backward that is split in two requires torch's own matrix
    # product, which saves its input.
    blocks = stage.blocks()
    recomputed = [] if cfg.recompute.mode == "none" else rooms.recompute().recompute(stage, cfg.recompute)
    if world.sizes["tp"] > 1:
        for module in [stage] if splits else recomputed:
            rooms.plans().keep_gathered(module)

    # Step 3, compile. Blocks are compiled one by one, so that one compiled graph serves all blocks. On a CPU with AMX
    # tiles, first give the linear layers faster bfloat16 matrix products.
    if choices.multiplies_on_amx(cfg, world):
        rooms.amx_products().multiply_on_amx(stage)
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
    copies: list[Copies] = []
    if wraps(cfg, world.sizes, splits):
        fsdp = rooms.fsdp()
        reshard = reshards(cfg, world.sizes["pp"], world.sizes["dp_shard"] * world.sizes["cp"])
        fsdp.apply_fsdp(stage, blocks, world.fsdp, cfg, reshard=reshard, experts=experts, of_experts=of_experts)
        copies.append(fsdp.Gathered(stage, reshard))
    elif keeps_masters(cfg, world.sizes):
        copies.append(rooms.masters().Masters(stage, getattr(torch, cfg.precision.params)))

    # Step 5, memory. Allocate the tensors only now, when each tensor has the size of this rank's shard.
    family.allocate(cfg, stage, world, torch.device("cpu") if cfg.fsdp.cpu_offload else world.device)
    stage.move_buffers(world.device)
    return partial, copies
