"""The cost of a model, as arithmetic: parameters, FLOPs, the peak they are measured against, wire bytes. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dtmega.config import Config

# Dense FLOP/s of bf16, and of fp16, by a part of torch.cuda.get_device_name(); the first match counts. From the
# datasheets of NVIDIA A100, L40S, H100, H200, HGX B200 and GB200 NVL72 (Hopper's and Blackwell's state twice this,
# "with sparsity") and of AMD Instinct MI300X.
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
    if dtype not in ("bfloat16", "float16"):
        return None
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), None)


class Piece(NamedTuple):
    """A unit that a pipeline cuts between, and what it costs. The pieces of a model, in order, are the whole of it.

    Attributes:
        name: "embed", "layers.0", ..., "head"; a layer's name ends in its number.
        elements: of its weights; of a weight that several pieces have, only at the first one.
        matmul_flops: of its matrix products, forward and backward, per token. A weight costs 2 FLOPs forward and 4
            backward (Kaplan et al. 2020, section 2.1); looking up a row of an embedding costs none.
        attention_flops: of QK^T and PV, forward and backward, per token and place of the sequence. Each costs 2 H K
            forward and twice that backward for a key that is seen (Narayanan et al. 2021, appendix). A causal query
            sees half of the sequence on average, so half of it counts there: 6 H K.
        shared: elements of weights that an earlier piece has too, as of a tied head.
        label_flops: of matrix products that are made for tokens with a label only, per such token.
        sequence_flops: of those that are made once for a sequence, per sequence.
        decoder_flops: of those that are made for the tokens of a decoder, per such token.
        decoder_attention_flops: of its attention to itself, per token of the decoder and place there.
        cross_attention_flops: of its attention to the encoder, per token of the decoder and place of the sequence.
        begins_decoder: the first piece of a decoder that comes behind an encoder.
    """

    name: str
    elements: int
    matmul_flops: int
    attention_flops: int
    shared: int = 0
    label_flops: int = 0
    sequence_flops: int = 0
    decoder_flops: int = 0
    decoder_attention_flops: int = 0
    cross_attention_flops: int = 0
    begins_decoder: bool = False

    @property
    def is_layer(self) -> bool:
        """True for one of a stack of blocks; the others are the ends of a stack."""
        return self.name.rpartition(".")[2].isdigit()

    def flops_per_token(self, seq_len: int, labelled: float = 1.0, decoder_seq_len: int = 0) -> int:
        """Model FLOPs of forward and backward for one of `seq_len` tokens, of which that share has a label.

        Those of a decoder, which has `decoder_seq_len` tokens for them, are shared by them evenly.
        """
        of_all = self.matmul_flops + seq_len * self.attention_flops
        of_decoder_token = self.decoder_flops + decoder_seq_len * self.decoder_attention_flops
        of_decoder_token += seq_len * self.cross_attention_flops
        of_sequence = self.sequence_flops + decoder_seq_len * of_decoder_token
        return of_all + round(labelled * self.label_flops + of_sequence / seq_len)


def n_parameters(pieces: Sequence[Piece]) -> int:
    """Elements of all weights, each once."""
    return sum(piece.elements for piece in pieces)


def flops_per_token(pieces: Sequence[Piece], seq_len: int, labelled: float = 1.0, decoder_seq_len: int = 0) -> int:
    """Model FLOPs of forward and backward for one of `seq_len` tokens: what training needs, not what recompute adds.

    Biases, norms, activations and softmax are left out, as everywhere. Padding counts like text.

    Args:
        labelled: share of tokens with a label, which tells in a model that predicts no others.
        decoder_seq_len: tokens of a decoder beside these, in a model that has one.
    """
    return sum(piece.flops_per_token(seq_len, labelled, decoder_seq_len) for piece in pieces)


BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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
    pieces: Sequence[Piece],
    sizes: Mapping[str, int],
    loss_chunk_tokens: int,
    wrapped: bool,
    stages: Sequence[Sequence[str]] = (),
    held: Sequence[int] = (0,),
    splits_backward: bool = False,
) -> list[Traffic]:
    """The traffic of one rank on the wire in one step of the training loop, of `global_batch_size` sequences.

    Left out: operations that are not of every step (drift checks, validation, checkpoints) or of one rank alone.
    Groups are those of `mesh.py`. Where a size does not divide evenly, this is a rank with the larger part.

    Args:
        pieces: of the whole model.
        sizes: of the axes, resolved.
        loss_chunk_tokens: tokens whose logits live at once (`loss.py`).
        wrapped: FSDP2 holds the weights (`fsdp.wraps`).
        stages: the names of the pieces of each stage of the pipeline; none without one.
        held: numbers of the stages on this rank.
        splits_backward: the schedule of the pipeline runs backward in two parts.

    Raises:
        ValueError: layers that are not Megatron's, or ends that are not BLOOM's, whose weights have other shapes; a
            pipeline that gathers a weight several times a step, since how often depends on the schedule.
    """
    d, f = cfg.model.hidden_size, cfg.model.ffn
    # Two LayerNorms 4D, QKV 3D^2 + 3D, output D^2 + D, MLP 2DF + F + D.
    megatrons = 4 * d + (3 * d * d + 3 * d) + (d * d + d) + (2 * d * f + f + d)
    layers_there = {piece.name: piece.elements for piece in pieces if piece.is_layer}
    if odd := [name for name, elements in layers_there.items() if elements != megatrons]:
        raise ValueError(
            f"no formula for the layers of this model: {odd[0]} has {layers_there[odd[0]]} elements, expected "
            f"Megatron's {megatrons} ([model] name)"
        )
    ends = n_parameters(pieces) - sum(layers_there.values())
    blooms = cfg.model.padded_vocab_size * d + 4 * d
    if ends != blooms:
        raise ValueError(
            f"no formula for the ends of this model: embedding and head have {ends} elements, expected {blooms}, of "
            f"V rows and two LayerNorms ([model] name)"
        )
    if cfg.recompute.method == "uniform" and cfg.recompute.layers > 1:
        raise ValueError(
            f"no formula for layers that are recomputed {cfg.recompute.layers} at a time: expected 1, or method="
            f"'block' ([recompute] layers, [recompute] method)"
        )
    stages = stages or [[piece.name for piece in pieces]]
    pp, data, shard, tp = sizes["pp"], sizes["dp_replicate"] * sizes["dp_shard"], sizes["dp_shard"], sizes["tp"]
    if pp > 1 and shard > 1 and (cfg.fsdp.reshard_after_forward is True or len(held) > 3):
        raise ValueError(
            f"no formula for a pipeline with reshard_after_forward={cfg.fsdp.reshard_after_forward} and {len(held)} "
            f"stages per rank; expected 'auto' or false, and at most 3 ([fsdp] reshard_after_forward, [pipeline] "
            f"virtual_stages)"
        )
    derived = {"data": data, "loss": pp * data, "shards": pp * shard * tp}
    first_and_last = f"pp 0+{pp - 1}"
    ranks = {**sizes, **derived, first_and_last: min(pp, 2), "world": pp * data * tp}
    tokens = cfg.batch.micro_batch_size * cfg.data.seq_len
    hidden_bytes = tokens * cfg.model.hidden_size * BYTES[cfg.precision.params]
    n = cfg.batch.global_batch_size // (data * cfg.batch.micro_batch_size)  # microbatches
    found = [
        Traffic("tokens with a loss", "data", "all-reduce", 1, 8),
        Traffic("loss and gradient norm", "world", "all-gather", 1, ranks["world"] * 16),
        Traffic("[log] num_zeros, params_norm", "shards", "all-reduce", cfg.log.num_zeros + cfg.log.params_norm, 8),
        Traffic("reason to stop", "world", "all-reduce", 1, 20),
    ]
    for number in held:
        layers = sum(name in layers_there for name in stages[number])
        ends = len(stages[number]) - layers
        found += _tp_traffic(cfg, n, layers, ends, hidden_bytes, tp, shard, splits_backward)
        found += _fsdp_traffic(cfg, n, layers, ends, pp, tp, shard, wrapped)
        # Each way one message per boundary and microbatch, the hidden state (arXiv:2104.04473, section 3.2), of which
        # sequence parallelism left S/tp; a neighbour on the same rank takes it from memory.
        away = [i for i in (number - 1, number + 1) if 0 <= i < len(stages) and i not in held]
        stream = "float32" if getattr(cfg.model, "fp32_residual", False) else cfg.precision.params
        stream_bytes = tokens * cfg.model.hidden_size * BYTES[stream]
        message_bytes = stream_bytes // (tp if cfg.mesh.sequence_parallel else 1)
        found += [Traffic("hidden state", "pp", kind, n * len(away), message_bytes) for kind in ("send", "receive")]
    if len(stages) - 1 in held:
        full, rest = divmod(tokens, loss_chunk_tokens)
        token_bytes = tp * (4 if cfg.model.label_smoothing else 3) * 4  # fp32
        found.append(Traffic("loss of a chunk", "tp", "all-gather", n * full, loss_chunk_tokens * token_bytes))
        found.append(Traffic("loss of the last chunk", "tp", "all-gather", n * (rest > 0), rest * token_bytes))
    one_copy = (0 in held) != (len(stages) - 1 in held)
    tied_bytes = 4 * _cut(-(-cfg.model.padded_vocab_size // tp), cfg.model.hidden_size, shard)
    found.append(Traffic("tied weight's gradient", first_and_last, "all-reduce", int(one_copy), tied_bytes))
    return [traffic for traffic in found if traffic.ops and ranks[traffic.axis] > 1]


def _tp_traffic(
    cfg: Config, n: int, layers: int, ends: int, hidden_bytes: int, tp: int, shard: int, splits_backward: bool
) -> list[Traffic]:
    """The traffic over tp of one stage; `ends`: how many of embedding and head it has.

    A layer has two parallel regions, each entered and left, forward and backward: 4 all-reduces (arXiv:1909.08053,
    section 3), with sequence parallelism 4 all-gathers and 4 reduce-scatters (arXiv:2205.05198, section 4.2.2). The
    embedding is a region only left and the head one only entered (its dX leaves backward): 1 each. What a layer's
    regions gathered is not kept: backward gathers it again, 6 all-gathers in all, unless it runs in two parts.
    Recompute, of either mode, goes forward through a layer again, which is where it gathers; to leave the last region
    only if dropout after it needs what comes.
    """
    passes, left = 4 * layers + ends, 0
    entered = 0 if splits_backward else 2 * layers
    if cfg.recompute.mode != "none":
        recomputed = min(cfg.recompute.layers, layers) if cfg.recompute.method == "block" else layers
        left = (2 if getattr(cfg.model, "hidden_dropout", 0) else 1) * recomputed
    if not cfg.mesh.sequence_parallel:
        return [Traffic("hidden state", "tp", "all-reduce", n * (passes + left), hidden_bytes)]
    # Weights on every rank that saw S/tp of the tokens: a layer's two norms and two biases, a norm at each end. fp32.
    replicated_bytes = 4 * _cut(cfg.model.hidden_size, 6 * layers + 2 * ends, shard)
    return [
        Traffic("hidden state", "tp", "all-gather", n * (passes + entered), hidden_bytes),
        Traffic("hidden state", "tp", "reduce-scatter", n * (passes + left), hidden_bytes),
        Traffic("gradients of replicated weights", "tp", "all-reduce", 1, replicated_bytes),
    ]


def _fsdp_traffic(
    cfg: Config, n: int, layers: int, ends: int, pp: int, tp: int, shard: int, wrapped: bool
) -> list[Traffic]:
    """FSDP's traffic of one stage: a group for each layer, and the root's with the ends, the tied weight once.

    Gradients are reduced once a step, and weights gathered once. Layers that are freed after forward are gathered for
    each microbatch, and all but the last one twice: with n = 1 ZeRO's 2 + 1 times the parameters (arXiv:1910.02054,
    section 7). Over replicas the reduced shards are summed (HSDP, arXiv:2304.11277, section 3.2.2); with one shard this
    is all there is, as in DDP. Where FSDP does not hold the weights, each matrix is summed by itself, and vectors
    together, in fp32.
    """
    d, f = cfg.model.hidden_size, cfg.model.ffn
    if not wrapped:
        rows = -(-cfg.model.padded_vocab_size // tp)
        vectors = (3 * d + f) // tp + 6 * d
        matrices = [("QKV", 3 * d // tp * d), ("output", d // tp * d), ("up", f // tp * d), ("down", f // tp * d)]
        of_layer = [*matrices, ("vectors", vectors)]
        of_root = [("embedding", rows * d), ("norms at the ends", 2 * ends * d)]
        return [
            Traffic(f"gradients, {what}", "dp_replicate", "all-reduce", units, 4 * elements)
            for units, found in ((layers, of_layer), (min(ends, 1), of_root))
            for what, elements in found
        ]
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
