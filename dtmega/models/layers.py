"""Pieces that models share: keyed dropout, and the language-model head that owns the loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtmega import keyed

# Tokens whose logits live at once: few enough for a CPU's cache, enough on a GPU to hide the traffic of dW [V, D].
CHUNK_TOKENS = {"cpu": 256, "cuda": 4096}
CHUNK_LOGITS = 2**24  # or as many tokens as keep to this number of logits, if the vocabulary is small


class KeyedDropout(nn.Module):
    """Dropout whose mask is a function of (site key, sample id, global position, channel), never of a generator.

    Attributes:
        key: int32 scalar buffer, set from (seed, site name) by the model's `init_buffers`.
        position_offset: global position of the first row; a plan that cuts the sequence sets it.
    """

    key: Tensor

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.position_offset = 0
        self.register_buffer("key", torch.zeros((), dtype=torch.int32), persistent=False)

    def forward(self, x: Tensor, sample_ids: Tensor | None) -> Tensor:
        """x: [B, S, D]; sample_ids: [B] int64, which may be absent only where nothing is dropped."""
        if self.p == 0.0 or not self.training:
            return x
        assert sample_ids is not None
        places = torch.arange(x.shape[1], device=x.device, dtype=torch.int32) + self.position_offset
        channels = torch.arange(x.shape[2], device=x.device, dtype=torch.int32)
        rows = keyed.mix(keyed.mix(keyed.fold(sample_ids) ^ self.key).unsqueeze(1) ^ places)
        return torch.where(keyed.keep(self.p, rows, channels), x / (1 - self.p), 0.0)


class LMHead(nn.Module):
    """Logits, or the sum of token losses, from the last hidden state; bias-free as BLOOM's and GPT's."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, h: Tensor, labels: Tensor | None = None) -> Tensor:
        """h: [B, S, D]. Returns logits [B, S, V], or with labels [B, S] the fp32 scalar sum (-100 is ignored)."""
        if labels is None:
            return F.linear(h, self.weight)
        return linear_cross_entropy(h.flatten(0, 1), self.weight, labels.flatten())


def linear_cross_entropy(h: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Sum over tokens of cross_entropy(h @ weight.T, labels), without ever holding [N, V] logits.

    Token chunks; the gradient is computed in the forward pass, where the logits are (Liger, arXiv:2410.10989).

    Args:
        h: [N, D], any floating dtype; the products are made in it, softmax and the sum in fp32.
        weight: [V, D], same dtype.
        labels: [N] int64; -100 takes no part.

    Returns:
        fp32 scalar.
    """
    return _LinearCrossEntropy.apply(h, weight, labels, torch.is_grad_enabled())  # pyright: ignore[reportReturnType]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, labels: Tensor, with_gradient: bool) -> Tensor:
        n_tokens, vocab_size = h.shape[0], weight.shape[0]
        chunk = max(CHUNK_TOKENS[h.device.type], CHUNK_LOGITS // vocab_size)
        loss = torch.zeros((), dtype=torch.float32, device=h.device)
        dh = torch.empty_like(h) if with_gradient else None
        dweight = torch.zeros_like(weight, dtype=torch.float32) if with_gradient else None
        for start in range(0, n_tokens, chunk):
            rows = slice(start, min(start + chunk, n_tokens))
            valid = labels[rows] != -100
            target = labels[rows].where(valid, 0).unsqueeze(1)
            logp = torch.log_softmax(torch.mm(h[rows], weight.t()), dim=-1, dtype=torch.float32)
            loss -= logp.gather(1, target).squeeze(1).where(valid, 0.0).sum()
            if dh is not None and dweight is not None:
                dlogits = logp.exp_().scatter_add_(1, target, torch.full_like(target, -1, dtype=torch.float32))
                dlogits = dlogits.mul_(valid.unsqueeze(1)).to(h.dtype)
                torch.mm(dlogits, weight, out=dh[rows])
                _add_product(dweight, dlogits.t(), h[rows])
        if dh is not None and dweight is not None:
            ctx.save_for_backward(dh, dweight.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dh, dweight = ctx.saved_tensors
        # In place: these buffers are ours alone, and [V, D] is the largest of the step.
        return dh.mul_(grad_outputs[0]), dweight.mul_(grad_outputs[0]), None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b in fp32, whatever the dtype of a and b."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    elif a.is_cuda:
        total += torch.mm(a, b, out_dtype=torch.float32)
    else:
        total += torch.mm(a, b)
