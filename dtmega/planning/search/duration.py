"""Estimate the time of a layout in closed form. The planner's simulation of the real step is the reference."""

from __future__ import annotations

import functools
import statistics
from typing import Any

import torch

from dtmega import config
from dtmega.mesh import AXES, group_lists
from dtmega.planning.prices import pricing
from dtmega.planning.prices.fabric import Fabric
from dtmega.planning.search.layout import Layout
from dtmega.planning.search.memory import NOT_IN_STATES, OF_EXPERTS, WHOLE, cut_of, n_scores, tokens_of
from dtmega.planning.search.places import Place, Places
from dtmega.planning.work import Message

# Memory traffic per microbatch of all kernels except matrix products, counted with fused compiled blocks:
# - the number of times that forward and backward move the bytes that a layer saves for backward;
# - the bytes per score of plain attention, in forward and in backward;
# - the bytes per logit;
# - the bytes per 16-bit gradient that is added to a 32-bit sum;
# - the bytes per element of the embedding and of the head (lookup, or scaling of the gradient);
# - the bytes per element of tied weights, whose two gradients are added up.
FORWARD_PASSES, BACKWARD_PASSES = 3.7, 4.8
SCORE_FORWARD, SCORE_BACKWARD = 7, 20
LOSS_BYTES, GRADIENT_BYTES, TABLE_BYTES, TIED_BYTES = 20, 10, 4, 6
# Bytes that FSDP reads and writes to copy tensors into and out of its communication buffer, for each byte of the
# buffer: first in an all-gather of weights, then in a reduce-scatter of gradients.
GATHER_COPIES, SUM_COPIES = 4, 2
LAUNCHES = 240  # number of kernels that one layer launches in forward and backward
# Bytes that AdamW moves for each parameter: AdamW reads the gradient, the weight and two moments, then writes the
# weight and the moments.
OPTIMIZER_BYTES = 28
NOT_IN_MICROBATCH: dict[str, Any] = {"schedule": "", "virtual_stages": 0}


