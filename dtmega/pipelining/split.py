"""Assign a model's pieces (embedding, layers, head) to pipeline stages, and the stages to ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise
from typing import Literal, NamedTuple, TypeVar

from dtmega import config
from dtmega.ops.cost import Piece
from dtmega.pipelining.table import SCHEDULES, csv_table, stages_in, stages_per_rank

Value = TypeVar("Value", int, float)


class Stages(NamedTuple):
    """The stages of a whole pipeline.

    Attributes:
        pieces: names of the pieces in each stage.
        ranks: stage indices of each pp rank, in ascending order.
    """

    pieces: list[list[str]]
    ranks: list[list[int]]


def plan_stages(cfg: config.Config, pieces: Sequence[Piece], pp: int) -> Stages:
    """Split the pieces into stages, and assign the stages to ranks as the configured schedule requires.

    Raises:
        ValueError: the schedule cannot run with this number of stages per rank, the CSV file is invalid, or the pieces
            cannot be split into this number of stages.
    """
    per_rank = stages_per_rank(cfg.pipeline)
    if cfg.pipeline.csv:
        ranks = stages_in(csv_table(cfg.pipeline.csv, pp))
        if per_rank and any(len(stages) != per_rank for stages in ranks):
            raise ValueError(
                f"virtual_stages={per_rank}, but the ranks of {cfg.pipeline.csv} have stages {ranks} "
                f"([pipeline] virtual_stages, [pipeline] csv)"
            )
    else:
        ranks = stages_of_ranks(SCHEDULES[cfg.pipeline.schedule].shape, pp, per_rank)
    n_stages = sum(len(stages) for stages in ranks)
    data = cfg.data
    names = pieces_of_stages(pieces, data.seq_len, cfg.pipeline, n_stages, data.mask_prob, data.decoder_length)
    return Stages(names, ranks)


class Cost(NamedTuple):
    """The cost of a pipeline piece: its FLOPs per token in forward and backward (time), and its parameters (memory)."""

    flops: int
    parameters: int


def balanced(costs: Sequence[Cost], n_stages: int) -> list[range]:
    """Split consecutive pieces into stages so that the slowest stage is as fast as possible; ties even out memory.

    Every microbatch waits for the slowest stage, so the first aim is to minimise the FLOPs of the slowest stage. Among
    splits that reach this minimum, the sum of the stages' squared parameter counts is minimised. Among splits that are
    still equal, earlier stages get fewer pieces, because earlier stages keep the activations of more microbatches under
    1F1B. The result is an exact optimum, found by dynamic programming. No stage is empty.
    """
    assert 1 <= n_stages <= len(costs)
    return list(_balanced(tuple(costs), n_stages))


@functools.cache  # a search over layouts splits a model into the same number of stages many times
def _balanced(costs: tuple[Cost, ...], n_stages: int) -> tuple[range, ...]:
    """Compute the ranges of pieces that `balanced` returns, and cache them."""
    flops = [0, *accumulate(piece.flops for piece in costs)]
    parameters = [0, *accumulate(piece.parameters for piece in costs)]
    slowest, _ = _best_cut(len(costs), n_stages, lambda i, j: flops[j] - flops[i], max)

    def squared_parameters(i: int, j: int) -> float:
        return (parameters[j] - parameters[i]) ** 2 if flops[j] - flops[i] <= slowest else float("inf")

    _, bounds = _best_cut(len(costs), n_stages, squared_parameters, lambda a, b: a + b)
    return tuple(range(bounds[i], bounds[i + 1]) for i in range(n_stages))


def _best_cut(
    n_pieces: int, n_stages: int, stage_cost: Callable[[int, int], Value], combine: Callable[[Value, Value], Value]
) -> tuple[Value, list[int]]:
    """The smallest combined cost of any split into stages, and the n_stages + 1 bounds of the stages in that split.

    Among several splits with this cost, choose the split whose last stage begins earliest. If several such splits
    remain, compare the second-to-last stages, and so on.

    Args:
        n_pieces: number of pieces.
        n_stages: number of stages.
        stage_cost: function (i, j) -> cost of a stage with the pieces i to j - 1.
        combine: function (cost, cost) -> combined cost of two stages, for example max or sum.
    """
    # best[j] holds the cost and the bounds of the cheapest split of the first j pieces into k stages. k begins at 1.
    best: dict[int, tuple[Value, list[int]]] = {}
    for j in range(1, n_pieces + 1):
        best[j] = stage_cost(0, j), [0, j]
    for k in range(2, n_stages + 1):
        # Add one stage: the last of the k stages holds pieces [i, j), and the k - 1 earlier stages hold pieces [0, i).
        longer: dict[int, tuple[Value, list[int]]] = {}
        for j in range(k, n_pieces + 1):
            candidates = []
            for i in range(k - 1, j):
                cost_before, _ = best[i]
                candidates.append((combine(cost_before, stage_cost(i, j)), i))
            cost, i = min(candidates)
            _, bounds = best[i]
            longer[j] = cost, [*bounds, j]
        best = longer
    return best[n_pieces]


def pieces_of_stages(
    pieces: Sequence[Piece],
    seq_len: int,
    pipeline: config.Pipeline,
    n_stages: int,
    labelled: float = 1.0,
    decoder_seq_len: int = 0,
) -> list[list[str]]:
    """The names of the pieces in each stage, either as listed in `[pipeline] stages` or balanced by cost.

    With `[pipeline] split`, encoder and decoder have separate stages and are balanced separately. If each rank has one
    stage, `split` corresponds to Megatron's --pipeline-model-parallel-split-rank.

    The cost of a piece is the FLOPs of the piece's matrix products and attention, and the memory of all weights that
    the piece needs. The embedding is a look-up, so the embedding costs no time. In memory, the embedding costs
    V D parameters, as much as the head, whether or not the two are tied.

    *Example:* the head of BLOOM-176B takes as long as 1.44 layers. With 12 balanced stages, eleven stages have 6 layers
    and the last stage has 4 layers and the head, so the slowest stage takes as long as 6 layers. The published stages
    count embedding and head as one layer each: [embedding + 5], ten times [6], [5 + head]. Every step is then 7 %
    longer, because the last stage takes as long as 6.44 layers. In return, the first stage holds one layer fewer.

    *Tip:* list `stages` yourself if memory is short. If the head takes as long as several layers (250k words, small
    D), the first and the last of the balanced stages may have no layer at all.

    Args:
        pieces: pieces of the whole model.
        seq_len: S, number of tokens in a sequence.
        pipeline: [pipeline] section of the configuration.
        n_stages: number of stages.
        labelled: fraction of tokens that have a label (`Piece.flops_per_token`).
        decoder_seq_len: T, number of tokens in a decoder sequence; 0 if the model is not an encoder-decoder.

    Raises:
        ValueError: there are more stages than layers; `stages` does not split layers 0 to L - 1 into n_stages;
            `split` is set together with `stages`, or for a model that is not an encoder-decoder; `split` leaves
            the encoder or the decoder without a stage.
    """
    if pipeline.split:
        border = _border(pieces, pipeline, n_stages)
        halves = [(pieces[:border], pipeline.split), (pieces[border:], n_stages - pipeline.split)]
    else:
        halves = [(pieces, n_stages)]
    if pipeline.stages:
        return _listed(pieces, pipeline.stages, n_stages)

    def cost(piece: Piece) -> Cost:
        return Cost(piece.flops_per_token(seq_len, labelled, decoder_seq_len), piece.elements + piece.shared)

    names_of_stages = []
    for half, n in halves:
        n_layers = sum(piece.is_layer for piece in half)
        if n > n_layers:
            keys = "[mesh] pp x [pipeline] virtual_stages" + (", [pipeline] split" if pipeline.split else "")
            raise ValueError(
                f"{n} stages cannot be cut from {_count_layers(half)} layers: {n} > {n_layers} "
                f"({keys}, [model] n_layers)"
            )
        costs = [cost(piece) for piece in half]
        for stage in balanced(costs, n):
            names_of_stages.append([half[i].name for i in stage])
    return names_of_stages


def _border(pieces: Sequence[Piece], pipeline: config.Pipeline, n_stages: int) -> int:
    """The index of the decoder's first piece. With `split`, a stage begins at this piece.

    Raises:
        ValueError: `split` is impossible or is set together with `stages`.
    """
    border = _decoder_start(pieces)
    if border == len(pieces):
        raise ValueError(
            f"split={pipeline.split} is for a model that has a decoder behind an encoder: expected 0, or such a model "
            f"([pipeline] split, [model] name)"
        )
    if pipeline.stages:
        raise ValueError(
            f"the listed stages decide already where the decoder begins: expected split=0, got "
            f"{pipeline.split} ([pipeline] split, [pipeline] stages)"
        )
    if pipeline.split >= n_stages:
        raise ValueError(
            f"split={pipeline.split} leaves the decoder no stage: expected 1 to {n_stages - 1}, as there are "
            f"{n_stages} stages ([pipeline] split, [mesh] pp x [pipeline] virtual_stages)"
        )
    return border


def _listed(pieces: Sequence[Piece], stages: Sequence[Sequence[int]], n_stages: int) -> list[list[str]]:
    """The names of each stage's pieces, given the layers of each stage.

    Pieces that are not layers stay with the layer before them, with two exceptions: pieces before the first layer are
    in the first stage, and the decoder's embedding stays with the decoder's first layer.
    """
    _check_stages(pieces, stages, n_stages)
    places = [i for i, piece in enumerate(pieces) if piece.is_layer]
    # If n layers come before a stage, cuts[n] is the index of the stage's first piece.
    cuts = []
    for place in places:
        follows_decoder_start = place > 0 and pieces[place - 1].begins_decoder
        cuts.append(place - 1 if follows_decoder_start else place)
    cuts.append(places[-1] + 1)
    counts = accumulate(len(stage) for stage in stages[:-1])
    bounds = [0, *(cuts[count] for count in counts), len(pieces)]
    names = [piece.name for piece in pieces]
    return [names[i:j] for i, j in pairwise(bounds)]


def _count_layers(pieces: Sequence[Piece]) -> str:
    """The number of layers in each stack, as text for messages: 'n_layers + n_decoder_layers=3 + 2'."""
    border = _decoder_start(pieces)
    stacks = {"n_layers": pieces[:border], "n_decoder_layers": pieces[border:]}
    counts = {key: sum(piece.is_layer for piece in stack) for key, stack in stacks.items()}
    counts = {key: n for key, n in counts.items() if n}
    return f"{' + '.join(counts)}={' + '.join(map(str, counts.values()))}"


def _decoder_start(pieces: Sequence[Piece]) -> int:
    """The index of the decoder's first piece, or the number of pieces if the model is not an encoder-decoder."""
    return next((i for i, piece in enumerate(pieces) if piece.begins_decoder), len(pieces))


