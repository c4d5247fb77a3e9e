"""A proof, before the first step of a compiled run, that compiled blocks compute what the same blocks compute eagerly.

A compiler may lose a gradient without an error. So each block computes a microbatch three times, with gradients:
compiled, eagerly, and eagerly in a wider dtype, which is the measure. The compiled results may be at most FACTOR times
as far from the measure as the eager results.

The proof runs what the run will run: the parallel model on its layout, after an evaluation, because Dynamo remembers
what it has compiled or skipped in one mode and reuses this in the other. Each block gets the arguments that its stage
passes to it, and is called after its stage: FSDP makes the first module that it sees the root. The proof takes no
gradient into `.grad`, draws nothing from torch's generators and communicates no gradients of parameters.

What was proven is remembered in the user's cache directory, under a digest of all that the compiled code depends on.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves, tree_map

from dtmega import __version__, config, rooms
from dtmega.data import cache_dir
from dtmega.distributed import exit_codes
from dtmega.distributed.agreement import Startup
from dtmega.files import atomic
from dtmega.mesh import World
from dtmega.ops.shards import local
from dtmega.training.random_text import blank_to_text
from dtmega.training.sharded_model import ShardedModel

FACTOR = 4.0  # largest distance of compiled results from the measure, relative to the distance of eager results
ROUNDINGS = 16  # roundings of the measure's dtype that no result is expected to be free of
LONGEST_TEXT = 256  # bytes of a rank's finding that the other ranks receive


class _Call(NamedTuple):
    """The arguments with which a stage calls a block, and the context variables at this time."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    context: contextvars.Context


def prove(cfg: config.Config, digest: str, world: World, model: ShardedModel, startup: Startup) -> list[str]:
    """Prove compiled blocks, unless they are proven. With [compile] enable = "auto", others run eagerly from now on.

    Args:
        cfg: configuration of the run.
        digest: digest of the directory that [model] path names.
        world: processes and mesh of the run.
        model: parallel model, with values.
        startup: coordinator of the ranks, which refuses the run if it must compile and a block is wrong.

    Returns:
        The line about blocks that run eagerly because of the proof, or that could not be proven; [] if all are right.
    """
    key = key_of(cfg, world, digest)
    with startup.step("compiled blocks that are proven") as step:
        step.send = startup.rank == 0 and is_proven(key)
    if step.received:
        return []
    with startup.step("proof of compiled blocks"):
        wrong, unproven = unlike_eager(cfg, world, model, startup.heartbeat)
        if wrong and cfg.compile.enable is True:
            raise ValueError(f"torch.compile changes block {wrong} ([compile] enable = false)")
    if wrong:
        run_eagerly(model)
        return [f"blocks run eagerly, because torch.compile changes block {wrong} ([compile] enable = 'auto')"]
    if unproven:
        return [f"compiled blocks could not be compared with eager ones: {unproven} ([compile] enable)"]
    if startup.rank == 0:
        remember(key)
    return []


def is_proven(key: str) -> bool:
    """Return True if a run on this machine has proven the blocks with this key (`key_of`)."""
    with contextlib.suppress(ValueError, OSError):
        return (cache_dir() / f"compiled-{key}").exists()
    return False


def remember(key: str) -> None:
    """Remember that the blocks with this key are proven. If nothing can be written, each run proves them again."""
    with contextlib.suppress(ValueError, OSError), atomic.replaced(cache_dir() / f"compiled-{key}"):
        pass


def key_of(cfg: config.Config, world: World, digest: str) -> str:
    """The digest of all that compiled code depends on: versions, device, layout, precision, mode and shapes.

    Args:
        cfg: configuration of the run.
        world: processes and mesh of the run.
        digest: digest of the directory that [model] path names.
    """
    sections = cfg.model_dump()
    names = ("model", "mesh", "precision", "recompute", "fsdp", "pipeline", "lora")
    on_gpu = world.device.type == "cuda"
    kind = torch.cuda.get_device_name(world.device) if on_gpu else torch.backends.cpu.get_cpu_capability()
    rows = {"data": sections["data"] | {"path": "", "tokenizer": ""}, "rows": cfg.batch.micro_batch_size}
    values = {name: sections[name] for name in names} | rows | {"freeze": cfg.train.freeze, "path": digest}
    values |= {"versions": (torch.__version__, __version__), "device": kind, "layout": dict(world.sizes)}
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True, default=str).encode())


