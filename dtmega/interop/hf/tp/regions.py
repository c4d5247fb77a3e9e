"""The edges at which the hidden state changes: of a run of blocks, and of each attention and feed-forward.

The modules' own forwards stay. Refused is what would come back wrong: attention probabilities (a rank
has those of its heads), and dropout whose masks the ranks would not agree on.
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
    """A module with attributes that count heads or groups of them: they get the numbers of this rank.

    Args:
        set: their new values.
    """

    cost = ("", "")

    def __init__(self, set: dict[str, int]) -> None:
        self.set = set

    def check(self, module: nn.Module, tp: int) -> None:
        """Anything goes."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, value in self.set.items():
            setattr(module, name, value)
        return module


class EnterHeads(Enter):
    """The hidden state enters an attention, which is told how many heads are here.

    Args:
        alibi: keyword argument [B H, 1, S] or [H, 1, S] that is cut to this rank's heads; `divide[0]` counts them.
        divide: attributes that count heads or features, in which the module's views are written: a tp-th of each.
        set: attributes with new values.
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
            kwargs[self.alibi] = _of_heads(kwargs[self.alibi], getattr(module, self.divide[0]), self.group)


def _changed(args: tuple[Any, ...], kwargs: dict[str, Any], change: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (change(args[0]), *args[1:]), dict(kwargs)
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def _of_heads(alibi: Tensor, heads: int, group: ProcessGroup) -> Tensor:
    """[B H, 1, S] -> [B H/tp, 1, S]; its slopes are those of all H heads, so the model itself must compute it."""
    return alibi.unflatten(0, (-1, group.size(), heads))[:, group.rank()].flatten(0, 1)


class StackBoundary(ParallelStyle):
    """The first and the last block of a stack: the hidden state is cut before one and whole again after the other."""

    def __init__(self, stack: Stack, first: bool, last: bool) -> None:
        self.stack, self.first, self.last = stack, first, last
        costs = ["before it: backward all-gather"] * first + ["after it: all-gather"] * last
        self.cost = ("", ", ".join(costs))

    def check(self, module: nn.Module, tp: int) -> None:
        """Anything goes."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group, stack = device_mesh.get_group(), self.stack

        def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x = args[0] if args else kwargs["hidden_states"]
            stack.cut = stack.sequence_parallel and not stack.hidden_states_wanted and x.shape[1] % group.size() == 0
            if not stack.cut:
                return None
            if module.training:
                stack.random.enter(x.device, group.rank())
            return _changed(args, kwargs, lambda x: mappings.split(x, group))

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
    """The module that runs a stack: refuses what the cut model cannot give as it is."""

    cost = ("", "")

    def __init__(self, stack: Stack, drops: bool) -> None:
        self.stack, self.drops = stack, drops

    def check(self, module: nn.Module, tp: int) -> None:
        """Anything goes."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()

        def look(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            def wanted(name: str) -> Any:
                value = kwargs.get(name)
                return getattr(module.config, name, False) if value is None else value

            if wanted("output_attentions"):
                raise ValueError("output_attentions: under tp a rank has the probabilities of its own heads only")
            self.stack.hidden_states_wanted = bool(wanted("output_hidden_states"))
            if self.drops and module.training:
                check_random_state(module, group)

        module.register_forward_pre_hook(look, with_kwargs=True)
        return module
