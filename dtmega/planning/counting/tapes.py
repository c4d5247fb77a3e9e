"""Tapes of compiled graphs. A graph runs node by node once for each kind of arguments; later runs are replayed.

A node costs about 0.4 ms of CPU time, because torch computes the shapes of the node's results. All layers and all
microbatches run the same graphs on arguments of the same shapes. A tape therefore stores everything that the first run
reported to the recorder: the launches, and the end of each storage's use (`recording.py`). A replay reports the same
events as the first run, but with the owner, action and streams at the time of the replay. During a replay, storages
inside the graph are only numbers in the ledger. Only the results become tensors: the replay makes each result at the
launch that made it in the first run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from dtmega.planning.counting.launches import Launch
from dtmega.planning.counting.recorder import Recorder


class Layout(NamedTuple):
    """The layout of a tensor in its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    @property
    def storage_bytes(self) -> int:
        """The number of bytes from the start of the storage to the end of the tensor's last element."""
        if 0 in self.size:
            return 0
        last = self.offset
        for size, stride in zip(self.size, self.stride, strict=True):
            last += (size - 1) * stride
        return (last + 1) * self.dtype.itemsize


class Argument(NamedTuple):
    """The properties of a graph's argument that affect a run of the graph.

    Attributes:
        slot: index of the first argument with this argument's storage; -1 if the argument is not a tensor.
        layout: layout of the tensor.
        value: argument itself, if it is not a tensor.
    """

    slot: int
    layout: Layout | None = None
    value: Any = None


class Launched(NamedTuple):
    """An operator that a graph launches.

    Storages are numbered: an argument's storage has the number `Argument.slot`, and new storages have higher numbers.

    Attributes:
        name: name of the operator, from which the recorder derives the owner of new storages.
        launch: launch of the operator, with the addresses of the first run.
        made: number and size in bytes of each storage that the operator makes.
        result: number of the storage at `launch.result`; -1 if `launch.result` is 0.
        awaited: number of the storage at `launch.awaited`; -1 if `launch.awaited` is 0.
    """

    name: str
    launch: Launch
    made: list[tuple[int, int]]
    result: int
    awaited: int


class Freed(NamedTuple):
    """The point at which a storage no longer holds a value of the graph.

    Attributes:
        slot: number of the storage.
        arguments: indices of the arguments on this storage. The storage remains if code outside the graph holds it.
    """

    slot: int
    arguments: list[int]


class Result(NamedTuple):
    """One result of a graph.

    Attributes:
        value: result itself, if it is not a tensor.
        argument: index of the argument that is the result or whose storage the result views; -1 if there is no such
            argument.
        slot: number of the storage that the graph made for the result; -1 if the graph made no storage for it.
        view: layout of the result if it is a view; None if the result is not a view.
        earlier: index of an earlier result that is the same tensor as this result; -1 if there is no such result.
    """

    value: Any = None
    argument: int = -1
    slot: int = -1
    view: Layout | None = None
    earlier: int = -1


class Tape(NamedTuple):
    """Everything that one run of a graph reports to the recorder.

    Attributes:
        events: launches of operators and releases of storages, in order.
        results: results of the graph.
        kept: number of each storage that the graph makes and returns -> layout of the tensor on this storage.
        mode: `FakeTensorMode` that creates the plan's tensors.
    """

    events: list[Launched | Freed]
    results: list[Result]
    kept: dict[int, Layout]
    mode: FakeTensorMode | None

    def play(self, args: list[Any], recorder: Recorder) -> list[Any]:
        """Replay the graph: report the events of a run to the recorder and return the graph's results.

        Args:
            args: arguments of the same kind as in the first run. The list is emptied.
            recorder: recorder of the rank.
        """
        held = [*args]
        args.clear()
        keys: dict[int, int] = {}
        tensors: dict[int, Tensor] = {}
        with _disable_current_modes():
            for event in self.events:
                if isinstance(event, Launched):
                    self._launch(event, held, keys, tensors, recorder)
                    continue
                for i in event.arguments:
                    held[i] = None
                if not event.arguments:
                    recorder.ledger.free(keys[event.slot])
            return self._returned(held, tensors)

    def _launch(
        self, event: Launched, held: list[Any], keys: dict[int, int], tensors: dict[int, Tensor], recorder: Recorder
    ) -> None:
        for slot, n_bytes in event.made:
            owner = recorder.owner(event.name)
            if slot in self.kept:
                tensors[slot] = _empty(self.kept[slot], self.mode)
                recorder.ledger.see(tensors[slot], owner)
                keys[slot] = tensors[slot].untyped_storage()._cdata
            else:
                keys[slot] = recorder.ledger.allocate(n_bytes, owner)
        launch = event.launch
        if launch.result or launch.awaited:
            result, awaited = (_key(slot, held, keys) for slot in (event.result, event.awaited))
            launch = launch._replace(result=result, awaited=awaited)
        recorder.queue(launch)

    def _returned(self, held: list[Any], tensors: dict[int, Tensor]) -> list[Any]:
        returned: list[Any] = []
        for result in self.results:
            if result.earlier >= 0:
                returned.append(returned[result.earlier])
                continue
            if result.slot < 0 and result.argument < 0:
                returned.append(result.value)
                continue
            base = tensors[result.slot] if result.slot >= 0 else held[result.argument]
            view = result.view
            returned.append(base if view is None else base.as_strided(view.size, view.stride, view.offset))
        return returned


def kind_of(args: Sequence[Any]) -> tuple[Argument, ...]:
    """The kind of a graph's arguments: their layouts, the storages that they share, and the values of non-tensors."""
    first: dict[int, int] = {}
    kind: list[Argument] = []
    for i, arg in enumerate(args):
        if isinstance(arg, Tensor):
            kind.append(Argument(first.setdefault(address(arg), i), layout_of(arg)))
        else:
            kind.append(Argument(-1, value=arg))
    return tuple(kind)


def layout_of(tensor: Tensor) -> Layout:
    """The layout of a tensor in its storage."""
    return Layout(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, tensor.device)


def address(tensor: Tensor) -> int:
    """The address of a tensor's storage."""
    return tensor.untyped_storage()._cdata


def _key(slot: int, held: list[Any], keys: dict[int, int]) -> int:
    """The ledger's key for the storage with this number; 0 if the number is -1, which means no storage."""
    if slot < 0:
        return 0
    return keys[slot] if slot in keys else address(held[slot])


def _empty(layout: Layout, mode: FakeTensorMode | None) -> Tensor:
    """Make a fake tensor without reporting the tensor to the recorder."""
    size, stride, _, dtype, device = layout
    return FakeTensor(mode, torch.empty_strided(size, stride, dtype=dtype, device="meta"), device)