def unlike_eager(
    cfg: config.Config, world: World, model: ShardedModel, heartbeat: Callable[[], object]
) -> tuple[str, str]:
    """Compare each compiled block with the same block run eagerly. All ranks call this function together.

    Args:
        cfg: configuration of the run.
        world: processes and mesh of the run.
        model: parallel model, with values.
        heartbeat: function that is called before each block.

    Returns:
        Two texts of the first rank that has one, equal on all ranks: the block and the tensor that are wrong, and the
        error that ended the comparison; '' if all are right, and if there was no error.
    """
    n = 1
    if world.sizes["pp"] > 1:
        broken_rule = rooms.schedule().broken_rule
        n = next(n for n in itertools.count(1) if not broken_rule(cfg.pipeline, world.sizes["pp"], n))
    rows = blank_to_text(model.objective.blank(cfg.data, cfg.batch.micro_batch_size), cfg.model.vocab_size)
    microbatches = [{name: tensor.to(world.device) for name, tensor in rows.items()} for _ in range(n)]
    model.losses(microbatches)
    blocks: dict[str, nn.Module] = {}
    for stage in model.stages.values():
        names = {module: name for name, module in stage.named_modules()}
        blocks |= {names[block]: block for block in stage.blocks()}
    with _recording(blocks) as calls:
        model.forward_only(microbatches)
    # Else, at the end of each backward, FSDP would reduce zeros into the gradients of all other blocks.
    for copies in model.copies:
        copies.expect(last=False, reduces=False)
    wrong, unproven = "", ""
    dtype = torch.float64 if world.device.type == "cpu" else torch.float32
    for name, call in calls.items():
        heartbeat()
        try:
            # The context variables hold what a transformers model's forward provides to its attention.
            found = call.context.run(_compare, blocks[name], call, dtype)
        # A device may lack memory for a block in the wider dtype, or a kernel: this says nothing of the compiled block.
        except RuntimeError as error:
            unproven = f"'{name}' in {dtype}: {exit_codes.error_summary(error)}"
            break
        wrong = wrong or (found and f"'{name}': {found}")
    for copies in model.copies:
        copies.expect(last=True, reduces=True)
    model.release()
    return _first_of_ranks(wrong, world), _first_of_ranks(unproven, world)


def run_eagerly(model: ShardedModel) -> None:
    """Make the blocks of all stages run without their compiled code from now on."""
    for stage in model.stages.values():
        for block in stage.blocks():
            block._compiled_call_impl = None


@contextlib.contextmanager
def _recording(blocks: Mapping[str, nn.Module]) -> Iterator[dict[str, _Call]]:
    """Inside the `with` block, run blocks eagerly and record the first call of each block."""
    calls: dict[str, _Call] = {}
    compiled = {name: block._compiled_call_impl for name, block in blocks.items()}

    def recorder(name: str, block: nn.Module) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.setdefault(name, _Call(args, kwargs, contextvars.copy_context()))
            return block._call_impl(*args, **kwargs)

        return call

    for name, block in blocks.items():
        block._compiled_call_impl = recorder(name, block)
    try:
        yield calls
    finally:
        for name, block in blocks.items():
            block._compiled_call_impl = compiled[name]


def _compare(block: nn.Module, call: _Call, dtype: torch.dtype) -> str:
    """Compare a block's results, compiled and eager, with those in `dtype`. Returns a finding; '' if all is right."""
    _gather(block)
    parameters = {name: p for name, p in block.named_parameters() if p.requires_grad}
    compiled = _results(block, call, parameters)
    eager = _results(block._call_impl, call, parameters)
    _gather(block)
    with _widened(block, dtype):
        wide = {name: p for name, p in block.named_parameters() if p.requires_grad}
        measure = _results(block._call_impl, call, wide, dtype)
    norms = {name: float(tensor.norm()) for name, tensor in measure.items()}
    far = {name: float((eager[name].to(dtype) - tensor).norm()) for name, tensor in measure.items()}
    relative = [far[name] / norm for name, norm in norms.items() if norm > 0]
    # A tensor with few elements may be exact by chance, so no tensor is expected to be closer than tensors usually are.
    usual = statistics.median(relative) if relative else 0.0
    floor = ROUNDINGS * torch.finfo(dtype).eps
    for name, tensor in measure.items():
        away = float((compiled[name].to(dtype) - tensor).norm())
        if not away <= FACTOR * max(far[name], max(usual, floor) * norms[name]) + floor:
            return f"{name} is {away:.3g} from the same in {dtype}, eager {far[name]:.3g}, norm {norms[name]:.3g}"
    return ""


