"""`convert --from megatron` of megatron-core's distributed checkpoints, written by torch.distributed.checkpoint."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dtmega import config, families
from dtmega.distributed import exit_codes
from tests import core_files
from tests.interop.megatron.test_folder import (
    L,
    V,
    arguments,
    assert_same_logits,
    checkpoint,
    convert,
    drawn,
    of_kind,
    read,
)
from tests.megatron_files import Layout

# By Megatron-LM's names of a layer: where a GPT of megatron-core has the same.
LAYER = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "self_attention.query_key_value.": "self_attention.linear_qkv.",
    "self_attention.dense.": "self_attention.linear_proj.",
    "post_attention_layernorm.": "mlp.linear_fc1.layer_norm_",
    "mlp.dense_h_to_4h.": "mlp.linear_fc1.",
    "mlp.dense_4h_to_h.": "mlp.linear_fc2.",
}


def by_their_names(weights: Mapping[str, Tensor], stacked: bool) -> dict[str, Tensor]:
    found = {}
    for name, tensor in weights.items():
        if ".layers." not in name:
            found[name.replace("encoder.final", "decoder.final")] = tensor
            continue
        _, _, number, inner = name.split(".", 3)
        module, end = next((module, inner.removeprefix(module)) for module in LAYER if inner.startswith(module))
        if not stacked:
            found[f"decoder.layers.{number}.{LAYER[module]}{end}"] = tensor
        elif number == "0":
            every = [weights[f"encoder.layers.{i}.{inner}"] for i in range(L)]
            found[f"decoder.layers.{LAYER[module]}{end}"] = torch.stack(every)
    return found


def written(
    folder: Path,
    stacked: bool = True,
    more: Mapping[str, Any] | None = None,
    backend: str = "torch_dist",
    optimizer: Mapping[str, Any] | None = None,
) -> Path:
    tensors: dict[str, Any] = by_their_names(drawn("gpt"), stacked)
    tensors |= {f"decoder.layers.mlp.linear_fc1._extra_state/shard_{i}_{L}": io.BytesIO(b"fp8") for i in range(L)}
    args = arguments("gpt", 3.0, Layout()) | {"position_embedding_type": "learned_absolute", "swiglu": False}
    return core_files.write(folder, {**tensors, **(more or {})}, args, backend=backend, optimizer=optimizer)


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "one by one"])
def test_layers_stacked_or_one_by_one_are_megatrons_model(
    tmp_path: Path, stacked: bool, capsys: pytest.CaptureFixture[str]
):
    assert convert(written(tmp_path / "in", stacked), tmp_path / "out", "--vocab-size", "22") == exit_codes.DONE
    assert "weights only: the files have no optimizer's state" in capsys.readouterr().out
    assert_same_logits(tmp_path / "out", "gpt")


@pytest.mark.parametrize("kind", ["fp32_param", "param"])
def test_weights_are_the_fp32_masters_where_these_are(tmp_path: Path, kind: str):
    name = "decoder.final_layernorm.weight"
    master = drawn("gpt")["encoder.final_layernorm.weight"] + 1
    moments = {f"optimizer.state.exp_avg.{name}": master + 1}
    written(tmp_path / "in", more={f"optimizer.state.{kind}.{name}": master, **moments})
    assert convert(tmp_path / "in", tmp_path / "out") == exit_codes.DONE
    assert torch.equal(read(tmp_path / "out")[1]["norm.weight"], master)


GROUPS = [{"wd_mult": 1.0, "lr": 1e-4}, {"wd_mult": 0.0, "lr": 1e-4}]
# What stands in common.pt of an optimizer in fp32, of one of 16 bits, and of the distributed one.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "fp32": {"state": {"common_step": torch.tensor(6.0)}, "param_groups": GROUPS},
    "16 bits": {"optimizer": {"state": {"common_step": 6}, "param_groups": GROUPS}},
    "distributed": {"optimizer": {"param_groups": [{**group, "step": 6} for group in GROUPS]}},
}


def adams(stacked: bool) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """Moments by kind and Megatron-LM's names, and the same under those in a checkpoint."""
    moments = {kind: drawn("gpt", seed) for seed, kind in enumerate(("exp_avg", "exp_avg_sq"), start=1)}
    stored = {}
    for kind, tensors in moments.items():
        stored |= {f"optimizer.state.{kind}.{name}": t for name, t in by_their_names(tensors, stacked).items()}
    return moments, stored


