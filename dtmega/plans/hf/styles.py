"""The words for models we did not write: how a module of `transformers` is cut, its own forward kept where it can be.

Inside a block attention and feed-forward compute on this rank's heads and features, from an input that is entered once
for all projections that share it. Outside blocks every rank has the whole hidden state and computes the same. The
gradients of parameters are complete after each backward: where a replicated parameter saw only this rank's tokens or
heads, autograd sums them over tp, so that any loop of the user's is right.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from dtmega.plans import mappings, styles
from dtmega.plans.hf.dropout import RandomStream
from dtmega.plans.styles import as_function, distribute, group_of, local


class Stack:
    """A run of blocks: is its hidden state cut along S in the forward under way?

    It is where sequence parallelism is wanted and tp divides S; else that forward is plain tensor parallelism, with the
    same numbers: so an odd prompt works, and each token that `generate` adds.
    """

    def __init__(self, sequence_parallel: bool) -> None:
        self.sequence_parallel = sequence_parallel
        self.hidden_states_wanted = False
        self.cut = False
        self.random = RandomStream()

    def enter(self, x: Tensor, group: ProcessGroup) -> Tensor:
        return _as_batch(mappings.gather, x, group) if self.cut else mappings.copy(x, group)

    def leave(self, x: Tensor, group: ProcessGroup) -> Tensor:
        return _as_batch(mappings.scatter, x, group) if self.cut else mappings.add_up(x, group)

    def shared(self, parameter: Any, group: ProcessGroup) -> Any:
        """A replicated parameter that meets the tokens of this rank."""
        weight = local(parameter)
        return mappings.copy(weight, group) if self.cut and weight is not None else weight


def _as_batch(move: Callable[[Tensor, ProcessGroup], Tensor], x: Tensor, group: ProcessGroup) -> Tensor:
    """OPT flattens [B, S/tp, D] to rows before its feed-forward; any order of rows is good that comes back the same."""
    return move(x, group) if x.ndim > 2 else move(x.unsqueeze(0), group).squeeze(0)


def plain(stack: Stack | None = None) -> Stack:
    return stack or Stack(sequence_parallel=False)


class Word(styles.Style):
    """A style whose moves depend on the forward under way. It may replace the forward of the class `exact` only."""

    exact: type[nn.Module] = nn.Linear
    cost: tuple[str, str] = ("", "")  # of a pass over it: plain, and where the sequence is cut

    def __init__(self, stack: Stack | None = None) -> None:
        super().__init__(sequence_parallel=False)
        self.stack = plain(stack)
        self.enter, self.leave = self.stack.enter, self.stack.leave

    def check(self, module: nn.Module, tp: int) -> None:
        if type(module).forward is not self.exact.forward:
            raise ValueError(
                f"{type(self).__name__} would replace the forward of {type(module).__name__}, which it does not know"
            )
        super().check(module, tp)


class Column(Word, styles.Column):
    """nn.Linear cut by output features. `enters`: its input is not yet in the region of local features."""

    def __init__(self, stack: Stack | None = None, enters: bool = False) -> None:
        super().__init__(stack)
        if enters:
            self.cost = ("backward all-reduce", "all-gather, backward reduce-scatter")
        else:
            self.enter = as_it_is


class Row(Word, styles.Row):
    """nn.Linear cut by input features; the bias is added once, to the sum."""

    cost = ("all-reduce", "reduce-scatter, backward all-gather")

    def forward(self, module: Any, x: Tensor) -> Tensor:
        group = group_of(module)
        out = self.leave(F.linear(x, local(module.weight)), group)
        return out if module.bias is None else out + self.stack.shared(module.bias, group)


class GatheredColumn(Column):
    """`colwise_gather_output`: cut by output features, but every rank gets all of them."""

    cost = ("all-gather, backward all-reduce", "")

    def __init__(self, stack: Stack | None = None) -> None:
        super().__init__(stack, enters=True)
        self.cost = type(self).cost

    def check_size(self, what: str, size: int, tp: int) -> None:
        if size <= (tp - 1) * -(-size // tp):
            raise ValueError(f"tp={tp} leaves a rank without any of {size}: {what} ([mesh] tp)")

    def forward(self, module: Any, x: Tensor) -> Tensor:
        return mappings.whole(super().forward(module, x), group_of(module), -1, module.weight.shape[0])


class SplitRow(Row):
    """`rowwise_split_input`: every rank has the whole input and takes its part."""

    cost = ("all-reduce, backward all-gather", "")

    def forward(self, module: Any, x: Tensor) -> Tensor:
        return super().forward(module, mappings.part(x, group_of(module), -1))


class SharedColumn(Word):
    """nn.Linear for keys or values where tp is a multiple of their heads: each rank computes the one head it needs.

    The weight stays whole on every rank; the parts of its gradient are summed. `enters`: as for a `Column`.
    """

    placements: ClassVar[dict[str, Placement]] = {"weight": Replicate(), "bias": Replicate()}
    cost = ("backward all-reduce of the weight", "backward all-reduce of the weight")

    def __init__(self, kv_heads: int, stack: Stack | None = None, enters: bool = False) -> None:
        super().__init__(stack)
        self.kv_heads = kv_heads
        if not enters:
            self.enter = as_it_is

    def forward(self, module: Any, x: Tensor) -> Tensor:
        group = group_of(module)
        head = group.rank() * self.kv_heads // group.size()

        def mine(parameter: Any) -> Any:
            if parameter is None:
                return None
            return mappings.copy(local(parameter), group).unflatten(0, (self.kv_heads, -1))[head]

        return F.linear(self.enter(x, group), mine(module.weight), mine(module.bias))


class Whole(ParallelStyle):
    """A module that computes on every rank with all of its parameters, whatever it is.

    Args:
        stack: it stands in a block, where a rank may have S/tp of the tokens.
        of_heads: it sees only this rank's heads.
    """

    def __init__(self, stack: Stack | None = None, of_heads: bool = False) -> None:
        self.stack, self.of_heads = plain(stack), of_heads
        self._function = as_function(self.forward)
        each = "backward all-reduce of the weight"
        self.cost = (each if of_heads else "", each if of_heads or self.stack.sequence_parallel else "")

    def check(self, module: nn.Module, tp: int) -> None:
        """Anything goes."""

    def forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        group = next(iter(module.parameters(recurse=False))).device_mesh.get_group()  # pyright: ignore[reportAttributeAccessIssue]
        summed = self.of_heads or self.stack.cut

        def here(parameter: Any) -> Tensor:
            return mappings.copy(local(parameter), group) if summed else local(parameter)

        with computing_on(module, here):
            return type(module).forward(module, *args, **kwargs)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own = list(module.named_parameters(recurse=False))
        for name, parameter in own:
            module.register_parameter(name, distribute(parameter, device_mesh, Replicate()))
        if own:
            module.forward = types.MethodType(self._function, module)
        return module


class HeadColumns(Word):
    """nn.Embedding [buckets, H] of T5's relative positions, cut by heads."""

    exact = nn.Embedding
    placements: ClassVar[dict[str, Placement]] = {"weight": Shard(1)}

    def forward(self, module: Any, x: Tensor) -> Tensor:
        return F.embedding(x, local(module.weight))


@contextlib.contextmanager
def computing_on(module: nn.Module, here: Callable[[Any], Tensor]) -> Iterator[None]:
    """The module's own parameters are what `here` makes of them, for a forward that knows nothing of DTensors."""
    own = {name: p for name, p in module._parameters.items() if p is not None}
    module._parameters.update({name: here(p) for name, p in own.items()})  # pyright: ignore[reportArgumentType, reportCallIssue]
    try:
        yield
    finally:
        module._parameters.update(own)


def as_it_is(x: Tensor, group: ProcessGroup) -> Tensor:
    return x
