"""Cross-entropy of logits that are sharded over the vocabulary, for models that compute the logits themselves."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from dtmega.ops.cross_entropy import locate, token_losses, with_gradient


def vocab_parallel_cross_entropy(
    logits_shard: Tensor,
    target: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    n_valid: int | None = None,
    vocab_start: int | None = None,
    reduction: Literal["none", "sum"] = "none",
) -> Tensor:
    """Compute cross_entropy(logits, target) + z_loss log(Z)^2, where each rank holds some columns of the logits.

    The loss is computed in fp32, with one all-gather of 3 numbers per token (4 with smoothing). Logits and target are
    not changed.

    Args:
        logits_shard: this rank's columns of the logits, [..., V_local], in any floating dtype and with any strides.
        target: index of each label in the whole vocabulary, [...] int64. The loss of a token with target -100 is 0; any
            other index outside [0, n_valid) raises an index error.
        group: process group over which the vocabulary is sharded; None if this rank has the whole vocabulary.
        label_smoothing: amount of smoothing as in `F.cross_entropy`, over the n_valid columns of all ranks.
        z_loss: factor of log(Z)^2, where Z is the softmax's denominator.
        n_valid: number of columns on all ranks, without the padding columns at the end; None if there is no padding.
        vocab_start: index of this rank's first column in the whole vocabulary. If vocab_start or n_valid is None, one
            more all-gather exchanges the sizes of all ranks.
        reduction: form of the result: "none" for the losses [...], or "sum" for the sum of the losses.

    Returns:
        The losses or their sum in fp32, equal on all ranks. The gradient of logits_shard is complete and needs no
        all-reduce. Backward can run only once.

    Raises:
        ValueError: the shapes do not match, or the reduction is unknown.
    """
    if target.shape != logits_shard.shape[:-1]:
        raise ValueError(
            f"logits {list(logits_shard.shape)} need a target {list(logits_shard.shape[:-1])}, got {list(target.shape)}"
        )
    if reduction not in ("none", "sum"):
        raise ValueError(f"reduction is 'none' or 'sum', got '{reduction}'")
    n_columns = logits_shard.shape[-1]
    needs_gradient = torch.is_grad_enabled() and logits_shard.requires_grad
    columns = locate(n_columns, vocab_start, n_valid, group, logits_shard.device)
    with torch.no_grad():
        logits = logits_shard.reshape(target.numel(), n_columns)
        gradient = logits.new_empty(logits.shape) if needs_gradient else None
        losses = token_losses(logits, target.reshape(-1), columns, label_smoothing, z_loss, gradient)
        losses = losses.sum() if reduction == "sum" else losses.view(target.shape)
    return losses if gradient is None else with_gradient(losses, logits_shard, gradient.view(logits_shard.shape))
