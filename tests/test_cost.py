"""cost.py against published figures, Hugging Face's BLOOM and PyTorch's own FLOP counter."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import BloomConfig, BloomForCausalLM

from dtmega import cost
from dtmega.config import Model

BLOOM_176B = Model(vocab_size=250880, hidden_size=14336, n_layers=70, n_heads=112)


def test_parameters_are_those_of_hugging_faces_bloom():
    model = Model(vocab_size=99, hidden_size=48, n_layers=3, n_heads=6)
    with torch.device("meta"):
        theirs = BloomForCausalLM(BloomConfig(vocab_size=99, hidden_size=48, n_layer=3, n_head=6))
    assert cost.parameters(model) == sum(p.numel() for p in theirs.parameters())


def test_an_mlp_of_another_width_adds_its_weights_and_biases():
    narrow = Model(vocab_size=99, hidden_size=48, n_layers=3, n_heads=6)
    wide = narrow.model_copy(update={"ffn_hidden_size": 4 * 48 + 1})
    assert cost.parameters(wide) - cost.parameters(narrow) == 3 * (48 + 48 + 1)


def test_flops_are_those_pytorch_counts_with_half_of_attention():
    model, batch, seq_len = Model(vocab_size=99, hidden_size=48, n_layers=3, n_heads=6), 2, 10
    with torch.device("meta"):
        theirs = BloomForCausalLM(
            BloomConfig(vocab_size=99, hidden_size=48, n_layer=3, n_head=6, attn_implementation="eager")
        )
        tokens = torch.zeros(batch, seq_len, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        theirs(tokens, attention_mask=None).logits.sum().backward()
    # Hugging Face multiplies all S x S pairs of B sequences in L layers: QK^T and PV, once forward and twice backward.
    all_pairs = batch * 3 * (2 + 2) * seq_len * seq_len * 48 * 3
    assert cost.flops_per_token(model, seq_len) * batch * seq_len == counter.get_total_flops() - all_pairs // 2


def test_a_model_of_transformers_is_what_was_counted_of_it():
    model = Model(name="hf", vocab_size=99, hidden_size=48, n_layers=3, elements=[1000, 9000])
    assert (cost.block_parameters(model), cost.parameters(model)) == (1000, 9000)
    of_a_layer = 6 * 1000 + 6 * 10 * 48  # each weight, and half of S keys: forward 4 S D / 2, backward twice that
    assert cost.block_flops_per_token(model, 10) == of_a_layer
    assert cost.flops_per_token(model, 10) == 3 * of_a_layer + 6 * 99 * 48


def test_megatrons_formula_gives_the_tflops_of_blooms_log():
    # bigscience train/tr11-176B-ml/chronicles.md, iteration 12695: 105.22 s, batch 2048, 384 GPUs, "TFLOPs: 149.02"
    flops = cost.megatron_flops_per_token(BLOOM_176B, 2048) * 2048 * 2048
    assert round(flops / 105.22 / 384 / 1e12, 2) == 149.02


def test_model_flops_are_below_megatrons_hardware_flops():
    assert 0.7 < cost.flops_per_token(BLOOM_176B, 2048) / cost.megatron_flops_per_token(BLOOM_176B, 2048) < 0.75


@pytest.mark.parametrize(
    ("device_name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("AMD Instinct MI300X", 1307),
    ],
)
def test_a_device_name_finds_its_own_peak(device_name: str, tflops: int):
    assert cost.peak_flops(device_name, "bfloat16") == tflops * 1e12


def test_a_device_that_is_not_in_the_table_has_no_peak():
    assert cost.peak_flops("NVIDIA H20", "bfloat16") is None


def test_a_dtype_that_is_not_in_the_table_has_no_peak():
    assert cost.peak_flops("NVIDIA H100 80GB HBM3", "float32") is None