def _check_stages(pieces: Sequence[Piece], stages: Sequence[Sequence[int]], n_stages: int) -> None:
    """Raise an error unless [pipeline] stages lists every layer once, in order, for the right number of stages."""
    n_layers = sum(piece.is_layer for piece in pieces)
    if len(stages) != n_stages:
        raise ValueError(
            f"[pipeline] stages has {len(stages)} lists of layers, expected {n_stages} = [mesh] pp x stages per rank "
            f"([pipeline] virtual_stages)"
        )
    if list(chain.from_iterable(stages)) != list(range(n_layers)):
        raise ValueError(
            f"[pipeline] stages must hold each of the layers 0 to {n_layers - 1} once, in order ([model] "
            f"{_count_layers(pieces)}), got {stages}"
        )
    for number, stage in enumerate(stages[1:-1], start=1):
        if not stage:
            raise ValueError(
                f"[pipeline] stages: stage {number} is empty; only the first (embedding) and the last (head) may be, "
                f"got {stages}"
            )


def stages_of_ranks(shape: Literal["loop", "v"], pp: int, per_rank: int) -> list[list[int]]:
    """The stage indices that each pp rank holds, in ascending order.

    In a `loop`, rank r holds stages r, r + pp, ... (Narayanan et al. 2021, section 2.2). In a `v`, rank r holds stages
    r and 2 pp - 1 - r, so that rank 0 holds the first and the last stage (Qi et al. 2023, arXiv:2401.10241, section 6).
    """
    if shape == "v":
        assert per_rank == 2
        return [[rank, 2 * pp - 1 - rank] for rank in range(pp)]
    return [list(range(rank, per_rank * pp, pp)) for rank in range(pp)]
