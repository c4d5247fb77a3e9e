"""Every file under configs/ loads, and the published models have their published sizes and hyperparameters."""

from __future__ import annotations

import pytest
import tomli

from dtmega import config, families
from dtmega.config.families.bert import BertKeys
from dtmega.config.families.llama import LlamaKeys
from dtmega.config.families.t5 import T5Keys
from dtmega.data.sampling.splits import split_documents
from dtmega.ops import cost

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
# name, parameters, L, D, H, peak lr, global batch. Sizes and parameters from huggingface.co/openai-community; GPT-2's
# recipe was not published, that of GPT-3 for such sizes was (arXiv 2005.14165, table 2.1): 0.5M or 1M tokens a batch.
GPT2 = [
    ("gpt2", 124_439_808, 12, 768, 12, 6.0e-4, 2**9),
    ("gpt2-medium", 354_823_168, 24, 1024, 16, 3.0e-4, 2**9),
    ("gpt2-large", 774_030_080, 36, 1280, 20, 2.5e-4, 2**9),
    ("gpt2-xl", 1_557_611_200, 48, 1600, 25, 2.0e-4, 2**10),
]
# name, parameters, V, D, L, H, heads of keys, F, longest sequence, theta, peak lr. Llama 2 from arXiv 2307.09288, table
# 1, Llama 3 from arXiv 2407.21783, table 3; what these leave out, and the parameters, from the model cards and
# config.json on huggingface.co/meta-llama.
LLAMAS = [
    ("2-7b", 6_738_415_616, 32_000, 4096, 32, 32, 32, 11_008, 4096, 1e4, 3.0e-4),
    ("2-13b", 13_015_864_320, 32_000, 5120, 40, 40, 40, 13_824, 4096, 1e4, 3.0e-4),
    ("2-70b", 68_976_648_192, 32_000, 8192, 80, 64, 8, 28_672, 4096, 1e4, 1.5e-4),
    ("3-8b", 8_030_261_248, 128_256, 4096, 32, 32, 8, 14_336, 8192, 5e5, 3.0e-4),
    ("3-70b", 70_553_706_496, 128_256, 8192, 80, 64, 8, 28_672, 8192, 5e5, 1.5e-4),
    ("3.2-1b", 1_235_814_400, 128_256, 2048, 16, 32, 8, 8192, 131_072, 5e5, 2e-5),
]
# name, parameters, V, D, L, H, heads of keys, F, K, window, theta, eps. Sizes and parameters from config.json and the
# safetensors on huggingface.co/mistralai and huggingface.co/Qwen; the recipes are ours.
FURTHER_LLAMAS = [
    ("mistral-7b", 7_241_732_096, 32_000, 4096, 32, 32, 8, 14_336, 128, 4096, 1e4, 1e-5),
    ("qwen3-0.6b", 596_049_920, 151_936, 1024, 28, 16, 8, 3072, 128, 0, 1e6, 1e-6),
    ("qwen3-8b", 8_190_735_360, 151_936, 4096, 36, 32, 8, 12_288, 128, 0, 1e6, 1e-6),
]
# name, parameters, L, D, H, LayerNorms, global batch, steps. The first two from arXiv 1810.04805, section 3 and
# appendix A.2, their parameters from huggingface.co/google-bert; Megatron's from arXiv 1909.08053, table 4 and section
# 4.2, with parameters by its shapes: V D + (512 + 2) D, 12 D^2 + 13 D a layer, 2 D^2 + 8 D + V + 2 of norms and heads.
BERTS = [
    ("bert-base", 110_106_428, 12, 768, 12, "post", 256, 1_000_000),
    ("bert-large", 336_226_108, 24, 1024, 16, "post", 256, 1_000_000),
    ("bert-1.3b", 1_280_595_772, 24, 2048, 32, "pre", 1024, 2_000_000),
    ("bert-3.9b", 3_869_081_404, 48, 2560, 40, "pre", 1024, 2_000_000),
]
# name, parameters, D, L of each stack, H, K, F. Parameters from huggingface.co/google-t5 and google; sizes from arXiv
# 1910.10683, section 3.7, of v1.1 from config.json there.
T5S = [
    ("t5-small", 60_506_624, 512, 6, 8, 64, 2048),
    ("t5-base", 222_903_552, 768, 12, 12, 64, 3072),
    ("t5-large", 737_668_096, 1024, 24, 16, 64, 4096),
    ("t5-3b", 2_851_598_336, 1024, 24, 32, 128, 16_384),
    ("t5-11b", 11_307_321_344, 1024, 24, 128, 128, 65_536),
    ("t5-v1.1-small", 76_961_152, 512, 8, 6, 64, 1024),
    ("t5-v1.1-base", 247_577_856, 768, 12, 12, 64, 2048),
    ("t5-v1.1-large", 783_150_080, 1024, 24, 16, 64, 2816),
    ("t5-v1.1-xl", 2_849_757_184, 2048, 24, 32, 64, 5120),
    ("t5-v1.1-xxl", 11_135_332_352, 4096, 24, 64, 64, 10_240),
]


