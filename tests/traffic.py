"""The collectives and messages of one rank in a step of the training loop, in closed form.

test_wire.py compares these formulas, which follow from the papers, with what a step hands to torch.distributed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dtmega.config import Config
from dtmega.ops.cost import Piece, n_parameters

# torch's operations, in place and functional. One that is not here ends the test with a KeyError.
KINDS = {
    "c10d::allreduce_": "all-reduce",
    "c10d::allgather_": "all-gather",
    "c10d::_allgather_base_": "all-gather",
    "c10d::_reduce_scatter_base_": "reduce-scatter",
    "c10d::alltoall_base_": "all-to-all",
    "c10d::send": "send",
    "c10d::recv_": "receive",
    "_c10d_functional::all_reduce": "all-reduce",
    "_c10d_functional::all_gather_into_tensor": "all-gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce-scatter",
    "_c10d_functional::all_to_all_single": "all-to-all",
}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Traffic(NamedTuple):
    """Operations of one rank that are alike: `ops` of `kind`, in its group along `axis`, of `payload_bytes` each.

    The payload is the larger of what goes in and what comes out: the output of an all-gather, the input of a
    reduce-scatter, the tensor of an all-reduce, the message of a send or a receive, all parts of an all-to-all. In a
    ring of n ranks each sends (n - 1) / n of the first two, and twice that of an all-reduce (Patarasuk and Yuan 2009,
    JPDC 69). Of an all-to-all each sends (n - 1) / n, too.
    """

    what: str
    axis: str
    kind: str
    ops: int
    payload_bytes: int


def traffic_of_a_step(
    cfg: Config,
    pieces: Sequence[Piece],
    sizes: Mapping[str, int],
    loss_chunk_tokens: int,
    wrapped: bool,
    stages: Sequence[Sequence[str]] = (),
    held: Sequence[int] = (0,),
    splits_backward: bool = False,
) -> list[Traffic]:
    """The traffic of one rank in one step of the training loop, which takes `global_batch_size` sequences.

    Operations that do not happen in every step (drift checks, validation, checkpoints) are left out, and so are groups
    of one rank. Groups are those of `mesh.py`. Where a size does not divide evenly, the rank has the larger part.

    Args:
        pieces: the pieces of the whole model.
        sizes: ranks along each axis, resolved.
        loss_chunk_tokens: tokens whose logits exist at once (`ops/cross_entropy.py`).
        wrapped: FSDP2 holds the weights (`choices.wraps`).
        stages: names of the pieces of each pipeline stage; none without a pipeline.
        held: numbers of the stages on this rank.
        splits_backward: the pipeline's schedule runs backward in two parts.

    Raises:
        ValueError: layers that are not Megatron's, or ends that are not BLOOM's, whose weights have other shapes; a
            pipeline that gathers a weight several times a step, since how often depends on the schedule.
    """
    stages = stages or [[piece.name for piece in pieces]]
    _check_formulas_hold(cfg, pieces, sizes, held)
    layer_names = {piece.name for piece in pieces if piece.is_layer}
    pp, cp, tp = sizes["pp"], sizes["cp"], sizes["tp"]
    data, shard = sizes["dp_replicate"] * sizes["dp_shard"], sizes["dp_shard"] * cp
    n_microbatches = cfg.batch.global_batch_size // (data * cfg.batch.micro_batch_size)
    tokens = cfg.batch.micro_batch_size * cfg.data.seq_len // cp
    hidden_bytes = tokens * cfg.model.hidden_size * BYTES[cfg.precision.params]
    first_and_last = f"pp 0+{pp - 1}"
    group_sizes = {
        **sizes,
        "data": data,
        "fsdp": shard,
        "loss": pp * data * cp,
        "shards": pp * shard * tp,
        first_and_last: min(pp, 2),
        "world": pp * data * cp * tp,
    }
    by_heads = cfg.mesh.cp_form == "heads"
    n_heads, head_size = cfg.model.n_heads // tp, cfg.model.hidden_size // cfg.model.n_heads

    step = _once_a_step(cfg, group_sizes["world"])
    for number in held:
        layers = sum(name in layer_names for name in stages[number])
        ends = len(stages[number]) - layers
        step += _tp_traffic(cfg, n_microbatches, layers, ends, hidden_bytes, tp, shard, splits_backward)
        step += _fsdp_traffic(cfg, n_microbatches, layers, ends, pp, tp, shard, wrapped)
        step += _pipeline_traffic(cfg, n_microbatches, number, len(stages), held, tokens, tp)
        head_bytes = tokens * head_size * BYTES[cfg.precision.params]
        passes = n_microbatches * (layers + _recomputed(cfg, layers)), n_microbatches * layers
        keeps = cfg.recompute.mode != "none"
        step += attention_over_ranks(by_heads, keeps, *passes, n_heads, n_heads, head_bytes, cp)
        # Each stage makes the rule of a microbatch's attention: all ranks' places of keys, for heads of queries, too.
        step.append(Traffic("places", "cp", "all-gather", n_microbatches * (1 + by_heads), cp * tokens * 4))
    holds_first, holds_last = 0 in held, len(stages) - 1 in held
    if holds_last:
        step += _loss_traffic(cfg, n_microbatches, tokens, loss_chunk_tokens, tp)
    # A rank that holds both ends has one weight for them; ranks that hold one end each sum the gradients of two copies.
    tied_bytes = 4 * _shard_elements(-(-cfg.model.padded_vocab_size // tp), cfg.model.hidden_size, shard)
    tied_sums = int(holds_first != holds_last)
    step.append(Traffic("tied weight's gradient", first_and_last, "all-reduce", tied_sums, tied_bytes))
    return [traffic for traffic in step if traffic.ops and group_sizes[traffic.axis] > 1]


def _check_formulas_hold(cfg: Config, pieces: Sequence[Piece], sizes: Mapping[str, int], held: Sequence[int]) -> None:
    """Refuse a model or a layout that the formulas do not describe, by a ValueError."""
    d, f = cfg.model.hidden_size, cfg.model.ffn
    # Two LayerNorms 4D, QKV 3D^2 + 3D, output D^2 + D, MLP 2DF + F + D.
    megatron_layer = 4 * d + (3 * d * d + 3 * d) + (d * d + d) + (2 * d * f + f + d)
    layers = [piece for piece in pieces if piece.is_layer]
    for layer in layers:
        if layer.elements != megatron_layer:
            raise ValueError(
                f"no formula for the layers of this model: {layer.name} has {layer.elements} elements, expected "
                f"Megatron's {megatron_layer} ([model] name)"
            )
    ends = n_parameters(pieces) - n_parameters(layers)
    bloom_ends = cfg.model.padded_vocab_size * d + 4 * d
    if ends != bloom_ends:
        raise ValueError(
            f"no formula for the ends of this model: embedding and head have {ends} elements, expected {bloom_ends}, "
            f"of V rows and two LayerNorms ([model] name)"
        )
    if cfg.recompute.method == "uniform" and cfg.recompute.layers > 1:
        raise ValueError(
            f"no formula for layers that are recomputed {cfg.recompute.layers} at a time: expected 1, or method="
            f"'block' ([recompute] layers, [recompute] method)"
        )
    gathers_several_times = cfg.fsdp.reshard_after_forward is True or len(held) > 3
    if sizes["pp"] > 1 and sizes["dp_shard"] * sizes["cp"] > 1 and gathers_several_times:
        raise ValueError(
            f"no formula for a pipeline with reshard_after_forward={cfg.fsdp.reshard_after_forward} and {len(held)} "
            f"stages per rank; expected 'auto' or false, and at most 3 ([fsdp] reshard_after_forward, [pipeline] "
            f"virtual_stages)"
        )


def _once_a_step(cfg: Config, world: int) -> list[Traffic]:
    """The few numbers that ranks tell each other in every step."""
    metrics = cfg.log.num_zeros + cfg.log.params_norm
    return [
        Traffic("tokens with a loss", "data", "all-reduce", 1, 8),
        Traffic("loss and gradient norm", "world", "all-gather", 1, world * 16),
        Traffic("[log] num_zeros, params_norm", "shards", "all-reduce", metrics, 8),
        Traffic("reasons to stop, and a request for a profile", "world", "all-reduce", 1, 4 * 7),
    ]


def _tp_traffic(
    cfg: Config,
    n_microbatches: int,
    layers: int,
    ends: int,
    hidden_bytes: int,
    tp: int,
    shard: int,
    splits_backward: bool,
) -> list[Traffic]:
    """The traffic over tp of one stage with so many layers; `ends` counts its embedding and its head.

    A layer has two parallel regions, each of which is entered and left, forward and backward: 4 all-reduces
    (arXiv:1909.08053, section 3), with sequence parallelism 4 all-gathers and 4 reduce-scatters (arXiv:2205.05198,
    section 4.2.2). The embedding is a region that is only left, the head one that is only entered (its dX leaves in
    backward): 1 each. What a layer's regions gathered is not kept: backward gathers it once more, 6 all-gathers in all,
    unless it runs in two parts. Recompute, in either mode, repeats a layer's forward, which then does that gathering;
    the last region of the repeated forward is left only if dropout behind it needs the output.
    """
    passes = 4 * layers + ends
    gathered_once_more = 0 if splits_backward else 2 * layers
    left_once_more = 0
    if cfg.recompute.mode != "none":
        regions_left = 2 if getattr(cfg.model, "hidden_dropout", 0) else 1
        left_once_more = regions_left * _recomputed(cfg, layers)
    n = n_microbatches
    if not cfg.mesh.sequence_parallel:
        return [Traffic("hidden state", "tp", "all-reduce", n * (passes + left_once_more), hidden_bytes)]
    # Weights that every rank has whole and that saw S/tp of the tokens: a layer's two norms and two biases, a norm at
    # each end. In fp32.
    replicated_bytes = 4 * _shard_elements(cfg.model.hidden_size, 6 * layers + 2 * ends, shard)
    return [
        Traffic("hidden state", "tp", "all-gather", n * (passes + gathered_once_more), hidden_bytes),
        Traffic("hidden state", "tp", "reduce-scatter", n * (passes + left_once_more), hidden_bytes),
        Traffic("gradients of replicated weights", "tp", "all-reduce", 1, replicated_bytes),
    ]


def _recomputed(cfg: Config, layers: int) -> int:
    """The number of a stage's layers whose forward is repeated in backward."""
    if cfg.recompute.mode == "none":
        return 0
    return min(cfg.recompute.layers, layers) if cfg.recompute.method == "block" else layers


