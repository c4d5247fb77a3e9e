"""torch's Adam and AdamW on this rank's parts of DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dtmega.ops.shards import local


class _OnLocalParts(torch.optim.Adam):
    """Adam that gives its fused kernel this rank's part of each DTensor.

    Local parts do not change the result, because Adam updates each element independently of all other elements. With
    DTensors, torch would first compute placements for whole lists of tensors, which takes longer than a small step.
    """

    def _init_group(
        self,
        group: dict[str, Any],
        params_with_grad: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        state_steps: list[Tensor],
    ) -> bool:
        """Fill torch's lists of tensors with local parts instead of DTensors. The state still holds DTensors."""
        lists = (params_with_grad, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps)
        has_complex = super()._init_group(group, *lists)
        for parameter, gradient in zip(params_with_grad, grads, strict=True):
            assert getattr(parameter, "placements", None) == getattr(gradient, "placements", None)
        for tensors in lists:
            tensors[:] = [local(tensor) for tensor in tensors]
        return has_complex


class AdamW(_OnLocalParts, torch.optim.AdamW):
    """torch's AdamW on local parts."""


class Adam(_OnLocalParts, torch.optim.Adam):
    """torch's Adam on local parts."""
