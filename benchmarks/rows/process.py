"""Whole processes, as a user starts them: CPU seconds of `train.py` and of all that it starts, by the kernel's account.

A step's time is the difference of two runs by the difference of their lengths, so that what a start takes is not in it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.rows import ours, peers
from benchmarks.rows.measure import Row, check_losses, cpu_ms

ROOT = Path(__file__).resolve().parent.parent.parent
BF16_LOSS = 2e-3
SIZES = {"hidden_size": 512, "n_layers": 4, "n_heads": 8, "vocab_size": 16384}
SEQ_LEN = 512
KEYS: dict[str, Any] = {
    "data.seq_len": SEQ_LEN,
    "batch.global_batch_size": 4,
    "precision.params": "bfloat16",
    "eval.interval": 0,
    "eval.steps": 1,
    "eval.prompt": "",
    "checkpoint.final": "false",
}


class Ended(NamedTuple):
    """The CPU seconds that a process has taken, and the loss of its first step."""

    cpu_s: float
    first_loss: float


class Setting:
    """The same weights and samples for `train.py` and for a script of transformers."""

    def __init__(self, closing: ExitStack) -> None:
        self.folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        self.model, self.tokens = self.folder / "model", self.folder / "tokens.npy"
        peers.bloom(self.model, **SIZES)
        self.keys = KEYS | {f"model.{key}": value for key, value in SIZES.items()}
        self.keys |= {"model.init_from": str(self.model)}
        self._write_tokens()

    def _write_tokens(self) -> None:
        """The samples in the order in which the trainer takes them."""
        with ExitStack() as closing:
            run = ours.begin("bloom.toml", self.keys, closing)
            rows = []
            for _ in range(64):
                (microbatch,) = next(run.batches).microbatches
                rows.append(torch.cat([microbatch["tokens"], microbatch["labels"][:, -1:]], dim=1))
        np.save(self.tokens, torch.cat(rows).numpy())

    def train(self, steps: int, keys: dict[str, Any]) -> Ended:
        with tempfile.TemporaryDirectory(dir=self.folder) as run_dir:
            words = self.keys | keys | {"train.steps": steps, "run.dir": run_dir}
            cpu_s, _ = cpu_seconds([str(ROOT / "train.py"), *ours.arguments("bloom.toml", words)])
            first = Path(run_dir, "metrics.jsonl").read_text().splitlines()
            losses = [row["loss"] for row in map(json.loads, first) if "loss" in row]
        return Ended(cpu_s, losses[0])

    def theirs(self, steps: int, *how: str) -> Ended:
        script = str(ROOT / "benchmarks" / "hf_script.py")
        cpu_s, printed = cpu_seconds([script, str(self.model), str(self.tokens), str(steps), *how])
        return Ended(cpu_s, json.loads(printed.splitlines()[-1])[0])


def cpu_seconds(arguments: list[str]) -> tuple[float, str]:
    """User and system time of a Python process and of its children, and what it printed.

    Raises:
        RuntimeError: it failed; the end of its words.
    """
    before = os.times()
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    after = os.times()
    if done.returncode:
        raise RuntimeError(f"{arguments[:2]} ended with {done.returncode}: {done.stderr[-3000:]}")
    seconds = after.children_user - before.children_user + after.children_system - before.children_system
    return seconds, done.stdout


def step(quick: bool) -> list[Row]:
    """CPU milliseconds of a step of train.py, compiled and not, beside a compiled script of transformers."""
    short, long = (2, 6) if quick else (4, 28)
    with ExitStack() as closing:
        setting = Setting(closing)
        forms = {
            "HF": lambda steps: setting.theirs(steps, "compile"),
            "compiled": lambda steps: setting.train(steps, {"compile.enable": "true"}),
            "eager": lambda steps: setting.train(steps, {"compile.enable": "false"}),
        }
        losses = {name: form(2).first_loss for name, form in forms.items()}  # and what is compiled is kept on disk
        equal = f"bf16 {check_losses(losses['compiled'], losses['HF'], BF16_LOSS)}"
        check_losses(losses["eager"], losses["HF"], BF16_LOSS)
        each: dict[str, list[float]] = {name: [] for name in forms}
        for i in range(1 if quick else 2):
            for name, form in [*forms.items()][:: 1 if i % 2 == 0 else -1]:
                each[name].append(1e3 * (form(long).cpu_s - form(short).cpu_s) / (long - short))
    ms = {name: statistics.median(found) for name, found in each.items()}
    name = "train.py as a process, bf16, a step"
    peer = "a script of HF, compiled"
    return [
        Row(f"{name}, compiled", peer, ms["compiled"], ms["HF"], "CPU ms", 0.80, equal),
        Row(f"{name}, eager", peer, ms["eager"], ms["HF"], "CPU ms", None, equal),
    ]


def start(quick: bool) -> list[Row]:
    """CPU seconds of a process that takes one step and ends, nothing compiled."""
    with ExitStack() as closing:
        setting = Setting(closing)
        forms = {"HF": lambda: setting.theirs(1), "ours": lambda: setting.train(1, {"compile.enable": "false"})}
        found: dict[str, list[Ended]] = {name: [] for name in forms}
        for _ in range(1 if quick else 3):
            for name, form in forms.items():
                found[name].append(form())
    seconds = {name: statistics.median(ended.cpu_s for ended in all_) for name, all_ in found.items()}
    equal = f"bf16 {check_losses(found['ours'][0].first_loss, found['HF'][0].first_loss, BF16_LOSS)}"
    return [
        Row(
            "start to the end of the first step", "a script of HF", seconds["ours"], seconds["HF"], "CPU s", None, equal
        )
    ]


def values(quick: bool) -> list[Row]:
    """Microseconds that an initial value takes to draw; a function of its place in the whole tensor."""
    with ExitStack() as closing:
        keys = {f"model.{key}": value for key, value in SIZES.items()}
        keys |= {"data.seq_len": SEQ_LEN, "precision.params": "float32"}
        run = ours.begin("bloom.toml", keys, closing)
        parameters = [parameter for _, parameter in run.model.named_parameters()]
        n = sum(parameter.numel() for parameter in parameters)

        def torchs() -> None:
            with torch.no_grad():
                for parameter in parameters:
                    parameter.normal_()

        forms = {"torch": torchs, "ours": lambda: run.model.draw(0)}
        ms = cpu_ms(forms, rounds=2 if quick else 5, warm_up=1)
    us = {name: 1e3 * found / n for name, found in ms.items()}
    name = "an initial value"
    peer = f"0.03 (torch's generator: {us['torch']:.4f})"
    return [Row(name, peer, us["ours"], 0.03, "CPU us", 1.0, "bits: tests/ops/test_keyed.py")]


BENCHMARKS = {"step": step, "start": start, "values": values}