class TimeEstimator:
    """Estimates the step times of one configuration's layouts.

    Args:
        cfg: configuration, with a dtype in [precision] params.
        places: work of the pipeline ranks.
        fabric: fabric of the cluster.
    """

    def __init__(self, cfg: config.Config, places: Places, fabric: Fabric) -> None:
        self.cfg, self._places, self.fabric = cfg, places, fabric
        self._bytes: int = getattr(torch, cfg.precision.params).itemsize
        self._reduce_bytes: int = getattr(torch, cfg.precision.reduce).itemsize
        self._microbatch_s = functools.cache(self._time_microbatch)
        self._update_s = functools.cache(self._time_update)
        self._collective_s = functools.cache(self._time_collective)

    def seconds(self, layout: Layout, n: int) -> float:
        """The time of one step with n microbatches.

        Raises:
            ValueError: the fabric has no speed for the dtype.
        """
        places = self._places.of(layout)
        microbatch, update = layout._replace(**NOT_IN_MICROBATCH), layout._replace(**NOT_IN_STATES)
        times = [self._microbatch_s(place, microbatch) for place in places]
        update_s = max(self._update_s(place, update, min(n, 2)) for place in places)
        seconds = n * max(times) + update_s
        if layout.pp == 1:
            return seconds
        boundary_bytes = tokens_of(self.cfg, layout) * self._bytes * self.cfg.model.hidden_size / cut_of(layout)
        next_rank = layout.data_size * layout.cp * layout.tp
        send_s = pricing.send_seconds(round(boundary_bytes), self.fabric, 0, next_rank)
        # The first microbatch travels through all stages and back.
        sends_s = 2 * (layout.pp - 1) * send_s
        return seconds + self._places.bubble(layout, n) * statistics.mean(times) + sends_s

    def _time_microbatch(self, place: Place, layout: Layout) -> float:
        """The time of one microbatch's forward and backward on one pipeline rank."""
        gpu, hidden = self.fabric.gpu, self.cfg.model.hidden_size
        tokens, cut, tp = tokens_of(self.cfg, layout), cut_of(layout), layout.tp
        again = 1.0 if layout.mode == "full" else 0.0
        dtype = self.cfg.precision.params
        product = max(1, round(tokens)), hidden, max(1, hidden // tp)
        flops = tokens * place.product_flops * (1 + again * place.in_layers / 3) / tp
        products_s = flops / pricing.reached_flops(gpu, dtype, product)
        attention = tokens * place.attention_flops * (1 + again / 3) / tp
        attention_s = attention / pricing.reached_flops(gpu, dtype, None)
        traffic_s = self._moved_bytes(place, layout) / gpu.memory_bytes_per_s
        launches_s = LAUNCHES * place.layers * gpu.launch_s
        seconds = products_s + attention_s + traffic_s + launches_s
        state_bytes = tokens * self._bytes * hidden
        if tp > 1:
            # A layer has two tensor-parallel regions: attention and feed-forward. In forward and in backward, each
            # region all-gathers its input and reduce-scatters its output. For the weights' gradients, each region
            # gathers its input once more. Without sequence parallelism, all-reduces replace these messages. A
            # recomputed layer repeats the reduction at the end of its first region.
            repeated = 0 if layout.mode == "none" else 1
            gathers, scatters, adds = (6, 4 + repeated, 0) if cut > 1 else (0, 0, 4 + repeated)
            group = "tp", _sizes(layout)
            one_s = self._collective_s("all-gather", round(state_bytes), *group)
            add_s = self._collective_s("all-reduce", round(state_bytes), *group)
            seconds += place.layers * ((gathers + scatters) * one_s + adds * add_s)
        if layout.cp > 1:
            group = "cp", _sizes(layout)
            whole = round(2 * state_bytes * layout.cp / tp)
            exchanged = 2 * whole // layout.cp
            if layout.cp_form == "heads":
                per_layer = (2 + again) * self._collective_s("all-to-all", exchanged, *group)
            else:
                per_layer = (1 + again) * self._collective_s("all-gather", whole, *group)
                per_layer += self._collective_s("all-to-all", whole, *group)
            seconds += place.layers * per_layer
        if layout.ep > 1:
            # Ranks send each token's hidden state to the token's experts and receive the results; backward exchanges
            # the gradients likewise. Before the hidden states, the ranks exchange the numbers of tokens to send.
            group = "ep", _sizes(layout)
            rows_s = self._collective_s("all-to-all", round(state_bytes * place.experts_per_token), *group)
            numbers_s = self._collective_s("all-to-all", 0, *group)
            seconds += place.mixtures * ((4 + 2 * again) * rows_s + (1 + again) * numbers_s)
        return max(seconds, self._exchanged_s(place, layout))

    def _moved_bytes(self, place: Place, layout: Layout) -> float:
        """The bytes that operators other than matrix products move for one microbatch on one pipeline rank."""
        tokens, hidden, tp = tokens_of(self.cfg, layout), self.cfg.model.hidden_size, layout.tp
        again = 0.0 if layout.mode == "none" else 1.0
        numbers = WHOLE * hidden * place.layers / cut_of(layout) + place.sides / tp
        numbers += OF_EXPERTS * hidden * place.experts_per_token * place.mixtures
        moved = (FORWARD_PASSES * (1 + again) + BACKWARD_PASSES) * tokens * self._bytes * numbers
        scores = n_scores(self.cfg, tokens) * place.layers / tp
        moved += (SCORE_FORWARD * (1 + again) + SCORE_BACKWARD) * scores
        moved += LOSS_BYTES * tokens * place.labelled * place.head_elements / hidden / tp
        moved += GRADIENT_BYTES * place.whole_elements(layout.ep) / tp
        moved += TABLE_BYTES * (place.embedding_elements + place.head_elements) / tp
        if place.is_tied:
            moved += TIED_BYTES * place.embedding_elements / tp
        if self._gathers_again(layout):
            moved += 2 * GATHER_COPIES * self._bytes * (place.whole_elements(layout.ep) - place.outside) / tp
        return moved

    def _gathers_again(self, layout: Layout) -> bool:
        """True if the weights are gathered for each microbatch."""
        return layout.n_shards > 1 and layout.pp == 1 and layout.reshard_after_forward is not False

    def _exchanged_s(self, place: Place, layout: Layout) -> float:
        """The time of FSDP's messages for one microbatch. The messages overlap with the microbatch's computation."""
        if layout.n_shards == 1:
            return 0.0
        seconds = 0.0
        if self._gathers_again(layout):
            seconds += 2 * self._sharded_s("all-gather", self._bytes, place, layout)
        if layout.accumulate == "sharded":
            seconds += self._sharded_s("reduce-scatter", self._reduce_bytes, place, layout)
        return seconds

    def _sharded_s(self, collective: str, element_bytes: int, place: Place, layout: Layout) -> float:
        """The time that FSDP takes to gather all weights of one pipeline rank once, or to reduce their gradients.

        With ep, the experts' weights are sharded over fewer ranks than the remaining weights.
        """
        key = _sizes(layout)
        of_experts = place.expert_elements / layout.tp
        others = place.elements / layout.tp - of_experts
        if layout.ep == 1:
            return self._collective_s(collective, round(element_bytes * (others + of_experts)), "fsdp", key)
        experts_s = self._collective_s(collective, round(element_bytes * of_experts / layout.ep), "efsdp", key)
        return experts_s + self._collective_s(collective, round(element_bytes * others), "fsdp", key)

    def _time_update(self, place: Place, layout: Layout, n_microbatches: int) -> float:
        """The time of the work done once per step: the optimizer, and messages that do not overlap with computation."""
        n, shards, key = place.elements / layout.tp, layout.n_shards, _sizes(layout)
        seconds = OPTIMIZER_BYTES * n / shards / self.fabric.gpu.memory_bytes_per_s
        if layout.dp_replicate > 1:
            n_bytes = round(self._reduce_bytes * n / shards)
            seconds += self._collective_s("all-reduce", n_bytes, "dp_replicate", key)
        if shards > 1 and layout.accumulate != "sharded" and (layout.pp > 1 or n_microbatches > 1):
            whole_s = self._sharded_s("reduce-scatter", self._reduce_bytes, place, layout)
            # Without a pipeline, the last backward overlaps with the reduce-scatters of all layers except the first.
            covered = 1.0 if layout.pp > 1 else (place.outside + place.largest) / max(1, place.elements)
            summed = place.whole_elements(layout.ep) / layout.tp
            copies_s = SUM_COPIES * self._reduce_bytes * summed / self.fabric.gpu.memory_bytes_per_s
            seconds += whole_s * covered + copies_s
        if shards > 1 and layout.pp > 1:
            seconds += self._sharded_s("all-gather", self._bytes, place, layout)
        return seconds

    def _time_collective(self, collective: str, n_bytes: int, axis: str, sizes: tuple[int, ...]) -> float:
        """The time of a collective over rank 0's group along an axis."""
        ranks = _first_group(axis, sizes)
        if len(ranks) == 1:
            return 0.0
        return pricing.collective_seconds(Message(collective, axis, len(ranks), n_bytes), self.fabric, ranks)


def _sizes(layout: Layout) -> tuple[int, ...]:
    """The sizes of the mesh axes, and of ep."""
    return layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp, layout.ep


@functools.cache
def _first_group(axis: str, sizes: tuple[int, ...]) -> list[int]:
    """The ranks in rank 0's group along an axis."""
    *axes, ep = sizes
    return group_lists(dict(zip(AXES, axes, strict=True)), ep)[axis][0]
