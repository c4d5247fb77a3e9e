"""The cut of a model into stages: which pieces each stage holds, and which stages each rank holds."""

from __future__ import annotations

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
        pieces: names of the pieces of each stage.
        ranks: stage numbers of each pp rank, ascending.
    """

    pieces: list[list[str]]
    ranks: list[list[int]]


def plan_stages(cfg: config.Config, pieces: Sequence[Piece], pp: int) -> Stages:
    """Cut the pieces into stages, and assign the stages to ranks as the configured schedule needs it.

    Raises:
        ValueError: a number of stages per rank that the schedule cannot run, an invalid CSV file, or pieces that cannot
            be cut into this number of stages.
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
    """The cost of a piece in time, as FLOPs per token forward and backward, and in memory, as parameters."""

    flops: int
    parameters: int


def balanced(costs: Sequence[Cost], n_stages: int) -> list[range]:
    """The contiguous cut into stages that makes the slowest stage as fast as possible, and then memory even.

    Every microbatch waits for the slowest stage, so the cut minimises the largest FLOPs of a stage. Among the best cuts
    the sum of squared parameters is minimised. Among equal cuts, earlier stages get fewer pieces, because under 1F1B
    they keep the activations of more microbatches. The cut is exact, by dynamic programming, and no stage is empty.
    """
    assert 1 <= n_stages <= len(costs)
    flops = [0, *accumulate(piece.flops for piece in costs)]
    parameters = [0, *accumulate(piece.parameters for piece in costs)]
    slowest, _ = _best_cut(len(costs), n_stages, lambda i, j: flops[j] - flops[i], max)

    def squared_parameters(i: int, j: int) -> float:
        return (parameters[j] - parameters[i]) ** 2 if flops[j] - flops[i] <= slowest else float("inf")

    _, bounds = _best_cut(len(costs), n_stages, squared_parameters, lambda a, b: a + b)
    return [range(bounds[i], bounds[i + 1]) for i in range(n_stages)]


def _best_cut(
    n_pieces: int, n_stages: int, stage_cost: Callable[[int, int], Value], combine: Callable[[Value, Value], Value]
) -> tuple[Value, list[int]]:
    """The smallest combined cost of a cut into stages, and the n_stages + 1 bounds of that cut.

    Among cuts of equal cost, the cut whose later stages begin earlier is chosen.

    Args:
        n_pieces: number of pieces.
        n_stages: number of stages.
        stage_cost: function (i, j) -> cost of a stage with the pieces i to j - 1.
        combine: function (cost, cost) -> cost of two stages together, such as max or sum.
    """
    # best[j] is the cheapest cut of the first j pieces into k stages, with its bounds. It starts with k = 1.
    best: dict[int, tuple[Value, list[int]]] = {}
    for j in range(1, n_pieces + 1):
        best[j] = stage_cost(0, j), [0, j]
    for k in range(2, n_stages + 1):
        # Add one stage: the last of the k stages holds pieces [i, j), and k - 1 stages hold the i pieces before it.
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
    """The names of each stage's pieces: as `[pipeline] stages` lists them, or balanced by cost.

    With `[pipeline] split` encoder and decoder have separate stages, balanced separately, like Megatron's
    --pipeline-model-parallel-split-rank (which has one stage per rank).

    The cost of a piece is the FLOPs of its matrix products and attention, and the memory of all weights that it needs.
    So the embedding, which is a look-up, costs no time, but as many parameters as the head, V D, whether the two are
    tied or not.

    *Example:* BLOOM-176B on 12 stages, where the head costs as much as 1.44 layers, is cut into eleven stages of 6
    layers and a last stage of 4 layers and the head; the slowest stage takes the time of 6 layers. The published cut
    counts embedding and head as one layer each: [embedding + 5], ten times [6], [5 + head]. Its last stage takes the
    time of 6.44 layers, so every step is 7 % longer, but its first stage holds one layer less.

    *Tip:* list `stages` yourself if memory is short. If the head costs as much as many layers (250k words, small D),
    the first and the last stage may hold no layer at all.

    Args:
        pieces: pieces of the whole model.
        seq_len: S, number of tokens in a sequence.
        pipeline: section [pipeline] of the configuration.
        n_stages: number of stages.
        labelled: share of tokens with a label (`Piece.flops_per_token`).
        decoder_seq_len: T in a model with a decoder behind an encoder, else 0.

    Raises:
        ValueError: more stages than layers; `stages` that are not a cut of layers 0 to L - 1 into n_stages; a `split`
            together with `stages`; a `split` for a model without encoder and decoder; a `split` that leaves no stage
            for one of the two.
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
    """The index of the piece with which the decoder begins, and with `split` also a stage.

    Raises:
        ValueError: a `split` that is impossible, or that is set together with `stages`.
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
    """The names of each stage's pieces, from lists of layers.

    Pieces that are not layers stay with the layer before them, with two exceptions: pieces before the first layer are
    in the first stage, and the decoder's embedding stays with the decoder's first layer.
    """
    _check_stages(pieces, stages, n_stages)
    places = [i for i, piece in enumerate(pieces) if piece.is_layer]
    # cuts[n] is the index of the first piece of a stage, if there are n layers before the stage.
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
    """The number of layers in each stack, in words for messages: 'n_layers + n_decoder_layers=3 + 2'."""
    border = _decoder_start(pieces)
    stacks = {"n_layers": pieces[:border], "n_decoder_layers": pieces[border:]}
    counts = {key: sum(piece.is_layer for piece in stack) for key, stack in stacks.items()}
    counts = {key: n for key, n in counts.items() if n}
    return f"{' + '.join(counts)}={' + '.join(map(str, counts.values()))}"


def _decoder_start(pieces: Sequence[Piece]) -> int:
    """The index of the first piece of a decoder behind an encoder; the number of pieces if there is none."""
    return next((i for i, piece in enumerate(pieces) if piece.begins_decoder), len(pieces))


def _check_stages(pieces: Sequence[Piece], stages: Sequence[Sequence[int]], n_stages: int) -> None:
    """Refuse [pipeline] stages that do not list every layer once, in order, for the right number of stages."""
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
    """The stage numbers that each pp rank holds, ascending.

    In a `loop`, rank r holds stages r, r + pp, ... (Narayanan et al. 2021, section 2.2). In a `v`, rank r holds stages
    r and 2 pp - 1 - r, so that rank 0 holds the first and the last stage (Qi et al. 2023, arXiv:2401.10241, section 6).
    """
    if shape == "v":
        assert per_rank == 2
        return [[rank, 2 * pp - 1 - rank] for rank in range(pp)]
    return [list(range(rank, per_rank * pp, pp)) for rank in range(pp)]
