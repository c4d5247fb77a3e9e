"""Measure what a plan costs: CPU seconds and memory of planning one rank of large jobs, without a GPU.

    python benchmarks/planning.py [NAME ...]

Each rank is planned in a process of its own, as `plan.plan_job` does; its CPU seconds include starting Python and
importing torch. The table goes to standard output.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from dtmega import config, families, mesh
from dtmega.planning.counting.role import plan_role
from dtmega.planning.extrapolation import enough_microbatches
from dtmega.training import checks, choices

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
STAGES_176B = [5, *[6] * 10, 5]  # layers


class Job(NamedTuple):
    """A job, and the places of its pipeline whose ranks are planned.

    Attributes:
        world_size: number of ranks.
        places: places in the pipeline.
        device: the fake device.
        keys: flags of the configuration.
    """

    world_size: int
    places: tuple[int, ...]
    device: torch.device
    keys: str


BLOOM_176B = (
    "--config bloom-176b.toml --batch.micro_batch_size 2 --batch.global_batch_size 2048 --batch.rampup [] "
    "--recompute.mode full --model.hidden_dropout 0.1 --model.attention_dropout 0 --mesh.tp 4 --mesh.pp 12"
)
JOBS = {
    "BLOOM-176B on 384": Job(384, (0, 5, 11), CUDA, f"{BLOOM_176B} --mesh.dp_shard 8"),
    "BLOOM-176B on 16,384": Job(
        16384,
        (0,),
        CUDA,
        f"{BLOOM_176B} --mesh.pp 16 --mesh.dp_shard 8 --mesh.dp_replicate 32 --batch.global_batch_size 16384",
    ),
    "Llama-3-8B on 16,384": Job(
        16384,
        (0,),
        CUDA,
        "--config llama-3-8b.toml --mesh.dp_replicate 64 --mesh.dp_shard 256 --batch.micro_batch_size 1 "
        "--batch.global_batch_size 16384",
    ),
    "Llama-3.2-1B on 2 CPUs": Job(2, (0,), CPU, "--config llama-3.2-1b.toml --mesh.dp_shard 2"),
    "BLOOM-560M on 2 CPUs": Job(2, (0,), CPU, "--config bloom-560m.toml --mesh.dp_shard 2"),
}


class Cost(NamedTuple):
    """The cost of one plan, and its result.

    Attributes:
        cpu_s: CPU seconds of the process.
        rss_bytes: its largest memory.
        run: number of microbatches of the longest step that was run.
        n_microbatches: number of microbatches of the step.
        peak_bytes: the planned peak of the rank, of the step that was run.
    """

    cpu_s: float
    rss_bytes: int
    run: int
    n_microbatches: int
    peak_bytes: int


def stages_176b() -> str:
    """The stages of BLOOM-176B as it ran: the layers of each. The ends have the embedding and the head besides."""
    rows: list[list[int]] = []
    first = 0
    for n_layers in STAGES_176B:
        rows.append([*range(first, first + n_layers)])
        first += n_layers
    return str(rows).replace(" ", "")


def cost(name: str, place: int) -> Cost:
    """Plan one rank in this process."""
    job = JOBS[name]
    flags = job.keys.split()
    if name == "BLOOM-176B on 384":
        flags += ["--pipeline.stages", stages_176b()]
    cfg = families.resolve(config.load(flags))
    sizes = mesh.resolve(cfg.mesh, job.world_size)
    cfg = choices.with_micro_batch_size(cfg, sizes)
    if cfg.precision.params == "auto":
        cfg = choices.with_params_dtype(cfg, "bfloat16")
    checks.check(cfg, sizes, job.device)
    data_size = sizes["dp_replicate"] * sizes["dp_shard"]
    n = cfg.batch.global_batch_size // (data_size * cfg.batch.micro_batch_size)
    runs = enough_microbatches(cfg.pipeline, sizes["pp"], n, job.device)
    rank = place * job.world_size // sizes["pp"]
    role = plan_role(cfg, sizes, rank, job.device, sorted({runs.shorter, runs.longer}))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = usage.ru_utime + usage.ru_stime
    return Cost(cpu_s, usage.ru_maxrss * 1024, runs.longer, n, role.peak.peak_bytes)


def main() -> None:
    """Print the table, a line for each rank."""
    names = sys.argv[1:] or [*JOBS]
    print("| job | place | CPU s | RSS, GiB | microbatches run | peak, GiB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name in names:
        total_s = 0.0
        started_s = time.perf_counter()
        for place in JOBS[name].places:
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
                found = process.submit(cost, name, place).result()
            total_s += found.cpu_s
            peak = f"{found.peak_bytes / 2**30:.2f}"
            numbers = (
                f"{found.cpu_s:.1f} | {found.rss_bytes / 2**30:.2f} | {found.run} of {found.n_microbatches} | {peak}"
            )
            print(f"| {name} | {place} | {numbers} |", flush=True)
        elapsed_s = time.perf_counter() - started_s
        print(f"| {name} | all | {total_s:.1f} | | {elapsed_s:.0f} s elapsed | |", flush=True)


if __name__ == "__main__":
    main()
