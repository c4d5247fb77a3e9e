"""Styles of the modules that shard or gather the hidden state: around a stack of blocks, and around attention.

The modules keep their own forwards. Two kinds of forward raise an error, because the results would be wrong: a forward
that must return attention probabilities, which a rank has only for its own heads; and a forward in which the ranks
would draw different dropout masks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from dtmega.interop.hf.tp.dropout import check_random_state
from dtmega.interop.hf.tp.styles import Stack
from dtmega.plans import mappings
from dtmega.plans.styles import Enter


class Counts(ParallelStyle):
    """Style of a module with attributes that count heads or head groups; sets each attribute to this rank's count.

    Args:
        set: new value of each attribute, keyed by attribute name.
    """

    cost = ("", "")

    def __init__(self, set: dict[str, int]) -> None:
        self.set = set

    def check(self, module: nn.Module, tp: int) -> None:
        """Accept any module."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, value in self.set.items():
            setattr(module, name, value)
        return module


class EnterHeads(Enter):
    """Style of an attention module: the input is gathered once for all projections, and head counts are divided by tp.

    Args:
        stack: stack of blocks that contains the module.
        also: names of further keyword arguments that hold unsharded hidden states, such as an encoder's output.
        alibi: name of the keyword argument with each head's biases, [B H, 1, S] or [H, 1, S]; each rank selects the
            biases of its own heads. `divide[0]` then names the attribute that counts the heads.
        divide: names of the module's attributes that count heads or features; each count is divided by tp.
        set: new value of each attribute, keyed by attribute name.
    """

    def __init__(
        self,
        stack: Stack,
        *,
        also: tuple[str, ...] = (),
        alibi: str | None = None,
        divide: tuple[str, ...] = (),
        set: dict[str, int] | None = None,
    ) -> None:
        super().__init__(stack, also)
        self.alibi, self.divide, self.set = alibi, divide, set or {}

    def check(self, module: nn.Module, tp: int) -> None:
        for name in self.divide:
            if getattr(module, name) % tp:
                raise ValueError(f"tp={tp} does not divide {name}={getattr(module, name)} of {type(module).__name__}")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        divided = {name: getattr(module, name) // device_mesh.size() for name in self.divide}
        return Counts(divided | self.set)._apply(module, device_mesh)

    def other_inputs(self, module: Any, kwargs: dict[str, Any]) -> None:
        if self.alibi:
            kwargs[self.alibi] = _alibi_of_rank(kwargs[self.alibi], getattr(module, self.divide[0]), self.group)


def _alibi_of_rank(alibi: Tensor, heads: int, group: ProcessGroup) -> Tensor:
    """Select the biases for this rank's heads, [B H, 1, S] -> [B H/tp, 1, S].

    A head's slope depends on the total number of heads, so the model computes the biases of all heads.
    """
    return alibi.unflatten(0, (-1, group.size(), heads))[:, group.rank()].flatten(0, 1)


class StackBoundary(ParallelStyle):
    """Style of a stack's first and last block: the first block shards the sequence, and the last gathers it.

    Whether to shard the sequence is decided separately for each forward; see `styles.Stack`.

    Args:
        stack: the stack of blocks.
        first: whether the module is the first block.
        last: whether the module is the last block. In a stack with only one block, the block is both first and last.
    """

    def __init__(self, stack: Stack, first: bool, last: bool) -> None:
        self.stack, self.first, self.last = stack, first, last
        costs = ["before it: backward all-gather"] * first + ["after it: all-gather"] * last
        self.cost = ("", ", ".join(costs))

    def check(self, module: nn.Module, tp: int) -> None:
        """Accept any module."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group, stack = device_mesh.get_group(), self.stack

        def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x = args[0] if args else kwargs["hidden_states"]
            # If the user asks for hidden states, every block must output an unsharded hidden state.
            stack.cut = stack.sequence_parallel and not stack.hidden_states_wanted and x.shape[1] % group.size() == 0
            if not stack.cut:
                return None
            if stack.drops and module.training:
                stack.random.enter(x.device, group.rank())
            part = mappings.split(x, group)
            if args:
                return (part, *args[1:]), dict(kwargs)
            return args, {**kwargs, "hidden_states": part}

        def end(module: nn.Module, args: Any, out: Any) -> Any:
            if not stack.cut:
                return None
            stack.random.leave()
            x = out[0] if isinstance(out, tuple) else out
            x = mappings.join(x, group, 1, x.shape[1] * group.size())
            return (x, *out[1:]) if isinstance(out, tuple) else x

        if self.first:
            module.register_forward_pre_hook(begin, with_kwargs=True)
        if self.last:
            module.register_forward_hook(end)
        return module


class Guard(ParallelStyle):
    """Parallel style of the module that runs a stack. It refuses a forward pass that tp would make wrong.

    Args:
        stack: the stack of blocks.
    """

    cost = ("", "")

    def __init__(self, stack: Stack) -> None:
        self.stack = stack

    def check(self, module: nn.Module, tp: int) -> None:
        """Accept any module."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()

        def check_forward(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            def option(name: str) -> Any:
                value = kwargs.get(name)
                return getattr(module.config, name, False) if value is None else value

            if option("output_attentions"):
                raise ValueError("output_attentions: under tp a rank has the probabilities of its own heads only")
            self.stack.hidden_states_wanted = bool(option("output_hidden_states"))
            if self.stack.drops and module.training:
                check_random_state(module, group)

        module.register_forward_pre_hook(check_forward, with_kwargs=True)
        return module
