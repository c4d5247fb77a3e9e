"""The base class of styles: a module's parameters become DTensors, and forward computes on their local shards.

Between modules the hidden state is a plain tensor: [B, S/tp, D] with sequence parallelism (arXiv:2205.05198), or
[B, S, D] on every rank without sequence parallelism. Each parameter becomes a DTensor on the 1-D tp mesh, because
FSDP2, gradient clipping and checkpoints expect DTensors. A module's forward computes only on the local shard of each
DTensor, so no operation on the hot path goes through DTensor's dispatch. Under FSDP2, forward gets these DTensors after
FSDP2 has gathered its own shards.

If a replicated parameter is applied to only S/tp of the tokens, or only to this rank's heads, its gradient on each rank
is only one term of a sum over tp, written {U_tp}. The gradient stays partial through backward. A style lists parameters
with partial gradients in `partial_gradients`, and these gradients are all-reduced once per step
(`plans.sum_partial_gradients`; Megatron's `allreduce_layernorm_grads`).
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from dtmega import rooms
from dtmega.plans import mappings, products

ADAPTER = ("lora_a", "lora_b")  # parameters that a linear layer's adapter adds to the layer


class Stack:
    """A stack of blocks that defines the hidden state's layout between modules and how regions begin and end.

    In a region, each rank computes its own features (heads, channels) from an input [B, S, D] that all ranks share.

    Args:
        sequence_parallel: whether the hidden state is sharded along S between modules.

    Attributes:
        cut: whether the hidden state is sharded along S in the current forward. In transformers models, `cut` may be
            False even with `sequence_parallel`, for example if tp does not divide S.
        sums_in_backward: whether gradients of replicated parameters are all-reduced over tp in backward, instead of
            once per step.
    """

    sums_in_backward: ClassVar[bool] = False

    def __init__(self, sequence_parallel: bool) -> None:
        self.sequence_parallel = sequence_parallel
        self.cut = sequence_parallel

    def enter(self, x: Tensor, group: ProcessGroup) -> Tensor:
        """Convert the hidden state to the input of a region, [B, S, D]."""
        return mappings.gather(x, group) if self.cut else mappings.copy(x, group)

    def enter_products(self, x: Tensor, group: ProcessGroup, module: Any) -> Tensor:
        """Convert the hidden state to the input of a region, [B, S, D]. Backward gathers this input again.

        The caller must call `products.again` at the end of the region. After `keep_gathered`, the products save their
        input, and nothing is gathered again.
        """
        if not module.gathers_again:
            return self.enter(x, group)
        return products.enter(x, group, self.cut, module.has_one_product)

    def leave(self, x: Tensor, group: ProcessGroup) -> Tensor:
        """Reduce the ranks' outputs of a region, [B, S, D] {U_tp}, to the hidden state between modules."""
        return mappings.scatter(x, group) if self.cut else mappings.add_up(x, group)

    def shared(self, parameter: Any, group: ProcessGroup, of_heads: bool) -> Any:
        """The local tensor of a replicated parameter.

        If the sequence is sharded, the parameter is applied only to this rank's tokens, so its gradient is partial,
        {U_tp}. With `of_heads`, the gradient is always partial. A stack that sums gradients in backward overrides this
        method.
        """
        return local_part(parameter)


