"""Train small models on layouts over nccl, with ranks that share one GPU: `python benchmarks/gpu_layouts.py`.

    python benchmarks/gpu_layouts.py                  all rows, in ten minutes
    python benchmarks/gpu_layouts.py tp mixture       rows whose names contain one of these words
    python benchmarks/gpu_layouts.py --deadline 200   start no row after 200 seconds

nccl refuses two ranks on one GPU of one host. Here every rank has a host id of its own (NCCL_HOSTID), so nccl takes
the ranks for different machines and connects them by sockets on the loopback interface. The GPU runs the ranks in
turns, so no time is measured.

Each rank runs `train.py` as a user would, with evaluation, a checkpoint and TensorBoard. The losses and norms of all
steps are compared with those of one process, which computes on the CPU in fp32, or on the GPU in bf16 and fp16.
Without a GPU, the ranks run over gloo, and the script only shows that the rows run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
GPU = torch.cuda.is_available()
Keys = dict[str, Any]
Numbers = dict[tuple[str, int], float]  # (kind, step) -> number
EVALUATIONS = ("val_loss", "test_loss")
LIMIT_S = 150.0  # for one run
STEPS = 4

SIZES: Keys = {"model.hidden_size": 64, "model.n_layers": 4, "model.n_heads": 4, "data.seq_len": 128}
TRAINING: Keys = {
    "batch.global_batch_size": 8,
    "batch.micro_batch_size": 2,
    "train.steps": STEPS,
    "train.epochs": 0,
    "eval.interval": STEPS,
    "eval.steps": 1,
    "eval.prompt": "def",
    "eval.sample_tokens": 8,
    "log.interval": 1,
    "optim.eps": 1e-6,
    "compile.enable": "false",
    "data.num_workers": 1,
    "run.timeout_s": 120,
}
FP32: Keys = {"precision.params": "float32"}
BF16: Keys = {"precision.params": "bfloat16", "precision.reduce": "float32"}
FP16: Keys = {"precision.params": "float16", "precision.reduce": "float32"}
DROPOUT: Keys = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
EXPERTS: Keys = {"model.ffn_hidden_size": 128, "model.expert_ffn_hidden_size": 64, "model.n_kv_heads": 2}
LATENT: Keys = EXPERTS | {
    "model.n_kv_heads": 0,
    "model.kv_channels": 24,
    "model.rotary_channels": 8,
    "model.v_channels": 16,
    "model.kv_latent_size": 32,
    "model.q_latent_size": 48,
}
T5: Keys = {"model.n_layers": 2, "model.ffn_hidden_size": 128}
BASE = "base"  # run directory whose weights the adapters start from
THEIRS = "theirs"  # directory of a mixture of transformers
ADAPTERS: Keys = {"model.init_from": BASE, "lora.rank": 4, "lora.alpha": 8}
HF: Keys = {"model.path": THEIRS, "data.tokenizer": "stdlib-8k", "data.seq_len": 128}
COMPILED: Keys = {"compile.enable": "true"}


class Leg(NamedTuple):
    """A run of some processes, or its continuation on another layout.

    Attributes:
        n_ranks: number of processes.
        keys: keys of the layout.
    """

    n_ranks: int
    keys: Keys


class Row(NamedTuple):
    """A layout whose numbers are compared with those of one process.

    Attributes:
        name: name of the layout.
        config: name of the configuration.
        model: keys that the layout's run shares with the run of one process.
        legs: runs in the same run directory, one after the other.
        truth: device on which the one process computes.
        bound: largest relative difference of a loss.
    """

    name: str
    config: str
    model: Keys
    legs: Sequence[Leg]
    truth: str = "cpu"
    bound: float = 1e-6


def row(name: str, config: str, n_ranks: int, layout: Keys, model: Keys | None = None, **more: Any) -> Row:
    return Row(name, config, FP32 | (model or {}), [Leg(n_ranks, layout)], **more)


ONE_GPU = "cuda" if GPU else "cpu"
ON_GPU: Keys = {"truth": ONE_GPU, "bound": 2e-3}
TP, PP, SHARD, REPLICATE = {"mesh.tp": 2}, {"mesh.pp": 2}, {"mesh.dp_shard": 2}, {"mesh.dp_replicate": 2}
CP, EP = {"mesh.cp": 2}, {"mesh.dp_shard": 2, "mesh.ep": 2}
ROWS = [
    row("dp_shard 2, dropout", "bloom", 2, SHARD, DROPOUT),
    row("tp 2, dropout", "bloom", 2, TP, DROPOUT),
    row("pp 2, 1F1B, dropout", "bloom", 2, PP, DROPOUT),
    row("mixture: ep 2", "moe", 2, EP, EXPERTS),
    row("cp 2, gather", "bloom", 2, CP | {"mesh.cp_form": "gather"}),
    row("cp 2, heads", "llama", 2, CP | {"mesh.cp_form": "heads"}, {"model.n_kv_heads": 2}),
    row("dp_replicate 2", "gpt", 2, REPLICATE, DROPOUT),
    row("pp 2, ZBV", "llama", 2, PP | {"pipeline.schedule": "ZBVZeroBubble"}, {"model.n_kv_heads": 2}),
    row("mixture in bf16: ep 2, grouped products", "moe", 2, EP, EXPERTS | BF16, **ON_GPU),
    row("latent attention: tp 2", "moe", 2, TP, LATENT),
    row("T5: pp 2, two tensors between stages", "t5", 2, PP, T5),
    row("BERT: tp 2", "bert", 2, TP, {"model.n_layers": 2}),
    Row(
        "resume: dp_shard 2 with asynchronous checkpoints, then tp 2",
        "bloom",
        FP32 | DROPOUT,
        [Leg(2, SHARD | {"checkpoint.mode": "async", "train.exit_interval": 2}), Leg(2, TP)],
    ),
    row("tp 2, compiled", "bloom", 2, TP | COMPILED),
    row("dp_shard 2, bf16, compiled", "bloom", 2, SHARD | COMPILED, BF16, **ON_GPU),
    row("dp_shard 2, fp16", "bloom", 2, SHARD, FP16, **ON_GPU),
    row("dp_shard 2, exact", "bloom", 2, SHARD, {"run.exact": "true"} | BF16, truth=ONE_GPU, bound=0.0),
    row("dp_shard 2, cpu_offload", "bloom", 2, SHARD | {"fsdp.cpu_offload": "true"}),
    row("HSDP 2 x 2", "llama", 4, SHARD | REPLICATE, {"model.n_kv_heads": 2}),
    row("dp_shard 2, Muon", "llama", 2, SHARD, {"model.n_kv_heads": 2, "optim.name": "muon"}),
    row("tp 2 x pp 2", "bloom", 4, TP | PP),
    row("mixture: ep 2 with capacity factor 1", "moe", 2, EP, EXPERTS | {"model.capacity_factor": 1.0}),
    row("latent attention in bf16: ep 2", "moe", 2, EP, LATENT | BF16, **ON_GPU),
    row("mixture: ep 2, compiled", "moe", 2, EP | COMPILED, EXPERTS),
    row("prefix LM: tp 2", "prefix-lm", 2, TP),
    row("one GPU: mixture, compiled", "moe", 1, COMPILED, EXPERTS),
    row("one GPU: mixture in bf16, compiled", "moe", 1, COMPILED, EXPERTS | BF16, **ON_GPU),
    row("one GPU: latent attention, compiled", "moe", 1, COMPILED, LATENT),
    row("one GPU: T5, compiled", "t5", 1, COMPILED, T5 | DROPOUT),
    row("one GPU: BERT, compiled", "bert", 1, COMPILED, {"model.n_layers": 2}),
    row("one GPU: prefix LM, compiled", "prefix-lm", 1, COMPILED),
    row("one GPU: fp16, compiled", "bloom", 1, COMPILED, FP16, **ON_GPU),
    row("one GPU: adapters on packed conversations, compiled", "sft", 1, COMPILED, ADAPTERS),
    row("dp_shard 2, adapters on packed conversations", "sft", 2, SHARD, ADAPTERS),
    row("transformers' mixture: ep 2", "hf", 2, EP, HF),
    row("transformers' mixture in bf16: ep 2", "hf", 2, EP, HF | BF16, **ON_GPU),
    row("transformers' mixture: tp 2", "hf", 2, TP, HF),
    row("pp 2, full recompute", "bloom", 2, PP | {"recompute.mode": "full"}),
]


def arguments(row: Row, keys: Keys, folder: Path) -> list[str]:
    settings = TRAINING | ({} if row.config == "hf" else SIZES) | row.model | keys | {"run.dir": folder}
    for key in ("model.init_from", "model.path"):
        if key in settings:
            settings[key] = folder.parent / settings[key]
    words = ["--config", f"{row.config}.toml"]
    for key, value in settings.items():
        words += [f"--{key}", str(value)]
    return words


PORTS = itertools.count(20_000)  # below the ports that the system gives to clients


def free_port() -> int:
    """A port on which no program listens. No two runs get the same port, even if they start at the same time."""
    while True:
        port = next(PORTS)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def run(row: Row, n_ranks: int, keys: Keys, folder: Path) -> str:
    """Run all ranks until they end. Returns '', or the last lines that a failed rank printed."""
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(n_ranks),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "train.py", *arguments(row, keys, folder)]
    ranks: list[subprocess.Popen[str]] = []
    logs = [(folder.parent / f"{folder.name}-{time.monotonic_ns()}-{rank}.log") for rank in range(n_ranks)]
    for rank, log in enumerate(logs):
        alone = {"RANK": str(rank), "NCCL_HOSTID": f"host{rank}"}
        with log.open("w") as output:
            ranks.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=os.environ | common | alone,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
    ends_s = time.monotonic() + LIMIT_S
    codes: list[int | None] = []
    for process in ranks:
        try:
            codes.append(process.wait(timeout=max(0.0, ends_s - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(None)
    for process in ranks:
        process.kill()
        process.wait()
    words = ""
    for rank, (code, log) in enumerate(zip(codes, logs, strict=True)):
        if code != 0:
            ending = "\n".join(log.read_text().splitlines()[-30:])
            words += f"rank {rank} ended with code {code}:\n{ending}\n"
    return words


def numbers(folder: Path) -> Numbers:
    """The losses and norms of all steps, and the evaluations' losses."""
    found: Numbers = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for kind in ("loss", "grad_norm", *EVALUATIONS):
            if kind in record:
                found[kind, record["step"]] = record[kind]
    return found


