"""Compare one GPU's numbers with a CPU's, and time a training step, in ten minutes: `python benchmarks/gpu.py`.

    python benchmarks/gpu.py [--set second] [--deadline 570]       the cases below, each in a process of its own
    python benchmarks/gpu.py step bloom-560m --ladder 4,8,16       one case: tokens/s of each micro-batch size that fits
    python benchmarks/gpu.py step bloom-560m --profile             also the kernels that take most of a step's time
    python benchmarks/gpu.py hf bloom-560m --compiled              transformers' model of this size, with as many tokens

The script times the trainer's own `train_step`, after three steps that compile and warm up. Times are medians of
wall-clock time, and each step ends with a synchronisation. MFU is the model FLOP/s (`dtmega/ops/cost.py`) divided by
989 TFLOP/s, the datasheet's value for an H100 or H200. With `--plan`, beside the memory that torch's allocator gave to
tensors, at the peak and between steps, stand the bytes that `dtmega plan` counts for the same arguments, and the time
that it predicts.
The last output is a table of all results, and a list of the cases that did not fit into the time. Without a GPU, all
sizes are tiny, and the script only shows that the code runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import transformers
from torch.profiler import ProfilerActivity, profile

from benchmarks.rows import ours, peers
from dtmega import config, families
from dtmega.ops import cost, keyed
from dtmega.training import device_peaks
from dtmega.training.step import train_step

ROOT = Path(__file__).resolve().parent.parent
FABRIC = "h100-ib"
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
WARM_UP, STEPS = (3, 12) if GPU else (1, 2)
RESULT = "result: "
TOO_LARGE = 3  # exit code of a case that ran out of memory
SHOWN_KERNELS = 20
DROPOUT = ["--model.hidden_dropout", "0.1", "--model.attention_dropout", "0.1"]
NO_DROPOUT = ["--model.hidden_dropout", "0", "--model.attention_dropout", "0"]
NEW = ["--model.init_from", ""]
# DeepSeek-V3's sizes with two layers, a dense one and one with 16 experts in 4 groups: 3.4 billion parameters.
FEW_EXPERTS = ["--model.n_layers", "2", "--model.dense_layers", "1", "--model.n_experts", "16"]
FEW_EXPERTS += ["--model.expert_groups", "4", "--model.groups_per_token", "2"]
# Weights, gradients and AdamW's state take 16 bytes per parameter: 105 GiB for BLOOM 7b1.
LARGEST = "bloom-7b1" if GPU and torch.cuda.get_device_properties(0).total_memory > 120 * 2**30 else "bloom-3b"
# The cases of each set as (limit in seconds, case), the most important case first.
SETS: dict[str, list[tuple[int, list[str]]]] = {
    "first": [
        (120, ["tests"]),
        (100, ["right"]),
        (150, ["step", "bloom-560m", "--ladder", "4,8,16", "--profile", *NO_DROPOUT]),
        (60, ["hf", "bloom-560m", "--ladder", "4,8"]),
        (150, ["hf", "bloom-560m", "--ladder", "4", "--compiled"]),
        (120, ["step", LARGEST, "--ladder", "1,2", *NO_DROPOUT]),
        (100, ["step", "bloom-560m", "--ladder", "8", *DROPOUT]),
    ],
    "second": [
        (100, ["step", "bloom-1b1", "--ladder", "4,8", *NO_DROPOUT]),
        (100, ["step", "bloom-3b", "--ladder", "2,4", "--profile", *NO_DROPOUT]),
        (100, ["step", "llama-3.2-1b", "--ladder", "1,2", *NEW]),
        (100, ["step", "llama-3-8b", "--ladder", "1,2", "--model.n_layers", "4"]),
        (150, ["hf", "bloom-3b", "--ladder", "2", "--compiled"]),
        (90, ["step", "bloom-1b1", "--ladder", "8", *DROPOUT]),
        (90, ["step", "bloom-3b", "--ladder", "4", *DROPOUT]),
        (120, ["step", LARGEST, "--ladder", "1", *DROPOUT]),
    ],
    "third": [
        (200, ["step", "qwen3-30b-a3b", "--ladder", "1", "--profile", "--model.n_layers", "4"]),
        (150, ["step", "deepseek-v3", "--ladder", "1", *FEW_EXPERTS]),
        (100, ["step", "mixtral-8x7b", "--ladder", "1", "--model.n_layers", "1"]),
        (150, ["hf", "bloom-560m", "--ladder", "4", "--compiled"]),
    ],
}
TINY = {"model.hidden_size": 64, "model.n_layers": 2, "model.n_heads": 2, "data.seq_len": 128, "model.vocab_size": 8192}
TINY_LLAMA = TINY | {"model.n_kv_heads": 1, "model.ffn_hidden_size": 128}
FP32 = {"precision.params": "float32"}
SMALL = TINY | {"data.seq_len": 200, "optim.eps": 1e-6}
Keys = dict[str, Any]


def tiny(name: str) -> Keys:
    """Keys that make a configuration small enough for a CPU; {} on a GPU."""
    if GPU:
        return {}
    return TINY_LLAMA if name.startswith("llama") else TINY


def micro_batches(size: int) -> Keys:
    return {"batch.micro_batch_size": size, "batch.global_batch_size": size, "mesh.tp": 1, "mesh.pp": 1}


# ---- correctness


def tests() -> int:
    """Run the tests that need a GPU. Without a GPU, run the CPU variants of the tests, on the plain kernels."""
    words = ["-m", "gpu"] if GPU else []
    command = [sys.executable, "-m", "pytest", "-q", str(ROOT / "tests/test_gpu.py"), *words]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def losses(overrides: Keys, steps: int) -> list[float]:
    with ExitStack() as closing:
        run = ours.begin("bloom.toml", FP32 | SMALL | micro_batches(4) | overrides, closing)
        found = [train_step(run, next(run.batches)).loss for _ in range(steps)]
    dist.destroy_process_group()
    return found


def right() -> int:
    """Check that a GPU draws the same random numbers as a CPU, to the bit, and computes equal losses.

    The losses are those of ten steps in fp32, without and with dropout, eager and compiled.
    """
    index = torch.arange(2**18) * 7 + 2**33
    same = torch.equal(keyed.normal(5, "w", index), keyed.normal(5, "w", index.to(DEVICE)).cpu())
    say(case=f"initial values on {DEVICE.type} are those of a CPU, to the bit", right=same)
    dropped = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
    all_right = same
    for name, dropout in (("without dropout", {}), ("with dropout", dropped)):
        truth = losses(dropout | {"run.device": "cpu", "compile.enable": "false"}, 10)
        for compiled in ("false", "true"):
            found = losses(dropout | {"compile.enable": compiled}, 10)
            worst = max(abs(a / b - 1) for a, b in zip(found, truth, strict=True))
            all_right &= worst < 1e-5
            say(case=f"ten steps {name}, compiled {compiled}", right=worst < 1e-5, worst_loss=f"{worst:.1e}")
    return 0 if all_right else 1


# ---- cost


def timed(step: Callable[[], object]) -> tuple[float, float]:
    """The seconds of the first step, and the median seconds of later steps, whose peak of memory is kept."""
    started_s = time.perf_counter()
    step()
    first_s = time.perf_counter() - started_s
    for _ in range(WARM_UP - 1):
        step()
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    times_s = []
    for _ in range(STEPS):
        started_s = time.perf_counter()
        step()
        times_s.append(time.perf_counter() - started_s)
    return first_s, statistics.median(times_s)


def report(case: str, cfg: config.Config, size: int, first_s: float, step_s: float, **more: Any) -> None:
    tokens = size * cfg.data.seq_len
    flops_per_token = cost.flops_per_token(families.pieces(cfg.model), cfg.data.seq_len, cfg.data.mask_prob)
    mfu = flops_per_token * tokens / step_s / device_peaks.reference_flops(DEVICE, cfg.precision.params)
    say(
        case=case,
        micro_batch=size,
        ms_per_step=round(1e3 * step_s, 1),
        tokens_per_s=round(tokens / step_s),
        mfu=round(mfu, 3),
        peak_bytes=torch.cuda.max_memory_allocated() if GPU else None,
        held_bytes=torch.cuda.memory_allocated() if GPU else None,
        first_step_s=round(first_s, 1),
        **more,
    )


class Plan:
    """A plan of one rank's step, counted by a process of its own."""

    def __init__(self, arguments: list[str]) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "plan.json"
        command = [sys.executable, "-m", "dtmega", "plan", *arguments, "--world", "1", "--json", str(self.path)]
        command += ["--fabric", FABRIC if GPU else "cpu-gloo", "--device", DEVICE.type]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()

    def answer(self) -> Keys:
        """The planned peak, the bytes between steps and the predicted time, as keys of a result."""
        _, errors = self.process.communicate()
        if self.process.returncode != 0:
            return {"plan_failed": errors[-2000:]}
        plan = json.loads(self.path.read_text())
        (role,) = plan["roles"]
        return {
            "planned_peak_bytes": role["peak_bytes"],
            "planned_held_bytes": sum(role["held"].values()),
            "predicted_ms": round(1e3 * plan["prediction"]["step"]["seconds"], 1),
        }