def attention_over_ranks(
    by_heads: bool,
    keeps: bool,
    n_forwards: int,
    n_backwards: int,
    n_heads: int,
    n_kv_heads: int,
    head_bytes: int,
    cp: int,
) -> list[Traffic]:
    """The traffic over cp of so many passes through a layer's attention.

    The form `gather` gathers keys and values in one message, [B, G, S, 2 K], and sends each rank the gradients of its
    tokens (Llama 3, arXiv:2407.21783, section 3.3.2). The form `heads` exchanges tokens for heads, of queries, keys,
    values and outputs, and each in backward (DeepSpeed-Ulysses, arXiv:2309.14509, section 3).

    Args:
        keeps: gathered keys and values are kept for backward, not gathered again.
        n_heads, n_kv_heads: H and G, a rank's heads of queries, and of keys and values.
        head_bytes: bytes of one head of this rank's tokens, B x S / cp x K numbers.
    """
    if not by_heads:
        gathered = cp * 2 * n_kv_heads * head_bytes
        return [
            Traffic("keys and values", "cp", "all-gather", n_forwards + (0 if keeps else n_backwards), gathered),
            Traffic("gradients of keys and values", "cp", "all-to-all", n_backwards, gathered),
        ]
    n = n_forwards + n_backwards
    return [
        Traffic("queries and outputs", "cp", "all-to-all", 2 * n, n_heads * head_bytes),
        Traffic("keys and values", "cp", "all-to-all", 2 * n, n_kv_heads * head_bytes),
    ]


