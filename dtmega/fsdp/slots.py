"""The places where autograd leaves a microbatch's gradients, for `exact.py`, which adds them up itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dtmega.ops.shards import local


class Slot:
    """A trained parameter of a stage, and the sum of its gradients in this step.

    Attributes:
        name: name in the whole model.
        parameter: the parameter that the optimizer updates.
        fsdp: FSDP2's record of the parameter; None without FSDP2.
        places: the further places of a shared parameter, whose gradients autograd must not add to the first one's.
        partial: whether each tp rank has a part of the gradient.
        total: the sum, int64 in the shape of the parameter's local part; None before the first microbatch.
    """

    def __init__(self, name: str, parameter: nn.Parameter, fsdp: Any, places: Sequence[Place], partial: bool) -> None:
        self.name, self.parameter, self.fsdp, self.places, self.partial = name, parameter, fsdp, places, partial
        self.total: Tensor | None = None

    def take(self) -> list[Tensor]:
        """Take this microbatch's gradients, one of each place: whole over the data ranks, this rank's part over tp."""
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
        """Shape of the gradients that `take` returns."""
        return local(self.parameter).shape if self.fsdp is None else self.fsdp._orig_size


class Place:
    """A further place of a shared parameter: in each forward, the module gets a leaf of its own with the same memory.

    Otherwise autograd would add the gradients of all places before they are rounded. Stages of a pipeline hold their
    places separately, so the sum on one process must round each gradient separately, too. A module that several layers
    call has a place for each call.
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
        # Under a pipeline, other microbatches may have passed the module since the forward of this one.
        assert leaf.grad is not None
        self._gradients.append(leaf.grad)
        leaf.grad = None

    def take(self) -> list[Tensor]:
        """Take the gradients of all calls in this microbatch."""
        gradients, self._gradients = self._gradients, []
        return gradients
