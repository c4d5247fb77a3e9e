"""The time of a layout by closed forms. The planner's simulation of counted works is the truth."""

from __future__ import annotations

import functools
import statistics
from typing import Any

import torch

from dtmega import config
from dtmega.mesh import AXES, DERIVED, rank_groups
from dtmega.planning.prices import pricing
from dtmega.planning.prices.fabric import Fabric
from dtmega.planning.search.layout import Layout
from dtmega.planning.search.memory import NOT_IN_STATES, WHOLE, cut_of, score_bytes, tokens_of
from dtmega.planning.search.places import Place, Places
from dtmega.planning.work import Message

# What operators between products move for each microbatch, fitted to counts: the numbers that a layer keeps, the scores
# of plain attention, bytes for each logit, for each gradient that is added to a sum, and for each number in the
# embedding and the head, whose gradients are made and added by themselves.
FORWARD_PASSES, BACKWARD_PASSES, SCORE_PASSES = 8, 17, 55
LOSS_BYTES, GRADIENT_BYTES, TABLE_BYTES = 60, 20, 14
# Bytes that AdamW moves for each parameter: reads gradient, weight and two moments, and writes the last three.
OPTIMIZER_BYTES = 28
# The share of a pipeline's bubble that is left if backward runs in two parts, if F, I and W take equally long.
SPLIT_BUBBLE = 1 / 3
# Bytes that the plain formula of attention keeps for each head and pair of tokens (Korthikanti et al. 2022,
# arXiv:2205.05198, table 2: 5), of which a causal mask leaves out some.
SCORE_BYTES = 4.2
# Tokens whose logits are in memory at once on a GPU, and bytes for each logit (`ops.cross_entropy`).
LOSS_TOKENS, LOGIT_BYTES = 4096, 6
NOT_IN_MICROBATCH: dict[str, Any] = {"schedule": "", "virtual_stages": 0}


class TimeEstimator:
    """The times of one configuration's layouts.

    Args:
        cfg: the configuration, with a dtype in [precision] params.
        places: places of the pipelines.
        fabric: the fabric.
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
        # The first microbatch goes through all stages and back.
        sends_s = 2 * (layout.pp - 1) * send_s
        return seconds + self._places.bubble(layout, n) * statistics.mean(times) + sends_s

    def _time_microbatch(self, place: Place, layout: Layout) -> float:
        """The time of one microbatch's forward and backward at a place."""
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
        seconds = products_s + attention_s + traffic_s
        state_bytes = tokens * self._bytes * hidden
        if tp > 1:
            # A layer has two regions. Each gathers its input and scatters its sum, forward and backward, and gathers
            # again for the weights' gradients; without sequence parallelism it adds up instead.
            gathers, scatters = (6 - 2 * (again > 0), 4) if cut > 1 else (0, 0)
            adds = 0 if cut > 1 else 4
            extra = 2 * again
            group = "tp", _sizes(layout)
            one_s = self._collective_s("all-gather", round(state_bytes), *group)
            add_s = self._collective_s("all-reduce", round(state_bytes), *group)
            per_layer = (gathers + scatters) * one_s + adds * add_s + extra * (2 * one_s if cut > 1 else add_s)
            seconds += place.layers * per_layer
        if layout.cp > 1:
            group = "cp", _sizes(layout)
            whole = round(2 * state_bytes * layout.cp / tp)
            exchanged = 2 * whole // layout.cp
            if layout.cp_form == "heads":
                per_layer = (4 + 2 * again) * self._collective_s("all-to-all", exchanged, *group)
            else:
                per_layer = (1 + again) * self._collective_s("all-gather", whole, *group)
                per_layer += self._collective_s("all-to-all", whole, *group)
            seconds += place.layers * per_layer
        return max(seconds, self._exchanged_s(place, layout))

    def _moved_bytes(self, place: Place, layout: Layout) -> float:
        """Bytes that operators without products move for one microbatch at a place."""
        tokens, hidden, tp = tokens_of(self.cfg, layout), self.cfg.model.hidden_size, layout.tp
        again = {"none": 0.0, "selective": 1.0, "full": 1.0}[layout.mode]
        numbers = WHOLE * hidden * place.layers / cut_of(layout) + place.sides / tp
        moved = (FORWARD_PASSES * (1 + again) + BACKWARD_PASSES) * tokens * self._bytes * numbers
        moved += SCORE_PASSES * (1 + again / 2) * score_bytes(self.cfg, tokens) * place.layers / tp
        moved += LOSS_BYTES * tokens * place.head_elements / hidden / tp
        moved += GRADIENT_BYTES * place.elements / tp
        return moved + TABLE_BYTES * (place.embedding_elements + place.head_elements) / tp

    def _exchanged_s(self, place: Place, layout: Layout) -> float:
        """The time of FSDP's messages of one microbatch, beside which the microbatch computes."""
        if layout.n_shards == 1:
            return 0.0
        group = "fsdp", _sizes(layout)
        n = place.elements / layout.tp
        seconds = 0.0
        if layout.pp == 1 and layout.reshard_after_forward is not False:
            seconds += 2 * self._collective_s("all-gather", round(self._bytes * n), *group)
        if layout.accumulate == "sharded":
            seconds += self._collective_s("reduce-scatter", round(self._reduce_bytes * n), *group)
        return seconds

    def _time_update(self, place: Place, layout: Layout, n_microbatches: int) -> float:
        """The time of what happens once a step: messages that no computation covers, and the optimizer."""
        n, shards, key = place.elements / layout.tp, layout.n_shards, _sizes(layout)
        seconds = OPTIMIZER_BYTES * n / shards / self.fabric.gpu.memory_bytes_per_s
        if layout.dp_replicate > 1:
            n_bytes = round(self._reduce_bytes * n / shards)
            seconds += self._collective_s("all-reduce", n_bytes, "dp_replicate", key)
        if shards > 1 and layout.accumulate != "sharded" and (layout.pp > 1 or n_microbatches > 1):
            whole_s = self._collective_s("reduce-scatter", round(self._reduce_bytes * n), "fsdp", key)
            # Without a pipeline the last microbatch's backward covers the sums of all layers but the first.
            covered = 1.0 if layout.pp > 1 else (place.outside + place.largest) / max(1, place.elements)
            seconds += whole_s * covered
        if shards > 1 and layout.pp > 1:
            seconds += self._collective_s("all-gather", round(self._bytes * n), "fsdp", key)
        return seconds

    def _time_collective(self, collective: str, n_bytes: int, axis: str, sizes: tuple[int, ...]) -> float:
        """The time of a collective over rank 0's group of an axis."""
        ranks = _first_group(axis, sizes)
        if len(ranks) == 1:
            return 0.0
        return pricing.collective_seconds(Message(collective, axis, len(ranks), n_bytes), self.fabric, ranks)


def _sizes(layout: Layout) -> tuple[int, ...]:
    """The sizes of the mesh axes."""
    return layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp


@functools.cache
def _first_group(axis: str, sizes: tuple[int, ...]) -> list[int]:
    """The group of rank 0 along an axis."""
    return rank_groups(dict(zip(AXES, sizes, strict=True)), DERIVED.get(axis, (axis,)))[0]