class Style(ParallelStyle):
    """A way to shard one kind of module: the parameters become DTensors, and the style replaces the module's forward.

    Args:
        stack: stack of blocks that contains the module; True for a new stack with sequence parallelism, False for a
            new stack without sequence parallelism.
        sizes: [model] key -> number that tp must divide.
    """

    placements: ClassVar[Mapping[str, Placement]] = {}
    cost: tuple[str, str] = ("", "")  # collectives of a module: (without sequence parallelism, with it)
    of_heads = False  # whether replicated parameters are applied only to this rank's heads
    enters = False  # whether the module forms a region of its own; its style then also does what `Enter` does
    inside = False  # whether the module's input is the input of a region: its own region, or an enclosing one
    output_dim = 0  # dim of a linear layer's weight that contains the output features

    def __init__(self, stack: Stack | bool = True, **sizes: int) -> None:
        self.stack = stack if isinstance(stack, Stack) else Stack(stack)
        self.sizes = sizes
        # All modules of a style share one function. With one function per module, torch.compile would compile each
        # block separately.
        self._function = as_function(self.forward)

    def known(self) -> tuple[type[nn.Module], ...]:
        """The module classes whose `forward` the style can replace."""
        return (nn.Linear,)

    def placement(self, name: str, tp: int) -> Placement | None:
        """The placement of a parameter over tp ranks; None if the style does not support a parameter with this name."""
        return self.placements.get(name)

    def partial_gradients(self, module: nn.Module, tp: int) -> set[str]:
        """The names of the parameters whose gradient on a rank covers only the rank's own tokens or heads."""
        if self.stack.sums_in_backward:
            return set()
        whole = {n for n, _ in module.named_parameters(recurse=False) if self.placed(n, tp) == Replicate()}
        if self.stack.cut or self.of_heads:
            return whole
        return whole & {"lora_a"} if self.placement("weight", tp) != Replicate() else set()

    def placed(self, name: str, tp: int) -> Placement | None:
        """The placement of a parameter of the module or its adapter; None if the style does not support the name."""
        if name in ADAPTER:
            return rooms.sharded_adapters().placement(name, self.placement("weight", tp), self.output_dim)
        return self.placement(name, tp)

    def forward(self, module: Any, x: Tensor) -> Tensor:
        raise NotImplementedError

    def matrix(self, module: Any) -> Tensor:
        """This rank's shard of a linear layer's weight, [out, in]."""
        return local_part(module.weight)

    def check(self, module: nn.Module, tp: int) -> None:
        """Check that the module can be divided over tp ranks.

        Raises:
            ValueError: tp does not divide a size, or the style cannot shard this kind of module.
        """
        kind, owner = type(self).__name__, type(module).__name__
        for key, size in self.sizes.items():
            if size % tp:
                raise ValueError(f"tp={tp} does not divide {key}={size} ([mesh] tp, [model] {key})")
        self.check_class(module)
        for name, parameter in module.named_parameters(recurse=False):
            placement, shape = self.placed(name, tp), list(parameter.shape)
            if placement is None:
                raise ValueError(f"{kind} is for modules with {list(self.placements)}, but {owner} has '{name}'")
            if isinstance(parameter, DTensor):
                raise ValueError(f"{kind} cannot cut '{name}' of {owner}: another style did ({parameter.placements})")
            if isinstance(placement, Shard):
                self.check_size(f"dim {placement.dim} of '{name}' {shape} of {owner}", shape[placement.dim], tp)

    def check_class(self, module: nn.Module) -> None:
        """Raise an error if the module's class has an unknown forward, which the style might replace incorrectly."""
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
            placement = self.placed(name, tp)
            assert placement is not None
            module.register_parameter(name, distribute(parameter, device_mesh, placement))
        module.forward = types.MethodType(self._function, module)
        if self.enters:
            module.gathers_again = True  # pyright: ignore[reportArgumentType]
            module.has_one_product = False  # pyright: ignore[reportArgumentType]
        return module


def has_adapter(module: Any) -> bool:
    """True if the linear layer has an adapter."""
    return hasattr(module, "lora_a")


def add_adapter(module: Any, out: Tensor, reduced: Tensor, b: Tensor) -> Tensor:
    """Add an adapter's result to the layer's output.

    Args:
        module: linear layer with the adapter.
        out: output of the layer, [..., out], or this rank's features of the output.
        reduced: product x A^T, [..., r].
        b: rows of B for the features in `out`.
    """
    return out + module.lora_scale * F.linear(reduced, b)


def distribute(parameter: nn.Parameter, tp: DeviceMesh, placement: Placement) -> nn.Parameter:
    """Convert a parameter that every rank has in full (or on meta) to a DTensor. The ranks do not communicate."""
    cut = distribute_tensor(parameter, tp, [placement], src_data_rank=None)
    return nn.Parameter(cut, requires_grad=parameter.requires_grad)


def as_function(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of a style in a plain function, which can be bound to a module.

    The method is already bound to the style. Dynamo in torch 2.11 cannot trace a call to a method that is bound
    twice, so binding the method itself to a module would cause a graph break in every block.
    """

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return method(module, *args, **kwargs)

    return forward


@contextlib.contextmanager
def computing_on(module: nn.Module, local: Callable[[Any], Tensor]) -> Iterator[None]:
    """Temporarily replace each of the module's parameters p with local(p), for a forward that cannot use DTensors."""
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    module._parameters.update({name: local(p) for name, p in parameters.items()})  # pyright: ignore[reportArgumentType, reportCallIssue]
    try:
        yield
    finally:
        module._parameters.update(parameters)


def local_part(parameter: Any) -> Any:
    """This rank's shard of a parameter.

    In backward, the gradient becomes a DTensor with the parameter's placement. The gradient of a replicated parameter
    is not all-reduced.
    """
    return None if parameter is None else parameter.to_local()
