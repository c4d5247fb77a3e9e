"""Logits that nobody has computed yet: `transformers` hands them to `F.cross_entropy`, which needs no whole ones.

A model's own code scales and caps them, casts and flattens them, and calls the cross-entropy. These follow, and then
the fused kernel of `dtmega.ops.cross_entropy` runs, which never holds [N, V]. Anything else that is done to them
computes the whole logits first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map_only

from dtmega.ops.cross_entropy import IGNORED, linear_cross_entropy
from dtmega.plans import mappings
from dtmega.plans.loss import vocab_parallel_cross_entropy
from dtmega.plans.products import product

_T: Any = torch.Tensor
# What answers from shape, dtype and device alone.
_ASKS = {
    *(getattr(_T, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "grad_fn")),
    *(getattr(_T, name).__get__ for name in ("is_cuda", "is_cpu", "is_meta", "is_leaf", "is_sparse", "is_quantized")),
    *(getattr(_T, name) for name in ("size", "dim", "numel", "is_floating_point", "is_complex", "__len__")),
}
_KEEPS = {_T.contiguous, _T.view, _T.reshape, _T.float, _T.to}
# With a number: Cohere, Granite, and both sides of the tanh of Gemma.
_MULTIPLIES, _DIVIDES, _TANH = {_T.mul, torch.mul}, {_T.div, torch.div}, {_T.tanh, torch.tanh}


class Parts(NamedTuple):
    """The tensors and numbers that logits are made of.

    Args:
        h: [..., D], the same on all ranks; its gradient is this rank's part {U_tp}.
        weight, bias: this rank's rows, [V_local, D] and [V_local].
        size, start: V, and the global number of this rank's first row.
        group: the ranks that have the others; None: all are here.
        unchanged: tells whether the weight still has the values of the forward.
        scale: what the product of h and weight, with the bias, is multiplied by.
        softcap: what is capped then, to softcap * tanh(it / softcap); None: nothing.
    """

    h: Tensor
    weight: Tensor
    bias: Tensor | None
    size: int
    start: int
    group: ProcessGroup | None
    unchanged: Callable[[], bool]
    scale: float = 1.0
    softcap: float | None = None

    def times(self, factor: float) -> Parts:
        if self.softcap is None:
            return self._replace(scale=self.scale * factor)
        # The same tanh of the same product, with another factor before it.
        return self._replace(scale=self.scale * factor, softcap=self.softcap * factor)

    def scaled(self) -> tuple[Tensor, Tensor | None]:
        """h and bias that give logits which only the cap is missing from."""
        if self.scale == 1.0:
            return self.h, self.bias
        return self.h * self.scale, None if self.bias is None else self.bias * self.scale

    def columns(self) -> Tensor:
        """The logits [..., V_local] of this rank."""
        h, bias = self.scaled()
        logits = product(h, self.weight, bias)
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


class VocabLogits(torch.Tensor):
    """h times weight transposed, plus bias: logits [..., V] over the ranks of a group, when somebody wants them.

    Changed in place they are what that made of them, on every rank.

    Raises:
        RuntimeError: used after the weight was changed or freed; take what you need before the optimizer's step.
    """

    _parts: Parts
    _changed: Tensor | None

    @staticmethod
    def __new__(cls, parts: Parts, dtype: torch.dtype | None = None) -> VocabLogits:
        shape = torch.Size((*parts.h.shape[:-1], parts.size))
        new = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype or parts.h.dtype, device=parts.h.device)  # pyright: ignore[reportAttributeAccessIssue]
        new._parts, new._changed = parts, None
        return new

    def whole(self) -> Tensor:
        """[..., V], a plain tensor, the same on all ranks, which must all call this."""
        if self._changed is not None:
            return self._changed
        p = self._checked()
        logits = p.columns()
        return (logits if p.group is None else mappings.join(logits, p.group, -1, p.size)).to(self.dtype)

    def cross_entropy(self, target: Tensor, reduction: str, label_smoothing: float) -> Tensor:
        """The cross-entropy of logits [N, V] and target [N]; -100 takes no part."""
        p = self._checked()
        terms: dict[str, Any] = {"label_smoothing": label_smoothing, "n_valid": p.size, "vocab_start": p.start}
        if p.bias is None:
            h, _ = p.scaled()
            total = linear_cross_entropy(h, p.weight, target, softcap=p.softcap, group=p.group, **terms)
        else:
            total = vocab_parallel_cross_entropy(p.columns(), target, p.group, reduction="sum", **terms)
        return (total if reduction == "sum" else total / (target != IGNORED).sum()).to(self.dtype)

    def _checked(self) -> Parts:
        if self._parts.weight.untyped_storage().size() == 0 or not self._parts.unchanged():
            raise RuntimeError(
                "the logits of a forward with labels are computed when they are first used, and the head's weight has "
                "changed since: use them before the optimizer's step (before backward under FSDP), or "
                "parallelize_hf(..., loss_parallel=False)"
            )
        return self._parts

    def _with(self, dtype: torch.dtype | None = None, **parts: Any) -> VocabLogits:
        return VocabLogits(self._parts._replace(**parts), dtype or self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            return f"VocabLogits({list(self.shape)}, {self.dtype}, not computed)"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ASKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args and isinstance(args[0], VocabLogits) else None
        if first is not None and first._changed is None:
            kept = _kept(func, *args, **kwargs) if func in _KEEPS else _curved(func, *args, **kwargs)
            if kept is not None:
                return kept
            if func is F.cross_entropy and (loss := _loss(*args, **kwargs)) is not None:
                return loss
        if first is not None and _in_place(func):
            first._changed = first.whole()
        args, kwargs = tree_map_only(VocabLogits, lambda x: x.whole(), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute the whole logits for calls that come past `__torch_function__`, from C++."""
        args, kwargs = tree_map_only(VocabLogits, lambda x: x.whole(), (args, kwargs or {}))
        return func(*args, **kwargs)


