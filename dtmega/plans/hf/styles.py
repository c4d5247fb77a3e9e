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
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dtmega.plans import mappings, styles
from dtmega.plans.hf.logits import Parts, VocabLogits
from dtmega.plans.hf.dropout import RandomStream
from dtmega.plans.styles import distribute, group_of, local


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
            self.enter = _as_it_is


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

    The weight stays whole on every rank; the parts of its gradient are summed.
    """

    placements: ClassVar[dict[str, Placement]] = {"weight": Replicate(), "bias": Replicate()}
    cost = ("backward all-reduce of the weight",) * 2

    def __init__(self, kv_heads: int, stack: Stack | None = None) -> None:
        super().__init__(stack)
        self.kv_heads = kv_heads

    def forward(self, module: Any, x: Tensor) -> Tensor:
        group = group_of(module)
        head = group.rank() * self.kv_heads // group.size()

        def mine(parameter: Any) -> Any:
            if parameter is None:
                return None
            return mappings.copy(local(parameter), group).unflatten(0, (self.kv_heads, -1))[head]

        return F.linear(x, mine(module.weight), mine(module.bias))


class PackedColumn(Word):
    """nn.Linear whose output is `parts` matrices of the same size side by side: each of them is cut.

    The bias stays whole: FSDP2 cuts dim 0 as well, and a vector cut so twice is put together in the wrong order.
    """

    parts: ClassVar[int] = 2
    placements: ClassVar[dict[str, Placement]] = {"weight": _StridedShard(0, split_factor=2), "bias": Replicate()}

    def __init__(self, stack: Stack | None = None) -> None:
        super().__init__(stack)
        self.cost = ("backward all-reduce", "all-gather, backward reduce-scatter")

    def check(self, module: nn.Module, tp: int) -> None:
        super().check(module, tp)
        for name, parameter in module.named_parameters(recurse=False):
            size = parameter.shape[-1] if name == "bias" else parameter.shape[self.placements["weight"].dim]  # pyright: ignore[reportAttributeAccessIssue]
            self.check_size(f"'{name}' of {type(module).__name__} in {self.parts} parts", size, self.parts * tp)

    def bias(self, module: Any) -> Any:
        if module.bias is None:
            return None
        group = group_of(module)
        return mappings.copy(local(module.bias), group).view(self.parts, group.size(), -1)[:, group.rank()].flatten()

    def forward(self, module: Any, x: Tensor) -> Tensor:
        return F.linear(self.enter(x, group_of(module)), local(module.weight), self.bias(module))


class _Conv(Word):
    """Conv1D: nn.Linear with the weight [in, out]."""

    @property
    def exact(self) -> type[nn.Module]:  # pyright: ignore[reportIncompatibleVariableOverride]
        from transformers.pytorch_utils import Conv1D

        return Conv1D


class ConvColumn(_Conv):
    placements: ClassVar[dict[str, Placement]] = {"weight": Shard(1), "bias": Shard(0)}

    def __init__(self, stack: Stack | None = None, enters: bool = False) -> None:
        super().__init__(stack)
        self.enter = self.stack.enter if enters else _as_it_is

    def forward(self, module: Any, x: Tensor) -> Tensor:
        return self.enter(x, group_of(module)) @ local(module.weight) + local(module.bias)


class ConvRow(_Conv):
    placements: ClassVar[dict[str, Placement]] = {"weight": Shard(0), "bias": Replicate()}
    cost = Row.cost

    def forward(self, module: Any, x: Tensor) -> Tensor:
        group = group_of(module)
        return self.leave(x @ local(module.weight), group) + self.stack.shared(module.bias, group)


class ConvPacked(_Conv):
    """GPT-2's [q | k | v] side by side: a contiguous cut would give a rank q and half of k."""

    parts: ClassVar[int] = 3
    placements: ClassVar[dict[str, Placement]] = {"weight": _StridedShard(1, split_factor=3), "bias": Replicate()}

    def check(self, module: nn.Module, tp: int) -> None:
        super().check(module, tp)
        columns = module.get_parameter("weight").shape[1]
        self.check_size(f"columns of {type(module).__name__} in {self.parts} parts", columns, self.parts * tp)

    def forward(self, module: Any, x: Tensor) -> Tensor:
        return x @ local(module.weight) + PackedColumn.bias(self, module)  # pyright: ignore[reportArgumentType]


