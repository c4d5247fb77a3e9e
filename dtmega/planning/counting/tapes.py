"""Tapes of compiled graphs: a graph runs node by node once for each kind of arguments, and is replayed afterwards.

A node costs some 0.4 ms of CPU time, because torch works out the shapes of its results. All layers of a model, and all
microbatches, run the same graphs on arguments of the same shapes. So a tape keeps what the first run has told the
recorder: the launches, and where the last value on a storage ended (`recording.py`). A replay tells the same again,
with the owner, action and streams of its own moment. Storages inside of the graph are then numbers in the ledger. Only
the results are tensors, which begin at the launch that made them in the first run.
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
    """The form of a tensor in its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    @property
    def storage_bytes(self) -> int:
        """Bytes up to the last element."""
        if 0 in self.size:
            return 0
        last = self.offset
        for size, stride in zip(self.size, self.stride, strict=True):
            last += (size - 1) * stride
        return (last + 1) * self.dtype.itemsize


class Argument(NamedTuple):
    """One argument of a graph, as far as a run depends on it.

    Attributes:
        slot: index of the first argument on the same storage; -1 for arguments that are no tensors.
        layout: form of the tensor.
        value: an argument that is no tensor.
    """

    slot: int
    layout: Layout | None = None
    value: Any = None


class Launched(NamedTuple):
    """An operator that a graph launches. Storages have numbers: those of `Argument.slot`, and then higher ones.

    Attributes:
        name: name of the operator, by which the recorder knows the owner of new storages.
        launch: the launch, with the addresses of the first run.
        made: number and bytes of each storage that the operator makes.
        result: number of the storage for `launch.result`; -1 without it.
        awaited: number of the storage for `launch.awaited`; -1 without it.
    """

    name: str
    launch: Launch
    made: list[tuple[int, int]]
    result: int
    awaited: int


class Freed(NamedTuple):
    """The end of the graph's last value on a storage.

    Attributes:
        slot: number of the storage.
        arguments: indices of the arguments on this storage. It stays if somebody else holds it.
    """

    slot: int
    arguments: list[int]


class Result(NamedTuple):
    """One result of a graph.

    Attributes:
        value: a result that is no tensor.
        argument: index of the argument that is the result, or whose storage the result views; -1 for others.
        slot: number of the storage that the graph made for the result; -1 for others.
        view: form of a view; None for the tensor itself.
        earlier: index of an earlier result that is the same tensor; -1 for others.
    """

    value: Any = None
    argument: int = -1
    slot: int = -1
    view: Layout | None = None
    earlier: int = -1


class Tape(NamedTuple):
    """Everything that one run of a graph tells the recorder.

    Attributes:
        events: launches and ends of storages, in order.
        results: results of the graph.
        kept: form of the tensor on each storage that the graph makes and returns, by the storage's number.
        mode: the mode that makes the plan's tensors.
    """

    events: list[Launched | Freed]
    results: list[Result]
    kept: dict[int, Layout]
    mode: FakeTensorMode | None

    def play(self, args: list[Any], recorder: Recorder) -> list[Any]:
        """Tell the recorder what a run of the graph would tell it, and return the results of the graph.

        Args:
            args: arguments, which must be of the kind of the first run's. The list is emptied.
            recorder: the recorder.
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
    """Everything on which the run of a graph depends: forms of the arguments, and which of them share a storage."""
    first: dict[int, int] = {}
    kind: list[Argument] = []
    for i, arg in enumerate(args):
        if isinstance(arg, Tensor):
            kind.append(Argument(first.setdefault(address(arg), i), layout_of(arg)))
        else:
            kind.append(Argument(-1, value=arg))
    return tuple(kind)


def layout_of(tensor: Tensor) -> Layout:
    """The form of a tensor in its storage."""
    return Layout(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, tensor.device)


def address(tensor: Tensor) -> int:
    """The address of a tensor's storage."""
    return tensor.untyped_storage()._cdata


def _key(slot: int, held: list[Any], keys: dict[int, int]) -> int:
    """The recorder's key of a storage; 0 without a storage."""
    if slot < 0:
        return 0
    return keys[slot] if slot in keys else address(held[slot])


def _empty(layout: Layout, mode: FakeTensorMode | None) -> Tensor:
    """A new tensor of the plan, unseen by the recorder."""
    size, stride, _, dtype, device = layout
    return FakeTensor(mode, torch.empty_strided(size, stride, dtype=dtype, device="meta"), device)
