"""Cross-entropy fused with the head's matrix product, so that the logits [N, V] of all tokens never exist at once.

The vocabulary may be sharded over ranks:

    loss = linear_cross_entropy(h, weight, labels)                         # one device
    loss = linear_cross_entropy(h, shard, labels, n_valid=V, group=tp)     # the same loss from this rank's rows
    loss = linear_cross_entropy(h, weight, labels, bias=bias)              # logits are h @ weight.T + bias

The gradient is computed in the forward pass, while the logits are in memory (Liger, arXiv:2410.10989). Each chunk of
tokens takes three matrix products and one softmax, and nothing is computed twice. In float16, much of the gradient
would underflow to zero before backward could multiply it by the loss scale. The forward pass therefore receives the
scale, as the argument `expected`, and applies the scale before the first rounding.

With a group, one all-gather per chunk exchanges row maxima, sums and the labels' logits. (Megatron's
`mpu/cross_entropy.py` makes three all-reduces and has neither smoothing nor ignored labels.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dtmega.ops import host
from dtmega.ops.cpu.huge_pages import on_huge_pages
from dtmega.ops.head_gradient import WeightGradient
from dtmega.ops.softmax import Passes, slices, wide

IGNORED = -100
# Number of tokens in a chunk; only one chunk's logits exist at a time. Each chunk adds a product to dW [V, D]; with
# this number of tokens, the addition costs little compared with the product.
CHUNK_TOKENS = {"cpu": 1024, "cuda": 4096}
# With a small vocabulary, a chunk may exceed CHUNK_TOKENS, as long as it has at most this number of logits.
CHUNK_LOGITS = 2**24


class Columns(NamedTuple):
    """The columns of the logits that this rank holds.

    Attributes:
        start: global index of this rank's first column.
        n_valid: number of columns on all ranks of `group` together, without the padding at the end.
        group: process group that shares the vocabulary; None if this rank has the whole vocabulary.
    """

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
    passes: type[Passes] = Passes,
) -> Tensor:
    """The sum over tokens of cross_entropy(h @ weight.T + bias, labels) + z_loss log(Z)^2 (PaLM, arXiv:2204.02311).

    Args:
        h: hidden states, [N, D] in any floating dtype, equal on all ranks. Products use this dtype; softmax
            and sums use fp32. With N = 0 the loss and all gradients are 0.
        weight: weight of the head, [V, D], in the dtype of h; with `group`, only this rank's rows, [V_local, D].
        labels: token ids in the whole vocabulary, [N] int64. The loss ignores labels of -100; any other label
            outside [0, n_valid) raises an index error.
        bias: bias of the head, [V], in the dtype of h; with `group`, sharded like the weight, [V_local]. The gradient
            of the bias is summed over tokens in fp32.
        label_weights: weight of each token's loss in the sum, [N] fp32; None if all weights are 1.
        label_smoothing: amount of smoothing as in `F.cross_entropy`, over the n_valid columns of all ranks.
        z_loss: factor of log(Z)^2, where Z is the softmax's denominator.
        softcap: cap of the logits, which become softcap * tanh((h @ weight.T + bias) / softcap) (Gemma 2,
            arXiv:2408.00118); None for no cap. The derivative needs a second buffer for a chunk's logits.
        n_valid: number of vocabulary rows without the padding rows at the end, which never enter the softmax; None if
            there is no padding.
        vocab_start: global index of this rank's first row; None to let the ranks exchange their row counts.
        group: process group that shares the vocabulary; None if this rank has the whole vocabulary. With a group, each
            chunk takes one all-gather of 3 fp32 numbers per token (4 with smoothing).
        expected: gradient that backward will pass to this sum; in float16, loss scale / count. The gradients are
            multiplied by this factor in fp32, before they are rounded. If backward passes a different number, the
            gradients are rescaled and rounded once more.
        passes: class that computes the softmax: `Passes`, or Inductor's kernels (`compiled_softmax.CompiledPasses`).

    Returns:
        The loss as an fp32 scalar, equal on all ranks. The gradients of weight and bias are final. The gradient of h
        is this rank's part of a sum over the group ({U_group}); the backward of the operation that gave h to all ranks
        must sum these parts. Backward can run only once, because it returns its own buffers as gradients.
    """
    columns = locate(weight.shape[0], vocab_start, n_valid, group, weight.device)
    n_tokens = h.shape[0]
    # Every chunk needs a collective, so all ranks must use the same chunks of tokens. The chunk size is therefore
    # computed from numbers that are equal on all ranks, and not from V_local, which is smaller on the last rank.
    n_columns = -(-columns.n_valid // (1 if group is None else group.size()))
    chunk = max(CHUNK_TOKENS[h.device.type], CHUNK_LOGITS // n_columns)
    gradients = _Gradients(h, weight, bias, chunk)
    with torch.no_grad():
        loss = torch.zeros((), dtype=wide(h.dtype), device=h.device)
        buffer = on_huge_pages(h.new_empty(min(chunk, n_tokens), weight.shape[0]))
        for rows in slices(n_tokens, chunk):
            logits, tanh = _logits(h[rows], weight, bias, softcap, buffer[: rows.stop - rows.start])
            dlogits = logits if gradients.are_needed else None
            weights = None if label_weights is None else label_weights[rows]
            loss += token_losses(
                logits, labels[rows], columns, label_smoothing, z_loss, dlogits, expected, weights, passes
            ).sum()
            if dlogits is not None:
                if tanh is not None:
                    torch.ops.aten.tanh_backward.grad_input(dlogits, tanh, grad_input=dlogits)  # times 1 - tanh^2
                gradients.add(rows, dlogits, h, weight)
        # Free the logits first: the weight's gradient in its final dtype can then use the logits' memory.
        logits = dlogits = tanh = buffer = None
        dh, dweight, dbias = gradients.finish(weight.dtype)
    # h, weight and bias each get their own node in the graph, because zero-bubble schedules run backward for h and for
    # the parameters at different times.
    for x, dx in ((h, dh), (weight, dweight), (bias, dbias)):
        if x is not None and dx is not None:
            loss = loss + with_gradient(torch.zeros_like(loss), x, dx.to(x.dtype), expected)
    return loss


def _logits(
    h: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, out: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Compute a chunk's logits, and the tanh that the derivative of the cap needs (None without a cap).

    Both results have the shape [n, V_local].

    Args:
        h: hidden states of the chunk's tokens, [n, D].
        weight, bias, softcap: arguments of `linear_cross_entropy`.
        out: memory for h @ weight.T + bias, [n, V_local].
    """
    if bias is None:
        torch.mm(h, weight.t(), out=out)
    else:
        torch.addmm(bias, h, weight.t(), out=out)
    if softcap is None:
        return out, None
    tanh = out.div_(softcap).tanh_()
    return tanh * softcap, tanh


