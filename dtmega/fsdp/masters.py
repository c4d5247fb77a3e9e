"""Mixed precision for a model that one rank holds as a whole: fp32 parameters, and copies in the compute dtype.

FSDP2 also offers mixed precision. But even if there is nothing to gather, FSDP2 copies weights twice and moves
gradients through two flat buffers (torch 2.13). Here, each weight and gradient is cast only once. The results are
bit-identical to FSDP2's results: each microbatch's gradient is rounded to the dtype of the copies and then accumulated
in fp32. With several ranks, `replicas.py` all-reduces the fp32 gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Masters:
    """A model's fp32 parameters, for the optimizer and checkpoints, and their copies, for forward and backward.

    From the model's forward until `release`, the copies replace the parameters in the modules. Between steps the copies
    take no memory. As soon as backward has computed a copy's gradient, this gradient is added to the parameter's
    gradient and freed.

    Args:
        model: model whose parameters get copies; the model may still be on the meta device.
        dtype: dtype of the copies.

    Attributes:
        copies: the copies in the compute dtype, which take no memory between steps; [] before the first forward.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._last = True
        self._dtype = dtype
        self._slots: list[_Slot] = []
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        self._computing = False
        model.register_forward_pre_hook(self._compute)

    def _compute(self, model: nn.Module, _: Any) -> None:
        if self._computing:
            return
        if not self._slots:
            for module in model.modules():
                for name, parameter in module.named_parameters(recurse=False):
                    # A frozen parameter that is kept in the compute dtype is its own copy.
                    if parameter.dtype == self._dtype:
                        continue
                    self._slots.append(_Slot(module, name, parameter))
            # A tied parameter has several slots but one copy.
            self._copies = {slot.master: self._copy(slot.master) for slot in self._slots}
        with torch.no_grad():
            for master, copy in self._copies.items():
                _allocate(copy)
                copy.copy_(master)
        for slot in self._slots:
            slot.module._parameters[slot.name] = self._copies[slot.master]
        self._computing = True

    def _copy(self, master: nn.Parameter) -> nn.Parameter:
        copy = nn.Parameter(torch.empty_like(master, dtype=self._dtype), requires_grad=master.requires_grad)
        if not master.requires_grad:
            return copy

        def add_up(_: Tensor) -> None:
            gradient = copy.grad
            copy.grad = None
            assert gradient is not None
            if master.grad is None:
                # empty_like gives the gradient the parameter's strides, which the optimizer's kernel expects.
                master.grad = torch.empty_like(master).copy_(gradient)
            else:
                master.grad += gradient
            if self._last:
                _free(copy)
            # Backward runs only the copy's hooks. So run the parameter's hooks (such as the hook of `Replicas`) here.
            for hook in (master._post_accumulate_grad_hooks or {}).values():  # pyright: ignore
                hook(master)

        copy.register_post_accumulate_grad_hook(add_up)
        return copy

    @property
    def copies(self) -> list[nn.Parameter]:
        return [*self._copies.values()]

    def expect(self, last: bool, reduces: bool) -> None:
        """Prepare the next backward. A step's last backward frees each copy together with the copy's gradient."""
        self._last = last

    def release(self) -> None:
        """Put the parameters back into the modules, after a step or after forwards without a backward."""
        if not self._computing:
            return
        for slot in self._slots:
            slot.module._parameters[slot.name] = slot.master
        for copy in self._copies.values():
            _free(copy)
        self._computing = False


class _Slot(NamedTuple):
    """A module attribute that holds a parameter.

    Attributes:
        module: module with the attribute.
        name: name of the attribute.
        master: fp32 parameter.
    """

    module: nn.Module
    name: str
    master: nn.Parameter


def _allocate(copy: Tensor) -> None:
    copy.untyped_storage().resize_(copy.numel() * copy.element_size())


def _free(copy: Tensor) -> None:
    copy.untyped_storage().resize_(0)
