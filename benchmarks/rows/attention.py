"""Attention with ALiBi, forward and backward in bf16, beside the formula of transformers' BLOOM, run eagerly."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.rows.measure import FP32_LOSS, Row, check_tensors, cpu_ms, top_operators
from dtmega.ops.attention import attention
from dtmega.ops.attention_rule import alibi_slopes, attention_rule

N_TOKENS, N_HEADS, HEAD_DIM = 2048, 8, 64
# S -> the ratio to reach.
REACH = {256: 0.60, 512: 0.47, 1024: 0.24, 2048: 0.22}


def at(seq_len: int, quick: bool) -> list[Row]:
    shape = (N_TOKENS // seq_len, N_HEADS, seq_len, HEAD_DIM)
    torch.manual_seed(0)
    truth = [torch.randn(shape) for _ in range(4)]
    slopes = alibi_slopes(N_HEADS)
    places = torch.arange(seq_len).expand(shape[0], -1)

    rule = attention_rule(places, causal=True, slopes=slopes)  # the layers of a model share one

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, rule)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return bloom_of_transformers(q, k, v, slopes)

    equal = _equal(ours, theirs, truth)
    in_bf16 = [x.bfloat16() for x in truth]
    compiled = torch.compile(ours, dynamic=False)
    forms = {"HF": _both_ways(theirs, in_bf16), "eager": _both_ways(ours, in_bf16)}
    forms["compiled"] = _both_ways(compiled, in_bf16)
    ms = cpu_ms(forms, rounds=5 if quick else 11)
    rows = []
    for form in ("compiled", "eager"):
        name = f"attention, bf16, S {seq_len}, {form}"
        # A run that compiles nothing is not what the figure to reach is of.
        reach = REACH[seq_len] if form == "compiled" else None
        rows.append(Row(name, "HF eager", ms[form], ms["HF"], "CPU ms", reach, equal, top_operators(forms[form])))
    return rows


def bloom_of_transformers(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """`BloomAttention.forward` of transformers, between its two linears, from q, k, v [B, H, S, K]."""
    b, h, s, head_dim = q.shape
    alibi = (slopes[:, None] * torch.arange(s)).expand(b, h, s).reshape(b * h, 1, s).to(q.dtype)
    keys = k.reshape(b * h, s, head_dim).transpose(1, 2)
    scores = alibi.baddbmm(batch1=q.reshape(b * h, s, head_dim), batch2=keys, beta=1.0, alpha=head_dim**-0.5)
    mask = torch.full((s, s), torch.finfo(q.dtype).min, dtype=q.dtype).triu(1)
    scores = scores.view(b, h, s, s) + mask
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.bmm(probabilities.view(b * h, s, s), v.reshape(b * h, s, head_dim)).view(b, h, s, head_dim)


def _both_ways(form: Callable[..., Tensor], tensors: list[Tensor]) -> Callable[[], object]:
    *inputs, gradient = tensors
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    return lambda: torch.autograd.grad(form(*inputs), inputs, gradient)


def _equal(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], tensors: list[Tensor]) -> str:
    """Compare results in fp32; theirs adds slope * place, some hundreds, to scores of about 1, and rounds them so."""
    *inputs, _ = tensors
    worst = check_tensors(ours(*inputs), theirs(*inputs), 3 * FP32_LOSS)
    return f"fp32 results within {worst:.0e}"


BENCHMARKS = {f"s{seq_len}": functools.partial(at, seq_len) for seq_len in REACH}
