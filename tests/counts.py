"""Exact figures of the trainer's own step, without a clock: for `test_counts.py` and `benchmarks/rows/counts.py`."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock, patch

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from dtmega import config, mesh
from dtmega.data.loader import StepBatch
from dtmega.ops.optim import build_optimizer
from dtmega.ops.shards import local
from dtmega.training.parallelize import parallelize
from dtmega.training.step import Run, train_step

MODEL: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "n_heads": 4, "n_layers": 3}
B, S = 2, 8
CPU = torch.device("cpu")


def settings(**sections: Any) -> config.Config:
    """A BLOOM of three layers in one microbatch a step."""
    data_size = 2 if "dp_shard" in sections.get("mesh", {}) else 1
    values = {
        "train": {"steps": 9},
        "model": MODEL,
        "data": {"seq_len": S},
        "batch": {"micro_batch_size": B, "global_batch_size": B * data_size},
        "compile": {"enable": False},
    }
    return config.validate(values | sections, "test")


def begin(cfg: config.Config, device: torch.device = CPU) -> Run:
    """A run that nobody watches."""
    world = mesh.start(device, mesh.resolve(cfg.mesh, mesh.world_size()))
    model = parallelize(cfg, world)
    model.draw(cfg.run.seed)
    optimizer = build_optimizer(model.named_parameters(), cfg.optim)
    nobody: dict[str, Any] = {
        name: Mock()
        for name in (
            "text",
            "batches",
            "checkpoints",
            "metrics",
            "watch",
            "phases",
            "health",
            "pace",
            "exit_status",
        )
    }
    return Run(cfg, cfg, world, model=model, optimizer=optimizer, **nobody)


def batch(cfg: config.Config, number: int = 0) -> StepBatch:
    """Tokens of any kind, others for each number."""
    tokens = (torch.arange(B * S).view(B, S) * (number + 1)) % MODEL["vocab_size"]
    microbatch = {
        "tokens": tokens,
        "labels": tokens.roll(-1, dims=1),
        "sample_ids": torch.arange(B) + B * number,
        "places": torch.arange(S).repeat(B, 1),
    }
    return StepBatch(0, cfg.batch.global_batch_size, [microbatch])


def state_bytes(run: Run) -> int:
    """Parameters, gradients and the optimizer's tensors of this rank after a step, each memory once.

    What an optimizer counts its steps with is left out.
    """
    train_step(run, batch(run.cfg))
    parameters = [parameter for _, parameter in run.model.named_parameters()]
    tensors: list[Tensor] = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    for state in run.optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor) and value.dim() > 0]
    storages = {}
    for tensor in tensors:
        storage = local(tensor.detach()).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@contextlib.contextmanager
def traced_only() -> Iterator[None]:
    """Trace what is compiled, as always, but run the graphs as they are: inductor's kernels cost many seconds."""
    compile_module = functools.partialmethod(nn.Module.compile, backend="aot_eager")
    compile_function = functools.partial(torch.compile, backend="aot_eager")
    with patch.object(nn.Module, "compile", compile_module), patch.object(torch, "compile", compile_function):
        yield


def graphs_by_step(n_steps: int) -> tuple[list[int], dict[str, int]]:
    """The number of graphs after each of so many steps on different batches, and the breaks in them by reason."""
    with traced_only():
        counters.clear()
        run = begin(settings(compile={"enable": True}))
        found = []
        for number in range(n_steps):
            train_step(run, batch(run.cfg, number))
            found.append(counters["stats"]["unique_graphs"])
    return found, dict(counters["graph_break"])


def messages(run: Run) -> Counter[tuple[str, str]]:
    """(operation, shapes) -> how often gloo is asked for it in a step; a mode of dispatch would end compiling."""
    train_step(run, batch(run.cfg))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as seen:
        train_step(run, batch(run.cfg))
    return Counter((e.name, str(e.input_shapes)) for e in seen.events() or [] if e.name.startswith("gloo:"))
