"""Cross-entropy over a vocabulary that may be cut over ranks, fused with the head's product so no [N, V] logits live.

    loss = linear_cross_entropy(h, weight, labels)                         # one device
    loss = linear_cross_entropy(h, shard, labels, n_valid=V, group=tp)     # the same number from this rank's rows
    loss = linear_cross_entropy(h, weight, labels, bias=bias)              # of logits h @ weight.T + bias

The gradient is computed in the forward pass, where the logits are (Liger, arXiv:2410.10989): three matrix products and
one softmax for each chunk of tokens, nothing twice. In float16 much of it would be rounded to zero before any scale of
the loss could save it: so the scale comes in here, as `expected`, before the first rounding.

Over a group, a chunk's row maxima, sums and target logits travel in one packed all-gather (Megatron's
`mpu/cross_entropy.py`: three all-reduces, without smoothing or ignored labels).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100
# Tokens whose logits live at once: enough of them that adding to dW [V, D] costs little beside the products.
CHUNK_TOKENS = {"cpu": 2048, "cuda": 4096}
CHUNK_LOGITS = 2**24  # or as many tokens as keep to this number of logits, if the vocabulary is small
CACHED_LOGITS = 2**19  # on a CPU the softmax goes over a few rows at a time, which stay in its cache: twice as fast


class Columns(NamedTuple):
    """The columns of the logits that are here: from `start` on; `group` has `n_valid` together, and then padding."""

    start: int
    n_valid: int
    group: dist.ProcessGroup | None


def linear_cross_entropy(
    h: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    label_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    n_valid: int | None = None,
    vocab_start: int | None = None,
    group: dist.ProcessGroup | None = None,
    expected: float = 1.0,
    compiled: bool = False,
) -> Tensor:
    """Sum over tokens of cross_entropy(h @ weight.T + bias, labels) + z_loss log(Z)^2 (PaLM, arXiv:2204.02311).

    Args:
        h: [N, D], any floating dtype; products are made in it, softmax and sums in fp32. The same on all ranks. There
            may be no tokens: the sum is 0, and so is each gradient.
        weight: [V, D], same dtype; with `group`, this rank's rows of it, [V_local, D].
        labels: [N] int64, global numbers; -100 takes no part, any other outside [0, n_valid) is an index error.
        bias: [V], same dtype; cut like the weight, [V_local]. Its gradient is summed over tokens in fp32.
        label_weights: [N] fp32, of each token's loss in the sum; None: 1.
        label_smoothing: as in `F.cross_entropy`, over the n_valid columns of all ranks.
        softcap: logits are softcap * tanh((h @ weight.T + bias) / softcap) (Gemma 2, arXiv:2408.00118). A second
            buffer of a chunk's logits, for the derivative.
        n_valid: V without the padding rows at its end, which never enter the softmax. None: there are none.
        vocab_start: global number of the first row. None: the ranks tell each other how many rows they have.
        group: the ranks that hold the vocabulary. One all-gather a chunk, of 3 fp32 a token (4 with smoothing).
        expected: the derivative by this sum that backward will begin with, as float16's loss scale / count. Gradients
            are computed with it in fp32 before they are rounded; if another one comes, they are out by the quotient's
            rounding, no more.
        compiled: the softmax is two kernels of Inductor's, which are made once for all sizes, and on a GPU is never
            there in fp32.

    Returns:
        fp32 scalar, the same on all ranks. The gradients of weight and bias are final; that of h is this rank's part
        {U_group}, to be summed by what gave h to the whole group. Backward works once: it hands out its buffers.
    """
    columns = locate(weight.shape[0], vocab_start, n_valid, group, weight.device)
    n_tokens = h.shape[0]
    needs_dh, needs_dweight, needs_dbias = (
        x is not None and x.requires_grad and torch.is_grad_enabled() for x in (h, weight, bias)
    )
    # The chunk is a collective, so it follows from sizes in which the ranks agree.
    n_columns = -(-columns.n_valid // (1 if group is None else group.size()))
    chunk = max(CHUNK_TOKENS[h.device.type], CHUNK_LOGITS // n_columns)
    with torch.no_grad():
        loss = torch.zeros((), dtype=_wide(h.dtype), device=h.device)
        dh = torch.empty_like(h) if needs_dh else None
        # Without tokens zeros all the same: FSDP reduces the gradients that there are, so all ranks must have some.
        dweight = torch.zeros_like(weight) if needs_dweight and n_tokens == 0 else None
        dbias = torch.zeros_like(bias, dtype=_wide(h.dtype)) if bias is not None and needs_dbias else None
        buffer = h.new_empty(min(chunk, n_tokens), weight.shape[0])
        for start in range(0, n_tokens, chunk):
            rows = slice(start, min(start + chunk, n_tokens))
            logits = buffer[: rows.stop - start]
            if bias is None:
                torch.mm(h[rows], weight.t(), out=logits)
            else:
                torch.addmm(bias, h[rows], weight.t(), out=logits)
            tanh = None
            if softcap is not None:
                tanh = logits.div_(softcap).tanh_()
                logits = tanh * softcap
            dlogits = logits if needs_dh or needs_dweight or needs_dbias else None
            weights = None if label_weights is None else label_weights[rows]
            loss += token_losses(
                logits, labels[rows], columns, label_smoothing, z_loss, dlogits, expected, weights, compiled
            ).sum()
            if tanh is not None and dlogits is not None:
                torch.ops.aten.tanh_backward.grad_input(dlogits, tanh, grad_input=dlogits)  # times 1 - tanh^2
            if dh is not None:
                torch.mm(logits, weight, out=dh[rows])
            if needs_dweight:
                dweight = _add_product(dweight, logits.t(), h[rows], alone=n_tokens <= chunk)
            if dbias is not None:
                dbias += logits.sum(dim=0, dtype=dbias.dtype)
    # Each in a node of its own: zero-bubble schedules go backward to h and to parameters at different times.
    for x, dx in ((h, dh), (weight, dweight), (bias, dbias)):
        if x is not None and dx is not None:
            loss = loss + with_gradient(torch.zeros_like(loss), x, dx.to(x.dtype), expected)
    return loss


def token_losses(
    logits: Tensor,
    labels: Tensor,
    columns: Columns,
    label_smoothing: float,
    z_loss: float,
    gradient: Tensor | None,
    expected: float = 1.0,
    weights: Tensor | None = None,
    compiled: bool = False,
) -> Tensor:
    """Losses [N] in fp32 from logits [N, V_local]; their derivatives by the logits are written to `gradient`, if given.

    These are multiplied by `expected` before they are rounded to the dtype of `gradient`. Each loss is multiplied by
    its weight [N], if there are any.

    Logits of padding columns are overwritten, and `gradient` [N, V_local] may be the logits themselves. A rank may have
    no columns: it takes its part in the collective, which the others would wait for in vain.
    """
    start, n_valid, group = columns
    # On a CPU a few rows at a time, so that they stay in its cache from one pass to the next.
    n_rows = max(1, logits.shape[0] if logits.is_cuda else CACHED_LOGITS // max(1, logits.shape[1]))
    if group is None and logits.shape[0] > n_rows:
        parts = zip(*(_split(x, n_rows, logits.shape[0]) for x in (logits, labels, gradient, weights)), strict=True)
        return torch.cat(
            [
                token_losses(x, some, columns, label_smoothing, z_loss, dx, expected, each, compiled)
                for x, some, dx, each in parts
            ]
        )
    if logits.shape[1] == 0:
        logits = logits.new_empty(logits.shape[0], 1)  # one of padding
        gradient = None

    # The label's column, where this rank has it; 0 where another has it.
    n_here = max(0, min(logits.shape[1], n_valid - start))
    logits[:, n_here:] = torch.finfo(logits.dtype).min  # finite, so that a rank with nothing but padding makes no NaN
    valid = labels != IGNORED
    known = (labels >= 0) & (labels < n_valid)
    here = known & (labels >= start) & (labels < start + n_here)
    column = (labels - start).where(here, 0).masked_fill(valid & ~known, -1).unsqueeze(1)  # -1 fails in gather

    # This rank's part of each token's softmax. Where there is a group, other ranks' are wanted before the next pass.
    pieces = logits.split(n_rows)
    gradients = _split(gradient, n_rows, logits.shape[0])
    rows: list[Tensor] = []
    kept: list[Tensor | None] = []
    for x, dx, at in zip(pieces, gradients, column.split(n_rows), strict=True):
        row, p = _statistics(x, at, n_here, bool(label_smoothing), compiled)
        rows.append(row)
        if p is not None and dx is not None and len(pieces) > 1:
            p = dx.copy_(p)  # together they would be twice the logits
        kept.append(p if dx is not None else None)
    found = torch.cat(rows, dim=1)  # [5, N]
    p_at_label = found[4].unsqueeze(1)
    mine = found[: 4 if label_smoothing else 3].contiguous()
    mine[2].masked_fill_(~here, 0)
    ranks = _all_gather(mine, group)  # [ranks, 3 or 4, N]

    # The loss of each token over all ranks' columns.
    peaks = ranks[:, 0]
    peak = peaks.amax(dim=0)
    sums = ranks[:, 1] * (peaks - peak).exp()  # [ranks, N]; their total times exp(peak) is Z
    log_sum = sums.sum(dim=0).log()
    log_z = peak + log_sum
    # Differences of logits come first: log(Z) alone would round away what is left of two large ones.
    below_peak = peak - ranks[:, 2].sum(dim=0)
    losses = log_sum + (1 - label_smoothing) * below_peak + z_loss * log_z.square()
    if label_smoothing:
        losses += label_smoothing * (peak - ranks[:, 3].sum(dim=0) / n_valid)

    # Its derivative by this rank's columns, over their logits.
    if gradient is not None:
        share = sums[0 if group is None else group.rank()] / sums.sum(dim=0)
        factor = expected if weights is None else weights.unsqueeze(1) * expected
        scale = (share * (1 + 2 * z_loss * log_z)).where(valid, 0).unsqueeze(1) * factor
        one_hot = ((1 - label_smoothing) * here).unsqueeze(1) * factor
        smooth = (label_smoothing / n_valid * valid).unsqueeze(1) * factor
        at_label = (p_at_label * scale - one_hot).to(gradient.dtype)
        own_peak, own_sum = mine[0].unsqueeze(1), mine[1].unsqueeze(1)
        by_rows = (t.split(n_rows) for t in (gradient, column, own_peak, scale / own_sum, scale, at_label, smooth))
        for x, p, (dx, at, peak, of_exponential, of_p, d_label, every) in zip(
            pieces, kept, zip(*by_rows, strict=True), strict=True
        ):
            if p is None:
                # In one place: where two arguments are parts of one tensor, torch writes to the first call's (2.13).
                if dx.data_ptr() != x.data_ptr():
                    dx.copy_(x)
                _fused(_exponential_)(dx, peak, of_exponential)
            elif p.dtype == dx.dtype:
                torch.mul(p, of_p, out=dx)
            else:
                dx.copy_(p.mul_(of_p))
            dx.scatter_(1, at, d_label)
            if label_smoothing:
                dx[:, :n_here] -= every
    losses = losses.where(valid, 0)
    return losses if weights is None else losses * weights


def _statistics(x: Tensor, column: Tensor, n_here: int, smooths: bool, compiled: bool) -> tuple[Tensor, Tensor | None]:
    """Numbers of each row of logits [N, V], [5, N] in fp32; and its probabilities, unless `compiled`.

    They are the largest, the sum of exp(x - largest), the logit at `column` [N, 1], the sum of all (if `smooths`), and
    the probability at `column`.
    """
    wide = _wide(x.dtype)
    label = x.gather(1, column).squeeze(1).to(wide)
    every = x[:, :n_here].sum(dim=1, dtype=wide) if smooths else label
    if compiled:
        peak, total = _fused(_peak_and_sum)(x)
        return torch.stack([peak, total, label, every, (label - peak).exp() / total]), None
    p = torch.softmax(x, dim=1, dtype=wide)
    # Where the peak is, p = 1 / sum(exp(x - peak)).
    peak, total = x.amax(dim=1).to(wide), 1 / p.amax(dim=1)
    return torch.stack([peak, total, label, every, p.gather(1, column).squeeze(1)]), p


def _split(x: Tensor | None, n_rows: int, n_all: int) -> Sequence[Tensor | None]:
    return [None] * max(1, -(-n_all // n_rows)) if x is None else x.split(n_rows)


@functools.cache
def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def _peak_and_sum(x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [N, V] -> in fp32 the largest of each row, and the sum of exp(x - largest)."""
    wide = x.to(_wide(x.dtype))
    peak = wide.amax(dim=1, keepdim=True)
    return peak.squeeze(1), (wide - peak).exp().sum(dim=1)


