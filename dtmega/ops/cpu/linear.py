"""Faster oneDNN matrix products for unsharded nn.Linear modules in bfloat16 on a CPU with AMX.

- A bias is added while the product is still in registers. torch would first fill the result with the bias and then add
  the product.
- If a weight has many more inputs than outputs, its gradient is computed from a transposed copy of the output's
  gradient. A product whose first factor is a transposed view would run at half the rate (torch 2.13). With fewer
  inputs, the copy would cost as much time as it saves.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDE = 2  # smallest ratio of input to output features at which the transposed copy pays off


def multiply_on_amx(model: nn.Module) -> None:
    """Make the model's nn.Linear modules compute bfloat16 products faster. Other dtypes are not affected.

    A layer with an adapter keeps its forward: its weight is frozen, so there is no gradient to compute faster.
    """
    for module in model.modules():
        if type(module) is nn.Linear and not hasattr(module, "lora_a"):
            module.forward = types.MethodType(_forward, module)


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    bf16 = x.dtype == module.weight.dtype == torch.bfloat16 and x.device.type == "cpu"
    if not bf16 or not module.weight.requires_grad or not torch.is_grad_enabled():
        return F.linear(x, module.weight, module.bias)
    return _Linear.apply(x, module.weight, module.bias)  # pyright: ignore[reportReturnType]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        if bias is None:
            return F.linear(x, weight)
        return biased_product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, _, needs_bias = ctx.needs_input_grad
        rows = grad_outputs[0].flatten(0, -2)
        dx = (rows @ weight).view(x.shape) if needs_x else None
        n_outputs, n_inputs = weight.shape
        x_rows = x.flatten(0, -2)
        dweight = wide_gradient(rows, x_rows) if n_inputs >= WIDE * n_outputs else rows.t() @ x_rows
        dbias = rows.sum(0) if needs_bias else None
        return dx, dweight, dbias


@torch.library.custom_op("dtmega::biased_product", mutates_args=())
def biased_product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute x W^T + b, [..., in] -> [..., out].

    The product is a custom operator, because Inductor uses oneDNN's operator only for constant weights.
    """
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@biased_product.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("dtmega::wide_gradient", mutates_args=())
def wide_gradient(rows: Tensor, x: Tensor) -> Tensor:
    """Compute rows^T x, [n, out] and [n, in] -> [out, in].

    The product is a custom operator, so that Inductor does not remove the contiguous copy of rows^T.
    """
    return rows.t().contiguous() @ x


@wide_gradient.register_fake
def _(rows: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(rows.shape[1], x.shape[1])
