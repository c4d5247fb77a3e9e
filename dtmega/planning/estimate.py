"""Memory and time of a layout by closed forms, for a search over many layouts. The planner's counts are the truth.

    estimator = Estimator(cfg, pieces, fabric)
    estimator.estimate(layout).peak_bytes

The forms know a model by its pieces (`ops.cost`) and its hidden size alone. A layer keeps for backward, for each token,
the inputs and outputs of its norms (4 D numbers), and for each matrix the side that is not D: with 12 D^2 weights these
are 16 D numbers, the 34 bytes of Korthikanti et al. 2022, arXiv:2205.05198, without the masks of dropout, which are
computed again here.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dtmega import config
from dtmega.fsdp import keeps_masters, reshards, wraps
from dtmega.mesh import AXES, DERIVED, rank_groups
from dtmega.ops.cost import Piece
from dtmega.pipelining.split import plan_stages
from dtmega.pipelining.table import SCHEDULES, csv_table, simulate
from dtmega.planning import pricing
from dtmega.planning.fabric import Fabric
from dtmega.planning.layouts import Layout, with_layout
from dtmega.planning.plan import in_flight
from dtmega.planning.work import Message

# A count is at most this many times an estimate, and at least an estimate divided by it: tests/planning/test_estimate.py
# measures the error on layouts of several families, and this leaves as much again.
MARGIN = 1.35
MASTER_BYTES = 4  # a parameter, its gradient after the sum over ranks, or a moment
# Numbers of width D for each token that the operators between products keep, and that tp alone does not divide.
WHOLE = 4
# Memory for the results of one layer's backward, in units of what tp divides in the layer's forward.
BACKWARD = 1.4
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
# Values for the keys of a layout that a part of an estimate does not read, so that its result serves many layouts.
NOT_IN_STATES: dict[str, Any] = {"micro_batch_size": 0, "sequence_parallel": True, "cp_form": "", "virtual_stages": 0}
NOT_IN_STATES |= {"mode": ""}
NOT_IN_MICROBATCH: dict[str, Any] = {"schedule": "", "virtual_stages": 0}
NOT_IN_ACTIVATIONS: dict[str, Any] = NOT_IN_MICROBATCH | {"pp": 0, "dp_replicate": 1, "dp_shard": 1, "cp_form": ""}
NOT_IN_ACTIVATIONS |= {"accumulate": "", "reshard_after_forward": ""}


class Estimate(NamedTuple):
    """The estimate of a layout.

    Attributes:
        peak_bytes: most bytes on one rank.
        seconds: time of one step.
        held_bytes: bytes of parameters, moments, gradients and gathered weights on that rank.
        kept_bytes: bytes of activations on that rank.
    """

    peak_bytes: int
    seconds: float
    held_bytes: int
    kept_bytes: int


class Place(NamedTuple):
    """The work of one place in the pipeline, before it is divided over tp, cp and data ranks.

    Attributes:
        number: number of the first place that has this work.
        elements: number of elements in its weights.
        largest: number of elements in the largest layer.
        outside: number of elements outside of layers.
        head_elements: number of elements in the weights of the loss; 0 without the head.
        embedding_elements: number of elements in the embedding; 0 without it.
        is_tied: True if the embedding and the head at this place are the same weights.
        layers: number of layers.
        sides: numbers that the layers keep for each token beside those of width D.
        product_flops, attention_flops: FLOPs of forward and backward, per token of the sequence.
        in_layers: share of `product_flops` in layers.
        ends: number of ends of the pipeline at this place.
    """

    number: int
    elements: int
    largest: int
    outside: int
    head_elements: int
    embedding_elements: int
    is_tied: bool
    layers: int
    sides: float
    product_flops: float
    attention_flops: float
    in_layers: float
    ends: int


class Estimator:
    """The estimates of one configuration's layouts.

    Args:
        cfg: the configuration, with a dtype in [precision] params.
        pieces: pieces of the whole model.
        fabric: the fabric.
    """

    def __init__(self, cfg: config.Config, pieces: Sequence[Piece], fabric: Fabric) -> None:
        self.cfg, self.pieces, self.fabric = cfg, list(pieces), fabric
        self._bytes: int = getattr(torch, cfg.precision.params).itemsize
        self._reduce_bytes: int = getattr(torch, cfg.precision.reduce).itemsize
        self._moments = 1 if cfg.optim.name == "sgd" else 2
        self._of_stages: dict[tuple[Any, ...], list[Place]] = {}
        self._of_tables: dict[int, tuple[list[int], float]] = {}
        # The functions below depend on some keys only, so their results serve many layouts.
        self._microbatch_s = functools.cache(self._time_microbatch)
        self._update_s = functools.cache(self._time_update)
        self._collective_s = functools.cache(self._time_collective)
        self._kept_bytes = functools.cache(self._count_kept)
        self._state_bytes = functools.cache(self._count_states)

    def estimate(self, layout: Layout) -> Estimate:
        """The estimate of a layout that training accepts."""
        n = self.cfg.batch.global_batch_size // (layout.data_size * layout.micro_batch_size)
        places = self._places(layout)
        peak_bytes = held_bytes = kept_bytes = 0
        states_key, kept_key = layout._replace(**NOT_IN_STATES), layout._replace(**NOT_IN_ACTIVATIONS)
        for place in places:
            states, update = self._state_bytes(place, states_key, min(n, 2))
            kept, working = self._kept_bytes(place, kept_key)
            between = self._between_bytes(place, layout, n)
            kept *= self._in_flight(layout, n, place.number)
            total = max(states + kept + working, update) + between
            if total > peak_bytes:
                peak_bytes, held_bytes, kept_bytes = total, states, kept
        return Estimate(round(peak_bytes), self._seconds(layout, n, places), round(held_bytes), round(kept_bytes))

    def _places(self, layout: Layout) -> list[Place]:
        """The places of the pipeline with different work."""
        key = layout.pp, layout.schedule, layout.virtual_stages
        if key not in self._of_stages:
            cfg = with_layout(self.cfg, layout)
            names, ranks = [[piece.name for piece in self.pieces]], [[0]]
            if layout.pp > 1:
                names, ranks = plan_stages(cfg, self.pieces, layout.pp)
            seen: dict[tuple[Any, ...], Place] = {}
            for number, stages in enumerate(ranks):
                held = [name for stage in stages for name in names[stage]]
                place = self._place(number, set(held))
                seen.setdefault(place[1:], place)
            self._of_stages[key] = list(seen.values())
        return self._of_stages[key]

    def _place(self, number: int, held: set[str]) -> Place:
        data = self.cfg.data
        mine = [piece for piece in self.pieces if piece.name in held]
        layers = [piece for piece in mine if piece.is_layer]
        has_first, has_last = self.pieces[0].name in held, self.pieces[-1].name in held
        decoder_share = data.decoder_length / data.seq_len
        elements = sides = 0
        product_flops = attention_flops = layer_flops = 0.0
        for piece in mine:
            elements += piece.elements + (0 if has_first else piece.shared)
            every = piece.flops_per_token(data.seq_len, data.mask_prob, data.decoder_length)
            attention = data.seq_len * piece.attention_flops
            attention += decoder_share * data.decoder_length * piece.decoder_attention_flops
            attention += decoder_share * data.seq_len * piece.cross_attention_flops
            attention_flops += attention
            product_flops += every - attention
            if piece.is_layer:
                layer_flops += every - attention
                # 6 FLOPs for each weight; each weight's matrix has one side D.
                sides += (piece.matmul_flops + decoder_share * piece.decoder_flops) / 6 / self.cfg.model.hidden_size
        largest = max((piece.elements for piece in layers), default=0)
        outside = elements - sum(piece.elements for piece in layers)
        head = self.pieces[-1]
        head_elements = head.elements + head.shared if has_last else 0
        in_layers = layer_flops / product_flops if product_flops else 0.0
        ends = has_first + has_last
        return Place(
            *(number, elements, largest, outside, head_elements),
            *(self.pieces[0].elements if has_first else 0, has_first and has_last and head.shared > 0),
            *(len(layers), sides),
            *(product_flops, attention_flops, in_layers, ends),
        )

    def _tokens(self, layout: Layout) -> float:
        """Number of tokens in a microbatch on one rank; those of a decoder are in `Place.sides`."""
        return layout.micro_batch_size * self.cfg.data.seq_len / layout.cp

    def _cut(self, layout: Layout) -> int:
        """The number of tp ranks that share the tokens between products."""
        return layout.tp if layout.sequence_parallel else 1

    def _count_states(self, place: Place, layout: Layout, n_microbatches: int) -> tuple[float, float]:
        """Bytes of weights and gradients while microbatches run, and while the optimizer does."""
        n, shards = place.elements / layout.tp, layout.n_shards
        splits = layout.pp > 1 and SCHEDULES[layout.schedule].splits_backward
        masters = MASTER_BYTES * n * (1 + self._moments) / shards
        gradients = MASTER_BYTES * n / shards
        if not wraps(self.cfg, layout.sizes, splits):
            copies = self._bytes * n if keeps_masters(self.cfg, layout.sizes) else 0.0
            return masters + copies + gradients, masters + gradients
        units = (place.outside + 2 * place.largest) / layout.tp
        cfg = with_layout(self.cfg, layout)
        gathered = units if reshards(cfg, layout.pp, shards) else n
        sharded = layout.accumulate == "sharded" and shards > 1
        if sharded or (layout.pp == 1 and n_microbatches == 1):
            whole = self._reduce_bytes * units + gradients
        else:
            whole = self._reduce_bytes * n
        return masters + self._bytes * gathered + whole, masters + gradients

    def _count_kept(self, place: Place, layout: Layout) -> tuple[float, float]:
        """Bytes that one microbatch keeps at a place, all stages together, and bytes while one layer or the loss runs."""
        hidden, layers = self.cfg.model.hidden_size, max(1, place.layers)
        tokens, cut, tp = self._tokens(layout), self._cut(layout), layout.tp
        width = tokens * self._bytes
        divided = width * place.sides / layers / tp
        divided += self._scores(tokens) / tp
        whole = width * WHOLE * hidden / cut
        layer = whole + divided
        working = BACKWARD * divided
        if layout.mode == "full":
            kept = width * hidden / cut
            working += layer + (width * 2 * hidden if cut > 1 else 0)
        elif layout.mode == "selective":
            kept = width * (hidden / cut + 2 * hidden) + 0.7 * divided
            working += layer - kept
        else:
            kept = layer
        if cut > 1:
            working += 2 * width * hidden  # the whole sequence's input of a product
        loss = 0.0
        if place.head_elements:
            rows = min(LOSS_TOKENS, tokens)
            n_columns = place.head_elements / hidden / tp
            loss = rows * n_columns * LOGIT_BYTES + MASTER_BYTES * place.head_elements / tp
        # The embedding's gradient has all rows, and a tied head's gradient is added to it.
        loss = max(loss, self._bytes * place.embedding_elements * (3 if place.is_tied else 1) / tp)
        first = width * hidden / cut if place.ends else 0.0
        return kept * place.layers + first, max(working, loss)

    def _scores(self, tokens: float) -> float:
        """Bytes of the attention's scores in one layer: dropout needs the plain formula, which keeps them."""
        if not getattr(self.cfg.model, "attention_dropout", 0.0):
            return 0.0
        return SCORE_BYTES * self.cfg.model.n_heads * self.cfg.data.seq_len * tokens

    def _between_bytes(self, place: Place, layout: Layout, n: int) -> float:
        """Bytes of the buffers of tensors between stages: one for each microbatch and neighbour."""
        if layout.pp == 1:
            return 0.0
        virtual = self._virtual(layout)
        per_buffer = self._tokens(layout) * self._bytes * self.cfg.model.hidden_size / self._cut(layout)
        return n * per_buffer * (2 * virtual - place.ends)

    def _virtual(self, layout: Layout) -> int:
        if self.cfg.pipeline.csv:
            return layout.virtual_stages or 1
        return layout.virtual_stages or int(SCHEDULES[layout.schedule].per_rank.rstrip("+"))

    def _in_flight(self, layout: Layout, n: int, place: int) -> float:
        """Microbatches in flight at a place, as a share of all of its stages together."""
        if layout.pp == 1:
            return 1.0
        virtual = self._virtual(layout)
        if self.cfg.pipeline.csv:
            return self._of_table(layout.pp)[0][place] / virtual
        return in_flight_of(layout.schedule, layout.pp, virtual, n, place) / virtual

    def _of_table(self, pp: int) -> tuple[list[int], float]:
        """The microbatches in flight and the bubble of the schedule in the CSV file."""
        if pp not in self._of_tables:
            table = csv_table(self.cfg.pipeline.csv, pp)
            self._of_tables[pp] = in_flight(table), simulate(table).bubble
        return self._of_tables[pp]

    def _seconds(self, layout: Layout, n: int, places: Sequence[Place]) -> float:
        """The time of one step."""
        microbatch, update = layout._replace(**NOT_IN_MICROBATCH), layout._replace(**NOT_IN_STATES)
        times = [self._microbatch_s(place, microbatch) for place in places]
        update_s = max(self._update_s(place, update, min(n, 2)) for place in places)
        slowest_s = max(times)
        seconds = n * slowest_s + update_s
        if layout.pp == 1:
            return seconds
        if self.cfg.pipeline.csv:
            return n * slowest_s / (1 - self._of_table(layout.pp)[1]) + update_s
        virtual = self._virtual(layout)
        left = (SPLIT_BUBBLE if SCHEDULES[layout.schedule].splits_backward else 1.0) / virtual
        boundary_bytes = self._tokens(layout) * self._bytes * self.cfg.model.hidden_size / self._cut(layout)
        ranks = layout.dp_replicate * layout.dp_shard * layout.cp * layout.tp
        send_s = pricing.send_seconds(round(boundary_bytes), self.fabric, 0, ranks)
        bubble_s = (layout.pp - 1) * (left * statistics.mean(times) + 2 * send_s)
        # While a schedule with one stage per rank is full, each microbatch still waits for its neighbours' messages.
        return seconds + bubble_s

    def _time_microbatch(self, place: Place, layout: Layout) -> float:
        """The time of one microbatch's forward and backward at a place."""
        gpu, hidden = self.fabric.gpu, self.cfg.model.hidden_size
        tokens, cut, tp = self._tokens(layout), self._cut(layout), layout.tp
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
        tokens, hidden, tp = self._tokens(layout), self.cfg.model.hidden_size, layout.tp
        again = {"none": 0.0, "selective": 1.0, "full": 1.0}[layout.mode]
        numbers = WHOLE * hidden * place.layers / self._cut(layout) + place.sides / tp
        moved = (FORWARD_PASSES * (1 + again) + BACKWARD_PASSES) * tokens * self._bytes * numbers
        moved += SCORE_PASSES * (1 + again / 2) * self._scores(tokens) * place.layers / tp
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
    return layout[: len(AXES)]