def _gather(block: nn.Module) -> None:
    """Let FSDP put its gathered parameters into a block's modules."""
    for module in block.modules():
        if isinstance(module, FSDPModule):
            module.unshard()


def _results(
    run: Callable[..., Any], call: _Call, parameters: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The outputs of a block and the gradients of its hidden states and parameters, this rank's shards, by name.

    Args:
        run: function that runs the block.
        call: arguments of the block.
        parameters: trained parameters of the block, keyed by name.
        dtype: dtype to which floating arguments are converted; None to leave them as they are.
    """
    hidden = next(t for t in tree_leaves((call.args, call.kwargs)) if isinstance(t, Tensor) and t.is_floating_point())
    inputs: list[Tensor] = []

    def prepare(t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.is_floating_point():
            return t
        mine = t.detach() if dtype is None else t.detach().to(dtype)
        # Hidden states have gradients. Other tensors, such as a rotation, do not.
        if t.dtype == hidden.dtype and t.ndim == hidden.ndim and t.shape[-1] == hidden.shape[-1]:
            mine = mine.requires_grad_() if mine is not t else mine.clone().requires_grad_()
            inputs.append(mine)
        return mine

    args, kwargs = tree_map(prepare, (call.args, call.kwargs))
    with torch.enable_grad():
        outputs = [t for t in tree_leaves(run(*args, **kwargs)) if isinstance(t, Tensor) and t.requires_grad]
        towards = [_direction(t) for t in outputs]
        gradients = torch.autograd.grad(outputs, [*inputs, *parameters.values()], towards, allow_unused=True)
    names = [f"the gradient of input {i}" for i in range(len(inputs))] + [f"the gradient of {n}" for n in parameters]
    results = {f"output {i}": t.detach() for i, t in enumerate(outputs)}
    for name, leaf, gradient in zip(names, [*inputs, *parameters.values()], gradients, strict=True):
        results[name] = local(torch.zeros_like(leaf) if gradient is None else gradient).detach().clone()
    return results


def _direction(t: Tensor) -> Tensor:
    """A gradient for an output, with unequal elements that are functions of the index."""
    return torch.arange(1, t.numel() + 1, device=t.device, dtype=torch.float32).sin().view(t.shape).to(t.dtype)


@contextlib.contextmanager
def _widened(block: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside the `with` block, a block computes with copies of its parameters and buffers in `dtype`, without hooks.

    FSDP's hooks would put its own parameters back into the modules.
    """
    copies: dict[int, Tensor] = {}

    def copy(t: Tensor | None) -> Tensor | None:
        if t is None or not t.is_floating_point():
            return t
        if id(t) not in copies:
            wide = t.detach().to(dtype)
            copies[id(t)] = nn.Parameter(wide, t.requires_grad) if isinstance(t, nn.Parameter) else wide
        return copies[id(t)]

    replaced = ("_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks")
    saved = [(module, {name: module.__dict__[name] for name in replaced}) for module in block.modules()]
    for module, held in saved:
        for name in ("_parameters", "_buffers"):
            module.__dict__[name] = {key: copy(t) for key, t in held[name].items()}
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            module.__dict__[name] = type(held[name])()
    try:
        yield
    finally:
        for module, held in saved:
            module.__dict__.update(held)


def _first_of_ranks(finding: str, world: World) -> str:
    """The finding of the first rank that has one, on all ranks; '' if no rank has one."""
    text = finding.encode()[:LONGEST_TEXT]
    mine = torch.zeros(LONGEST_TEXT, dtype=torch.uint8)
    mine[: len(text)] = torch.tensor([*text], dtype=torch.uint8)
    everyone = [torch.zeros_like(mine, device=world.device) for _ in range(world.size)]
    dist.all_gather(everyone, mine.to(world.device))
    texts = (bytes(t.tolist()).rstrip(b"\0").decode(errors="replace") for t in everyone)
    return next((text for text in texts if text), "")