def step(name: str, size: int, keys: Keys, *, show_kernels: bool, compare_plan: bool) -> int:
    """Time a micro-batch size, and print the kernels of a step or what a plan says of it, if asked for.

    Returns:
        0, or `TOO_LARGE` if memory ran out.
    """
    case = " ".join([name, *(f"{key}={value}" for key, value in keys.items())])
    settings = micro_batches(size) | tiny(name) | keys
    with ExitStack() as closing:
        plan = None
        if compare_plan:
            plan = closing.enter_context(Plan(ours.arguments(f"{name}.toml", ours.ALONE | settings)))
        run = ours.begin(f"{name}.toml", settings, closing)
        try:
            first_s, step_s = timed(lambda: train_step(run, next(run.batches)))
        except torch.OutOfMemoryError:
            say(case=case, micro_batch=size, out_of_memory=True)
            return TOO_LARGE
        report(case, run.cfg, size, first_s, step_s, **(plan.answer() if plan else {}))
        if show_kernels:
            kernels(lambda: train_step(run, next(run.batches)))
    return 0


def hf(name: str, size: int, compiled: bool) -> int:
    """Time transformers' model with the sizes of this configuration: fp32 weights, autocast, fused AdamW.

    Returns:
        0, or `TOO_LARGE` if memory ran out.
    """
    settings = {key: str(value) for key, value in tiny(name).items()}
    cfg = config.load(ours.arguments(f"{name}.toml", settings | {"run.dir": tempfile.gettempdir()}))
    model: Any = cfg.model
    theirs = transformers.BloomConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        n_layer=model.n_layers,
        n_head=model.n_heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cache=False,
    )
    case = f"transformers' {name}, {'compiled' if compiled else 'eager'}"
    try:
        with DEVICE:
            network = transformers.BloomForCausalLM(theirs).train()
            tokens = torch.randint(model.vocab_size, (size, cfg.data.seq_len))
        inputs = {"input_ids": tokens, "labels": tokens}
        report(case, cfg, size, *timed(peers.HfStep(network, inputs, autocast=True, compiled=compiled)))
    except torch.OutOfMemoryError:
        say(case=case, micro_batch=size, out_of_memory=True)
        return TOO_LARGE
    return 0


