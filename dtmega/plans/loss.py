"""Cross-entropy of logits that are cut over the vocabulary, for models whose head is not `dtmega.loss`'s fused one."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from dtmega.loss import locate, token_losses, with_gradient


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
    """cross_entropy(logits, target) + z_loss log(Z)^2 where each rank holds some columns of the logits.

    fp32 math, one all-gather of 3 numbers a token (4 with smoothing); logits and target stay as they are.

    Args:
        logits_shard: [..., V_local], any floating dtype and strides.
        target: [...] int64, global numbers; -100 gives 0, any other outside [0, n_valid) is an index error.
        group: the ranks that hold the vocabulary; None: all of it is here.
        label_smoothing: as in `F.cross_entropy`, over the n_valid columns of all ranks.
        n_valid: V without the padding columns at its end. None: there are none.
        vocab_start: global number of the first column here. None (as for n_valid): one more all-gather, of the sizes.
        reduction: "none" gives [...], "sum" a scalar.

    Returns:
        fp32, the same on all ranks. The gradient of logits_shard is this rank's and final. Backward works once.

    Raises:
        ValueError: shapes that do not belong together, or another reduction.
    """
    if target.shape != logits_shard.shape[:-1]:
        raise ValueError(
            f"logits {list(logits_shard.shape)} need a target {list(logits_shard.shape[:-1])}, got {list(target.shape)}"
        )
    if reduction not in ("none", "sum"):
        raise ValueError(f"reduction is 'none' or 'sum', got '{reduction}'")
    n_columns, grad = logits_shard.shape[-1], torch.is_grad_enabled() and logits_shard.requires_grad
    columns = locate(n_columns, vocab_start, n_valid, group, logits_shard.device)
    with torch.no_grad():
        logits = logits_shard.reshape(target.numel(), n_columns)
        gradient = logits.new_empty(logits.shape) if grad else None
        losses = token_losses(logits, target.reshape(-1), columns, label_smoothing, z_loss, gradient)
        losses = losses.sum() if reduction == "sum" else losses.view(target.shape)
    return losses if gradient is None else with_gradient(losses, logits_shard, gradient.view(logits_shard.shape))
