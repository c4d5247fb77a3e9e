"""Requirements of pipeline schedules: checks before a run, microbatch counts, and a backward pass in two parts.

`pipeline.py` runs a schedule.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from dtmega import config
from dtmega.ops.cost import Piece
from dtmega.pipelining.split import plan_stages
from dtmega.pipelining.table import SCHEDULES, csv_table, microbatches_in


def check_schedule(cfg: config.Config, pieces: Sequence[Piece], pp: int, data_size: int, compiled: bool) -> None:
    """Raise an error if the schedule cannot run on pp > 1 ranks. Call this function before anything is built.

    Args:
        cfg: configuration of the run.
        pp: number of ranks in the pipeline.
        pieces: pieces of the whole model (embedding, layers, head).
        data_size: number of data ranks over which the global batch is split.
        compiled: whether blocks will be compiled.

    Raises:
        ValueError: the schedule cannot run with the number of stages, or with the number of microbatches at some batch
            size of the ramp-up; [pipeline] stages is invalid; or the schedule runs backward in two parts while blocks
            are compiled or recomputed.
    """
    plan_stages(cfg, pieces, pp)
    name = f"schedule '{cfg.pipeline.csv or cfg.pipeline.schedule}'"
    batch = cfg.batch
    for size in batch.sizes:
        n_microbatches = size // (data_size * batch.micro_batch_size)
        if broken := broken_rule(cfg.pipeline, pp, n_microbatches):
            raise ValueError(
                f"{size} sequences / ({data_size} data ranks x micro_batch_size={batch.micro_batch_size}) = "
                f"{n_microbatches} microbatches, but {name} needs {broken} ([batch] global_batch_size, rampup and "
                f"micro_batch_size, [mesh] pp, [pipeline] schedule)"
            )
    splits = splits_backward(cfg, pp)
    # With compiled or recomputed blocks, a split backward would still give exact gradients, but would repeat work. The
    # repeated work would cost more time than the filled bubbles save.
    if splits and compiled:
        raise ValueError(
            f"{name} runs backward in two parts, but that of a compiled block is one piece and would run twice "
            f"([compile] enable = false, or [pipeline] schedule)"
        )
    if splits and cfg.recompute.mode != "none":
        raise ValueError(
            f"{name} runs backward in two parts, and each would recompute a block, the second once for every weight "
            f"([recompute] mode = 'none', or [pipeline] schedule)"
        )


def splits_backward(cfg: config.Config, pp: int) -> bool:
    """Return True if the schedule runs backward in two parts: first for input gradients, later for weight gradients."""
    if pp == 1:
        return False
    if cfg.pipeline.csv:
        actions = itertools.chain.from_iterable(csv_table(cfg.pipeline.csv, pp))
        return any(action.kind in "IW" for action in actions)
    return SCHEDULES[cfg.pipeline.schedule].splits_backward


def broken_rule(pipeline: config.Pipeline, pp: int, n: int) -> str:
    """Describe the rule of torch's schedule that n microbatches would break; '' if n microbatches break no rule."""
    if pipeline.csv:
        n_in_file = microbatches_in(csv_table(pipeline.csv, pp))
        return "" if n == n_in_file else f"the {n_in_file} that the file has"
    if pipeline.schedule == "1F1B" and n < pp:
        return f"one per stage: {n} < pp={pp}"
    if pipeline.schedule == "DualPipeV" and n < 2 * pp:
        return f"one per stage: {n} < 2 x pp = {2 * pp}"
    rounds = max(1, n // pp)
    if pipeline.schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and n % rounds:
        return f"equal rounds of about pp={pp}: {n} % ({n} // {pp}) = {n % rounds}, expected 0"
    return ""
