"""Estimate the memory of a layout in closed form. The reference is the planner, which runs the step on fake devices.

For each token, a layer saves 16 D numbers for backward, or 32 D bytes in 16 bits. The inputs and outputs of the norms
take 4 D of these numbers. Each weight matrix has one side of length D. For each matrix, the layer saves a vector as
long as the other side; with 12 D^2 weights, these vectors take 12 D numbers. `formulas.activation_bytes_per_layer`
counts 34 D bytes: it adds 2 D bytes of dropout masks, which dtmega does not save but computes again in backward.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from dtmega import config, families
from dtmega.pipelining.table import SCHEDULES
from dtmega.planning.search.layout import Layout, with_layout
from dtmega.planning.search.places import Place, Places
from dtmega.training.choices import keeps_masters, reshards, wraps

MASTER_BYTES = 4  # bytes of a parameter, of a gradient after the sum over ranks, or of a moment
# Number of vectors of width D that a layer saves for each token outside its matrix products (the inputs and outputs of
# the norms). tp divides these vectors only with sequence parallelism.
WHOLE = 4
# Number of vectors of width D that a mixture of experts saves for each token and each expert that the token uses: the
# expert's input and its result. tp does not divide these vectors.
OF_EXPERTS = 2
# Memory for the results of one layer's backward, as a share of the layer's tp-divided activations (without scores).
BACKWARD = 0.7
# Share of a layer's tp-divided activations that selective recomputation still saves.
OF_PRODUCTS = 0.7
# Bytes that plain attention keeps for each score: the probability in 16 bits and dropout's mask. (Korthikanti et al.
# 2022, arXiv:2205.05198, table 2, count 5 bytes, because they keep the softmax's result before and after dropout.)
# In backward, two 32-bit numbers per score (8 bytes) replace the kept bytes. SCORE_BACKWARD_BYTES is the increase.
SCORE_BYTES, SCORE_BACKWARD_BYTES = 3, 5
# Maximum number of tokens whose logits are in memory at once on a GPU (`ops.cross_entropy`). If there are more than
# twice LOSS_TOKENS tokens, the head's gradient is summed in 32 bits (`ops.head_gradient`), and each element of the
# gradient takes SUMMED_BYTES.
LOSS_TOKENS, SUMMED_BYTES = 4096, 8
# Number of vectors of width D, counted in the compute dtype, that each token needs during the loss: the last
# norm in 32 bits, the norm's input, and the norm's gradient.
BESIDE_LOSS = 6
# Fixed values for the layout keys that a part of the estimate does not read. Layouts that differ only in these keys
# then share one cached result.
NOT_IN_STATES: dict[str, Any] = {
    "micro_batch_size": 0,
    "sequence_parallel": True,
    "cp_form": "",
    "virtual_stages": 0,
    "mode": "",
}
NOT_IN_ACTIVATIONS: dict[str, Any] = {
    "pp": 0,
    "dp_replicate": 1,
    "dp_shard": 1,
    "cp_form": "",
    "accumulate": "",
    "schedule": "",
    "virtual_stages": 0,
    "reshard_after_forward": "",
}


class Memory(NamedTuple):
    """The memory of the fullest rank.

    Attributes:
        peak_bytes: largest number of bytes held at one time.
        states_bytes: bytes of parameters, moments, gradients and gathered weights while microbatches run.
        kept_bytes: bytes of activations of all microbatches in flight.
    """

    peak_bytes: float
    states_bytes: float
    kept_bytes: float


class MemoryEstimator:
    """Estimates the memory of one configuration's layouts.

    Args:
        cfg: configuration, with a dtype in [precision] params.
        places: work of the pipeline ranks.
    """

    def __init__(self, cfg: config.Config, places: Places) -> None:
        self.cfg, self._places = cfg, places
        self._bytes: int = getattr(torch, cfg.precision.params).itemsize
        self._reduce_bytes: int = getattr(torch, cfg.precision.reduce).itemsize
        self._moments = 1 if cfg.optim.name == "sgd" else 2
        trained, frozen = families.elements(cfg)
        # The ratios of trained and of frozen elements to the elements in `pieces`. `pieces` does not include adapters.
        n = max(1, sum(piece.elements for piece in places.pieces))
        self._trained, self._frozen = trained / n, frozen / n
        self._frozen_bytes = getattr(torch, cfg.lora.base).itemsize
        self._kept_bytes = functools.cache(self._count_kept)
        self._state_bytes = functools.cache(self._count_states)

    def memory(self, layout: Layout, n: int) -> Memory:
        """The memory of the fullest rank, for a layout whose steps have n microbatches."""
        states_key, kept_key = layout._replace(**NOT_IN_STATES), layout._replace(**NOT_IN_ACTIVATIONS)
        fullest = Memory(0.0, 0.0, 0.0)
        for place in self._places.of(layout):
            states, update = self._state_bytes(place, states_key, min(n, 2))
            kept, working = self._kept_bytes(place, kept_key)
            kept *= self._places.in_flight(layout, n, place.number)
            peak = max(states + kept + working, update) + self._between_bytes(place, layout, n)
            fullest = max(fullest, Memory(peak, states, kept))
        return fullest

    def _count_states(self, place: Place, layout: Layout, n_microbatches: int) -> tuple[float, float]:
        """Bytes of weights and gradients held while microbatches run, and bytes held while the optimizer runs."""
        n, shards = place.elements / layout.tp, layout.n_shards
        splits = layout.pp > 1 and SCHEDULES[layout.schedule].splits_backward
        n_trained = n * self._trained
        masters = (MASTER_BYTES * n_trained * (1 + self._moments) + self._frozen_bytes * n * self._frozen) / shards
        gradients = MASTER_BYTES * n_trained / shards
        if not wraps(self.cfg, layout.sizes, splits):
            copies = self._bytes * n if keeps_masters(self.cfg, layout.sizes) else 0.0
            return masters + copies + gradients, masters + gradients
        units = (place.outside + 2 * place.whole_largest(layout.ep)) / layout.tp
        computed = place.whole_elements(layout.ep) / layout.tp
        cfg = with_layout(self.cfg, layout)
        gathered = units if reshards(cfg, layout.pp, shards) else computed
        sharded = layout.accumulate == "sharded" and shards > 1
        if sharded or (layout.pp == 1 and n_microbatches == 1):
            whole = self._reduce_bytes * units * self._trained + gradients
        else:
            whole = self._reduce_bytes * computed * self._trained
        return masters + self._bytes * gathered + whole, masters + gradients

    def _count_kept(self, place: Place, layout: Layout) -> tuple[float, float]:
        """Bytes that a microbatch saves for backward, and additional bytes held while one layer or the loss runs."""
        hidden, layers = self.cfg.model.hidden_size, max(1, place.layers)
        tokens, cut, tp = tokens_of(self.cfg, layout), cut_of(layout), layout.tp
        width = tokens * self._bytes
        sides = width * place.sides / layers / tp
        scores = n_scores(self.cfg, tokens) / tp
        divided = sides + SCORE_BYTES * scores
        of_experts = OF_EXPERTS * width * hidden * place.experts_per_token * place.mixtures / layers
        whole = width * WHOLE * hidden / cut + of_experts
        layer = whole + divided
        # All weight gradients of a layer are in memory together before they are added to the accumulated gradients.
        gradients = self._bytes * place.whole_largest(layout.ep) / tp
        working = max(BACKWARD * sides, gradients) + SCORE_BACKWARD_BYTES * scores
        if layout.mode == "full":
            kept = width * hidden / cut
            working += layer + (width * 2 * hidden if cut > 1 else 0)
        elif layout.mode == "selective":
            kept = width * (hidden / cut + 2 * hidden) + OF_PRODUCTS * sides
            working += layer - kept
        else:
            kept = layer
        if cut > 1:
            working += 2 * width * hidden  # a product's input, gathered over tp
        loss = 0.0
        if place.head_elements:
            n_labelled = tokens * place.labelled
            logits = self._bytes * min(LOSS_TOKENS, n_labelled) * place.head_elements / hidden / tp
            in_32_bits = n_labelled > 2 * LOSS_TOKENS
            of_head = place.head_elements / tp
            loss = logits + (SUMMED_BYTES if in_32_bits else self._bytes) * of_head + BESIDE_LOSS * width * hidden
            working += self._bytes * of_head  # the head's gradient, until it is accumulated
        # The embedding's gradient is as large as the embedding, and a tied head's gradient is added to it. While these
        # gradients are in memory, the microbatch's activations are already freed.
        table = self._bytes * place.embedding_elements * (3 if place.is_tied else 1) / tp
        loss = max(loss, table - kept * place.layers)
        first = width * hidden / cut if place.ends else 0.0
        return kept * place.layers + first, max(working, loss)

    def _between_bytes(self, place: Place, layout: Layout, n: int) -> float:
        """The bytes of the buffers for tensors between stages: one buffer for each microbatch and neighbour."""
        if layout.pp == 1:
            return 0.0
        virtual = self._places.virtual(layout)
        per_buffer = tokens_of(self.cfg, layout) * self._bytes * self.cfg.model.hidden_size / cut_of(layout)
        return n * per_buffer * (2 * virtual - place.ends)


def tokens_of(cfg: config.Config, layout: Layout) -> float:
    """The number of a microbatch's tokens on one rank, not counting decoder tokens (`Place.sides` includes them)."""
    return layout.micro_batch_size * cfg.data.seq_len / layout.cp


def cut_of(layout: Layout) -> int:
    """The number of ranks over which sequence parallelism divides the tokens; 1 without sequence parallelism."""
    return layout.tp if layout.sequence_parallel else 1


def n_scores(cfg: config.Config, tokens: float) -> float:
    """The number of attention scores that one layer keeps; 0 without dropout, because fused kernels keep no scores."""
    if not getattr(cfg.model, "attention_dropout", 0.0):
        return 0.0
    return cfg.model.n_heads * cfg.data.seq_len * tokens
