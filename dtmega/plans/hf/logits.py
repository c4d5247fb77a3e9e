"""Logits that nobody has computed yet: `transformers` hands them to `F.cross_entropy`, which needs only a rank's columns.

A model's own loss code casts them, flattens them and calls the cross-entropy. These follow, and then the fused kernel of
`dtmega.loss` runs, which never holds [N, V]. Anything else that is done to them computes the whole logits first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map_only

from dtmega.loss import IGNORED, linear_cross_entropy
from dtmega.plans import mappings
from dtmega.plans.loss import vocab_parallel_cross_entropy

_T: Any = torch.Tensor
# What answers from shape, dtype and device alone.
_ASKS = {
    *(getattr(_T, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "grad_fn")),
    *(getattr(_T, name).__get__ for name in ("is_cuda", "is_cpu", "is_meta", "is_leaf", "is_sparse", "is_quantized")),
    *(getattr(_T, name) for name in ("size", "dim", "numel", "is_floating_point", "is_complex", "__len__")),
}
_KEEPS = {_T.contiguous, _T.view, _T.reshape, _T.float, _T.to}


class VocabLogits(torch.Tensor):
    """h [..., D] times weight [V_local, D] transposed, plus bias: logits [..., V] over the ranks of `group`.

    Args:
        h: the same on all ranks; its gradient is this rank's part {U_tp}.
        size, start: V, and the global number of this rank's first row.

    Raises:
        RuntimeError: used after the weight was changed or freed; take what you need before the optimizer's step.
    """

    _parts: tuple[Tensor, Tensor, Tensor | None, int, int, ProcessGroup]
    _version_seen: int

    @staticmethod
    def __new__(
        cls, h: Tensor, weight: Tensor, bias: Tensor | None, size: int, start: int, group: ProcessGroup, dtype: Any = None
    ) -> VocabLogits:
        shape = torch.Size((*h.shape[:-1], size))
        new = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype or h.dtype, device=h.device)  # pyright: ignore[reportAttributeAccessIssue]
        new._parts = (h, weight, bias, size, start, group)
        new._version_seen = weight._version
        return new

    def whole(self) -> Tensor:
        """[..., V], a plain tensor, the same on all ranks, which must all call this."""
        h, weight, bias, size, _, group = self._checked()
        return mappings.whole(F.linear(h, weight, bias), group, -1, size).to(self.dtype)

    def cross_entropy(self, target: Tensor, reduction: str, label_smoothing: float) -> Tensor:
        """Of logits [N, V] and target [N]; -100 takes no part."""
        h, weight, bias, size, start, group = self._checked()
        terms: dict[str, Any] = {"label_smoothing": label_smoothing, "n_valid": size, "vocab_start": start, "group": group}
        if bias is None:
            total = linear_cross_entropy(h, weight, target, **terms)
        else:
            total = vocab_parallel_cross_entropy(F.linear(h, weight, bias), target, reduction="sum", **terms)
        return (total if reduction == "sum" else total / (target != IGNORED).sum()).to(self.dtype)

    def _checked(self) -> tuple[Tensor, Tensor, Tensor | None, int, int, ProcessGroup]:
        weight = self._parts[1]
        if weight.untyped_storage().size() == 0 or weight._version != self._version_seen:
            raise RuntimeError(
                "the logits of a forward with labels are computed when they are first used, and the head's weight has "
                "changed since: use them before the optimizer's step (before backward under FSDP), or "
                "parallelize_hf(..., loss_parallel=False)"
            )
        return self._parts

    def _with(self, h: Tensor, dtype: torch.dtype) -> VocabLogits:
        return VocabLogits(h, *self._checked()[1:], dtype=dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            return f"VocabLogits({list(self.shape)}, {self.dtype}, not computed)"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ASKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _KEEPS and isinstance(args[0], VocabLogits):
            kept = _kept(func, *args, **kwargs)
            if kept is not None:
                return kept
        if func is F.cross_entropy:
            loss = _loss(*args, **kwargs)
            if loss is not None:
                return loss
        args, kwargs = tree_map_only(VocabLogits, lambda x: x.whole(), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What comes past `__torch_function__`, from C++."""
        args, kwargs = tree_map_only(VocabLogits, lambda x: x.whole(), (args, kwargs or {}))
        return func(*args, **kwargs)


def _kept(func: Any, logits: VocabLogits, *args: Any, **kwargs: Any) -> VocabLogits | None:
    """The same logits cast or flattened; None for what only the whole ones can do."""
    h = logits._parts[0]
    if func is _T.contiguous:
        return logits
    if func is _T.float:
        return logits._with(h, torch.float32)
    if func is _T.to:
        (target,) = args if len(args) == 1 and not kwargs else (None,)
        if isinstance(target, torch.dtype):
            return logits._with(h, target)
        return logits if target is not None and target == logits.device else None
    shape = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
    if isinstance(shape, torch.dtype) or kwargs or shape[-1] != logits.shape[-1]:
        return None
    return logits._with(h.reshape(*shape[:-1], h.shape[-1]), logits.dtype)


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
