"""Models of transformers under the trainer, on several layouts in one spawned group: for test_training.py."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtmega import config, families, mesh, train
from dtmega.checkpoint.resume import open_checkpoint
from dtmega.checkpoint.run import Checkpoints
from dtmega.checkpoint.state import Progress, State
from dtmega.checkpoint.tensors import tensors_of
from dtmega.checkpoint.weights import load_weights
from dtmega.data.loader import IGNORED, StepBatch
from dtmega.interop import stored
from dtmega.interop.hf.tp.verify import deviation
from dtmega.mesh import World
from dtmega.ops import optim, shards
from dtmega.ops.shards import local
from dtmega.training.checks import check
from dtmega.training.parallelize import parallelize
from dtmega.training.sharded_model import ShardedModel
from dtmega.training.step import count, train_step
from tests import hf_models, ranks
from tests.hf_models import Case

CPU = torch.device("cpu")
SEQ_LEN, SEQUENCES, STEPS = 16, 4, 2
LR, CLIP, DECAY = 1e-2, 0.5, 0.1
EPS = 1e-4  # large enough that a gradient which is 0 but for rounding (OPT's biases of keys) stays none
TIMEOUT_S = 600.0
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    # The time of layouts with tp or cp is collectives, so these have fewer microbatches.
    "tp 2": (2, {"mesh": {"tp": 2}, "batch": {"micro_batch_size": 2}}),
    "pp 2": (2, {"mesh": {"pp": 2}}),
    "dp 2": (2, {}),
    "HSDP 2 x 2": (4, {"mesh": {"dp_replicate": 2, "dp_shard": 2}}),
    "dp 2, ep 2": (2, {"mesh": {"ep": 2}}),
    "dp 4, ep 2": (4, {"mesh": {"ep": 2}}),
    "pp 2 x dp 2, ep 2": (4, {"mesh": {"pp": 2, "ep": 2}}),
    "cp 2, ep 2": (2, {"mesh": {"cp": 2, "ep": 2}, "batch": {"micro_batch_size": 2}}),
    "tp 2 x dp 2": (4, {"mesh": {"tp": 2}, "batch": {"micro_batch_size": 2}}),
    "tp 2 x dp 2, recompute": (4, {"mesh": {"tp": 2}, "recompute": {"mode": "full"}}),
    "pp 2 x tp 2": (4, {"mesh": {"pp": 2, "tp": 2}}),
    "cp 2": (2, {"mesh": {"cp": 2, "cp_form": "gather"}, "batch": {"micro_batch_size": 2}}),
    "cp 2, heads": (2, {"mesh": {"cp": 2, "cp_form": "heads"}, "recompute": {"mode": "full"}}),
    "cp 2 x tp 2": (
        4,
        {"mesh": {"cp": 2, "tp": 2}, "recompute": {"mode": "full"}, "batch": {"micro_batch_size": 2}},
    ),
    "cp 2 x pp 2": (4, {"mesh": {"cp": 2, "pp": 2}}),
    "cp 2 x dp 2": (4, {"mesh": {"cp": 2}}),
}


class Job(NamedTuple):
    """fn(world, keys, *args) on the first n ranks: their world, and the configuration keys of the layout."""

    layout: str
    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()


def run_all(jobs: Mapping[str, Job]) -> dict[str, list[Any]]:
    """One after the other, in one spawned group; what each rank of a job returned."""
    sizes = {name: LAYOUTS[job.layout][0] for name, job in jobs.items()}
    with tempfile.TemporaryDirectory() as stores:
        results = ranks.run(max(sizes.values()), _one_rank, dict(jobs), stores, timeout_s=TIMEOUT_S)
    return {name: [results[rank][name] for rank in range(n)] for name, n in sizes.items()}


def _one_rank(jobs: dict[str, Job], stores: str) -> dict[str, Any]:
    """Those of one layout that follow each other are in one group."""
    rank, found = dist.get_rank(), {}
    dist.destroy_process_group()
    for i, (layout, together) in enumerate(itertools.groupby(jobs.items(), lambda item: item[1].layout)):
        n, keys = LAYOUTS[layout]
        if rank < n:
            store = dist.FileStore(str(Path(stores, str(i))), n)  # pyright: ignore[reportPrivateImportUsage]
            timeout = timedelta(seconds=TIMEOUT_S)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timeout)
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(n)}
            asked = config.Mesh(**keys.get("mesh", {}))
            world = mesh.start(CPU, mesh.resolve(asked, n), ep=asked.ep)
            for name, (_, fn, args) in together:
                found[name] = fn(world, keys, *args)
            del world
            gc.collect()  # gloo aborts if a tensor with pending work outlives its group
            dist.barrier()
            dist.destroy_process_group()
    return found


def configured(path: str, keys: Mapping[str, Any], **more: dict[str, Any]) -> config.Config:
    """Sections of the layout and `more` over those of this file."""
    sections: dict[str, dict[str, Any]] = {
        "train": {"steps": STEPS},
        "model": {"name": "hf", "path": path},
        "data": {"seq_len": SEQ_LEN, "tokenizer": "bytes"},
        "batch": {"micro_batch_size": 1, "global_batch_size": SEQUENCES},
        "optim": {"lr": LR, "clip_grad": CLIP, "weight_decay": DECAY, "eps": EPS},
        "run": {"device": "cpu"},
    }
    for name, values in [*keys.items(), *more.items()]:
        sections[name] = {**sections.get(name, {}), **values}
    cfg = families.resolve(config.validate(sections, "test"))
    check(cfg, mesh.resolve(cfg.mesh, dist.get_world_size()), CPU)
    return cfg


def batch(vocab: int, step: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels [SEQUENCES, SEQ_LEN]; of the labels not as many count in each sequence."""
    generator = torch.Generator().manual_seed(step)
    tokens, labels = torch.randint(3, vocab, (2, SEQUENCES, SEQ_LEN), generator=generator)
    for row in range(SEQUENCES):
        labels[row, : 2 * row] = IGNORED
    return tokens, labels