def _kept(func: Any, logits: VocabLogits, *args: Any, **kwargs: Any) -> VocabLogits | None:
    """The same logits cast or flattened; None for what only the whole ones can do."""
    h = logits._parts.h
    if func is _T.contiguous:
        return logits
    if func is _T.float:
        return logits._with(torch.float32)
    if func is _T.to:
        (target,) = args if len(args) == 1 and not kwargs else (None,)
        if isinstance(target, torch.dtype):
            return logits._with(target)
        return logits if target is not None and target == logits.device else None
    shape = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
    if isinstance(shape, torch.dtype) or kwargs or shape[-1] != logits.shape[-1]:
        return None
    return logits._with(h=h.reshape(*shape[:-1], h.shape[-1]))


def _curved(func: Any, logits: VocabLogits, *args: Any, **kwargs: Any) -> VocabLogits | None:
    """The same logits times a number, or their tanh; None for anything else."""
    parts = logits._parts
    if func in _TANH and not args and not kwargs and parts.softcap is None:
        return logits._with(softcap=1.0)
    if func in _MULTIPLIES | _DIVIDES and len(args) == 1 and not kwargs and type(args[0]) in (int, float):
        factor = float(args[0]) if func in _MULTIPLIES else 1.0 / args[0] if args[0] else 0.0
        # A factor of 0 or below leaves nothing to cap: whoever means it gets the whole logits.
        return VocabLogits(parts.times(factor), logits.dtype) if factor > 0 else None
    return None


def _in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _loss(
    logits: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = IGNORED,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """The loss from this rank's columns; None where the kernel has no such loss."""
    usual = weight is None and size_average is None and reduce is None and ignore_index == IGNORED
    if not (isinstance(logits, VocabLogits) and usual and logits.ndim == 2 and reduction in ("mean", "sum")):
        return None
    if target.is_floating_point() or target.shape != logits.shape[:1]:
        return None
    return logits.cross_entropy(target, reduction, label_smoothing)
