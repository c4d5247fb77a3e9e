"""Closed forms from the literature: activation memory, states under ZeRO, pipeline bubbles.

The planner's own numbers are counts of the real step, and its answers compare the counts with these formulas. The
letters are as in the papers: s sequence length, b microbatch size, h hidden size, a attention heads, L layers, t
tensor-parallel size, p pipeline size, v stages per rank, m microbatches.
"""

from __future__ import annotations

from typing import Literal

Recompute = Literal["none", "selective", "full"]


def activation_bytes_per_layer(
    s: int, b: int, h: int, a: int, t: int = 1, sequence_parallel: bool = False, recompute: Recompute = "none"
) -> float:
    """The bytes that one layer of Megatron's GPT keeps for backward, for one microbatch, in 16 bits with dropout.

    Korthikanti et al. 2022, arXiv:2205.05198, table 2: s b h (34 + 5 a s / h) on one rank. Tensor parallelism divides
    all but 10 of the 34 by t; sequence parallelism also divides the 10. Selective recomputation repeats the attention's
    core and drops 5 a s / h; full recomputation keeps only the layer's input, 2 s b h.

    Args:
        s, b, h, a: sequence length, microbatch size, hidden size, and number of attention heads.
        t: tensor-parallel size.
        sequence_parallel: whether the inputs of norms and dropouts are divided over the sequence.
        recompute: recomputed part of a layer ("none", "selective" or "full", as in [recompute] mode).
    """
    inputs = s * b * h
    if recompute == "full":
        return 2 * inputs / (t if sequence_parallel else 1)
    core = 5 * a * s / h if recompute == "none" else 0.0
    whole = 0.0 if sequence_parallel else 10.0
    return inputs * (whole + (34 - whole + core) / t)


def zero_bytes(parameters: float, n_ranks: int, stage: int) -> float:
    """The bytes of weights, gradients and optimizer states on one rank, with 16-bit weights and gradients.

    Rajbhandari et al. 2020, arXiv:1910.02054, figure 1: 2 + 2 + 12 bytes for each parameter, the 12 for Adam
    (32-bit weights and two moments). Stage 1 shards the optimizer states, stage 2 also the gradients, and stage 3 also
    the weights.

    Args:
        parameters: number of parameters on the rank, after division by tensor and pipeline parallelism.
        n_ranks: number of ranks that share the states.
        stage: ZeRO stage, from 0 to 3.

    Raises:
        ValueError: the stage is not in the range 0 to 3.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage}, expected 0 to 3: ZeRO's stages of sharding (planning.formulas.zero_bytes)")
    weights = 2 / n_ranks if stage >= 3 else 2
    gradients = 2 / n_ranks if stage >= 2 else 2
    states = 12 / n_ranks if stage >= 1 else 12
    return parameters * (weights + gradients + states)


def bubble_over_ideal(p: int, m: int, v: int = 1) -> float:
    """A pipeline rank's waiting time, divided by its computing time.

    Narayanan et al. 2021, arXiv:2104.04473, section 2.2: (p - 1) / m for GPipe and 1F1B, and (p - 1) / (m v) for
    interleaved schedules with v stages per rank.
    """
    return (p - 1) / (m * v)