def microbatches(world: World, cfg: config.Config, step: int) -> StepBatch:
    """This data rank's part."""
    tokens, labels = (t[world.data_rank :: world.data_size] for t in batch(cfg.model.vocab_size, step))
    size = cfg.batch.micro_batch_size
    parts = zip(tokens.split(size), labels.split(size), strict=True)
    return StepBatch(0, SEQUENCES, [{"tokens": tokens, "labels": labels} for tokens, labels in parts])


def loss_of(model: Any, step: int, label_smoothing: float = 0.0) -> Tensor:
    """transformers' logits, torch's loss."""
    tokens, labels = batch(model.config.vocab_size, step)
    return F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten(), label_smoothing=label_smoothing)


def truth(path: str) -> dict[str, Any]:
    """The results of transformers and torch on the directory in one process."""
    options = {"dtype": torch.float32, "experts_implementation": "eager"}  # a plain loop over experts
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, **options).train()
    found: dict[str, Any] = {"smoothed": loss_of(model, 0, 0.1).item()}
    groups = [[p for p in model.parameters() if (p.ndim >= 2) is matrices] for matrices in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": DECAY}, {"params": groups[1], "weight_decay": 0.0}],
        lr=LR,
        betas=(0.9, 0.95),
        eps=EPS,
    )
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            found["gradients"] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        assert norm > 2 * CLIP
        optimizer.step()
    return found | {"losses": losses, "stepped": {n: p.detach().clone() for n, p in model.named_parameters()}}


def truths(cases: Sequence[Case]) -> tuple[dict[Case, str], str]:
    """Directories, and a file of {case: truth}."""
    directories = hf_models.saved(list(cases))
    path = Path(next(iter(directories.values()))).parent / f"{zlib.crc32(repr(cases).encode())}-train.pt"
    torch.save({case: truth(where) for case, where in directories.items()}, path)
    return directories, str(path)


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put together from all ranks that hold a part; all of a mesh call it."""
    return {n: shards.full_tensor(t) if isinstance(t, DTensor) else t.detach().clone() for n, t in tensors.items()}


def errors(ours: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative, of the tensors that this rank holds a part of."""
    total = torch.stack([t.norm() for t in truth.values()]).norm().item()
    found = whole(ours)
    return {name: deviation(found[name], truth[name], total) for name in found}


def ready(cfg: config.Config, world: World) -> tuple[ShardedModel, int]:
    """The model with the weights of its directory, and the bytes read for it."""
    model, source = parallelize(cfg, world), stored.weights(cfg.model)
    assert source is not None
    load_weights(source, model.stored_tensors(), cfg.model.vocab_size)
    return model, source.bytes_read


def numbers(world: World, keys: dict[str, Any], directories: dict[Case, str], path: str) -> dict[Case, Any]:
    """The distance from transformers of loss, gradients and two steps, for each case, and what was read for it."""
    truths, found = torch.load(path, weights_only=False), {}
    for case, where in directories.items():
        cfg, expected = configured(where, keys), truths[case]
        model, bytes_read = ready(cfg, world)
        parts = [local(tensor) for _, tensor in model.stored_tensors()]
        result: dict[str, Any] = {"bytes_read": bytes_read, "bytes_held": sum(p.nbytes for p in parts)}
        result["loss"] = abs(forward_backward(model, world, cfg) / expected["losses"][0] - 1)
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        result["gradients"] = errors(gradients, expected["gradients"])
        losses, _ = steps(cfg, world, model)
        result["losses"] = max(abs(a / b - 1) for a, b in zip(losses, expected["losses"], strict=True))
        result["stepped"] = errors(dict(model.named_parameters()), expected["stepped"])
        found[case] = result
    return found