def test_megatrons_worked_example_has_the_parameters_of_its_shapes():
    model = config.load(["--config", "bert-345m.toml"]).model
    d, rows = 1024, 30_592  # 30,522 words, padded to a multiple of 128
    embeddings = (rows + 512 + 2) * d
    layers = 24 * (12 * d * d + 13 * d)
    heads = 2 * d * d + 8 * d + rows + 2
    assert cost.n_parameters(families.pieces(model)) == embeddings + layers + heads


def load(size: str) -> config.Config:
    return config.load(["--config", f"bloom-{size}.toml"])


@pytest.mark.parametrize("path", sorted(config.CONFIGS_DIR.glob("*.toml")), ids=lambda path: path.stem)
def test_a_config_that_ships_loads(path):
    config.load(["--config", str(path)])


def test_every_published_size_has_a_config():
    assert sorted(p.stem for p in config.CONFIGS_DIR.glob("bloom-*.toml")) == sorted(f"bloom-{s}" for s in SIZES)


@pytest.mark.parametrize(("size", "parameters"), [row[:2] for row in PUBLISHED])
def test_a_published_model_has_its_published_number_of_parameters(size: str, parameters: int):
    assert cost.n_parameters(families.pieces(load(size).model)) == parameters


@pytest.mark.parametrize("row", PUBLISHED, ids=SIZES)
def test_a_published_model_has_its_published_recipe_and_no_other_key(row):
    size, _, n_layers, hidden_size, n_heads, lr, min_lr, global_batch_size, increment = row
    assert tomli.loads((config.CONFIGS_DIR / f"bloom-{size}.toml").read_text()) == {
        "run": {"dir": f"runs/bloom-{size}", "seed": 42},
        "model": {
            **{"name": "bloom", "n_layers": n_layers, "hidden_size": hidden_size, "n_heads": n_heads},
            **{"vocab_size": 250_880, "init_std": 0.0048, "hidden_dropout": 0.1, "attention_dropout": 0.1},
        },
        "data": {"path": "data/roots", "tokenizer": "data/bloom-tokenizer.json", "seq_len": 2048},
        "batch": {
            **{"micro_batch_size": 1, "global_batch_size": global_batch_size},
            **{"rampup": [192, increment, 9_765_625]},  # 20B tokens of 2048
        },
        "optim": {
            **{"lr": lr, "min_lr": min_lr, "schedule": "cosine", "unit": "samples"},
            **{"warmup": 183_105, "decay": 200_000_000},
            **{"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "clip_grad": 1.0},
        },
        "train": {"samples": 220_000_000},
        "eval": {"interval": 1000, "steps": 1, "prompt": ""},
        "log": {"interval": 1},
        "checkpoint": {"interval": 100 if size == "176b" else 250},
        "precision": {"params": "bfloat16", "reduce": "float32"},
    }


def test_every_published_gpt2_has_a_config():
    assert {p.stem for p in config.CONFIGS_DIR.glob("gpt2*.toml")} == {row[0] for row in GPT2}


@pytest.mark.parametrize("row", GPT2, ids=[row[0] for row in GPT2])
def test_a_published_gpt2_has_its_published_sizes_and_the_recipe_of_the_gpt3_of_its_size(row):
    name, parameters, n_layers, hidden_size, n_heads, lr, global_batch_size = row
    assert cost.n_parameters(families.pieces(config.load(["--config", name]).model)) == parameters
    assert tomli.loads((config.CONFIGS_DIR / f"{name}.toml").read_text()) == {
        "run": {"dir": f"runs/{name}"},
        "model": {
            **{"name": "gpt", "n_layers": n_layers, "hidden_size": hidden_size, "n_heads": n_heads},
            **{"vocab_size": 50_257, "max_position_embeddings": 1024},
            **{"hidden_dropout": 0.1, "attention_dropout": 0.1},
        },
        "data": {"path": "data/webtext", "tokenizer": "gpt2", "seq_len": 1024},
        "batch": {"micro_batch_size": 4, "global_batch_size": global_batch_size},
        "optim": {
            **{"lr": lr, "min_lr": pytest.approx(lr / 10), "schedule": "cosine", "unit": "tokens"},
            **{"warmup": 375_000_000, "decay": 260_000_000_000},
            **{"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "clip_grad": 1.0},
        },
        "train": {"tokens": 300_000_000_000},
        "eval": {"interval": 1000},
        "precision": {"params": "bfloat16", "reduce": "float32"},
    }


def test_every_published_bert_has_a_config():
    assert {p.stem for p in config.CONFIGS_DIR.glob("bert-*.toml")} == {row[0] for row in BERTS} | {"bert-345m"}


@pytest.mark.parametrize("row", BERTS, ids=[row[0] for row in BERTS])
def test_a_published_bert_has_its_published_sizes_and_recipe(row):
    name, parameters, n_layers, hidden_size, n_heads, norm, global_batch_size, steps = row
    cfg = config.load(["--config", f"{name}.toml"])
    model = cfg.model
    assert isinstance(model, BertKeys)
    assert cost.n_parameters(families.pieces(model)) == parameters
    assert (model.n_layers, model.hidden_size, model.n_heads, model.ffn) == (
        n_layers,
        hidden_size,
        n_heads,
        4 * hidden_size,
    )
    assert (model.vocab_size, model.max_position_embeddings, cfg.data.seq_len) == (30_522, 512, 512)
    assert (model.norm, model.gelu, model.head_gelu) == (norm, "erf", "erf")
    assert model.layer_norm_eps == {"post": 1e-12, "pre": 1e-5}[norm]
    assert (model.hidden_dropout, model.attention_dropout) == (0.1, 0.1)
    assert (cfg.batch.global_batch_size, cfg.train.steps) == (global_batch_size, steps)
    optim = cfg.optim
    assert (optim.lr, optim.min_lr, optim.schedule, optim.unit, optim.warmup) == (1e-4, 0.0, "linear", "steps", 10_000)
    assert (optim.beta1, optim.beta2, optim.eps, optim.weight_decay, optim.clip_grad) == (0.9, 0.999, 1e-6, 0.01, 1.0)


def test_every_published_t5_has_a_config():
    assert {p.stem for p in config.CONFIGS_DIR.glob("t5-*.toml")} == {row[0] for row in T5S} | {"t5-megatron"}


@pytest.mark.parametrize("row", T5S, ids=[row[0] for row in T5S])
def test_a_published_t5_has_its_published_sizes_and_form(row):
    name, parameters, hidden_size, n_layers, n_heads, kv_channels, ffn = row
    cfg = config.load(["--config", name])
    model = cfg.model
    assert isinstance(model, T5Keys)
    assert cost.n_parameters(families.pieces(model)) == parameters
    sizes = (model.hidden_size, model.n_layers, model.decoder_layers, model.n_heads, model.head_dim, model.ffn)
    assert sizes == (hidden_size, n_layers, n_layers, n_heads, kv_channels, ffn)
    assert (model.vocab_size, cfg.data.seq_len) == (32_128, 512)
    later = "v1.1" in name
    form = ("gelu_tanh", True, False, False) if later else ("relu", False, True, True)
    assert (model.activation, model.gated, model.tied, model.scale_head) == form
    rates = (model.hidden_dropout, model.attention_dropout, model.inner_dropout)
    assert rates == ((0.0, 0.0, 0.0) if later else (0.1, 0.1, 0.1))
    assert (cfg.batch.global_batch_size, cfg.train.steps) == (2**11, 1_000_000)


def test_megatrons_worked_example_of_a_t5_has_the_parameters_of_its_shapes():
    model = config.load(["--config", "t5-megatron"]).model
    d, rows = 768, 30_720  # 30,522 words, [BOS], [EOS] and 100 sentinels, padded to a multiple of 128
    norm, attention = 2 * d, 4 * d * d + 4 * d
    mlp = 2 * 4 * d * d + 5 * d
    encoder = 12 * (attention + mlp + 2 * norm) + norm
    decoder = 12 * (2 * attention + mlp + 3 * norm) + norm
    assert cost.n_parameters(families.pieces(model)) == (rows + 512) * d + encoder + decoder + rows


def test_every_published_llama_has_a_config():
    assert {p.stem for p in config.CONFIGS_DIR.glob("llama-*.toml")} == {f"llama-{row[0]}" for row in LLAMAS}


@pytest.mark.parametrize("row", LLAMAS, ids=[row[0] for row in LLAMAS])
def test_a_published_llama_has_its_published_sizes_and_recipe(row):
    name, parameters, vocab_size, hidden_size, n_layers, n_heads, kv_heads, ffn, longest, theta, lr = row
    cfg = config.load(["--config", f"llama-{name}.toml"])
    model = cfg.model
    assert isinstance(model, LlamaKeys)
    assert cost.n_parameters(families.pieces(model)) == parameters
    assert (model.vocab_size, model.hidden_size, model.n_layers) == (vocab_size, hidden_size, n_layers)
    assert (model.n_heads, model.kv_heads, model.ffn) == (n_heads, kv_heads, ffn)
    assert (model.max_position_embeddings, model.rope_theta, model.rms_norm_eps) == (longest, theta, 1e-5)
    assert (model.tied, model.rope_factor) == ((True, 32.0) if name == "3.2-1b" else (False, 1.0))
    assert (cfg.optim.lr, cfg.data.seq_len, cfg.precision.params) == (lr, min(longest, 8192), "bfloat16")
    if name != "3.2-1b":  # whose recipe is ours
        assert cfg.batch.global_batch_size * cfg.data.seq_len == 2**22
        assert cfg.optim.min_lr == pytest.approx(lr / {"2": 10, "3": 100}[name[0]])
        assert cfg.optim.warmup == {"2": 2000, "3": 8000}[name[0]]
        assert cfg.optim.eps == {"2": 1e-5, "3": 1e-8}[name[0]]
        assert cfg.train.tokens == {"2": 2e12, "3": 15e12}[name[0]]


@pytest.mark.parametrize("row", FURTHER_LLAMAS, ids=[row[0] for row in FURTHER_LLAMAS])
def test_mistral_and_qwen3_are_llamas_of_their_published_sizes(row):
    name, parameters, vocab_size, hidden_size, n_layers, n_heads, kv_heads, ffn, head_dim, window, theta, eps = row
    model = config.load(["--config", f"{name}.toml"]).model
    assert isinstance(model, LlamaKeys)
    assert cost.n_parameters(families.pieces(model)) == parameters
    assert (model.vocab_size, model.hidden_size, model.n_layers) == (vocab_size, hidden_size, n_layers)
    assert (model.n_heads, model.kv_heads, model.ffn, model.head_dim) == (n_heads, kv_heads, ffn, head_dim)
    assert (model.rope_theta, model.rms_norm_eps, model.qk_norm) == (theta, eps, name.startswith("qwen3"))
    assert (model.window, model.window_layers) == (window, [])


def test_the_configuration_for_models_of_transformers_fine_tunes():
    """Small steps without decay, in bf16; the sizes are the directory's."""
    assert tomli.loads((config.CONFIGS_DIR / "hf.toml").read_text()) == {
        "run": {"dir": "runs/hf"},
        "model": {"name": "hf"},
        "data": {"path": "stdlib", "seq_len": 512, "split": "9,1,0"},
        "batch": {"micro_batch_size": 1, "global_batch_size": 16},
        "optim": {"lr": 2e-5, "schedule": "cosine", "warmup_fraction": 0.1, "weight_decay": 0.0},
        "train": {"steps": 200},
        "precision": {"params": "bfloat16"},
    }
    assert split_documents(6, (9, 1, 0)) == [(0, 5), (5, 6), (6, 6)]


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        *(("bloom", 40), ("gpt", 30), ("llama", 30), ("prefix-lm", 30), ("bert", 30), ("t5", 30)),
        *(("hf", 20), ("llama-3.2-1b", 50), ("mistral-7b", 50), ("qwen3-0.6b", 50), ("qwen3-8b", 50)),
    ],
)
def test_a_recipe_of_our_own_warms_up_for_its_steps_or_for_two_of_twenty(name: str, steps: int):
    cfg = config.load(["--config", name])
    assert cfg.optim.warmup_until(cfg.train.steps) == steps
    short = config.load(["--config", name, "--train.steps", "20"])
    assert 1 <= short.optim.warmup_until(20) <= 2
