"""Lazy logits for `transformers` models, computed only when an operation needs the values.

A model's own code scales, caps, casts and flattens the logits, and then calls `F.cross_entropy`. `VocabLogits` records
these operations and computes the cross-entropy with the fused kernel from `dtmega.ops.cross_entropy`, which never holds
the logits [N, V]. Any other operation computes the full logits first.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map_only

from dtmega.ops.cross_entropy import IGNORED, linear_cross_entropy
from dtmega.ops.vocab_loss import vocab_parallel_cross_entropy

_T: Any = torch.Tensor
# Functions that need only the logits' shape, dtype or device.
_METADATA = {
    *(getattr(_T, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "grad_fn")),
    *(getattr(_T, name).__get__ for name in ("is_cuda", "is_cpu", "is_meta", "is_leaf", "is_sparse", "is_quantized")),
    *(getattr(_T, name) for name in ("size", "dim", "numel", "is_floating_point", "is_complex", "__len__")),
}
# Functions that cast or reshape.
_CASTS_AND_VIEWS = {_T.contiguous, _T.view, _T.reshape, _T.float, _T.to}
# Functions recorded as `scale` or `softcap`: Cohere and Granite scale; Gemma divides, takes tanh and multiplies.
_MULTIPLIES, _DIVIDES, _TANH = {_T.mul, torch.mul}, {_T.div, torch.div}, {_T.tanh, torch.tanh}


class Parts(NamedTuple):
    """The tensors and numbers that define logits.

    With `z = scale * (h weight^T + bias)`, the logits are `softcap * tanh(z / softcap)`, or `z` without a softcap.

    Attributes:
        h: hidden state [..., D], the same on all ranks; its gradient is a partial sum over tp, {U_tp}.
        weight: this rank's rows of the head's weight, [V_local, D].
        bias: this rank's elements of the bias, [V_local]; None if there is no bias.
        size: number of columns in the full logits, V.
        start: global index of this rank's first row.
        group: ranks over which the rows are sharded; None if this rank has all rows.
        join: function that makes the full logits of this rank's columns; None if this rank has all rows.
        unchanged: function that returns True if the weight has not changed since the forward.
        scale: factor for the logits before the cap.
        softcap: bound on the logits; None if the logits are not capped.
    """

    h: Tensor
    weight: Tensor
    bias: Tensor | None
    size: int
    start: int
    group: ProcessGroup | None
    join: Callable[[Tensor], Tensor] | None
    unchanged: Callable[[], bool]
    scale: float = 1.0
    softcap: float | None = None

    def times(self, factor: float) -> Parts:
        """Return the `Parts` of these logits multiplied by `factor`."""
        if self.softcap is None:
            return self._replace(scale=self.scale * factor)
        # If the factor multiplies both scale and softcap, the tanh's argument `z / softcap` stays the same.
        return self._replace(scale=self.scale * factor, softcap=self.softcap * factor)

    def scaled(self) -> tuple[Tensor, Tensor | None]:
        """`h` and `bias` multiplied by the scale, so that `h weight^T + bias` gives the logits before the cap."""
        if self.scale == 1.0:
            return self.h, self.bias
        return self.h * self.scale, None if self.bias is None else self.bias * self.scale

    def columns(self) -> Tensor:
        """This rank's columns of the logits, [..., V_local]."""
        h, bias = self.scaled()
        logits = F.linear(h, self.weight, bias)
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


class VocabLogits(torch.Tensor):
    """Logits [..., V] that are sharded along V over a group's ranks and computed only when used.

    If an operation needs the values, all ranks must run the operation together. An operation that changes the logits in
    place first computes the full logits on every rank, and later operations see the changed values.

    Raises:
        RuntimeError: the logits are first used after the head's weight was changed (by the optimizer's step) or freed
            (by FSDP2).
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
        """The logits [..., V] as a plain tensor, the same on all ranks. All ranks must call this method together."""
        if self._changed is not None:
            return self._changed
        p = self._checked()
        logits = p.columns()
        return (logits if p.join is None else p.join(logits)).to(self.dtype)

    def cross_entropy(self, target: Tensor, reduction: str, label_smoothing: float) -> Tensor:
        """The cross-entropy of logits [N, V] and targets [N]. Targets of -100 are ignored.

        Args:
            target: token ids, int64 [N].
            reduction: kind of reduction over the tokens that are not ignored, "sum" or "mean".
            label_smoothing: argument of `F.cross_entropy`.
        """
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
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args and isinstance(args[0], VocabLogits) else None
        if first is not None and first._changed is None:
            record = _cast_or_view if func in _CASTS_AND_VIEWS else _scale_or_tanh
            recorded = record(func, *args, **kwargs)
            if recorded is not None:
                return recorded
            if func is F.cross_entropy and (loss := _loss(*args, **kwargs)) is not None:
                return loss
        if first is not None and _in_place(func):
            first._changed = first.whole()
        args, kwargs = tree_map_only(VocabLogits, lambda x: x.whole(), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute the full logits for calls from C++, which do not go through `__torch_function__`."""
        args, kwargs = tree_map_only(VocabLogits, lambda x: x.whole(), (args, kwargs or {}))
        return func(*args, **kwargs)