def experts_over_ranks(
    n_forwards: int, n_backwards: int, sent: Sequence[int], received: Sequence[int], row_bytes: int, n_experts: int
) -> list[Traffic]:
    """The traffic over ep of so many passes through a layer's experts.

    A row for each token and expert goes to the rank of the expert, and its result comes back; the gradients go the same
    ways (GShard, arXiv:2006.16668, section 3.2). Before, the ranks tell each other how many rows each expert gets.

    Args:
        sent, received: number of rows to and from each rank of the group, this rank included.
        row_bytes: bytes of one row, D numbers.
        n_experts: number of all experts.
    """
    rows = max(sum(sent), sum(received))
    return [
        Traffic("rows and results", "ep", "all-to-all", 2 * (n_forwards + n_backwards), rows * row_bytes),
        Traffic("numbers of rows", "ep", "all-to-all", n_forwards, n_experts * 8),
    ]


def leaving_bytes(
    n_forwards: int, n_backwards: int, sent: Sequence[int], received: Sequence[int], row_bytes: int, own: int
) -> int:
    """The bytes of rows that leave rank `own` of the ep group: those it sends, and the results of those it received."""
    rows = sum(sent) - sent[own] + sum(received) - received[own]
    return (n_forwards + n_backwards) * rows * row_bytes


def sent_bytes(traffic: Sequence[Traffic], n: int) -> int:
    """The bytes that each of n ranks sends in all-gathers and all-to-alls."""
    return sum(one.ops * one.payload_bytes for one in traffic) * (n - 1) // n