class _Gradients:
    """The gradients of h [N, D], weight [V_local, D] and bias [V_local], collected chunk by chunk.

    A gradient that is not needed stays None.

    Args:
        h, weight, bias: inputs of `linear_cross_entropy`.
        chunk: number of tokens in each chunk except the last chunk, which may be smaller.

    Attributes:
        are_needed: whether at least one of the three gradients is needed.
    """

    def __init__(self, h: Tensor, weight: Tensor, bias: Tensor | None, chunk: int) -> None:
        needs_dh, needs_dweight, needs_dbias = (
            x is not None and x.requires_grad and torch.is_grad_enabled() for x in (h, weight, bias)
        )
        n_tokens = h.shape[0]
        self.are_needed = needs_dh or needs_dweight or needs_dbias
        self._dh = torch.empty_like(h) if needs_dh else None
        # Without tokens the gradient is all zeros instead of None. FSDP reduces the gradients that exist, and all ranks
        # must reduce the same gradients.
        self._dweight = torch.zeros_like(weight) if needs_dweight and n_tokens == 0 else None
        self._products = WeightGradient(n_tokens, chunk) if needs_dweight and n_tokens else None
        # The sum is in fp32, because a bf16 sum over thousands of tokens would lose small terms.
        self._dbias = torch.zeros_like(bias, dtype=wide(h.dtype)) if bias is not None and needs_dbias else None

    def add(self, rows: slice, dlogits: Tensor, h: Tensor, weight: Tensor) -> None:
        """Add the contribution of the tokens `rows`, given the gradient of these tokens' logits, [n, V_local]."""
        if self._dh is not None:
            torch.mm(dlogits, weight, out=self._dh[rows])
        if self._products is not None:
            self._products.add(dlogits, h[rows])
        if self._dbias is not None:
            self._dbias += dlogits.sum(dim=0, dtype=self._dbias.dtype)

    def finish(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of h, of the weight (rounded to `dtype`) and of the bias (still in fp32)."""
        if self._products is not None:
            self._dweight = self._products.finish(dtype)
        return self._dh, self._dweight, self._dbias


def token_losses(
    logits: Tensor,
    labels: Tensor,
    columns: Columns,
    label_smoothing: float,
    z_loss: float,
    gradient: Tensor | None,
    expected: float = 1.0,
    weights: Tensor | None = None,
    passes: type[Passes] = Passes,
) -> Tensor:
    """The tokens' losses [N] in fp32, from logits [N, V_local].

    All ranks of the group call this function together, even a rank without columns.

    Args:
        logits: this rank's columns of the logits, [N, V_local].
        labels, label_smoothing, z_loss, passes: arguments of `linear_cross_entropy`.
        columns: this rank's columns as a range of all ranks' columns.
        gradient: memory for the derivative of each loss with respect to the token's logits, [N, V_local]; may be the
            same tensor as `logits`; None for no derivatives. Padding columns are never read and get the gradient 0.
        expected: number by which the derivatives are multiplied before they are rounded to the dtype of `gradient`.
        weights: factor of each loss, [N] fp32; None if all factors are 1.
    """
    start, n_valid, group = columns
    n_tokens = logits.shape[0]
    n_local = max(0, min(logits.shape[1], n_valid - start))
    if gradient is not None:
        gradient[:, n_local:] = 0
        gradient = gradient[:, :n_local] if n_local else None
    # A rank without columns uses a dummy column that no label refers to. The dummy logits are finite, because -inf
    # would become NaN.
    logits = logits[:, :n_local] if n_local else logits.new_full((n_tokens, 1), torch.finfo(logits.dtype).min)
    is_counted, is_local, column = _find_labels(labels, columns, n_local)

    # From here on, tensors have one fp32 number per row, [N, 1]. Names with `local_` denote numbers from this rank's
    # columns only. The labels' logits are read now, because the derivatives may overwrite the logits below.
    dtype = wide(logits.dtype)
    local_label = logits.gather(1, column).to(dtype)
    local_peak = torch.empty_like(local_label)
    local_total = torch.empty_like(local_label)
    factor = is_counted.to(dtype) * expected
    if weights is not None:
        factor *= weights.unsqueeze(1)
    smooth = label_smoothing / n_valid * factor if label_smoothing else None
    local_sums = [local_peak, local_total, local_label * is_local]
    if label_smoothing:
        local_sums.append(logits[:, :n_local].sum(dim=1, keepdim=True, dtype=dtype))

    # Without a group, the derivatives of a few rows are computed right after their softmax, while the rows are still in
    # the cache. With a group, the derivatives have to wait for the other ranks' maxima and sums.
    over_logits = passes(logits)
    for rows in host.each(over_logits.rows):
        peak, total = local_peak[rows], local_total[rows]
        over_logits.peak_and_total(logits[rows], peak, total)
        if gradient is not None and group is None:
            slope = _slope(peak, total, factor[rows], z_loss)
            over_logits.derivatives(logits[rows], gradient[rows], peak, slope, _rows(smooth, rows), reuse_scratch=True)
    sums = _all_gather(torch.cat(local_sums, dim=1), group).split(1, dim=2)  # 3 or 4 tensors [ranks, N, 1]
    # Each rank has summed exp(x - its own peak). Rescale each sum to the peak over all ranks, then add the sums.
    peak = sums[0].amax(dim=0)
    total = (sums[1] * (sums[0] - peak).exp()).sum(dim=0)  # Z / exp(peak)
    slope = _slope(peak, total, factor, z_loss)
    if gradient is not None and group is not None:
        for rows in host.each(over_logits.rows):
            over_logits.derivatives(
                logits[rows], gradient[rows], peak[rows], slope[rows], _rows(smooth, rows), reuse_scratch=False
            )
    if gradient is not None:
        target = (1 - label_smoothing) * is_local * factor
        _subtract_target(gradient, column, local_label, peak, slope, smooth, target)

    # The loss is log(Z) - label's logit, with log(Z) = peak + log(total). The label's logit is first subtracted from
    # the peak: both may be large, and their small difference would be lost in the rounding of log(Z).
    log_total = total.log()
    losses = log_total + (1 - label_smoothing) * (peak - sums[2].sum(dim=0)) + z_loss * (peak + log_total).square()
    if label_smoothing:
        losses += label_smoothing * (peak - sums[3].sum(dim=0) / n_valid)
    losses = losses.where(is_counted, 0).squeeze(1)
    return losses if weights is None else losses * weights


def _find_labels(labels: Tensor, columns: Columns, n_local: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find each label among this rank's `n_local` columns.

    Returns:
        Three tensors [N, 1]:

        - a mask of the tokens that take part in the loss;
        - a mask of the tokens whose label has its column on this rank;
        - the index of the label's column on this rank: 0 if the column is on a different rank, and -1 if the label is
          invalid (`gather` then fails).
    """
    start, n_valid, _ = columns
    labels = labels.unsqueeze(1)
    is_counted = labels != IGNORED
    is_valid = (labels >= 0) & (labels < n_valid)
    is_local = is_valid & (labels >= start) & (labels < start + n_local)
    column = (labels - start).where(is_local, 0).masked_fill(is_counted & ~is_valid, -1)
    return is_counted, is_local, column


def _subtract_target(
    gradient: Tensor,
    column: Tensor,
    local_label: Tensor,
    peak: Tensor,
    slope: Tensor,
    smooth: Tensor | None,
    target: Tensor,
) -> None:
    """Subtract `target` [N, 1] from the label's column in each row of `gradient`; a target of 0 changes nothing.

    The derivative in that column is computed again from the label's logit. The number in `gradient` is already rounded,
    so subtracting from that number would round twice.
    """
    derivative = (local_label - peak).exp() * slope - target
    if smooth is not None:
        derivative -= smooth
    # Assign by an index: on a CPU, scatter_ would copy a whole bf16 gradient to fp32 and back (torch 2.13).
    tokens = torch.arange(gradient.shape[0], device=column.device)
    gradient[tokens, column.squeeze(1)] = derivative.squeeze(1).to(gradient.dtype)


def _slope(peak: Tensor, total: Tensor, factor: Tensor, z_loss: float) -> Tensor:
    """The coefficient of exp(logit - peak) in the derivative of a row's loss.

    Smoothing and the label each subtract a constant from the product of this coefficient and exp(logit - peak).
    """
    slope = factor / total
    return slope * (1 + 2 * z_loss * (peak + total.log())) if z_loss else slope


def _rows(x: Tensor | None, rows: slice) -> Tensor | None:
    return None if x is None else x[rows]


def locate(
    n_local: int, vocab_start: int | None, n_valid: int | None, group: dist.ProcessGroup | None, device: torch.device
) -> Columns:
    """Find out which of all columns of the vocabulary are this rank's `n_local` columns.

    If `vocab_start` or `n_valid` is None, one all-gather of all ranks' sizes provides the missing number.
    """
    sizes, rank = [n_local], 0
    if group is not None and (vocab_start is None or n_valid is None):
        sizes, rank = _all_gather(torch.tensor(n_local, device=device), group).tolist(), group.rank()
    start = sum(sizes[:rank]) if vocab_start is None else vocab_start
    return Columns(start, sum(sizes) if n_valid is None else n_valid, group)


def with_gradient(value: Tensor, x: Tensor, gradient: Tensor, expected: float = 1.0) -> Tensor:
    """Return `value`, connected to x in autograd's graph by a derivative that is already known.

    Args:
        value: one or more numbers computed from x. The dims of `value` are the leading dims of x, and each number
            depends only on its own part of x.
        x: tensor from which `value` was computed.
        gradient: `expected` times the derivative, in the shape of x. Backward changes this tensor in place and
            returns it as the gradient of x.
        expected: gradient that backward will probably pass to `value`.
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
            # The divisor is a tensor in the dtype of `upstream`, so the quotient is exactly 1 for the expected
            # gradient, and the product below changes no bit.
            upstream = upstream / upstream.new_full((), ctx.expected)
        # A scalar stays a tensor without dims, because 0-dim tensors do not promote dtypes: a bf16 gradient is then
        # multiplied without an fp32 copy.
        if upstream.ndim:
            upstream = upstream[(..., *[None] * (gradient.ndim - upstream.ndim))]
        # Multiply in place, because dW [V, D] is the largest buffer of the step. Multiplying also marks the buffer as
        # changed, so that a second backward raises an error. If the factor is 1, multiplying an empty slice is enough
        # to mark it. Only a factor on the CPU is compared with 1: reading a factor from a GPU makes the host wait.
        is_one = upstream.ndim == 0 and upstream.device.type == "cpu" and bool(host.read(upstream == 1))
        (gradient[:0] if is_one else gradient).mul_(upstream)
        return None, gradient, None, None


def _all_gather(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The tensors x of all ranks in the group, [ranks, *x.shape]."""
    if group is None:
        return x.unsqueeze(0)
    ranks = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(ranks, x, group)
    return torch.stack(ranks)
