"""The form of all words of a plan: parameters become DTensors, and the module's forward computes on the local parts.

Between modules the hidden state is a plain tensor: [B, S/tp, D] with sequence parallelism (arXiv:2205.05198), else
[B, S, D] on every rank. Each parameter becomes a DTensor on the 1-D tp mesh, which is what FSDP2, gradient clipping
and checkpoints read. The module's forward takes the local part of it (FSDP2 hands it the same kind of DTensor, gathered
over FSDP2's own axes), so that DTensor dispatches no operation of the hot path.

The gradient of a replicated parameter that sees S/tp of the tokens, or this rank's heads, is this rank's part {U_tp}.
It stays so through backward; a style names such parameters in `partial_gradients`, to be summed once a step
(`plans.sum_partial_gradients`; Megatron's `allreduce_layernorm_grads`).
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from dtmega.plans import mappings, products


class Stack:
    """A run of blocks: how its hidden state lies between modules, enters a region of local features and leaves it.

    Args:
        sequence_parallel: it is cut along S.

    Attributes:
        cut: it is, in the forward under way.
        sums_in_backward: gradients of replicated parameters are summed there, not once a step.
    """

    sums_in_backward: ClassVar[bool] = False

    def __init__(self, sequence_parallel: bool) -> None:
        self.sequence_parallel = sequence_parallel
        self.cut = sequence_parallel

    def enter(self, x: Tensor, group: ProcessGroup) -> Tensor:
        """The input of a region, [B, S, D]."""
        return mappings.gather(x, group) if self.cut else mappings.copy(x, group)

    def enter_products(self, x: Tensor, group: ProcessGroup, module: Any) -> Tensor:
        """The input of a region, [B, S, D], for its products; `products.again` must follow.

        What is gathered no product keeps, unless the module is asked to (`keep_gathered`).
        """
        if not module.gathers_again:
            return self.enter(x, group)
        return products.enter(x, group, self.cut, module.alone)

    def leave(self, x: Tensor, group: ProcessGroup) -> Tensor:
        return mappings.scatter(x, group) if self.cut else mappings.add_up(x, group)

    def shared(self, parameter: Any, group: ProcessGroup, of_heads: bool) -> Any:
        """A replicated parameter, to meet this rank's tokens if the sequence is cut, and if `of_heads` in any case."""
        return local_part(parameter)


class Style(ParallelStyle):
    """Parameters as DTensors, and `forward` in place of the module's own.

    Args:
        stack: where the module stands, or whether sequence parallelism is wanted there.
        sizes: what tp must divide, by its key in [model].
    """

    placements: ClassVar[Mapping[str, Placement]] = {}
    cost: tuple[str, str] = ("", "")  # collectives: plain, and where the sequence is cut
    of_heads = False  # replicated parameters meet only this rank's heads
    enters = False  # takes its own input in
    inside = False  # computes on an input that was taken in, by itself or by an Enter around it

    def __init__(self, stack: Stack | bool = True, **sizes: int) -> None:
        self.stack = stack if isinstance(stack, Stack) else Stack(stack)
        self.sizes = sizes
        # One function for all modules of a style: with one for each, torch.compile would compile each block anew.
        self._function = as_function(self.forward)

    def known(self) -> tuple[type[nn.Module], ...]:
        """The classes whose forward is what the style's own computes."""
        return (nn.Linear,)

    def placement(self, name: str, tp: int) -> Placement | None:
        """The placement of a parameter over tp ranks; None: the style is not for modules that have it."""
        return self.placements.get(name)

    def partial_gradients(self, module: nn.Module, tp: int) -> set[str]:
        """Parameters whose gradient on each rank is that of its own tokens or heads."""
        if self.stack.sums_in_backward or not (self.stack.cut or self.of_heads):
            return set()
        return {n for n, _ in module.named_parameters(recurse=False) if self.placement(n, tp) == Replicate()}

    def forward(self, module: Any, x: Tensor) -> Tensor:
        raise NotImplementedError

    def matrix(self, module: Any) -> Tensor:
        """This rank's part of a linear's weight, [out, in]."""
        return local_part(module.weight)

    def check(self, module: nn.Module, tp: int) -> None:
        """Refuse, by a ValueError, a module that tp ranks cannot share or that the style is not for."""
        kind, owner = type(self).__name__, type(module).__name__
        for key, size in self.sizes.items():
            if size % tp:
                raise ValueError(f"tp={tp} does not divide {key}={size} ([mesh] tp, [model] {key})")
        self.check_class(module)
        for name, parameter in module.named_parameters(recurse=False):
            placement, shape = self.placement(name, tp), list(parameter.shape)
            if placement is None:
                raise ValueError(f"{kind} is for modules with {list(self.placements)}, but {owner} has '{name}'")
            if isinstance(parameter, DTensor):
                raise ValueError(f"{kind} cannot cut '{name}' of {owner}: another style did ({parameter.placements})")
            if isinstance(placement, Shard):
                self.check_size(f"dim {placement.dim} of '{name}' {shape} of {owner}", shape[placement.dim], tp)

    def check_class(self, module: nn.Module) -> None:
        """A style may replace a forward that it knows: a class that computes something else would come out wrong."""
        if all(type(module).forward is not known.forward for known in self.known()):
            names = ", ".join(known.__name__ for known in self.known())
            raise ValueError(
                f"{type(self).__name__} is for {names}: it would replace the forward of {type(module).__name__}, which "
                f"it does not know"
            )

    def check_size(self, what: str, size: int, tp: int) -> None:
        if size % tp:
            raise ValueError(f"tp={tp} does not divide {size}: {what} ([mesh] tp)")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        tp = device_mesh.size()
        self.check(module, tp)
        self.group = device_mesh.get_group()
        for name, parameter in list(module.named_parameters(recurse=False)):
            placement = self.placement(name, tp)
            assert placement is not None
            module.register_parameter(name, distribute(parameter, device_mesh, placement))
        module.forward = types.MethodType(self._function, module)
        if self.enters:
            module.gathers_again = True  # pyright: ignore[reportArgumentType]
            module.alone = False  # pyright: ignore[reportArgumentType]
        return module


def distribute(parameter: nn.Parameter, tp: DeviceMesh, placement: Placement) -> nn.Parameter:
    """The DTensor of a parameter that every rank holds whole, or of one on meta; nothing is communicated."""
    cut = distribute_tensor(parameter, tp, [placement], src_data_rank=None)
    return nn.Parameter(cut, requires_grad=parameter.requires_grad)


def as_function(method: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function that calls a method of a style, to be bound to a module.

    The method itself is bound already, to the style. Bound once more to a module it is a call that Dynamo of torch 2.11
    does not follow: a graph break in every block.
    """

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return method(module, *args, **kwargs)

    return forward


@contextlib.contextmanager
def computing_on(module: nn.Module, here: Callable[[Any], Tensor]) -> Iterator[None]:
    """Put what `here` makes of the module's parameters in their place, for a forward that knows no DTensors."""
    own = {name: p for name, p in module._parameters.items() if p is not None}
    module._parameters.update({name: here(p) for name, p in own.items()})  # pyright: ignore[reportArgumentType, reportCallIssue]
    try:
        yield
    finally:
        module._parameters.update(own)


def local_part(parameter: Any) -> Any:
    """The part of a parameter on this rank.

    The gradient comes back with the parameter's placement, and for a replicated one unsummed.
    """
    return None if parameter is None else parameter.to_local()