@functools.cache
def _first_group(axis: str, sizes: tuple[int, ...]) -> list[int]:
    """The group of rank 0 along an axis."""
    return rank_groups(dict(zip(AXES, sizes, strict=True)), DERIVED.get(axis, (axis,)))[0]


def in_flight_of(schedule: str, pp: int, virtual: int, n: int, place: int) -> int:
    """The most microbatches that a rank has in flight, counted over its stages, as `plan.in_flight` counts them.

    For the schedules that split backward, and for those that fill the pipeline in rounds, the true number may be
    smaller by a few.

    Args:
        schedule: name of the schedule.
        pp: number of ranks in the pipeline.
        virtual: stages per rank.
        n: number of microbatches.
        place: place of the rank in the pipeline.
    """
    if schedule in ("GPipe", "LoopedBFS"):
        return n * virtual
    if schedule == "1F1B":
        return min(n, pp - place)
    if schedule == "ZBVZeroBubble":
        return min(2 * n, 2 * pp)
    if schedule == "DualPipeV":
        return min(2 * n, 2 * pp + 1)
    per_round = n // max(1, n // pp)
    warm_up = (virtual - 1) * per_round
    if schedule == "Interleaved1F1B":
        return min(n * virtual, warm_up + 2 * (pp - 1 - place) + 1)
    return min(n * virtual, warm_up + pp)  # each rank postpones as many W as it has ranks before it
