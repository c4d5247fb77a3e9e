"""Estimates of a search over layouts beside counts and simulated times, for the table in docs/planning-search.md.

    python benchmarks/estimates.py          # some 5 CPU minutes

Each layout is planned for 8 fake GPUs; models are cut to some layers, which changes no ratio.
"""

from __future__ import annotations

import shlex

import torch

from dtmega import config, families, mesh
from dtmega.planning.plan import plan_job, time_step
from dtmega.planning.prices import fabric
from dtmega.planning.search.estimate import Estimator
from dtmega.planning.search.layout import SECTIONS, Layout, describe
from dtmega.training import checks, choices

WORLD = 8
BLOOM = "--config bloom-7b1.toml --model.n_layers 4 --batch.global_batch_size 32 --batch.rampup []"
TWO = f"{BLOOM} --mesh.tp 2 --batch.micro_batch_size 2"
LLAMA = "--config llama-2-7b.toml --batch.micro_batch_size 1 --batch.global_batch_size 32"
QWEN = "--config qwen3-30b-a3b.toml --model.n_layers 3 --batch.micro_batch_size 1 --batch.global_batch_size 16"
ROWS = (
    TWO,
    f"{TWO} --recompute.mode full",
    f"{TWO} --recompute.mode selective",
    f"{BLOOM} --mesh.cp 2 --mesh.tp 2 --batch.micro_batch_size 1 --mesh.sequence_parallel false",
    f"{LLAMA} --model.n_layers 4",
    f"{LLAMA} --model.n_layers 8 --mesh.pp 2",
    "--config llama-3-8b.toml --model.n_layers 8 --mesh.pp 2 --mesh.tp 2 --pipeline.schedule Interleaved1F1B "
    "--batch.micro_batch_size 1 --batch.global_batch_size 16",
    "--config llama-2-13b.toml --model.n_layers 6 --mesh.cp 4 --mesh.cp_form heads --batch.micro_batch_size 1 "
    "--batch.global_batch_size 16 --fsdp.reshard_after_forward false",
    "--config gpt2-xl.toml --model.n_layers 6 --mesh.dp_replicate 2 --batch.micro_batch_size 4 "
    "--batch.global_batch_size 64",
    "--config bert-large.toml --model.n_layers 6 --batch.micro_batch_size 8 --batch.global_batch_size 128 "
    "--recompute.mode full",
    "--config t5-large.toml --model.n_layers 4 --model.n_decoder_layers 4 --mesh.tp 2 --batch.micro_batch_size 4 "
    "--batch.global_batch_size 64",
    "--config mixtral-8x7b.toml --model.n_layers 2 --mesh.ep 4 --mesh.tp 2 --batch.micro_batch_size 1 "
    "--batch.global_batch_size 16 --compile.enable false",
    f"{QWEN} --mesh.ep 8",
    f"{QWEN} --mesh.ep 4 --recompute.mode full",
)


def layout_of(cfg: config.Config, sizes: dict[str, int]) -> Layout:
    """The layout of a configuration."""
    values = {}
    for key, section in SECTIONS.items():
        values[key] = sizes.get(key, getattr(getattr(cfg, section), key, "whole"))
    return Layout(**values)


def row(arguments: str) -> str:
    """One row of the table."""
    gpu, a100 = torch.device("cuda", 0), fabric.load("a100-ib")
    cfg = families.resolve(config.load(shlex.split(arguments)))
    if cfg.precision.params == "auto":
        cfg = choices.with_params_dtype(cfg, "bfloat16")
    sizes = mesh.resolve(cfg.mesh, WORLD)
    checks.check(cfg, sizes, gpu)
    layout = layout_of(cfg, sizes)
    estimate = Estimator(cfg, families.pieces(cfg.model), a100).estimate(layout)
    plan = plan_job(cfg, sizes, gpu)
    seconds = time_step(plan, a100).seconds
    memory, time = estimate.peak_bytes / plan.fullest.peak.peak_bytes, estimate.seconds / seconds
    name = shlex.split(arguments)[1].removesuffix(".toml")
    return f"| {name} | {cfg.model.n_layers} | {WORLD} | {describe(layout)} | {memory:.2f} | {time:.2f} |"


if __name__ == "__main__":
    for arguments in ROWS:
        print(row(arguments), flush=True)
