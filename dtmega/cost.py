"""What a model costs, as arithmetic: parameters, FLOPs, the peak they are measured against, wire bytes. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dtmega.config import Config, Model

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


def block_parameters(model: Model) -> int:
    """Elements of one layer: two LayerNorms 4D, QKV 3D^2 + 3D, output D^2 + D, MLP 2DF + F + D; hf: as counted."""
    if model.elements:
        return model.elements[0]
    d, f = model.hidden_size, model.ffn
    return 4 * d + (3 * d * d + 3 * d) + (d * d + d) + (2 * d * f + f + d)


def parameters(model: Model) -> int:
    """Elements of all weights of a BLOOM; the tied head counts once.

    Embedding VD and its LayerNorm 2D; the layers; last LayerNorm 2D. hf: as counted.
    """
    if model.elements:
        return model.elements[1]
    d = model.hidden_size
    return model.vocab_size * d + 2 * d + model.n_layers * block_parameters(model) + 2 * d


def block_flops_per_token(model: Model, seq_len: int) -> int:
    """Model FLOPs of forward and backward of one layer for one of `seq_len` tokens.

    A weight of a matrix product costs 2 FLOPs forward and 4 backward per token (Kaplan et al. 2020, section 2.1): the
    layer's 4 D^2 + 2 DF. QK^T and PV cost 4 S D forward over S keys, three times that with backward (Narayanan et
    al. 2021, appendix), and half of it counts, because a causal query sees half of the keys on average: 6 S D.
    Biases, norms, activations and softmax are left out, as everywhere; of hf, biases and norms are among the weights.
    """
    d = model.hidden_size
    weights = model.elements[0] if model.elements else 4 * d * d + 2 * d * model.ffn
    return 6 * weights + 6 * seq_len * d


def head_flops_per_token(model: Model) -> int:
    """The same of the head: 6 VD. It counts, though its weight is the embedding's, whose look-up multiplies nothing."""
    return 6 * model.vocab_size * model.hidden_size


def flops_per_token(model: Model, seq_len: int) -> int:
    """Model FLOPs of forward and backward for one of `seq_len` tokens: what training needs, not what recompute adds."""
    return model.n_layers * block_flops_per_token(model, seq_len) + head_flops_per_token(model)


def megatron_flops_per_token(model: Model, seq_len: int) -> float:
    """What Megatron's and BLOOM's logs call FLOPs, to compare with their "TFLOPs": hardware FLOPs with full recompute.

    96 L D^2 (1 + S / 6D + V / 16LD), Narayanan et al. 2021, equation 3: the layers' forward runs twice, attention is
    counted over all S keys, and F = 4D.
    """
    layers, d = model.n_layers, model.hidden_size
    return 96 * layers * d * d * (1 + seq_len / (6 * d) + model.vocab_size / (16 * layers * d))


BYTES = {"float32": 4, "bfloat16": 2}


class Traffic(NamedTuple):
    """Operations of one rank that are alike: `ops` of `kind`, in its group along `axis`, of `payload_bytes` each.

    The payload is the larger of what goes in and what comes out: the output of an all-gather, the input of a
    reduce-scatter, the tensor of an all-reduce, the message of a send or a receive. In a ring of n ranks each sends
    (n - 1) / n of the first two, and of an all-reduce twice that (Patarasuk and Yuan 2009, JPDC 69).
    """

    what: str
    axis: str
    kind: str
    ops: int
    payload_bytes: int


