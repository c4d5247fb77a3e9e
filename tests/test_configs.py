"""Every file under configs/ loads, and the published models have their published sizes and hyperparameters."""

from __future__ import annotations

import pytest

from dtmega import config, cost

# name, parameters, L, D, H, peak lr, final lr, global batch, ramp's increment. Parameters from the model cards on
# huggingface.co/bigscience; the rest from "BLOOM" (arXiv 2211.05100), table 3, and the ramp from BigScience's scripts.
PUBLISHED = [
    ("560m", 559_214_592, 24, 1024, 16, 3.0e-4, 1e-5, 256, 32),
    ("1b1", 1_065_314_304, 24, 1536, 16, 2.5e-4, 1e-5, 256, 16),
    ("1b7", 1_722_408_960, 24, 2048, 16, 2.0e-4, 1e-5, 512, 16),
    ("3b", 3_002_557_440, 30, 2560, 32, 1.6e-4, 1e-5, 512, 32),
    ("7b1", 7_069_016_064, 30, 4096, 32, 1.2e-4, 1e-5, 512, 32),
    ("176b", 176_247_271_424, 70, 14336, 112, 6.0e-5, 6e-6, 2048, 16),
]
SIZES = [row[0] for row in PUBLISHED]


def load(size: str) -> config.Config:
    return config.load(["--config", f"bloom-{size}.toml"])


@pytest.mark.parametrize("path", sorted(config.CONFIGS_DIR.glob("*.toml")), ids=lambda path: path.stem)
def test_a_config_that_ships_loads(path):
    config.load(["--config", str(path)])


def test_every_published_size_has_a_config():
    assert sorted(p.stem for p in config.CONFIGS_DIR.glob("bloom-*.toml")) == sorted(f"bloom-{s}" for s in SIZES)


@pytest.mark.parametrize(("size", "parameters"), [row[:2] for row in PUBLISHED])
def test_a_published_model_has_its_published_number_of_parameters(size: str, parameters: int):
    assert cost.parameters(load(size).model) == parameters


@pytest.mark.parametrize("row", PUBLISHED, ids=SIZES)
def test_a_published_model_has_its_own_hyperparameters(row):
    c = load(row[0])
    ours = (c.model.n_layers, c.model.hidden_size, c.model.n_heads, c.optim.lr, c.optim.min_lr)
    assert (*ours, c.batch.global_batch_size, c.batch.rampup) == (*row[2:8], [192, row[8], 9_765_625])


@pytest.mark.parametrize("size", SIZES)
def test_the_published_models_share_one_recipe(size: str):
    c = load(size)
    shared = {
        "run": {"seed": 42},
        "model": {"vocab_size": 250_880, "init_std": 0.0048, "hidden_dropout": 0.1, "attention_dropout": 0.1},
        "data": {"seq_len": 2048},
        "batch": {"micro_batch_size": 1},
        "optim": {
            **{"schedule": "cosine", "unit": "samples", "warmup": 183_105, "decay": 200_000_000},
            **{"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "clip_grad": 1.0},
        },
        "train": {"samples": 220_000_000},
        "precision": {"params": "bfloat16", "reduce": "float32"},
    }
    assert {s: {k: getattr(getattr(c, s), k) for k in keys} for s, keys in shared.items()} == shared