def _fsdp_traffic(
    cfg: Config, n_microbatches: int, layers: int, ends: int, pp: int, tp: int, shard: int, wrapped: bool
) -> list[Traffic]:
    """FSDP's traffic of one stage: a group for each layer, and the root's with the ends, the tied weight once.

    Gradients are reduced once a step, or once a microbatch where they add up in shards, and weights gathered once.
    Layers that are freed after forward are gathered for each microbatch, and all but the last one twice: with one
    microbatch ZeRO's 2 + 1 times the parameters (arXiv:1910.02054, section 7). Over replicas the reduced shards are
    summed once a step (HSDP, arXiv:2304.11277, section 3.2.2); with one shard nothing else is sent, as in DDP.
    """
    if not wrapped:
        return _unwrapped_gradients(cfg, layers, ends, tp)
    d, f = cfg.model.hidden_size, cfg.model.ffn
    # (rows, elements in each): QKV, up; output and down with their biases and the two norms; embedding; norms.
    of_layer = (
        _shard_elements(3 * d // tp, d + 1, shard)
        + _shard_elements(f // tp, d + 1, shard)
        + _shard_elements(d, (d + f) // tp + 6, shard)
    )
    vocab_rows = -(-cfg.model.padded_vocab_size // tp)
    of_root = _shard_elements(vocab_rows, d, shard) + _shard_elements(d, 2 * ends, shard)
    freed = pp == 1 and bool(cfg.fsdp.reshard_after_forward)
    layer_gathers = n_microbatches * (2 * layers - 1) if freed else layers
    roots = min(ends, 1)
    n_sums = n_microbatches if cfg.fsdp.accumulate == "sharded" else 1
    traffic: list[Traffic] = []
    for what, units, gathers, elements in (
        ("layer", layers, layer_gathers, of_layer),
        ("root", roots, roots, of_root),
    ):
        weight_bytes = elements * BYTES[cfg.precision.params]
        gradient_bytes = elements * BYTES[cfg.precision.reduce]
        traffic += [
            Traffic(f"weights, {what}", "fsdp", "all-gather", gathers, shard * weight_bytes),
            Traffic(f"gradients, {what}", "fsdp", "reduce-scatter", n_sums * units, shard * gradient_bytes),
            Traffic(f"gradients, {what}", "dp_replicate", "all-reduce", units, gradient_bytes),
        ]
    return traffic


def _unwrapped_gradients(cfg: Config, layers: int, ends: int, tp: int) -> list[Traffic]:
    """The sums over replicas where FSDP does not hold the weights: each matrix alone, vectors together, in fp32."""
    d, f = cfg.model.hidden_size, cfg.model.ffn
    of_layer = {
        "QKV": 3 * d // tp * d,
        "output": d // tp * d,
        "up": f // tp * d,
        "down": f // tp * d,
        "vectors": (3 * d + f) // tp + 6 * d,
    }
    of_root = {"embedding": -(-cfg.model.padded_vocab_size // tp) * d, "norms at the ends": 2 * ends * d}
    traffic: list[Traffic] = []
    for units, elements_by_name in ((layers, of_layer), (min(ends, 1), of_root)):
        for what, elements in elements_by_name.items():
            traffic.append(Traffic(f"gradients, {what}", "dp_replicate", "all-reduce", units, 4 * elements))
    return traffic


def _pipeline_traffic(
    cfg: Config, n_microbatches: int, number: int, n_stages: int, held: Sequence[int], tokens: int, tp: int
) -> list[Traffic]:
    """The hidden states and their gradients that stage `number` exchanges with its neighbours.

    One message each way per boundary and microbatch (arXiv:2104.04473, section 3.2). With sequence parallelism it holds
    1/tp of the rank's tokens. A neighbour on the same rank takes it from memory.
    """
    neighbours = [i for i in (number - 1, number + 1) if 0 <= i < n_stages and i not in held]
    dtype = "float32" if getattr(cfg.model, "fp32_residual", False) else cfg.precision.params
    message_bytes = tokens * cfg.model.hidden_size * BYTES[dtype] // (tp if cfg.mesh.sequence_parallel else 1)
    n_messages = n_microbatches * len(neighbours)
    return [Traffic("hidden state", "pp", kind, n_messages, message_bytes) for kind in ("send", "receive")]


def _loss_traffic(cfg: Config, n_microbatches: int, tokens: int, chunk_tokens: int, tp: int) -> list[Traffic]:
    """The packed sums of each chunk of tokens, 3 fp32 a token or 4 with smoothing; the last chunk may be smaller."""
    full_chunks, last_tokens = divmod(tokens, chunk_tokens)
    token_bytes = tp * (4 if cfg.model.label_smoothing else 3) * 4
    n_last = n_microbatches if last_tokens else 0
    return [
        Traffic("loss of a chunk", "tp", "all-gather", n_microbatches * full_chunks, chunk_tokens * token_bytes),
        Traffic("loss of the last chunk", "tp", "all-gather", n_last, last_tokens * token_bytes),
    ]


def _shard_elements(rows: int, columns: int, shard: int) -> int:
    """Elements of [rows, columns] on each of `shard` ranks, with FSDP2's padding of rows."""
    return -(-rows // shard) * columns