@pytest.mark.parametrize(("optimizer", "stacked"), [("fp32", True), ("16 bits", False), ("distributed", True)])
def test_adams_moments_are_those_of_their_weights(tmp_path: Path, optimizer: str, stacked: bool):
    moments, stored = adams(stacked)
    written(tmp_path / "in", stacked, more=stored, optimizer=OPTIMIZERS[optimizer])
    assert convert(tmp_path / "in", tmp_path / "out", "--vocab-size", str(V)) == exit_codes.DONE
    state, tensors = checkpoint(tmp_path / "out")
    assert (state.progress.step, state.progress.samples, state.updates, state.progress.skipped) == (7, 56, 6, 1)
    assert config.load(["--config", str(tmp_path / "out" / "config.toml")]).data.order == "megatron-core"
    model = config.model_section(state.config["model"], "out")
    for kind, there in moments.items():
        for name, tensor in of_kind("gpt", there, model).items():
            assert torch.equal(tensors[f"optimizer/{kind}/{name}"], tensor), (kind, name)


@pytest.mark.parametrize(
    ("lost", "why"),
    [
        (
            "exp_avg_sq.decoder.layers.mlp.linear_fc2.bias",
            "there is no exp_avg_sq of 'decoder.layers.mlp.linear_fc2.bias'",
        ),
        ("common_step", "the files do not say how many updates Adam has made"),
        ("nothing", "the moments are cut into buckets of that run's layout"),
    ],
)
def test_moments_that_are_not_whole_are_left_out_with_the_reason(
    tmp_path: Path, lost: str, why: str, capsys: pytest.CaptureFixture[str]
):
    _, stored = adams(stacked=True)
    optimizer = {"state": {} if lost == "common_step" else {"common_step": 6}, "param_groups": GROUPS}
    more = {name: tensor for name, tensor in stored.items() if not name.endswith(lost)}
    if lost == "nothing":
        more["optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0.exp_avg"] = torch.ones(3)
    written(tmp_path / "in", more=more, optimizer=optimizer)
    assert convert(tmp_path / "in", tmp_path / "out") == exit_codes.DONE
    assert f"weights only: {why}" in capsys.readouterr().out
    assert [name for name in checkpoint(tmp_path / "out")[1] if not name.startswith("model/")] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "zarr"}, "metadata.json has sharded_backend='zarr', expected 'torch_dist'"),
        (
            {"more": {"decoder.layers.mlp.router.weight": torch.ones(L, 2)}},
            "has no place for decoder.layers.mlp.router",
        ),
        (
            {"more": {"decoder.layers.1.mlp.linear_fc2.bias": torch.ones(8)}},
            "'decoder.layers.1.mlp.linear_fc2.bias' is there twice",
        ),
        ({"more": {"output_layer.bias": torch.ones(2, 0)}}, "'output_layer.bias' is [2, 0], expected a tensor with"),
    ],
)
def test_what_is_no_such_checkpoint_of_a_gpt_is_refused_and_nothing_is_written(
    tmp_path: Path, options: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
):
    assert convert(written(tmp_path / "in", **options), tmp_path / "out") == exit_codes.REFUSED
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------------------ Llama

HEADS, KV_HEADS, SAMPLE = 4, 2, torch.arange(24).view(2, 12) * 3 % 70