def wire(
    cfg: Config,
    sizes: Mapping[str, int],
    loss_chunk_tokens: int,
    stages: Sequence[Sequence[int]] = (),
    held: Sequence[int] = (0,),
) -> list[Traffic]:
    """What one rank puts on the wire in one step of the training loop, of `global_batch_size` sequences.

    Left out: what is not of every step (drift checks, validation, checkpoints), and what stays in a group of one rank.
    Groups are those of `mesh.py`. Where a size does not divide evenly, this is a rank with the larger part.

    Args:
        sizes: of the axes, resolved.
        loss_chunk_tokens: tokens whose logits live at once (`loss.py`).
        stages: the layers of each stage of the pipeline; none without one.
        held: numbers of the stages on this rank.

    Raises:
        ValueError: a model of transformers; a pipeline that gathers a weight several times a step, since how often
            depends on the schedule.
    """
    if cfg.model.elements:
        raise ValueError("no formula for a model that was counted: what its blocks hold is not known ([model] path)")
    stages = stages or [range(cfg.model.n_layers)]
    pp, data, shard, tp = sizes["pp"], sizes["dp_replicate"] * sizes["dp_shard"], sizes["dp_shard"], sizes["tp"]
    if pp > 1 and shard > 1 and (cfg.fsdp.reshard_after_forward is True or len(held) > 3):
        raise ValueError(
            f"no formula for a pipeline with reshard_after_forward={cfg.fsdp.reshard_after_forward} and {len(held)} "
            f"stages per rank; expected 'auto' or false, and at most 3 ([fsdp] reshard_after_forward, [pipeline] "
            f"virtual_stages)"
        )
    derived = {"data": data, "loss": pp * data, "shards": pp * shard * tp, "embedding": min(pp, 2)}
    ranks = {**sizes, **derived, "world": pp * data * tp}
    tokens = cfg.batch.micro_batch_size * cfg.data.seq_len
    hidden_bytes = tokens * cfg.model.hidden_size * BYTES[cfg.precision.params]
    n = cfg.batch.global_batch_size // (data * cfg.batch.micro_batch_size)  # microbatches
    found = [
        Traffic("tokens with a loss", "data", "all-reduce", 1, 8),
        Traffic("loss", "loss", "all-reduce", 1, 8),
        Traffic("gradient norm", "shards", "all-reduce", 1, 8),
        Traffic("[log] num_zeros, params_norm", "shards", "all-reduce", cfg.log.num_zeros + cfg.log.params_norm, 8),
        Traffic("reason to stop", "world", "all-reduce", 1, 16),
    ]
    for number in held:
        layers, ends = len(stages[number]), (number == 0) + (number == len(stages) - 1)
        found += _tp_traffic(cfg, n, layers, ends, hidden_bytes, tp, shard)
        found += _fsdp_traffic(cfg, n, layers, ends, pp, tp, shard)
        # Each way one message per boundary and microbatch, the hidden state (arXiv:2104.04473, section 3.2), of which
        # sequence parallelism left S/tp; a neighbour on the same rank takes it from memory.
        away = [i for i in (number - 1, number + 1) if 0 <= i < len(stages) and i not in held]
        message_bytes = hidden_bytes // (tp if cfg.mesh.sequence_parallel else 1)
        found += [Traffic("hidden state", "pp", kind, n * len(away), message_bytes) for kind in ("send", "receive")]
    if len(stages) - 1 in held:
        full, rest = divmod(tokens, loss_chunk_tokens)
        token_bytes = tp * (4 if cfg.model.label_smoothing else 3) * 4  # fp32
        found.append(Traffic("loss of a chunk", "tp", "all-gather", n * full, loss_chunk_tokens * token_bytes))
        found.append(Traffic("loss of the last chunk", "tp", "all-gather", n * (rest > 0), rest * token_bytes))
    one_copy = (0 in held) != (len(stages) - 1 in held)
    tied_bytes = 4 * _cut(-(-cfg.model.padded_vocab_size // tp), cfg.model.hidden_size, shard)
    found.append(Traffic("tied weight's gradient", "embedding", "all-reduce", int(one_copy), tied_bytes))
    return [traffic for traffic in found if traffic.ops and ranks[traffic.axis] > 1]


def _tp_traffic(cfg: Config, n: int, layers: int, ends: int, hidden_bytes: int, tp: int, shard: int) -> list[Traffic]:
    """Of one stage; `ends`: how many of embedding and head it has.

    A layer has two parallel regions, each entered and left, forward and backward: 4 all-reduces (arXiv:1909.08053,
    section 3), with sequence parallelism 4 all-gathers and 4 reduce-scatters (arXiv:2205.05198, section 4.2.2). The
    embedding is a region only left and the head one only entered (its dX leaves backward): 1 each. Recompute, of either
    mode, goes forward through a layer again; to leave the last region only if dropout after it needs what comes.
    """
    passes, entered, left = 4 * layers + ends, 0, 0
    if cfg.recompute.mode != "none":
        entered, left = 2 * layers, (2 if cfg.model.hidden_dropout else 1) * layers
    if not cfg.mesh.sequence_parallel:
        return [Traffic("hidden state", "tp", "all-reduce", n * (passes + left), hidden_bytes)]
    # Weights on every rank that saw S/tp of the tokens: a layer's two norms and two biases, a norm at each end. fp32.
    replicated_bytes = 4 * _cut(cfg.model.hidden_size, 6 * layers + 2 * ends, shard)
    return [
        Traffic("hidden state", "tp", "all-gather", n * (passes + entered), hidden_bytes),
        Traffic("hidden state", "tp", "reduce-scatter", n * (passes + left), hidden_bytes),
        Traffic("gradients of replicated weights", "tp", "all-reduce", 1, replicated_bytes),
    ]


def _fsdp_traffic(cfg: Config, n: int, layers: int, ends: int, pp: int, tp: int, shard: int) -> list[Traffic]:
    """Of one stage: a group for each layer, and the root's with what the ends hold, the tied weight once.

    Gradients are reduced once a step, and weights gathered once. Layers that are freed after forward are gathered for
    each microbatch, and all but the last one twice: with n = 1 ZeRO's 2 + 1 times the parameters (arXiv:1910.02054,
    section 7). Over replicas the reduced shards are summed (HSDP, arXiv:2304.11277, section 3.2.2); with one shard this
    is all there is, as in DDP.
    """
    d, f = cfg.model.hidden_size, cfg.model.ffn
    # (rows, elements in each): QKV, up; output and down with their biases and the two norms; embedding; norms.
    layer = _cut(3 * d // tp, d + 1, shard) + _cut(f // tp, d + 1, shard) + _cut(d, (d + f) // tp + 6, shard)
    root = _cut(-(-cfg.model.padded_vocab_size // tp), d, shard) + _cut(d, 2 * ends, shard)
    freed = pp == 1 and bool(cfg.fsdp.reshard_after_forward)
    params_bytes, reduce_bytes = BYTES[cfg.precision.params], BYTES[cfg.precision.reduce]
    found = []
    gathers = n * (2 * layers - 1) if freed else layers
    for what, units, gathered, part in (("layer", layers, gathers, layer), ("root", min(ends, 1), min(ends, 1), root)):
        found += [
            Traffic(f"weights, {what}", "dp_shard", "all-gather", gathered, shard * part * params_bytes),
            Traffic(f"gradients, {what}", "dp_shard", "reduce-scatter", units, shard * part * reduce_bytes),
            Traffic(f"gradients, {what}", "dp_replicate", "all-reduce", units, part * reduce_bytes),
        ]
    return found


def _cut(rows: int, columns: int, shard: int) -> int:
    """Elements of [rows, columns] on each of `shard` ranks, with FSDP2's padding of rows."""
    return -(-rows // shard) * columns
