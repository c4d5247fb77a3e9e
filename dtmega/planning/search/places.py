"""The work of each pipeline rank, from the costs of the model's pieces (embedding, layers, head; `ops.cost.Piece`).

All estimates of memory and time start from this work.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from dtmega import config
from dtmega.ops.cost import Piece
from dtmega.pipelining.split import plan_stages
from dtmega.pipelining.table import SCHEDULES, csv_table, simulate
from dtmega.planning.extrapolation import in_flight
from dtmega.planning.search.layout import Layout, with_layout

# Share of a pipeline's bubble that remains if backward runs in two parts and F, I and W take equally long.
SPLIT_BUBBLE = 1 / 3


class Place(NamedTuple):
    """The stages on one pipeline rank and their work, before the work is divided over tp, cp and data ranks.

    Attributes:
        number: index of the first pipeline rank that has this work.
        elements: number of elements in the weights of the stages.
        largest: number of elements in the largest layer.
        outside: number of elements outside of layers.
        head_elements: number of elements in the weights of the output head; 0 without a head.
        labelled: share of the tokens whose logits are computed.
        embedding_elements: number of elements in the embedding; 0 without an embedding.
        is_tied: whether the rank has both the embedding and the head, and the two share their weights.
        layers: number of layers.
        sides: number of values that the layers save for backward for each token, not counting the vectors of width D.
        product_flops, attention_flops: FLOPs of the products with weights, and of attention, for forward and backward,
            per token of the sequence.
        in_layers: share of `product_flops` in layers.
        ends: number of ends of the pipeline on this rank: 1 for the model's first or last piece, 2 for both, else 0.
        expert_elements, largest_experts: numbers of elements in the experts of all layers, and in the experts of the
            largest layer.
        mixtures: number of layers that contain a mixture of experts.
        experts_per_token: number of experts that a token uses in one layer with experts.
    """

    number: int
    elements: int
    largest: int
    outside: int
    head_elements: int
    labelled: float
    embedding_elements: int
    is_tied: bool
    layers: int
    sides: float
    product_flops: float
    attention_flops: float
    in_layers: float
    ends: int
    expert_elements: int
    largest_experts: int
    mixtures: int
    experts_per_token: int

    def whole_elements(self, ep: int) -> float:
        """The number of weight elements that a rank uses, with only its own experts, before division by tp."""
        return self.elements - self.expert_elements * (1 - 1 / ep)

    def whole_largest(self, ep: int) -> float:
        """The part of `whole_elements` that belongs to the largest layer."""
        return self.largest - self.largest_experts * (1 - 1 / ep)


class Places:
    """The pipeline ranks' work in each layout of one configuration.

    Args:
        cfg: configuration whose layouts are searched.
        pieces: embedding, layers and head of the whole model.
    """

    def __init__(self, cfg: config.Config, pieces: Sequence[Piece]) -> None:
        self.cfg, self.pieces = cfg, list(pieces)
        self._known: dict[tuple[Any, ...], list[Place]] = {}

    def of(self, layout: Layout) -> list[Place]:
        """The work of the pipeline ranks, without duplicates.

        Of several ranks with equal work, only the first is returned, because it has the most microbatches in flight.
        """
        key = layout.pp, layout.schedule, layout.virtual_stages
        if key not in self._known:
            cfg = with_layout(self.cfg, layout)
            names, ranks = [[piece.name for piece in self.pieces]], [[0]]
            if layout.pp > 1:
                names, ranks = plan_stages(cfg, self.pieces, layout.pp)
            seen: dict[tuple[Any, ...], Place] = {}
            for number, stages in enumerate(ranks):
                held = [name for stage in stages for name in names[stage]]
                place = self._place(number, set(held))
                seen.setdefault(place[1:], place)
            self._known[key] = list(seen.values())
        return self._known[key]

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
            attention = piece.attention_per_token(data.seq_len)
            attention += decoder_share * data.decoder_length * piece.decoder_attention_flops
            attention += decoder_share * data.seq_len * piece.cross_attention_flops
            attention_flops += attention
            product_flops += every - attention
            if piece.is_layer:
                layer_flops += every - attention
                # A weight costs 6 FLOPs per token, and one side of each weight matrix is D.
                sides += (piece.matmul_flops + decoder_share * piece.decoder_flops) / 6 / self.cfg.model.hidden_size
        largest = max(layers, key=lambda piece: piece.elements, default=None)
        mixtures = [piece for piece in layers if piece.experts_per_token]
        outside = elements - sum(piece.elements for piece in layers)
        head = self.pieces[-1]
        head_elements = head.elements + head.shared if has_last else 0
        labelled = data.mask_prob if head.label_flops else 1.0
        if head.decoder_flops:
            labelled = decoder_share
        in_layers = layer_flops / product_flops if product_flops else 0.0
        ends = has_first + has_last
        return Place(
            *(number, elements, largest.elements if largest else 0, outside, head_elements, labelled),
            *(self.pieces[0].elements if has_first else 0, has_first and has_last and head.shared > 0),
            *(len(layers), sides),
            *(product_flops, attention_flops, in_layers, ends),
            *(sum(piece.expert_elements for piece in mixtures), largest.expert_elements if largest else 0),
            *(len(mixtures), max((piece.experts_per_token for piece in mixtures), default=0)),
        )

    def virtual(self, layout: Layout) -> int:
        """The number of stages per rank."""
        if self.cfg.pipeline.csv:
            stages = {action.stage for row in csv_table(self.cfg.pipeline.csv, layout.pp) for action in row}
            return len(stages) // layout.pp
        return layout.virtual_stages or int(SCHEDULES[layout.schedule].per_rank.rstrip("+"))

    def in_flight(self, layout: Layout, n: int, place: int) -> float:
        """The number of microbatches in flight on a pipeline rank. A microbatch in one of v stages counts as 1 / v.

        Args:
            layout: layout of the job.
            n: number of microbatches.
            place: index of the pipeline rank.
        """
        if layout.pp == 1:
            return 1.0
        virtual = self.virtual(layout)
        if self.cfg.pipeline.csv:
            return _of_table(self.cfg.pipeline.csv, layout.pp)[0][place] / virtual
        return in_flight_of(layout.schedule, layout.pp, virtual, n, place) / virtual

    def bubble(self, layout: Layout, n: int) -> float:
        """The time that a rank spends waiting for other pipeline ranks, in units of the rank's time per microbatch.

        With 1F1B, the result is p - 1. With v stages per rank, this number is divided by v
        (`formulas.bubble_over_ideal`).

        Args:
            layout: layout of the job.
            n: number of microbatches.
        """
        if layout.pp == 1:
            return 0.0
        if self.cfg.pipeline.csv:
            waits = _of_table(self.cfg.pipeline.csv, layout.pp)[1]
            return n * waits / (1 - waits)
        left = SPLIT_BUBBLE if SCHEDULES[layout.schedule].splits_backward else 1.0
        return left * (layout.pp - 1) / self.virtual(layout)


@functools.cache
def _of_table(path: str, pp: int) -> tuple[list[float], float]:
    """Return (number of microbatches in flight on each rank, bubble) for the schedule in a CSV file."""
    table = csv_table(path, pp)
    return in_flight(table), simulate(table).bubble


def in_flight_of(schedule: str, pp: int, virtual: int, n: int, place: int) -> int:
    """The peak number of microbatches in flight on a rank, over all of the rank's stages (`extrapolation.in_flight`).

    For schedules that split backward, and for schedules that fill the pipeline in rounds, the true number may be
    slightly smaller.

    Args:
        schedule: name of the schedule.
        pp: number of ranks in the pipeline.
        virtual: number of stages per rank.
        n: number of microbatches.
        place: index of the rank in the pipeline.
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
    return min(n * virtual, warm_up + pp)  # each rank postpones one W for each earlier rank
