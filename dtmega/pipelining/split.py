"""The pieces of the model that each stage holds, and the stages that each rank holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, TypeVar

from dtmega import config
from dtmega.ops.cost import Piece
from dtmega.pipelining.table import SCHEDULES, csv_table, stages_in, stages_per_rank

Value = TypeVar("Value", int, float)


class Stages(NamedTuple):
    """The whole pipeline.

    Attributes:
        pieces: the names of the pieces that each stage holds.
        ranks: the stage numbers of each pp rank, ascending.
    """

    pieces: list[list[str]]
    ranks: list[list[int]]


def plan_stages(cfg: config.Config, pieces: Sequence[Piece], pp: int) -> Stages:
    """Cut the pieces into stages and deal these to the ranks, as the configured schedule needs it.

    Raises:
        ValueError: as `stages_per_rank`, `csv_table` and `pieces_of_stages` say.
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
    held = pieces_of_stages(pieces, data.seq_len, cfg.pipeline, n_stages, data.mask_prob, data.decoder_length)
    return Stages(held, ranks)


class Cost(NamedTuple):
    """The cost of one piece of a model: time, in FLOPs per token forward and backward, and memory, in parameters."""

    flops: int
    parameters: int


def balanced(costs: Sequence[Cost], n_stages: int) -> list[range]:
    """The contiguous cut of the pieces into stages, none empty: the slowest stage as fast as can be, then memory even.

    Every microbatch waits for the slowest stage, so no cut with a larger maximum of FLOPs is considered. Of those with
    the smallest, the one with the least sum of squared parameters is taken; of equals, the one with fewer pieces in
    earlier stages, because under 1F1B these keep the activations of more microbatches. Exact (dynamic programming).
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
    """The smallest combined cost, and the n_stages + 1 bounds of the stages [i, j) that have it.

    Of cuts with the same cost, the one whose later stages begin earlier.
    """
    # best[j] is the cheapest cut of the first j pieces into k stages, with its bounds; first of all k = 1.
    best: dict[int, tuple[Value, list[int]]] = {}
    for j in range(1, n_pieces + 1):
        best[j] = stage_cost(0, j), [0, j]
    for k in range(2, n_stages + 1):
        # One stage more: the last of the k stages is [i, j), and k - 1 stages hold the i pieces before it.
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
    """The names of the pieces of each stage: by `[pipeline] stages`, or balanced by cost.

    With `[pipeline] split` encoder and decoder have stages of their own, and each is balanced by itself: Megatron's
    --pipeline-model-parallel-split-rank, which has a rank for each stage.

    A piece costs its matrix products and attention, and the memory of all weights that it needs: the embedding no time
    (a look-up) but V D parameters, as many as the head, tied or not.

    BLOOM-176B on 12 stages (head = 1.44 layers) becomes eleven times 6 layers and [4 + head], whose slowest stage takes
    6 layers' time. The published [embedding + 5], ten times [6], [5 + head] counts both ends
    as one layer each; its last stage takes 6.44, so every step 7 % longer, but its first stage holds one layer less.
    Where memory is short, say so in `stages`. Where the head costs many layers (250k words, D small), the first and the
    last stage may hold no layer at all.

    Args:
        labelled, decoder_seq_len: as `Piece.flops_per_token` takes them.

    Raises:
        ValueError: more stages than layers; `stages` that are not a cut of layers 0 to L - 1 into n_stages; a `split`
            beside them, of a model without a decoder behind an encoder, or that leaves one of both no stage.
    """
    if pipeline.split:
        border = _border(pieces, pipeline, n_stages)
        halves = [(pieces[:border], pipeline.split), (pieces[border:], n_stages - pipeline.split)]
    else:
        halves = [(pieces, n_stages)]
    if pipeline.stages:
        return _given(pieces, pipeline.stages, n_stages)

    def cost(piece: Piece) -> Cost:
        return Cost(piece.flops_per_token(seq_len, labelled, decoder_seq_len), piece.elements + piece.shared)

    found = []
    for half, n in halves:
        n_layers = sum(piece.is_layer for piece in half)
        if n > n_layers:
            keys = "[mesh] pp x [pipeline] virtual_stages" + (", [pipeline] split" if pipeline.split else "")
            raise ValueError(
                f"{n} stages cannot be cut from {_counted(half)} layers: {n} > {n_layers} ({keys}, [model] n_layers)"
            )
        found += [[half[i].name for i in stage] for stage in balanced([cost(piece) for piece in half], n)]
    return found


def _border(pieces: Sequence[Piece], pipeline: config.Pipeline, n_stages: int) -> int:
    """The number of the piece with which the decoder begins, which shall be the first one of stage `split`."""
    border = _decoder(pieces)
    if border == len(pieces):
        raise ValueError(
            f"split={pipeline.split} is for a model that has a decoder behind an encoder: expected 0, or such a model "
            f"([pipeline] split, [model] name)"
        )
    if pipeline.stages:
        raise ValueError(
            f"the stages are listed, so where the decoder begins is said already: expected split=0, got "
            f"{pipeline.split} ([pipeline] split, [pipeline] stages)"
        )
    if pipeline.split >= n_stages:
        raise ValueError(
            f"split={pipeline.split} leaves the decoder no stage: expected 1 to {n_stages - 1}, as there are "
            f"{n_stages} stages ([pipeline] split, [mesh] pp x [pipeline] virtual_stages)"
        )
    return border


def _given(pieces: Sequence[Piece], stages: Sequence[Sequence[int]], n_stages: int) -> list[list[str]]:
    """The names of the pieces of each stage, whose layers are listed.

    What is no layer stays with the layer before it, and at the beginning with the first stage. What a decoder begins
    with stays with its first layer.
    """
    _check_stages(pieces, stages, n_stages)
    places = [i for i, piece in enumerate(pieces) if piece.is_layer]
    cuts = [i - 1 if i and pieces[i - 1].begins_decoder else i for i in places]
    cuts.append(places[-1] + 1)
    counts = accumulate(len(stage) for stage in stages[:-1])
    bounds = [0, *(cuts[count] for count in counts), len(pieces)]
    return [[piece.name for piece in pieces[i:j]] for i, j in pairwise(bounds)]


def _counted(pieces: Sequence[Piece]) -> str:
    """The number of layers by its key, of each stack that is there: 'n_layers + n_decoder_layers=3 + 2'."""
    border = _decoder(pieces)
    layers = {"n_layers": pieces[:border], "n_decoder_layers": pieces[border:]}
    counts = {key: n for key, those in layers.items() if (n := sum(piece.is_layer for piece in those))}
    return f"{' + '.join(counts)}={' + '.join(map(str, counts.values()))}"


def _decoder(pieces: Sequence[Piece]) -> int:
    """The number of the first piece of a decoder behind an encoder; that of all pieces where there is none."""
    return next((i for i, piece in enumerate(pieces) if piece.begins_decoder), len(pieces))


def _check_stages(pieces: Sequence[Piece], stages: Sequence[Sequence[int]], n_stages: int) -> None:
    n_layers = sum(piece.is_layer for piece in pieces)
    if len(stages) != n_stages:
        raise ValueError(
            f"[pipeline] stages has {len(stages)} lists of layers, expected {n_stages} = [mesh] pp x stages per rank "
            f"([pipeline] virtual_stages)"
        )
    if [layer for stage in stages for layer in stage] != list(range(n_layers)):
        raise ValueError(
            f"[pipeline] stages must hold each of the layers 0 to {n_layers - 1} once, in order ([model] "
            f"{_counted(pieces)}), got {stages}"
        )
    for number, stage in enumerate(stages[1:-1], start=1):
        if not stage:
            raise ValueError(
                f"[pipeline] stages: stage {number} is empty; only the first (embedding) and the last (head) may be, "
                f"got {stages}"
            )


def stages_of_ranks(shape: Literal["loop", "v"], pp: int, per_rank: int) -> list[list[int]]:
    """The stage numbers that each pp rank holds, ascending.

    loop: rank r holds r, r + pp, ... (Narayanan et al. 2021, section 2.2). v: r and 2 pp - 1 - r, so rank 0 holds the
    first and the last (Qi et al. 2023, arXiv:2401.10241, section 6).
    """
    if shape == "v":
        assert per_rank == 2
        return [[rank, 2 * pp - 1 - rank] for rank in range(pp)]
    return [[rank + i * pp for i in range(per_rank)] for rank in range(pp)]
