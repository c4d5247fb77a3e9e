"""Record the first run of a graph on arguments of one kind, as a tape (`tapes.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from dtmega.planning.counting.launches import Launch, tensors_in
from dtmega.planning.counting.ledger import Ledger
from dtmega.planning.counting.tapes import Argument, Freed, Launched, Result, Tape, address, layout_of


class Recording:
    """A recording of a graph's first run on arguments of one kind, made during the run.

    Args:
        kind: kind of the arguments.
        args: arguments of the graph.
        placeholders: nodes of the graph that represent the arguments.
        ledger: ledger of the device.
    """

    def __init__(
        self, kind: tuple[Argument, ...], args: Sequence[Any], placeholders: Iterable[fx.Node], ledger: Ledger
    ) -> None:
        self._kind, self._ledger = kind, ledger
        self._events: list[Launched | Freed] = []
        self._n_slots = len(kind)
        self._slots: dict[int, int] = {}  # address of a live storage that the graph uses -> index of the storage
        self._values: dict[fx.Node, list[int]] = {}  # graph node whose value is live -> storages of the value
        self._n_values: Counter[int] = Counter()  # storage index -> count of live values on that storage
        self._exact = True
        for argument, arg in zip(kind, args, strict=True):
            if argument.layout is not None:
                self._slots[address(arg)] = argument.slot
        for node, arg in zip(placeholders, args, strict=True):
            self.hold(node, arg)

    def launched(self, name: str, launch: Launch, made: list[Tensor]) -> None:
        """Record an operator: its name, its launch, and the tensors that it has made in memory."""
        new: list[tuple[int, int]] = []
        for tensor in made:
            self._slots[address(tensor)] = self._n_slots
            new.append((self._n_slots, tensor.untyped_storage().nbytes()))
            self._n_slots += 1
        if new or launch.work is not None or launch.awaited:
            result, awaited = self._slots.get(launch.result, -1), self._slots.get(launch.awaited, -1)
            self._events.append(Launched(name, launch, new, result, awaited))

    def hold(self, node: fx.Node, value: Any) -> None:
        """Record the value that `node` has computed."""
        slots = [self._slots[address(tensor)] for tensor in tensors_in(value) if address(tensor) in self._slots]
        self._values[node] = slots
        self._n_values.update(slots)

    def let_go(self, nodes: Sequence[fx.Node]) -> None:
        """Record that the graph has released the values of some nodes."""
        for node in nodes:
            for slot in self._values.pop(node):
                self._n_values[slot] -= 1
                if not self._n_values[slot]:
                    self._free(slot)

    def _free(self, slot: int) -> None:
        (key,) = (key for key, number in self._slots.items() if number == slot)
        del self._slots[key]
        arguments = [i for i, argument in enumerate(self._kind) if argument.slot == slot]
        # Code outside the graph may hold an argument but not a tensor that the graph made.
        if not arguments and self._ledger.lives(key):
            self._exact = False
        self._events.append(Freed(slot, arguments))

    def finish(self, returned: Sequence[Any], placeholders: Sequence[int]) -> Tape | None:
        """Finish the recording. Return the tape, or None if a replay could not return the graph's results.

        Args:
            returned: results of the graph.
            placeholders: argument index of each result; -1 for a result that is not an argument.
        """
        results: list[Result] = []
        bases: dict[int, Tensor] = {}
        first: dict[int, int] = {}  # id of a result tensor -> index of the result
        for i, (value, argument) in enumerate(zip(returned, placeholders, strict=True)):
            if argument >= 0:
                result = Result(argument=argument)
            elif not isinstance(value, Tensor):
                result = Result(value)
            elif id(value) in first:
                result = Result(earlier=first[id(value)])
            else:
                first[id(value)] = i
                result = self._result(value, bases)
            if result is None:
                return None
            results.append(result)
        kept = {slot: layout_of(base) for slot, base in bases.items()}
        for slot, base in bases.items():
            # A tensor made by a replay begins at the storage's first element and fills the whole storage.
            if kept[slot].offset or kept[slot].storage_bytes != base.untyped_storage().nbytes():
                return None
        for slot in sorted(set(self._slots.values())):
            if slot >= len(self._kind) and slot not in kept:
                self._events.append(Freed(slot, []))
        modes = {base.fake_mode for base in bases.values() if isinstance(base, FakeTensor)}
        if not self._exact or (bases and len(modes) != 1):
            return None
        return Tape(self._events, results, kept, modes.pop() if modes else None)

    def _result(self, value: Tensor, bases: dict[int, Tensor]) -> Result | None:
        """The tape's description of a new tensor; None if a tape cannot describe it.

        The tensor (for a view, the view's base) is added to `bases`.
        """
        slot = self._slots.get(address(value))
        if slot is None:
            return None
        layout = layout_of(value)
        if slot < len(self._kind):
            for i, argument in enumerate(self._kind):
                if argument.slot != slot or argument.layout is None:
                    continue
                if value._is_view() and argument.layout.dtype == layout.dtype:
                    return Result(argument=i, view=layout)
                if argument.layout == layout:
                    return Result(argument=i)
            return None
        base = value._base if value._is_view() else value
        if base is None or base.dtype != layout.dtype or bases.setdefault(slot, base) is not base:
            return None
        return Result(slot=slot, view=layout if value._is_view() else None)
