"""Find a model's sequence lengths, and check that the mesh divides the lengths and the attention heads."""

from __future__ import annotations

from collections.abc import Mapping

from dtmega import config
from dtmega.models.model import Model


def check_lengths(cfg: config.Config, whole: Model, lengths: Mapping[str, int], sizes: Mapping[str, int]) -> None:
    """Refuse lengths that cp, or tp with sequence parallelism, does not divide.

    Raises:
        ValueError: cp or tp does not divide a length.
    """
    cp, tp = sizes["cp"], sizes["tp"]
    for key, length in lengths.items():
        # Under a causal mask, a rank holds two slices, one from each half of the sequence.
        n_slices = cp if key in whole.both_ways else 2 * cp
        if cp > 1 and length % n_slices:
            product = f"cp={cp}" if n_slices == cp else f"2 x cp = {n_slices}"
            raise ValueError(f"{product} does not divide {key}={length} ([mesh] cp, [data] {key})")
        if cfg.mesh.sequence_parallel and (length // cp) % tp:
            part = f"{key}={length}" if cp == 1 else f"{key} / cp = {length} / {cp} = {length // cp}"
            keys = "[mesh] tp, " if cp == 1 else "[mesh] tp, [mesh] cp, [mesh] sequence_parallel, "
            raise ValueError(f"tp={tp} does not divide {part} ({keys}[data] {key})")


def attends_by_heads(cfg: config.Config, n_heads: int, n_kv_heads: int, sizes: Mapping[str, int]) -> bool:
    """Return True if attention under cp exchanges heads, False if it gathers keys and values ([mesh] cp_form).

    Let H and G be this rank's numbers of query heads and key/value heads. To exchange heads, a rank receives
    2 (H + G) K (cp - 1) / cp numbers per token and layer in each forward or backward. To gather keys and values, a
    rank receives 2 G K (cp - 1) numbers three times in a step: in forward, before backward, and as gradients in
    backward. In a step with p passes (2, or 3 with recomputation), 'auto' therefore exchanges heads if cp divides the
    heads and 3 cp > p (H / G + 1).

    Raises:
        ValueError: cp_form is 'heads', but cp does not divide the numbers of heads.
    """
    cp, tp = sizes["cp"], sizes["tp"]
    n_local_kv_heads = max(1, n_kv_heads // tp)
    divides = n_heads % (tp * cp) == 0 and n_local_kv_heads % cp == 0
    if cp == 1 or cfg.mesh.cp_form == "gather":
        return False
    if cfg.mesh.cp_form == "heads" and not divides:
        raise ValueError(
            f"cp_form = 'heads' divides heads among ranks: expected tp x cp = {tp * cp} to divide n_heads={n_heads}, "
            f"and cp={cp} the {n_local_kv_heads} heads of keys and values of a tp rank ([mesh] cp_form, cp, tp)"
        )
    passes = 2 if cfg.recompute.mode == "none" else 3
    sends_less = 3 * cp * n_local_kv_heads > passes * (n_heads // tp + n_local_kv_heads)
    return divides and (cfg.mesh.cp_form == "heads" or sends_less)


def lengths_of(cfg: config.Config, whole: Model) -> dict[str, int]:
    """The lengths of a model's sequences: [data] key -> length.

    Raises:
        ValueError: [data] sets the length of a sequence that the model does not have, such as a decoder sequence.
    """
    for key in cfg.data.lengths:
        field = config.Data.model_fields[key]
        if key not in whole.lengths and getattr(cfg.data, key) != field.default:
            raise ValueError(
                f"{key}={getattr(cfg.data, key)} means nothing to a model without such sequences: expected "
                f"{field.default}, or another model ([data] {key}, [model] name)"
            )
    return {key: cfg.data.lengths[key] for key in whole.lengths}
