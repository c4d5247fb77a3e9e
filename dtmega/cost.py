"""What a model costs, as arithmetic: parameters, FLOPs, and the peak it is measured against. No torch."""

from __future__ import annotations

from dtmega.config import Model

# Dense bf16 FLOP/s by a part of torch.cuda.get_device_name(); the first match counts. From the datasheets of NVIDIA
# A100, L40S, H100, H200, HGX B200 and GB200 NVL72 (Hopper's and Blackwell's state twice this, "with sparsity") and of
# AMD Instinct MI300X.
PEAK_FLOPS = {
    "A100": 312e12,
    "L40S": 362e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "MI300X": 1307e12,
}


def peak_flops(device_name: str, dtype: str) -> float | None:
    """FLOP/s of dense matrix products by the datasheet; None for a device, or a dtype (in torch's words), not there."""
    if dtype != "bfloat16":
        return None
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), None)


def parameters(model: Model) -> int:
    """Elements of all weights of a BLOOM; the tied head counts once.

    Embedding VD and its LayerNorm 2D; per layer two LayerNorms 4D, QKV 3D^2 + 3D, output D^2 + D, MLP 2DF + F + D;
    last LayerNorm 2D.
    """
    d, f = model.hidden_size, model.ffn
    layer = 4 * d + (3 * d * d + 3 * d) + (d * d + d) + (2 * d * f + f + d)
    return model.vocab_size * d + 2 * d + model.n_layers * layer + 2 * d


def flops_per_token(model: Model, seq_len: int) -> int:
    """Model FLOPs of forward and backward for one of `seq_len` tokens: what training needs, not what recompute adds.

    A weight of a matrix product costs 2 FLOPs forward and 4 backward per token (Kaplan et al. 2020, section 2.1): the
    layers' L (4 D^2 + 2 DF) and the head's VD. The head counts, though its weight is the embedding's; the embedding's
    look-up does not multiply. QK^T and PV cost 4 S D forward over S keys, three times that with backward (Narayanan et
    al. 2021, appendix), and half of it counts, because a causal query sees half of the keys on average: 6 L S D.
    Biases, norms, activations and softmax are left out, as everywhere.
    """
    d = model.hidden_size
    matmul_weights = model.n_layers * (4 * d * d + 2 * d * model.ffn) + model.vocab_size * d
    return 6 * matmul_weights + 6 * model.n_layers * seq_len * d


def megatron_flops_per_token(model: Model, seq_len: int) -> float:
    """What Megatron's and BLOOM's logs call FLOPs, to compare with their "TFLOPs": hardware FLOPs with full recompute.

    96 L D^2 (1 + S / 6D + V / 16LD), Narayanan et al. 2021, equation 3: the layers' forward runs twice, attention is
    counted over all S keys, and F = 4D.
    """
    layers, d = model.n_layers, model.hidden_size
    return 96 * layers * d * d * (1 + seq_len / (6 * d) + model.vocab_size / (16 * layers * d))