class Whole(ParallelStyle):
    """A module that computes on every rank with all of its parameters, whatever it is.

    Args:
        stack: it stands in a block, where a rank may have S/tp of the tokens.
        of_heads: it sees only this rank's heads.
    """

    def __init__(self, stack: Stack | None = None, of_heads: bool = False) -> None:
        self.stack, self.of_heads = plain(stack), of_heads
        self._method = self.forward
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
            module.forward = types.MethodType(self._method, module)
        return module


class HeadColumns(Word):
    """nn.Embedding [buckets, H] of T5's relative positions, cut by heads."""

    exact = nn.Embedding
    placements: ClassVar[dict[str, Placement]] = {"weight": Shard(1)}

    def forward(self, module: Any, x: Tensor) -> Tensor:
        return F.embedding(x, local(module.weight))


class VocabEmbedding(styles.VocabEmbedding):
    """nn.Embedding, or a subclass that does something to each row, cut by rows: tokens [B, S] -> [B, S, D]."""

    cost = ("all-reduce", "all-reduce")

    def __init__(self) -> None:
        super().__init__(sequence_parallel=False)

    def check(self, module: nn.Module, tp: int) -> None:
        if not isinstance(module, nn.Embedding) or module.max_norm is not None or module.scale_grad_by_freq:
            raise ValueError(
                f"VocabEmbedding is for nn.Embedding without max_norm and scale_grad_by_freq, not {module}"
            )
        super().check(module, tp)

    def forward(self, module: Any, x: Tensor) -> Tensor:
        group, weight = group_of(module), local(module.weight)
        start, size = self.first_row(module.weight), module.weight.shape[0]
        elsewhere = (x >= 0) & (x < size) & ((x < start) | (x >= start + weight.shape[0]))
        with computing_on(module, local):
            padding, here = module.padding_idx, module.padding_idx is not None
            here = here and start <= padding < start + weight.shape[0]
            module.padding_idx = padding - start if here else None
            try:
                rows = type(module).forward(module, (x - start).masked_fill(elsewhere, 0))
            finally:
                module.padding_idx = padding
        return mappings.add_up(rows.masked_fill(elsewhere.unsqueeze(-1), 0), group)


class VocabHead(styles._Vocabulary):
    """nn.Linear to the vocabulary, cut by rows: [..., D] -> logits [..., V], on every rank.

    With `fused`, in a forward with labels, they are `VocabLogits`: the loss takes this rank's columns, and the whole
    logits are made only if something else asks for them.
    """

    placements: ClassVar[dict[str, Placement]] = {"weight": Shard(0), "bias": Shard(0)}
    cost = ("backward all-reduce; 3 numbers a token for the loss",) * 2

    def __init__(self, fused: bool) -> None:
        super().__init__(sequence_parallel=False)
        self.fused, self.labelled = fused, False
        self.gathered_by_fsdp, self.calls = False, 0
        if not fused:
            self.cost = ("all-gather of the logits, backward all-reduce",) * 2

    def check(self, module: nn.Module, tp: int) -> None:
        if type(module).forward is not nn.Linear.forward:
            raise ValueError(f"VocabHead is for nn.Linear, not for {type(module).__name__}")
        super().check(module, tp)

    def forward(self, module: Any, x: Tensor) -> Tensor:
        group, weight, size = group_of(module), local(module.weight), module.weight.shape[0]
        self.calls += 1
        parameter, version, call = module.weight, module.weight._version, self.calls

        def unchanged() -> bool:
            # FSDP2 writes the next weights into the same memory, without a new version of it.
            return parameter._version == version and (not self.gathered_by_fsdp or self.calls == call)

        start, x = self.first_row(parameter), mappings.copy(x, group)
        logits = VocabLogits(Parts(x, weight, local(module.bias), size, start, group, unchanged))
        return logits if self.fused and self.labelled else logits.whole()


@contextlib.contextmanager
def computing_on(module: nn.Module, here: Callable[[Any], Tensor]) -> Iterator[None]:
    """The module's own parameters are what `here` makes of them, for a forward that knows nothing of DTensors."""
    own = {name: p for name, p in module._parameters.items() if p is not None}
    module._parameters.update({name: here(p) for name, p in own.items()})  # pyright: ignore[reportArgumentType, reportCallIssue]
    try:
        yield
    finally:
        module._parameters.update(own)


def _as_it_is(x: Tensor, group: ProcessGroup) -> Tensor:
    return x