def difference(found: Numbers, truth: Numbers, *kinds: str) -> float:
    """The largest relative difference of the numbers of these kinds; infinite if a number is missing."""
    if found.keys() != truth.keys():
        return float("inf")
    return max(abs(found[key] / truth[key] - 1) for key in truth if key[0] in kinds)


def truth_of(row: Row, folder: Path) -> Numbers | str:
    """The numbers of one process, or what the process printed if it failed."""
    words = run(row, 1, {"run.device": row.truth}, folder)
    return words or numbers(folder)


def write_mixture(folder: Path) -> None:
    """Write a new mixture of transformers, with random weights."""
    torch.manual_seed(0)
    sizes = transformers.OlmoeConfig(
        vocab_size=8192,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_experts=8,
        num_experts_per_tok=2,
    )
    transformers.OlmoeForCausalLM(sizes).save_pretrained(folder)


def compare(row: Row, folder: Path, truth: Future[Numbers | str]) -> tuple[str, bool]:
    """A line of the table, and whether the row is right."""
    started_s = time.monotonic()
    for leg in row.legs:
        words = run(row, leg.n_ranks, leg.keys, folder)
        if words:
            return f"| {row.name} | failed | | |\n{words}", False
    took_s = time.monotonic() - started_s
    expected = truth.result()
    if isinstance(expected, str):
        return f"| {row.name} | its truth failed | | |\n{expected}", False
    found = numbers(folder)
    losses = difference(found, expected, "loss")
    norms = difference(found, expected, "grad_norm")
    evaluations = difference(found, expected, *EVALUATIONS)
    right = max(losses, evaluations) <= row.bound
    cells = [row.name, str(row.legs[-1].n_ranks), f"{losses:.1e}", f"{norms:.1e}", f"{evaluations:.1e}"]
    return f"| {' | '.join(cells)} | {'right' if right else 'WRONG'} | {took_s:.0f} s", right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="words of which a row's name must contain one")
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds after which no row is started")
    parser.add_argument("--at-once", type=int, default=3 if GPU else 1, help="rows that run at the same time")
    args = parser.parse_args()
    chosen = [row for row in ROWS if not args.words or any(word in row.name for word in args.words)]
    if not chosen:
        parser.error(f"no row's name contains one of {', '.join(args.words)}")
    started_s = time.monotonic()
    wrong: list[str] = []
    skipped: list[str] = []
    print("| layout | ranks | losses | norms | evaluations | |\n| --- | ---: | ---: | ---: | ---: | --- |", flush=True)
    with (
        tempfile.TemporaryDirectory() as name,
        ThreadPoolExecutor(4 if GPU else 1) as alone,
        ThreadPoolExecutor(args.at_once) as together,
    ):
        folder = Path(name)
        truths: dict[str, Future[Numbers | str]] = {}

        def one(number: int, row: Row) -> None:
            if time.monotonic() - started_s > args.deadline:
                skipped.append(row.name)
                return
            key = repr((row.config, row.model, row.truth))
            if key not in truths:
                truths[key] = alone.submit(truth_of, row, folder / f"truth-{number}")
            line, right = compare(row, folder / f"run-{number}", truths[key])
            print(line, flush=True)
            if not right:
                wrong.append(row.name)

        needed = {row.model.get(key) for row in chosen for key in ("model.init_from", "model.path")}
        if BASE in needed:
            run(Row(BASE, "bloom", FP32, []), 1, {"train.steps": 1}, folder / BASE)
        if THEIRS in needed:
            write_mixture(folder / THEIRS)
        for waiting in [together.submit(one, number, row) for number, row in enumerate(chosen)]:
            waiting.result()
    if skipped:
        print(f"no time for: {'; '.join(skipped)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