def llama(**values: Any) -> Any:
    """A Llama of transformers with grouped queries."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": HEADS}
    small = LlamaConfig(**sizes, num_key_value_heads=KV_HEADS, vocab_size=70, initializer_range=0.3, **values)
    return LlamaForCausalLM(small).eval()


def args_of_llama(theirs: Any, **values: Any) -> dict[str, Any]:
    """The arguments of a run with transformers' model, as Megatron-LM names them."""
    found = {
        **{"num_layers": theirs.config.num_hidden_layers, "hidden_size": theirs.config.hidden_size},
        **{"num_attention_heads": HEADS, "group_query_attention": True, "num_query_groups": KV_HEADS},
        **{"ffn_hidden_size": theirs.config.intermediate_size, "kv_channels": theirs.config.hidden_size // HEADS},
        **{"padded_vocab_size": theirs.config.vocab_size, "max_position_embeddings": 64, "swiglu": True},
        **{"normalization": "RMSNorm", "norm_epsilon": theirs.config.rms_norm_eps, "add_bias_linear": False},
        **{"position_embedding_type": "rope", "rotary_base": 10_000, "rotary_percent": 1.0},
        **{"rotary_interleaved": False, "rotary_seq_len_interpolation_factor": None, "use_rope_scaling": False},
        **{"rope_scaling_factor": 8.0, "use_rotary_position_embeddings": False, "add_position_embedding": True},
        **{"untie_embeddings_and_output_weights": not theirs.config.tie_word_embeddings, "qk_layernorm": False},
        **{"apply_layernorm_1p": False, "squared_relu": False, "num_experts": None, "hidden_dropout": 0.0},
        **{"seed": 1234, "global_batch_size": 8, "micro_batch_size": 4, "lr": 1e-4, "train_iters": 20},
        **{"consumed_train_samples": 56, "tokenizer_type": "HuggingFaceTokenizer", "seq_length": 12},
    }
    return found | values


def written_llama(folder: Path, theirs: Any, more: Mapping[str, Any] | None = None, **values: Any) -> Path:
    tied = theirs.config.tie_word_embeddings
    tensors = core_files.of_llama(theirs.state_dict(), HEADS, KV_HEADS, tied)
    return core_files.write(folder, {**tensors, **(more or {})}, args_of_llama(theirs, **values))


def assert_has_logits_of(path: Path, theirs: Any) -> None:
    """Our model with the weights of a checkpoint computes what transformers' does."""
    model, weights = read(path)
    built = families.of(model).build(model).eval()
    built.init_buffers(0)
    built.load_state_dict(weights, strict=False)
    with torch.no_grad():
        found = built(SAMPLE, places=torch.arange(SAMPLE.shape[1]).expand_as(SAMPLE))
        expected = theirs(SAMPLE).logits
    torch.testing.assert_close(found[..., : expected.shape[-1]], expected, rtol=1e-5, atol=1e-5)


SCALED = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0}
SCALED |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("of_theirs", "args"),
    [
        ({}, {}),
        ({"tie_word_embeddings": True}, {}),
        (
            {"rope_parameters": SCALED},
            {"rotary_base": 500_000, "use_rope_scaling": True, "rope_scaling_factor": 32.0},
        ),
    ],
    ids=["untied", "tied", "scaled"],
)
def test_a_llama_has_the_logits_of_transformers(tmp_path: Path, of_theirs: dict[str, Any], args: dict[str, Any]):
    theirs = llama(**of_theirs)
    assert convert(written_llama(tmp_path / "in", theirs, **args), tmp_path / "out") == exit_codes.DONE
    assert_has_logits_of(tmp_path / "out", theirs)
    continued = (tmp_path / "out" / "config.toml").read_text()
    assert config.load(["--config", str(tmp_path / "out" / "config.toml")]).model == read(tmp_path / "out")[0]
    assert 'dir = "runs/llama"' in continued
    assert convert(tmp_path / "in", tmp_path / "hf", to="hf") == exit_codes.DONE
    again = LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        assert torch.equal(again(SAMPLE).logits, theirs(SAMPLE).logits)