def _cast_or_view(func: Any, logits: VocabLogits, *args: Any, **kwargs: Any) -> VocabLogits | None:
    """The logits after a cast or a reshape that keeps the last dim; None for calls that need the full logits."""
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


def _scale_or_tanh(func: Any, logits: VocabLogits, *args: Any, **kwargs: Any) -> VocabLogits | None:
    """The logits multiplied or divided by a number, or the tanh of the logits; None for anything else."""
    parts = logits._parts
    if func in _TANH and not args and not kwargs and parts.softcap is None:
        return logits._with(softcap=1.0)
    if func in _MULTIPLIES | _DIVIDES and len(args) == 1 and not kwargs and type(args[0]) in (int, float):
        number = float(args[0])
        # For a factor of 0 or less, compute the full logits: multiplied by it, the softcap would be no bound any more.
        if number <= 0:
            return None
        factor = number if func in _MULTIPLIES else 1.0 / number
        return VocabLogits(parts.times(factor), logits.dtype) if factor > 0 else None
    return None


def _in_place(func: Any) -> bool:
    """True if a function changes its first argument in place, judging by the function's name."""
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
    """`F.cross_entropy`, computed from this rank's columns; None if the fused kernel does not support the arguments."""
    usual = weight is None and size_average is None and reduce is None and ignore_index == IGNORED
    if not (isinstance(logits, VocabLogits) and usual and logits.ndim == 2 and reduction in ("mean", "sum")):
        return None
    if target.is_floating_point() or target.shape != logits.shape[:1]:
        return None
    return logits.cross_entropy(target, reduction, label_smoothing)


class FusedHead:
    """The head of a model, an nn.Linear: [..., D] -> logits [..., V], or `VocabLogits` in a forward with labels.

    Attributes:
        fused: whether to return `VocabLogits` if there are labels; if False, every forward computes the logits.
        labelled: whether the current forward has labels; `watch_labels` sets this attribute.
        gathered_by_fsdp: whether FSDP2 gathers the weight for each forward.
        calls: number of forwards so far.
    """

    def __init__(self, fused: bool = True) -> None:
        self.fused, self.labelled = fused, False
        self.gathered_by_fsdp, self.calls = False, 0

    def fuse(self, module: Any) -> None:
        """Fuse head and loss on a rank that has the whole head, whose parameters stay unchanged.

        Raises:
            ValueError: the module's class has a forward of its own.
        """
        if type(module).forward is not nn.Linear.forward:
            raise ValueError(
                f"head and loss are computed together for a Linear: it would replace the forward of "
                f"{type(module).__name__}, which it does not know"
            )

        def forward(module: Any, x: Tensor) -> Tensor:
            return self.logits(module.weight, x, module.weight, module.bias)

        module.forward = types.MethodType(forward, module)

    def logits(
        self,
        parameter: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        start: int = 0,
        group: ProcessGroup | None = None,
        join: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """The logits of this forward.

        Args:
            parameter: the head's whole weight, [V, D].
            x, weight, bias, start, group, join: fields of `Parts`.
        """
        self.calls += 1
        version, call = parameter._version, self.calls

        def unchanged() -> bool:
            # In every forward, FSDP2 gathers the weight into one reused buffer without changing the tensor's version.
            # So after a later forward, the weight counts as changed.
            return parameter._version == version and (not self.gathered_by_fsdp or self.calls == call)

        logits = VocabLogits(Parts(x, weight, bias, parameter.shape[0], start, group, join, unchanged))
        return logits if self.fused and self.labelled else logits.whole()


def watch_labels(model: nn.Module, head: FusedHead) -> None:
    """Before each forward of `model`, record in the head whether the call has labels."""

    def note_labels(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        head.labelled = kwargs.get("labels") is not None

    model.register_forward_pre_hook(note_labels, with_kwargs=True)


def fuse_loss(stage: nn.Module, model: Any) -> None:
    """Compute head and loss together, for the trainer, on a rank that has the whole head.

    Args:
        stage: the module that the trainer calls, with or without labels.
        model: the `transformers` model in `stage`: all layers, or those of one pipeline stage.
    """
    module = model.get_output_embeddings()
    if isinstance(module, nn.Linear):
        head = FusedHead()
        head.fuse(module)
        watch_labels(stage, head)
