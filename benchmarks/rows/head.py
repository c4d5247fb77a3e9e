"""The head's product with cross-entropy, forward and backward in bf16, beside its three matrix products alone."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.rows.measure import Row, check_losses, check_tensors, cpu_ms, top_operators
from dtmega.ops.cpu import huge_pages
from dtmega.ops.cross_entropy import linear_cross_entropy

HIDDEN = 1024
# V -> tokens, the ratio to reach.
SIZES = {8192: (2048, 1.30), 32768: (2048, 1.25), 250880: (512, 1.15)}


def at(vocab_size: int, quick: bool) -> list[Row]:
    n_tokens, reach = SIZES[vocab_size]
    huge_pages.keep_freed_memory()  # as `train.py` does; the products alone write to memory that is there
    torch.manual_seed(0)
    h, weight = torch.randn(n_tokens, HIDDEN), torch.randn(vocab_size, HIDDEN) * HIDDEN**-0.5
    labels = torch.randint(vocab_size, (n_tokens,))
    equal = _equal(h[:256], weight, labels[:256])
    h, weight = (x.bfloat16().requires_grad_() for x in (h, weight))

    def ours() -> object:
        loss = linear_cross_entropy(h, weight, labels, expected=1 / n_tokens)
        return torch.autograd.grad(loss, (h, weight), torch.full_like(loss, 1 / n_tokens))

    forms: dict[str, Callable[[], object]] = {"products": _products(h.detach(), weight.detach()), "ours": ours}
    ms = cpu_ms(forms, rounds=3 if quick else 7)
    name = f"head + loss, bf16, V {vocab_size:,}"
    return [Row(name, "its three products", ms["ours"], ms["products"], "CPU ms", reach, equal, top_operators(ours))]


def _products(h: Tensor, weight: Tensor) -> Callable[[], object]:
    """The least that a head costs: logits, and from them the gradients of both factors."""
    logits = h.new_empty(h.shape[0], weight.shape[0])
    dh, dweight = torch.empty_like(h), torch.empty_like(weight)

    def products() -> object:
        torch.mm(h, weight.t(), out=logits)
        torch.mm(logits, weight, out=dh)
        return torch.mm(logits.t(), h, out=dweight)

    return products


def _equal(h: Tensor, weight: Tensor, labels: Tensor) -> str:
    """Compare loss and gradients with torch's own cross-entropy of all logits, in fp32."""
    ours, theirs = ([x.detach().clone().requires_grad_() for x in (h, weight)] for _ in range(2))
    loss = linear_cross_entropy(*ours, labels)
    truth = F.cross_entropy(theirs[0] @ theirs[1].t(), labels, reduction="sum")
    loss.backward()
    truth.backward()
    for x, y in zip(ours, theirs, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        check_tensors(x.grad, y.grad, 1e-5)
    return f"fp32 {check_losses(loss.item(), truth.item())}"


BENCHMARKS = {f"v{vocab_size}": functools.partial(at, vocab_size) for vocab_size in SIZES}
