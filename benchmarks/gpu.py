"""One GPU in ten minutes: are its numbers those of a CPU, and what does a step cost? `python benchmarks/gpu.py`.

    python benchmarks/gpu.py                                       every case below, each in a process of its own
    python benchmarks/gpu.py bloom-560m --batch.micro_batch_size 8     the step of one configuration
    python benchmarks/gpu.py bloom-560m --profile                  and the kernels that it spends its time in

What is timed is the trainer's own `train_step`, on batches of the default corpus, after three steps that compile and
warm up; times are medians of the clock, which a step ends with a synchronisation for. Without a GPU everything is tiny
and of no interest but that it runs.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from dtmega import cost, families, keyed, metrics, train
from dtmega.startup import Startup
from dtmega.step import Run, train_step

GPU = torch.cuda.is_available()
WARM_UP, STEPS = (3, 15) if GPU else (1, 2)
TIMEOUT_S = 150 if GPU else 1500
CASES = [
    ["right"],
    ["bloom-560m", "--profile"],
    ["bloom-560m", "--model.hidden_dropout", "0.1", "--model.attention_dropout", "0.1"],
    ["bloom-1b1"],
    ["bloom-3b", "--batch.micro_batch_size", "2"],
]
# Whatever the configuration says of these, a step alone does not need it.
ALONE = {
    "batch.micro_batch_size": "4",
    "batch.global_batch_size": "4",
    "batch.rampup": "[]",
    "mesh.tp": "1",
    "mesh.pp": "1",
    "mesh.dp_shard": "1",
    "train.samples": "0",
    "train.tokens": "0",
    "train.steps": "1000",
    "optim.unit": "steps",
    "optim.warmup": "10",
    "optim.decay": "0",
    "log.tensorboard": "false",
    "data.path": "stdlib",
    "data.tokenizer": "stdlib-8k",
    "data.num_workers": "0",
}
TINY = {"model.hidden_size": "64", "model.n_layers": "2", "model.n_heads": "2", "data.seq_len": "128"}
SMALL = TINY | {"model.vocab_size": "8192", "data.seq_len": "200", "optim.eps": "1e-6"}


def begin(name: str, overrides: dict[str, str], closing: ExitStack) -> Run:
    """The trainer, ready for its first step."""
    folder = closing.enter_context(tempfile.TemporaryDirectory())
    keys = ALONE | ({} if GPU else TINY) | {"run.dir": folder} | overrides
    argv = ["--config", f"{name}.toml", *(word for key, value in keys.items() for word in (f"--{key}", value))]
    run, _ = train.begin(argv, Startup(), closing)
    return run


def losses(overrides: dict[str, str], steps: int) -> list[float]:
    with ExitStack() as closing:
        run = begin("bloom", SMALL | overrides, closing)
        found = [train_step(run, next(run.batches))[0] for _ in range(steps)]
    dist.destroy_process_group()
    return found


def right() -> None:
    """Drawn numbers equal to the bit, and the losses of ten steps in fp32 with dropout."""
    index = torch.arange(2**18) * 7 + 2**33
    device = torch.device("cuda" if GPU else "cpu")
    same = torch.equal(keyed.normal(5, "w", index), keyed.normal(5, "w", index.to(device)).cpu())
    print(f"initial values on {device.type} are those of a CPU, to the bit: {same}")
    dropped = {"model.hidden_dropout": "0.1", "model.attention_dropout": "0.1"}
    for name, dropout in (("without dropout", {}), ("with dropout", dropped)):
        truth = losses(dropout | {"run.device": "cpu", "compile.enable": "false"}, 10)
        for compiled in ("false", "true"):
            ours = losses(dropout | {"compile.enable": compiled}, 10)
            worst = max(abs(a / b - 1) for a, b in zip(ours, truth, strict=True))
            print(f"ten steps {name}, compiled {compiled}: largest relative difference of a loss {worst:.1e}")


def step(name: str, overrides: dict[str, str], show_kernels: bool) -> None:
    with ExitStack() as closing:
        run = begin(name, overrides, closing)
        cfg, device = run.cfg, run.world.device
        started = time.perf_counter()
        train_step(run, next(run.batches))
        first_s = time.perf_counter() - started
        for _ in range(WARM_UP - 1):
            train_step(run, next(run.batches))
        batches = [next(run.batches) for _ in range(STEPS)]
        times_s = []
        for batch in batches:
            started = time.perf_counter()
            train_step(run, batch)
            times_s.append(time.perf_counter() - started)
        step_s = statistics.median(times_s)
        tokens = cfg.batch.global_batch_size * cfg.data.seq_len
        flops_per_token = cost.flops_per_token(families.pieces(cfg.model), cfg.data.seq_len, cfg.data.mask_prob)
        flops_per_s = flops_per_token * tokens / step_s
        row = {
            "case": " ".join([name, *(f"{key}={value}" for key, value in overrides.items())]),
            "ms per step": round(1e3 * step_s, 1),
            "tokens/s": round(tokens / step_s),
            "MFU": round(flops_per_s / metrics.reference_flops(device, cfg.precision.params), 3),
            "peak GiB": round(torch.cuda.max_memory_allocated() / 2**30, 1) if GPU else None,
            "first step s": round(first_s, 1),
        }
        print(json.dumps(row))
        if show_kernels:
            kernels(run)


def kernels(run: Run) -> None:
    """Where the time of a step goes: the twenty that take most."""
    batch = next(run.batches)
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if GPU else [])]) as seen:
        train_step(run, batch)
    sort_by = "self_device_time_total" if GPU else "self_cpu_time_total"
    print(seen.key_averages().table(sort_by=sort_by, row_limit=20, max_name_column_width=80))


def main(argv: list[str]) -> int:
    if not argv:
        own = [sys.executable, str(Path(__file__))]
        codes = [
            subprocess.run([*own, *case], timeout=TIMEOUT_S * (1 if GPU else 10), check=False).returncode
            for case in CASES
        ]
        return max(codes)
    name, *rest = argv
    show_kernels = "--profile" in rest
    flags = [word for word in rest if word != "--profile"]
    if name == "right":
        right()
    else:
        step(
            name,
            {flag.removeprefix("--"): value for flag, value in zip(flags[::2], flags[1::2], strict=True)},
            show_kernels,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
