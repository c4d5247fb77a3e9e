"""A small job that the tests of the planner's answers share."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VALUES = {
    "model.vocab_size": "257",
    "model.hidden_size": "32",
    "model.n_layers": "2",
    "model.n_heads": "4",
    "data.tokenizer": "bytes",
    "data.seq_len": "32",
    "data.split": "8,1,1",
    "batch.micro_batch_size": "1",
    "compile.enable": "false",
}
KEYS = ["--config", str(ROOT / "tests" / "small.toml")]
for _key, _value in VALUES.items():
    KEYS += [f"--{_key}", _value]
LAYOUT = ["--world", "2"]
