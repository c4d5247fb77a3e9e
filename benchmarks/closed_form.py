"""Predict a step's time in closed form from a model's sizes and a layout, for comparison with published figures.

The planner itself prices counted work (`step_time.py`). The closed form covers the matrix products of a standard
transformer, the memory traffic of the operators between products, and the messages, all averaged over the stages. The
efficiencies of the shipped fabrics are fitted with this closed form (`benchmarks/published.py`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from dtmega.planning.prices import pricing
from dtmega.planning.prices.fabric import Fabric
from dtmega.planning.work import Message

# Bytes of activations that a layer keeps for backward, per token and hidden unit, and the part of these bytes that
# tensor parallelism alone does not divide (Korthikanti et al. 2022, arXiv:2205.05198). Forward writes and reads each
# byte once; backward moves twice as many bytes.
KEPT_BYTES, WHOLE_BYTES = 34, 10
# Bytes that AdamW moves for each parameter. In 32 bits, AdamW reads the gradient, the weight and two moments, then
# writes the weight and the moments. In addition, AdamW writes the weight in 16 bits.
OPTIMIZER_BYTES = 30


class Run(NamedTuple):
    """A transformer decoder, its layout, and its batch.

    Attributes:
        layers, hidden, heads, kv_heads, feed_forward, vocab, seq_len: sizes of the model.
        gated: whether the feed-forward network has three matrices (SwiGLU).
        n_gpus, tp, pp, virtual: numbers of GPUs, tensor-parallel ranks, pipeline ranks, and stages per pipeline rank.
        micro_batch, global_batch: batch sizes in sequences.
        recompute: share of the layers whose forward is recomputed in backward.
        recompute_attention: whether the attention's core is recomputed in every layer.
        sequence_parallel: whether the norms' inputs are divided over the sequence.
        data: form of data parallelism. "fsdp" shards the weights, gathers them for each microbatch, and reduces
            gradients during the computation; "after" reduces gradients after the last backward.
        dtype: dtype of the products.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocab: int
    seq_len: int
    gated: bool
    n_gpus: int
    tp: int
    pp: int
    virtual: int
    micro_batch: int
    global_batch: int
    recompute: float
    recompute_attention: bool
    sequence_parallel: bool
    data: Literal["fsdp", "after"]
    dtype: str = "bfloat16"

    @property
    def layer_parameters(self) -> int:
        """The number of elements in the matrices of one layer."""
        attention = 2 * self.hidden**2 * (1 + self.kv_heads / self.heads)
        return round(attention) + (3 if self.gated else 2) * self.hidden * self.feed_forward

    @property
    def data_ranks(self) -> int:
        """The number of ranks over which the global batch is divided."""
        return self.n_gpus // (self.tp * self.pp)

    @property
    def n_microbatches(self) -> int:
        """The number of microbatches per data rank."""
        return self.global_batch // (self.data_ranks * self.micro_batch)

    @property
    def rank_parameters(self) -> float:
        """The average number of elements in one rank's part of the model. The model has one embedding and one head."""
        whole = self.layers * self.layer_parameters + 2 * self.vocab * self.hidden
        return whole / (self.tp * self.pp)


class Parts(NamedTuple):
    """A predicted step's time, split by what takes the time, in seconds.

    Attributes:
        products_s: time of the matrix products.
        attention_s: time of the attention's core.
        traffic_s: time of the operators that only move bytes, between products and in the optimizer.
        tp_s, data_s: exposed communication time of tensor parallelism and of data parallelism.
        bubble_s: time spent waiting in the pipeline.
    """

    products_s: float
    attention_s: float
    traffic_s: float
    tp_s: float
    data_s: float
    bubble_s: float

    @property
    def seconds(self) -> float:
        """The time of the step."""
        return sum(self)


def step(run: Run, fabric: Fabric) -> Parts:
    """Predict a step.

    Raises:
        ValueError: the fabric has no peak FLOP/s for the dtype.
    """
    gpu, m = fabric.gpu, run.n_microbatches
    tokens = run.micro_batch * run.seq_len
    ranks = run.tp * run.pp
    linear = 6 * (run.layers * run.layer_parameters + run.vocab * run.hidden)
    linear += 2 * run.recompute * run.layers * run.layer_parameters
    product = (tokens, run.hidden, max(1, min(run.hidden, run.feed_forward) // run.tp))
    products_s = tokens * linear / ranks / pricing.reached_flops(gpu, run.dtype, product)

    # On average, a causal query sees half of the keys, so attention costs 2 S h FLOPs per token in forward, and twice
    # as many in backward.
    again = 1.0 if run.recompute_attention else run.recompute
    attention = (6 + 2 * again) * run.layers * run.seq_len * run.hidden
    attention_s = tokens * attention / ranks / pricing.reached_flops(gpu, run.dtype, None)

    whole = 0 if run.sequence_parallel else WHOLE_BYTES
    kept = whole + (KEPT_BYTES - whole) / run.tp
    moved = 2 * kept * (3 + run.recompute) * run.layers * run.hidden / run.pp
    traffic_s = tokens * moved / gpu.memory_bytes_per_s

    sums = (4 + 2 * run.recompute) * run.layers / run.pp
    tp_s = sums * _seconds("all-reduce", 2 * tokens * run.hidden, fabric, range(run.tp))

    microbatch_s = products_s + attention_s + traffic_s + tp_s
    stride = run.tp
    data_group = range(0, run.data_ranks * stride, stride)
    weights = run.rank_parameters
    optimizer_s = OPTIMIZER_BYTES * weights / gpu.memory_bytes_per_s
    if run.data == "fsdp":
        gather_s = _seconds("all-gather", round(2 * weights), fabric, data_group)
        reduce_s = _seconds("reduce-scatter", round(4 * weights), fabric, data_group)
        data_s = m * max(0.0, 2 * gather_s + reduce_s - microbatch_s)
        optimizer_s /= run.data_ranks
    else:
        data_s = _seconds("all-reduce", round(2 * weights), fabric, data_group)
    bubble_s = (run.pp - 1) / run.virtual * microbatch_s
    return Parts(m * products_s, m * attention_s, m * traffic_s + optimizer_s, m * tp_s, data_s, bubble_s)


def _seconds(collective: str, n_bytes: int, fabric: Fabric, ranks: range) -> float:
    return pricing.collective_seconds(Message(collective, "", len(ranks), n_bytes), fabric, ranks)


def tokens_per_s_per_gpu(run: Run, fabric: Fabric) -> float:
    """The predicted speed of one GPU.

    Raises:
        ValueError: the fabric has no peak FLOP/s for the dtype.
    """
    return run.global_batch * run.seq_len / run.n_gpus / step(run, fabric).seconds
