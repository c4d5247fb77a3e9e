"""Expert parallelism (ep) for transformers' mixtures; transformers' own code computes the experts on each rank.

`ops/expert_parallel.py` divides the experts over ranks and sends each rank the rows (one per token and expert) that
its experts work on. transformers' code multiplies each expert's result by the token's routing weight. Under ep,
transformers' code receives only weights of 1, and each rank then multiplies the results for its own tokens by the true
weights.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dtmega.models.experts import dispatch, order_by_expert, permute
from dtmega.ops.shards import local
from dtmega.plans.base import computing_on


def send_to_experts(module: Any, ep: int) -> None:
    """Make an experts module compute on the rows that the module's `exchange` receives from all ranks.

    Args:
        module: module with all E experts, before `plans.expert_parallel.divide` divides them.
        ep: number of ranks over which the experts are divided.
    """
    module.n_experts = module.num_experts
    # transformers expects this attribute to count the experts that the parameters hold.
    module.num_experts //= ep
    module.forward = types.MethodType(_forward, module)


def _forward(module: Any, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Apply k experts to each token and add up the weighted results.

    Args:
        module: the experts module.
        x: tokens, [N, D].
        experts: indices of each token's experts, [N, k].
        weights: routing weights of each token's experts, [N, k].
    """
    k = experts.shape[1]
    order = order_by_expert(experts, module.n_experts)
    arrived = module.exchange(dispatch(x, order, k), order.n_rows)
    # Append a row of zeros, so that a rank that receives no rows still computes gradients (zeros) for its experts.
    rows = F.pad(arrived.rows, (0, 0, 0, 1))
    numbers = F.pad(arrived.experts, (0, 1)).unsqueeze(1)
    ones = torch.ones(numbers.shape, dtype=weights.dtype, device=weights.device)
    with computing_on(module, local):
        results = type(module).forward(module, rows, numbers, ones)[:-1]
    by_token = permute(arrived.give_back(results), order.place, order.pairs).view(*experts.shape, -1)
    return (by_token * weights.unsqueeze(-1)).sum(1).to(x.dtype)
