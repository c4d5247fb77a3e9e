"""The objects that hold each parameter's gradients of a microbatch until `exact.py` takes and adds the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dtmega.ops.shards import local


class Slot:
    """A trained parameter of a stage, and the integer sum of its gradients in this step.

    Attributes:
        name: name of the parameter in the whole model.
        parameter: parameter that the optimizer updates.
        fsdp: FSDP2's `FSDPParam` for the parameter; None without FSDP2.
        places: further uses of a shared parameter (see `Place`). Autograd must keep the gradients of these uses
            separate from the gradient of the first use.
        partial: whether the gradient on each tp rank is a partial sum.
        total: sum so far, int64 in the shape of this rank's shard; None before the first microbatch.
    """

    def __init__(self, name: str, parameter: nn.Parameter, fsdp: Any, places: Sequence[Place], partial: bool) -> None:
        self.name, self.parameter, self.fsdp, self.places, self.partial = name, parameter, fsdp, places, partial
        self.total: Tensor | None = None

    def take(self) -> list[Tensor]:
        """Remove and return the microbatch's gradients, one per use of the parameter.

        The gradients may be sharded over tp, but not by FSDP2.
        """
        taken: list[Tensor | None] = []
        for place in self.places:
            taken += place.take()
        if self.fsdp is None:
            taken.append(self.parameter.grad)
            self.parameter.grad = None
        elif self.fsdp.unsharded_accumulated_grad is not None:
            taken.append(self.fsdp.unsharded_accumulated_grad)
            self.fsdp.unsharded_accumulated_grad = None
        elif hasattr(self.fsdp, "_unsharded_param"):
            # Unlike `unsharded_param`, this attribute may be read after the weights are freed.
            taken.append(self.fsdp._unsharded_param.grad)
            self.fsdp._unsharded_param.grad = None
        return [local(gradient) for gradient in taken if gradient is not None]

    @property
    def whole_shape(self) -> torch.Size:
        """The shape of the gradients that `take` returns."""
        return local(self.parameter).shape if self.fsdp is None else self.fsdp._orig_size


class Place:
    """A further use of a shared parameter, by a module of its own or by several layers that call one module.

    In each forward, the module gets its own leaf tensor, which shares the parameter's memory. Without separate leaves,
    autograd would add the gradients of all uses before rounding. The stages of a pipeline round the gradient of each
    use separately, so a single process must do the same. If several layers call the module, each call gets a leaf.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._name = name
        self._shared: nn.Parameter | None = None
        self._gradients: list[Tensor] = []
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, _: Any) -> None:
        if torch.is_grad_enabled():
            self._shared = module._parameters[self._name]
            assert self._shared is not None
            leaf = nn.Parameter(self._shared.detach(), requires_grad=self._shared.requires_grad)
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(self._keep)
            module._parameters[self._name] = leaf

    def _leave(self, module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        if self._shared is not None:
            module._parameters[self._name] = self._shared
            self._shared = None

    def _keep(self, leaf: Tensor) -> None:
        # In a pipeline, the module may run the forward of further microbatches before this leaf's backward.
        assert leaf.grad is not None
        self._gradients.append(leaf.grad)
        leaf.grad = None

    def take(self) -> list[Tensor]:
        """Remove and return the gradients of all calls in this microbatch."""
        gradients, self._gradients = self._gradients, []
        return gradients