def test_a_qwen3_has_the_logits_of_transformers(tmp_path: Path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": HEADS}
    windows = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    small = Qwen3Config(**sizes, **windows, head_dim=32, num_key_value_heads=KV_HEADS, vocab_size=70)
    theirs = Qwen3ForCausalLM(small).eval()
    with torch.no_grad():
        for layer in theirs.model.layers:
            layer.self_attn.q_norm.weight.normal_()
            layer.self_attn.k_norm.weight.normal_()
    args = {"kv_channels": 32, "qk_layernorm": True, "window_size": (4, 0), "window_attn_skip_freq": [0, 1, 1]}
    assert convert(written_llama(tmp_path / "in", theirs, **args), tmp_path / "out") == exit_codes.DONE
    assert_has_logits_of(tmp_path / "out", theirs)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"window_size": 8}, "window_size=8, expected two numbers"),
        ({"window_size": (7, 0), "window_attn_skip_freq": [1, 0]}, "expected a number above 0 or a list of 3 numbers"),
        ({"apply_layernorm_1p": True}, "has apply_layernorm_1p=True, expected False"),
        ({"squared_relu": True}, "has squared_relu=True, expected False"),
        ({"num_experts": 8}, "has num_experts=8, expected None"),
        ({"multi_latent_attention": True}, "has multi_latent_attention=True, expected False"),
        ({"rotary_percent": 0.5}, "has rotary_percent=0.5, expected 1.0"),
        ({"rotary_interleaved": True}, "has rotary_interleaved=True, expected False"),
        ({"rotary_seq_len_interpolation_factor": 2}, "has rotary_seq_len_interpolation_factor=2, expected None"),
        ({"position_embedding_type": "yarn"}, "has position_embedding_type='yarn', expected 'rope'"),
        ({"normalization": "LayerNorm"}, "has normalization='LayerNorm', expected 'RMSNorm'"),
        ({"swiglu": False}, "has swiglu=False, expected True"),
        ({"add_bias_linear": True}, "has add_bias_linear=True, expected False"),
        ({"kv_channels": 32}, "is [128, 64], expected [256, 64]"),
        ({"num_query_groups": 3}, "n_kv_heads=3 does not divide n_heads=4"),
    ],
)
def test_a_variant_of_llama_that_is_not_built_is_refused_by_the_name_of_its_argument(
    tmp_path: Path, args: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
):
    assert convert(written_llama(tmp_path / "in", llama(), **args), tmp_path / "out") == exit_codes.REFUSED
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


ROUTER = {"decoder.layers.mlp.router.weight": torch.ones(3, 8, 64)}
# The two matrices of 8 experts of three layers, by the names that megatron-core has given them: SequentialMLP, and
# TEGroupedMLP in a distributed checkpoint and in a state_dict.
EXPERTS: dict[str, dict[str, Tensor]] = {
    "one by one": {
        f"decoder.layers.mlp.experts.local_experts.{expert}.linear_fc{i}.weight": torch.ones(3, *shape)
        for expert in range(8)
        for i, shape in ((1, (192, 64)), (2, (64, 96)))
    },
    "stacked": {
        "decoder.layers.mlp.experts.experts.linear_fc1.weight": torch.ones(3, 8, 192, 64),
        "decoder.layers.mlp.experts.experts.linear_fc2.weight": torch.ones(3, 8, 64, 96),
    },
    "numbered": {
        f"decoder.layers.{layer}.mlp.experts.linear_fc{i}.weight{expert}": torch.ones(shape)
        for layer in range(3)
        for expert in range(8)
        for i, shape in ((1, (192, 64)), (2, (64, 96)))
    },
}


@pytest.mark.parametrize("names", EXPERTS)
def test_a_checkpoint_with_experts_is_refused_by_their_names_even_if_its_arguments_do_not_tell(
    tmp_path: Path, names: str, capsys: pytest.CaptureFixture[str]
):
    written_llama(tmp_path / "in", llama(), more={**ROUTER, **EXPERTS[names]})
    assert convert(tmp_path / "in", tmp_path / "out") == exit_codes.REFUSED
    message = capsys.readouterr().err
    assert "has no place for decoder.layers.mlp.router.weight, decoder.layers." in message
    assert not (tmp_path / "out").exists()


def test_the_configuration_of_a_moe_does_not_make_a_checkpoint_readable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    written_llama(tmp_path / "in", llama(), more={**ROUTER, **EXPERTS["stacked"]})
    assert convert(tmp_path / "in", tmp_path / "out", "--config", "mixtral-8x7b.toml") == exit_codes.REFUSED
    assert "megatron-core has no model like this one of name = 'moe'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
