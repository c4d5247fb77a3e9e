"""Record everything that one rank does on a fake device: its memory by owner, and its work in order."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork
from torch._guards import TracingContext
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from dtmega.planning.counting import launches
from dtmega.planning.counting.copies import copied_bytes
from dtmega.planning.counting.launches import Launch
from dtmega.planning.counting.ledger import Ledger
from dtmega.planning.counting.queues import Streams
from dtmega.planning.work import Work
from dtmega.training.phases import COMPUTING

ROOM = "rooms for messages"
BETWEEN_STAGES = "input and tensors between stages"
LETTERS = {"forward": "F", "backward": "B", "backward-inputs": "I", "backward-weights": "W"}


class Recorder:
    """The observer of one rank (`fake_device.Observer`), which also listens to the phases and ranges of the step.

    Args:
        device: fake device.

    Attributes:
        ledger: memory by owner ("gradients", "activations of layers.0", ...), now and at each action's peak.
        works: kernels and messages of the step, in the order in which the host launches them.
        streams: streams of the device; set when the device exists.
        groups: torch's name for each process group -> (name of the group in `World.groups`, size of the group).
        action: name of the current action, as in `Work.action`.
        hidden: whether new tensors take no memory, because a compiled block never writes them.
        in_graph: whether a compiled graph runs, whose kernels convert elements as they read them.
        on_launch: function to call after each launch, with the operator's name, the launch, and the tensors that are
            new in memory; None for no function.
    """

    def __init__(self, device: torch.device) -> None:
        self.ledger = Ledger(device)
        self.works: list[Work] = []
        self.streams: Streams
        self.groups: dict[str, tuple[str, int]] = {}
        self.action = "build"
        self.hidden = False
        self.in_graph = False
        self.on_launch: Callable[[str, Launch, list[Tensor]], None] | None = None
        self._phase = "build"
        self._block = ""
        self._named_owner = ""
        self._exchanging = False  # whether FSDP2 is gathering weights or reducing gradients
        self._outstanding: set[int] = set()  # asynchronous messages that no work has waited for yet
        self._waits_for_itself = False  # True from the launch of a synchronous message until the message's own wait
        self.name_storages: Callable[[], None] = _nothing
        self._results: dict[int, int] = {}  # storage of a functional collective's result -> number of the message

    @property
    def in_build(self) -> bool:
        """True before the first phase of a step. Work is not counted before this phase."""
        return self._phase == "build"

    def name_groups(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        """Record the names of the process groups. If a group has several names, record the first name."""
        everyone = dist.group.WORLD
        assert everyone is not None
        for name, group in {**groups, "world": everyone}.items():
            self.groups.setdefault(group.group_name, (name, group.size()))

    def begin(self) -> None:
        """Begin a step and forget the previous steps."""
        self.ledger.forget_peak()
        self.ledger.spans = []
        self.works = []
        self.streams.restart()
        self._outstanding = set()
        self._results = {}

    def enter(self, name: str) -> None:
        """Begin a phase of the step (`training.phases.Phases.enter`)."""
        self._end_action()
        self._phase = self.action = name

    @contextlib.contextmanager
    def range(self, what: str, stage: int | None, microbatch: int | None) -> Iterator[None]:
        """Record a pipeline action or, without a pipeline, a forward or backward pass."""
        if what not in LETTERS:
            yield
            return
        self._end_action()
        before, self.action = self.action, f"{stage}{LETTERS[what]}{microbatch}"
        yield
        self._end_action()
        self.action = before

    def _end_action(self) -> None:
        self.name_storages()
        self.ledger.end_span(self.action)

    @contextlib.contextmanager
    def owning(self, owner: str) -> Iterator[None]:
        """Inside the `with` block, assign this owner to all new tensors."""
        before, self._named_owner = self._named_owner, owner
        try:
            yield
        finally:
            self._named_owner = before

    def watch_blocks(self, stage: nn.Module, blocks: list[nn.Module]) -> None:
        """Make the recorder know which block of `stage` is computing, for the owner of the block's activations."""
        names = {module: name for name, module in stage.named_modules()}
        for block in blocks:
            call = block._compiled_call_impl or block._call_impl
            block._compiled_call_impl = functools.partial(self._call_block, names[block], call)

    def _call_block(self, name: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        before, self._block = self._block, name
        try:
            return call(*args, **kwargs)
        finally:
            self._block = before

    @contextlib.contextmanager
    def exchanges_of_fsdp(self) -> Iterator[None]:
        """Inside the `with` block, give the buffers of FSDP2's all-gathers and reduce-scatters their own owner."""

        def noted(function: Any) -> Any:
            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                before, self._exchanging = self._exchanging, True
                try:
                    return function(*args, **kwargs)
                finally:
                    self._exchanging = before

            return call

        with contextlib.ExitStack() as stack:
            for name in ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce"):
                stack.enter_context(patch.object(_fsdp_param_group, name, noted(getattr(_fsdp_param_group, name))))
            yield

    def launched(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Add an operator's new storages to the ledger, and append the operator to the list of work items."""
        if TracingContext.try_get() is not None:
            return  # a graph is being captured, and nothing runs
        known = launches.described(operator)
        made: list[Tensor] = []
        # The result of an in-place operator is its argument, even if a fake operator returns a different tensor.
        if not known.returns_argument:
            owner = self.owner(known.name)
            for tensor in launches.tensors_in(output):
                if self.ledger.see(tensor, owner, hidden=self.hidden):
                    made.append(tensor)
        if self.in_build:
            return
        if self.ledger.device_type == "cpu" and not self.in_graph:
            n_bytes = copied_bytes(operator, args, kwargs, output)
            self.ledger.free(self.ledger.allocate(n_bytes, self.owner(known.name)))
        launch = launches.launched(known, args, kwargs, output, self.ledger, self.groups, self.hidden)
        self.queue(launch)
        if self.on_launch is not None:
            self.on_launch(known.name, launch, made)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record that the memory of a storage was freed or allocated again."""
        self.ledger.resized(storage)

    def owner(self, name: str) -> str:
        """The owner of the storages that the operator `name` makes in the current action."""
        if self._named_owner:
            return self._named_owner
        if self.in_build:
            return "parameters and buffers"
        if self._exchanging:
            return ROOM
        if self._phase != COMPUTING:
            return f"{self._phase}: {name}"
        if self.action == COMPUTING:
            return BETWEEN_STAGES
        if "F" not in self.action:
            return f"backward: {name}"
        return f"activations of {self._block}" if self._block else f"activations outside of blocks: {name}"

    def queue(self, launch: Launch) -> None:
        """Append a launch to the list of work items and queue the launch on its stream."""
        current = self.streams.current
        if launch.awaited:
            number = self._results.pop(launch.awaited, None)
            if number is not None:
                current.awaited.add(number)
        if launch.work is None:
            return
        number = len(self.works)
        message = launch.work.message
        stream = current
        if message is not None:
            stream = self.streams.of_group(message.axis)
            stream.wait_stream(current)
        waits = stream.queue(number)
        self.works.append(launch.work._replace(action=self.action, stream=stream.name, waits=waits))
        # The schedule simulator decides when a stage waits for its neighbours.
        if message is None or message.collective in ("send", "receive"):
            return
        if launch.result:
            self._results[launch.result] = number
        elif launch.is_async:
            self._outstanding.add(number)
        else:
            current.awaited.add(number)
            self._waits_for_itself = True

    @contextlib.contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """Count each kernel launch in the `with` block `times` times. The block must not send messages."""
        first = len(self.works)
        yield
        body = self.works[first:]
        for _ in range(times - 1):
            for work in body:
                assert work.message is None, work
                self.queue(Launch(work))

    @contextlib.contextmanager
    def waits_for_messages(self) -> Iterator[None]:
        """Inside the `with` block, record waits for asynchronous messages."""
        wait = FakeWork.wait

        def noted(work: FakeWork, *args: Any, **kwargs: Any) -> bool:
            result = wait(work, *args, **kwargs)
            # The launch of a synchronous message calls `wait` immediately, for this message alone.
            if not self._waits_for_itself:
                self.streams.current.awaited |= self._outstanding
                self._outstanding = set()
            self._waits_for_itself = False
            return result

        with patch.object(FakeWork, "wait", noted):
            yield


def _nothing() -> None:
    """Do nothing. This function is the default of `Recorder.name_storages`."""
