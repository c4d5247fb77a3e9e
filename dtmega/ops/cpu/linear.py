"""Linears in bfloat16 on a CPU with AMX, where a rank has them whole: two products that oneDNN has a faster form of.

A bias is added while the product is still in registers; torch fills the result with it first, and adds the product to
that. And of a matrix that is much wider than tall the gradient is made from a transposed copy of the result's gradient:
a product whose first factor is transposed runs at half the rate (torch 2.13). Where the matrix is not so wide, copying
costs what it saves.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDE = 2  # times as many input as output features


def multiply_on_amx(model: nn.Module) -> None:
    """Give the linears of a model that a rank has whole these products; in other dtypes they compute as before."""
    for module in model.modules():
        if type(module) is nn.Linear:
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
        of_x = (rows @ weight).view(x.shape) if needs_x else None
        n_outputs, n_inputs = weight.shape
        of_rows = x.flatten(0, -2)
        of_weight = wide_gradient(rows, of_rows) if n_inputs >= WIDE * n_outputs else rows.t() @ of_rows
        of_bias = rows.sum(0) if needs_bias else None
        return of_x, of_weight, of_bias


@torch.library.custom_op("dtmega::biased_product", mutates_args=())
def biased_product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x W^T + b, [..., in] -> [..., out]. An operator, for Inductor has the one below for constant weights only."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@biased_product.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


# By this name recompute knows it.
BIASED_PRODUCT = torch.ops.dtmega.biased_product.default


@torch.library.custom_op("dtmega::wide_gradient", mutates_args=())
def wide_gradient(rows: Tensor, x: Tensor) -> Tensor:
    """rows^T x, [n, out] and [n, in] -> [out, in]. An operator, so that Inductor keeps the copy."""
    return rows.t().contiguous() @ x


@wide_gradient.register_fake
def _(rows: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(rows.shape[1], x.shape[1])
