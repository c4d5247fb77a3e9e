"""Tiny runs whose checkpoints are kept under tests/runs, to see that later code resumes them with the same losses.

`python -m tests.kept_runs NAME` makes tests/runs/NAME with the code as it is: the checkpoint of step CUT of a run of
STEPS steps, and metrics.jsonl with the losses of all of them. Once a released version has written a kept run, it is
never made again.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from dtmega import train
from dtmega.checkpoint import resume
from dtmega.data.indexed_files.writer import IndexedWriter
from dtmega.data.tokenizers.load import load_tokenizer

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "tests" / "runs"
SMALL = ROOT / "tests" / "small.toml"
CUT = 4
STEPS = 8
# All that small.toml says and more, so that it may change.
KEYS = {
    "run.device": "cpu",
    "model.vocab_size": 257,
    "model.hidden_size": 8,
    "model.n_layers": 2,
    "model.n_heads": 2,
    "model.ffn_hidden_size": 16,
    "model.hidden_dropout": 0.1,
    "data.tokenizer": "bytes",
    "data.seq_len": 16,
    "data.split": "8,1,1",
    "data.num_workers": 0,
    "batch.micro_batch_size": 2,
    "batch.global_batch_size": 4,
    "optim.lr": 1e-2,
    "optim.min_lr": 1e-4,
    "optim.schedule": "cosine",
    "optim.eps": 1e-6,
    "optim.warmup": 2,
    "train.steps": STEPS,
    "eval.interval": 0,
    "eval.steps": 1,
    "eval.sample_tokens": 0,
    "log.tensorboard": False,
    "checkpoint.interval": CUT,
    "checkpoint.keep": 2,
    "precision.params": "float32",
    "compile.enable": False,
}


def write_text(prefix: Path) -> None:
    """The text that all of them read: 100 documents of 20 to 32 bytes, by a formula."""
    eod_id = load_tokenizer("bytes").eod_id
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for i in range(100):
            writer.add([*((7 * i + j * j) % 251 for j in range(20 + i % 13)), eod_id])


def flags(folder: Path, **changed: Any) -> list[str]:
    """The command line of such a run in `folder`, where its text is too."""
    keys = {"run.dir": str(folder / "run"), "data.path": str(folder / "text"), **KEYS, **changed}
    words = [word for k, v in keys.items() for word in (f"--{k}", v if isinstance(v, str) else json.dumps(v))]
    return ["--config", str(SMALL), *words]


def make(name: str) -> None:
    """Train, and keep what is to be kept."""
    kept = KEPT / name
    assert not kept.exists(), f"{kept} is there already"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # so that no path of this machine is kept
        run = Path("run")
        write_text(Path("text"))
        assert train.main(flags(Path())) == 0
        checkpoint = f"checkpoints/{resume.name(CUT)}"
        shutil.copytree(run / checkpoint, kept / checkpoint)
        shutil.copy(run / "metrics.jsonl", kept)


if __name__ == "__main__":
    make(sys.argv[1])
