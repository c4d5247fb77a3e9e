"""Two ranks of data parallelism beside torch's DistributedDataParallel around the same model; CPU time of one rank."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.rows import ours
from benchmarks.rows.measure import Row, check_losses, interleaved, top_operators
from dtmega import families
from dtmega.models.initial import init_weights
from dtmega.ops import optim
from dtmega.ops.cpu import huge_pages
from dtmega.training.step import Run
from tests import ranks

TIMEOUT_S = 1800.0
KEYS: dict[str, Any] = {
    "model.hidden_size": 512,
    "model.n_layers": 4,
    "model.n_heads": 8,
    "model.vocab_size": 8192,
    "data.seq_len": 256,
    "batch.micro_batch_size": 2,
    "batch.global_batch_size": 4,
    "compile.enable": "false",
}
# Axis -> the ratio to reach.
AXES = {"dp_shard": 1.05, "dp_replicate": 0.95}


def axes(quick: bool) -> list[Row]:
    """A BLOOM of 4 layers in fp32."""
    found = ranks.run(2, _on_a_rank, 3 if quick else 7, timeout_s=TIMEOUT_S)
    _, equal, tops = found[0]
    ms = {name: statistics.fmean(times[name] for times, *_ in found) for name in found[0][0]}
    return [
        Row(f"BLOOM step over {axis} 2, fp32, S 256", "DDP", ms[axis], ms["DDP"], "CPU ms", reach, equal, tops[axis])
        for axis, reach in AXES.items()
    ]


def _on_a_rank(rounds: int) -> tuple[dict[str, float], str, dict[str, list[str]]]:
    warnings.simplefilter("ignore")
    huge_pages.keep_freed_memory()  # as train.py does on a CPU; DDP's step has its memory so, too
    with ExitStack() as closing:
        forms: dict[str, Callable[[], Any]] = {}
        for axis in AXES:
            forms[axis] = ours.Stepper(
                ours.begin("bloom.toml", KEYS | {"precision.params": "float32", f"mesh.{axis}": 2}, closing)
            )
        first: Any = forms["dp_shard"]
        forms["DDP"] = DDPStep(first.run, first.batch.microbatches)
        loss, norm = forms["DDP"]()
        for axis in AXES:
            outcome = forms[axis]()
            equal = f"fp32 {check_losses(outcome.loss, loss)}"
            check_losses(outcome.grad_norm, norm, 1e-4)
        times = interleaved(forms, rounds)
        medians = {name: statistics.median(found) for name, found in times.items()}
        return medians, equal, {axis: top_operators(forms[axis]) for axis in AXES}


class DDPStep:
    """A step of the same model, whole on each rank, with gradients averaged by DDP."""

    def __init__(self, run: Run, microbatches: list[dict[str, Tensor]]) -> None:
        model = families.build(run.cfg)
        init_weights(model, run.cfg.run.seed)
        model.init_buffers(run.cfg.run.seed)
        self.model = DistributedDataParallel(_WithLoss(model))
        self.microbatches = microbatches
        self.optimizer = optim.build_optimizer(model.named_parameters(), run.cfg.optim)
        self.parameters = [*model.parameters()]

    def __call__(self) -> tuple[float, float]:
        (microbatch,) = self.microbatches
        self.optimizer.zero_grad()
        loss = self.model(microbatch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        return total.item() / 2, norm.item()


class _WithLoss(nn.Module):
    """The mean loss of a microbatch; each rank has as many tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, microbatch: dict[str, Tensor]) -> Tensor:
        return self.model(**microbatch)["lm"] / microbatch["labels"].numel()


BENCHMARKS = {"axes": axes}