def _exponential_(x: Tensor, peak: Tensor, times: Tensor) -> None:
    """times exp(x - peak), in place. x: [N, V], peak and times: [N, 1]."""
    x.copy_((x.to(_wide(x.dtype)) - peak).exp() * times)


def locate(
    n_local: int, vocab_start: int | None, n_valid: int | None, group: dist.ProcessGroup | None, device: torch.device
) -> Columns:
    """Find this rank's n_local columns among all. What is not given follows from the other ranks' sizes."""
    sizes, rank = [n_local], 0
    if group is not None and (vocab_start is None or n_valid is None):
        sizes, rank = _all_gather(torch.tensor(n_local, device=device), group).tolist(), group.rank()
    start = sum(sizes[:rank]) if vocab_start is None else vocab_start
    return Columns(start, sum(sizes) if n_valid is None else n_valid, group)


def with_gradient(value: Tensor, x: Tensor, gradient: Tensor, expected: float = 1.0) -> Tensor:
    """`value`, with `gradient` as `expected` times its derivative by x: value's dimensions, then x's.

    The buffer is used up by it.
    """
    return _KnownGradient.apply(value, x, gradient, expected)  # pyright: ignore[reportReturnType]


class _KnownGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, x: Tensor, gradient: Tensor, expected: float) -> Tensor:
        ctx.save_for_backward(gradient)
        ctx.expected = expected
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = ctx.saved_tensors
        (upstream,) = grad_outputs
        if ctx.expected != 1.0:
            # By a tensor of the same dtype, so that what was expected gives 1 to the bit and rounds nothing.
            upstream = upstream / upstream.new_full((), ctx.expected)
        if upstream.ndim:  # a scalar stays one: then a product with bf16 is made without a copy in fp32
            upstream = upstream[(..., *[None] * (gradient.ndim - upstream.ndim))]
        # In place: dW [V, D] is the step's largest buffer. A second backward finds it changed, and autograd raises.
        return None, gradient.mul_(upstream), None, None


def _all_gather(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[ranks, *x.shape]"""
    if group is None:
        return x.unsqueeze(0)
    ranks = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(ranks, x, group)
    return torch.stack(ranks)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, alone: bool) -> Tensor:
    """total + a @ b, in fp32 unless the product is `alone`: then it is already rounded no more than once."""
    if a.dtype == _wide(a.dtype) or alone:
        return torch.mm(a, b) if total is None else total.addmm_(a, b)
    product = torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.mm(a, b).float()
    return product if total is None else total.add_(product)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