def forward_backward(model: ShardedModel, world: World, cfg: config.Config) -> float:
    """The mean loss of the first step."""
    first = microbatches(world, cfg, 0)
    counts = count(world, model.objective, first)
    total = model.forward_backward(first.microbatches, counts)
    dist.all_reduce(total, group=world.groups["loss"])
    return total.item() / counts["tokens"]


def steps(cfg: config.Config, world: World, model: ShardedModel) -> tuple[list[float], torch.optim.Optimizer]:
    """Losses of two steps as the trainer does them."""
    optimizer = optim.build_optimizer(model.named_parameters(), cfg.optim)
    parts = {"cfg": cfg, "world": world, "model": model, "optimizer": optimizer}
    run: Any = SimpleNamespace(**parts, spikes=None, watch=Mock(), phases=Mock(), loss_scale=None)
    return [train_step(run, microbatches(world, cfg, i))[0] for i in range(STEPS)], optimizer


def smoothing(world: World, keys: dict[str, Any], where: str) -> tuple[float, float]:
    """(training, evaluation): mean losses with label_smoothing = 0.1."""
    cfg = configured(where, keys, model={"label_smoothing": 0.1})
    model, _ = ready(cfg, world)
    training = forward_backward(model, world, cfg)
    first = microbatches(world, cfg, 0)
    total = model.losses(first.microbatches)
    dist.all_reduce(total, group=world.groups["loss"])
    return training, total.item() / count(world, model.objective, first)["tokens"]


def rounded(world: World, keys: dict[str, Any], where: str) -> dict[str, Any]:
    """A step in bf16."""
    cfg = configured(where, keys, precision={"params": "bfloat16"})
    model, _ = ready(cfg, world)
    dtypes = set()
    model.stages[0].blocks()[0].register_forward_hook(lambda _, args, out: dtypes.add(args[0].dtype))
    loss = forward_backward(model, world, cfg)
    masters = {p.dtype for _, p in model.named_parameters()} | {p.grad.dtype for _, p in model.named_parameters()}  # pyright: ignore
    return {"loss": loss, "masters": masters, "activations": dtypes}


def drawn(world: World, keys: dict[str, Any], directories: dict[str, str]) -> dict[str, dict[str, Tensor]]:
    """Initial values without weights, whole."""
    found = {}
    for name, where in directories.items():
        cfg = configured(where, keys)
        model = parallelize(cfg, world)
        model.draw(cfg.run.seed)
        found[name] = whole({n: p.detach() for n, p in model.named_parameters()})
    return found


def saving(world: World, keys: dict[str, Any], where: str, folder: str, mode: str) -> dict[str, Tensor]:
    """Train, save in the foreground or in the background; what should be in the checkpoint, whole."""
    cfg = configured(where, keys, checkpoint={"dir": folder, "mode": mode})
    model, _ = ready(cfg, world)
    _, optimizer = steps(cfg, world, model)
    checkpoints, tensors = Checkpoints(cfg, CPU), tensors_of(model.owned(), optimizer)
    expected = whole(tensors)
    outcomes = checkpoints.save(tensors, State.of(cfg.model_dump(), progress=Progress(STEPS), updates=STEPS))
    if mode == "async":
        with torch.no_grad():  # what is trained meanwhile is not in it
            for _, p in model.named_parameters():
                local(p).zero_()
    outcomes += checkpoints.wait()
    checkpoints.close()
    assert [o.error for o in outcomes] == [""]
    return expected


def reading(world: World, keys: dict[str, Any], where: str, folder: str) -> dict[str, Tensor]:
    """The whole tensors of a run on this layout after it loaded that checkpoint."""
    cfg = configured(where, keys)
    model = parallelize(cfg, world)
    optimizer = optim.build_optimizer(model.named_parameters(), cfg.optim)
    checkpoints, damage = Checkpoints(cfg, CPU), list[str]()
    state = checkpoints.load([open_checkpoint(folder)], model.stored_tensors(), optimizer, damage)
    checkpoints.close()
    assert state is not None
    assert (state.progress.step, damage) == (STEPS, [])
    return whole(tensors_of(model.owned(), optimizer))


def training(_: World, keys: dict[str, Any], argv: list[str], folder: str) -> int:
    """train.py; returns the exit code, and prints into `folder`."""
    flags = [word for s, values in keys.items() for k, v in values.items() for word in (f"--{s}.{k}", str(v))]
    with Path(folder, f"stdout-{dist.get_rank()}").open("w") as file, contextlib.redirect_stdout(file):
        return train.main([*argv, *flags])