def kernels(step: Callable[[], object]) -> None:
    """Print the twenty operations that take most of a step's time."""
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if GPU else [])], acc_events=True) as seen:
        step()
    sort_by = "self_device_time_total" if GPU else "self_cpu_time_total"
    print(seen.key_averages().table(sort_by=sort_by, row_limit=SHOWN_KERNELS, max_name_column_width=80))


def say(**row: Any) -> None:
    print(RESULT + json.dumps(row), flush=True)


# ---- all cases


def all_cases(name: str, deadline_s: float) -> int:
    """Run the cases of a set one after the other, while there is time. Returns the highest exit code."""
    started_s = time.monotonic()
    found: list[str] = []
    skipped: list[str] = []
    worst = 0
    for limit_s, case in SETS[name]:
        left_s = deadline_s - (time.monotonic() - started_s)
        if left_s < limit_s / 2:
            skipped.append(" ".join(case))
            continue
        print(f"\n=== {' '.join(case)}", flush=True)
        lines, code = one_case(case, min(limit_s if GPU else 1500, left_s))
        found += lines
        worst = max(worst, code)
    print("\n" + "\n".join(found))
    if skipped:
        print(f"no time for: {'; '.join(skipped)}")
    return worst


def one_case(case: list[str], limit_s: float) -> tuple[list[str], int]:
    """Run a case. Returns the lines of its results, and its exit code: 1 if the case took too long."""
    with tempfile.TemporaryFile("w+") as words:
        try:
            command = [sys.executable, str(Path(__file__).resolve()), *case]
            code = subprocess.run(
                command, stdout=words, stderr=subprocess.STDOUT, timeout=limit_s, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = 1
            print(f"no end after {limit_s:.0f} s", flush=True)
        words.seek(0)
        lines = words.read().splitlines()
    print("\n".join(lines[-80:]), flush=True)
    return [line.removeprefix(RESULT) for line in lines if line.startswith(RESULT)], code


def climb(argv: list[str], ladder: list[int]) -> int:
    """Run a case once for each micro-batch size, in a process of its own, until memory runs out.

    Kernels are shown for the smallest size only.
    """
    flags = [word for word in argv if word not in ("--ladder", ",".join(map(str, ladder)))]
    for size in ladder:
        rung = [word for word in flags if word != "--profile" or size == ladder[0]]
        command = [sys.executable, str(Path(__file__).resolve()), *rung, "--ladder", str(size)]
        code = subprocess.run(command, check=False).returncode
        if code != 0:
            return 0 if code == TOO_LARGE else code
    return 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", choices=["tests", "right", "step", "hf"])
    parser.add_argument("name", nargs="?", default="bloom-560m")
    parser.add_argument("--set", choices=SETS, default="first")
    parser.add_argument("--deadline", type=float, default=570.0 if GPU else 3600.0, help="seconds")
    parser.add_argument("--ladder", default="4", help="micro-batches to try, smallest first")
    parser.add_argument("--profile", action="store_true", help="show the kernels of a step")
    parser.add_argument("--plan", action="store_true", help="compare with `dtmega plan`")
    parser.add_argument("--compiled", action="store_true")
    args, rest = parser.parse_known_args(argv)
    ladder = [int(size) for size in args.ladder.split(",")]
    if args.case is None:
        return all_cases(args.set, args.deadline)
    if args.case == "tests":
        return tests()
    if args.case == "right":
        return right()
    if len(ladder) > 1:
        return climb(argv, ladder)
    (size,) = ladder
    if args.case == "hf":
        return hf(args.name, size, args.compiled)
    keys = {flag.removeprefix("--"): value for flag, value in zip(rest[::2], rest[1::2], strict=True)}
    return step(args.name, size, keys, show_kernels=args.profile, compare_plan=args.plan)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
