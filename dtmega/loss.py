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

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dtmega.head_gradient import WeightGradient
from dtmega.pages import on_huge_pages
from dtmega.softmax import CompiledPasses, Passes, wide

IGNORED = -100
# Tokens whose logits live at once: enough of them that adding to dW [V, D] costs little beside the products.
CHUNK_TOKENS = {"cpu": 1024, "cuda": 4096}
CHUNK_LOGITS = 2**24  # or as many tokens as keep to this number of logits, if the vocabulary is small


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
        loss = torch.zeros((), dtype=wide(h.dtype), device=h.device)
        dh = torch.empty_like(h) if needs_dh else None
        # Without tokens zeros all the same: FSDP reduces the gradients that there are, so all ranks must have some.
        dweight = torch.zeros_like(weight) if needs_dweight and n_tokens == 0 else None
        products = WeightGradient(n_tokens, chunk)
        dbias = torch.zeros_like(bias, dtype=wide(h.dtype)) if bias is not None and needs_dbias else None
        buffer = on_huge_pages(h.new_empty(min(chunk, n_tokens), weight.shape[0]))
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
                products.add(logits, h[rows])
            if dbias is not None:
                dbias += logits.sum(dim=0, dtype=dbias.dtype)
        logits = dlogits = tanh = buffer = None  # what comes now has room in their memory
        if needs_dweight and dweight is None:
            dweight = products.whole(weight.dtype)
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

    Columns of padding are not read, and have a gradient of 0. `gradient` [N, V_local] may be the logits themselves. A
    rank may have no columns: it takes its part in the collective, which the others would wait for in vain.
    """
    start, n_valid, group = columns
    n_tokens = logits.shape[0]
    n_here = max(0, min(logits.shape[1], n_valid - start))
    if gradient is not None:
        gradient[:, n_here:] = 0
        gradient = gradient[:, :n_here] if n_here else None
    # Without columns one that no label is in, finite, so that it makes no NaN.
    logits = logits[:, :n_here] if n_here else logits.new_full((n_tokens, 1), torch.finfo(logits.dtype).min)

    # The label's column, where this rank has it; 0 where another has it.
    labels = labels.unsqueeze(1)
    valid = labels != IGNORED
    known = (labels >= 0) & (labels < n_valid)
    here = known & (labels >= start) & (labels < start + n_here)
    column = (labels - start).where(here, 0).masked_fill(valid & ~known, -1)  # -1 fails in gather

    # All that follows is [N, 1] in fp32, and so that the sums of other ranks can be told from this one's, `own_`.
    dtype = wide(logits.dtype)
    own_label = logits.gather(1, column).to(dtype)
    own_peak, own_total = torch.empty_like(own_label), torch.empty_like(own_label)
    factor = valid.to(dtype) * expected
    if weights is not None:
        factor *= weights.unsqueeze(1)
    smooth = label_smoothing / n_valid * factor if label_smoothing else None
    sums = [own_peak, own_total, own_label * here]
    if label_smoothing:
        sums.append(logits[:, :n_here].sum(dim=1, keepdim=True, dtype=dtype))

    # Rows have their derivatives at once where no other rank is asked, while they are in the cache.
    passes = (CompiledPasses if compiled else Passes)(logits)
    for rows in passes.rows:
        peak, total = own_peak[rows], own_total[rows]
        passes.numbers(logits[rows], peak, total)
        if gradient is not None and group is None:
            slope = _slope(peak, total, factor[rows], z_loss)
            passes.derivatives(logits[rows], gradient[rows], peak, slope, _rows(smooth, rows), following=True)
    ranks = _all_gather(torch.cat(sums, dim=1), group).split(1, dim=2)  # 3 or 4 of [ranks, N, 1]
    peak = ranks[0].amax(dim=0)
    total = (ranks[1] * (ranks[0] - peak).exp()).sum(dim=0)  # over exp(peak) this is Z
    slope = _slope(peak, total, factor, z_loss)
    if gradient is not None and group is not None:
        for rows in passes.rows:
            passes.derivatives(
                logits[rows], gradient[rows], peak[rows], slope[rows], _rows(smooth, rows), following=False
            )
    if gradient is not None:
        at_label = (own_label - peak).exp() * slope - (1 - label_smoothing) * here * factor
        if smooth is not None:
            at_label -= smooth
        # On a CPU scatter_ would copy all of a gradient in bf16 to fp32 and back (torch 2.13).
        tokens = torch.arange(n_tokens, device=column.device)
        gradient[tokens, column.squeeze(1)] = at_label.squeeze(1).to(gradient.dtype)

    # Differences of logits come first: log(Z) alone would round away what is left of two large ones.
    log_total = total.log()
    losses = log_total + (1 - label_smoothing) * (peak - ranks[2].sum(dim=0)) + z_loss * (peak + log_total).square()
    if label_smoothing:
        losses += label_smoothing * (peak - ranks[3].sum(dim=0) / n_valid)
    losses = losses.where(valid, 0).squeeze(1)
    return losses if weights is None else losses * weights


def _slope(peak: Tensor, total: Tensor, factor: Tensor, z_loss: float) -> Tensor:
    """The derivative of a row's loss by exp(logit - peak), without what smoothing and the label take off."""
    slope = factor / total
    return slope * (1 + 2 * z_loss * (peak + total.log())) if z_loss else slope


def _rows(x: Tensor | None, rows: slice) -> Tensor | None:
    return None if x is None else x[rows]


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
        # In place: dW [V, D] is the step's largest buffer. A second backward finds it changed, and autograd raises; so
        # does a product of no rows, which is all that a factor of 1 needs, where the host can see it without waiting.
        is_one = upstream.ndim == 0 and upstream.device.type == "cpu" and bool(upstream == 1)
        (gradient[:0] if is_one else gradient).mul_(upstream)
        return None, gradient, None, None


def _all_gather(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[ranks, *x.shape]"""
    if group is None:
        return x.unsqueeze(0)
    ranks = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(ranks, x, group)
    return torch.stack(ranks)
