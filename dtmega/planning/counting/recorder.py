"""Record everything that one rank does on a pretended device: memory by owner, and the work in order."""

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
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from dtmega.planning.counting.ledger import Ledger
from dtmega.planning.counting.queues import Streams
from dtmega.planning.work import Message, Work
from dtmega.training.phases import COMPUTING

# torch's operators that send, by the name behind "c10d::" or "_c10d_functional::", and the kind of the message.
COLLECTIVES = {
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "alltoall_": "all-to-all",
    "all_to_all_single": "all-to-all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "send": "send",
    "recv_": "receive",
}
ROOM = "rooms for messages"
BETWEEN_STAGES = "input and tensors between stages"
LETTERS = {"forward": "F", "backward": "B", "backward-inputs": "I", "backward-weights": "W"}
PRODUCTS = {
    torch.ops.aten.mm: (0, 1),
    torch.ops.aten.addmm: (1, 2),
    torch.ops.aten.bmm: (0, 1),
    torch.ops.aten.baddbmm: (1, 2),
}


class Recorder:
    """The observer of one rank (`pretend.Observer`), and its listener for phases and ranges of the step.

    Args:
        device: the pretended device.

    Attributes:
        ledger: the memory, by owner.
        works: the kernels and messages of the step, in the order in which the host launches them.
        streams: the device's streams; set when the device exists.
        groups: name in `World.groups` of each process group, by torch's name of the group.
        action: name of the current action, as in `Work.action`.
    """

    def __init__(self, device: torch.device) -> None:
        self.ledger = Ledger(device)
        self.works: list[Work] = []
        self.streams: Streams
        self.groups: dict[str, tuple[str, int]] = {}
        self.action = "build"
        self._device = device
        self._phase = "build"
        self._block = ""
        self._named_owner = ""
        self._hidden = False  # True for results that a compiled block never writes to memory
        self._exchanging = False  # True while FSDP gathers weights or sums gradients
        self._outstanding: set[int] = set()  # asynchronous messages that nobody has waited for
        self._waits_for_itself = False  # True from a synchronous message until its own wait
        self.name_storages: Callable[[], None] = _nothing
        self._results: dict[int, int] = {}  # storage of a functional collective's result -> number of the message

    def name_groups(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        """Learn the names of the process groups. Of several names of one group the first counts."""
        everyone = dist.group.WORLD
        assert everyone is not None
        for name, group in {**groups, "world": everyone}.items():
            self.groups.setdefault(group.group_name, (name, group.size()))

    def begin(self) -> None:
        """Begin a step, and forget the steps before."""
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
        """Take note of an action of the pipeline, or of a forward or backward without a pipeline."""
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
    def hiding(self) -> Iterator[None]:
        """Count no memory for new tensors, inside the `with` block only."""
        self._hidden = True
        try:
            yield
        finally:
            self._hidden = False

    @contextlib.contextmanager
    def owning(self, owner: str) -> Iterator[None]:
        """Give all new tensors this owner, inside the `with` block only."""
        before, self._named_owner = self._named_owner, owner
        try:
            yield
        finally:
            self._named_owner = before

    def watch_blocks(self, stage: nn.Module, blocks: list[nn.Module]) -> None:
        """Note which block computes. The name of a block is its name in the stage."""
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
        """Give the buffers in which FSDP2 gathers weights and sums gradients an owner, inside the `with` block only."""

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
        """Enter new storages in the ledger, and the work in the list."""
        if TracingContext.try_get() is not None:
            return  # a graph is made, nothing runs
        packet = operator._overloadpacket
        namespace, _, name = str(packet).partition(".")
        outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
        # The result of an operator in place is its argument, even where a fake tensor is returned as another tensor.
        if not _returns_argument(operator):
            owner = self._owner(namespace, name)
            for tensor in outputs:
                self.ledger.see(tensor, owner, hidden=self._hidden)
        if self._phase == "build":
            return
        if name == "wait_tensor":
            self._wait_for(args[0])
            return
        if name in COLLECTIVES and "c10d" in namespace:
            self._send(operator, name, args, kwargs, outputs)
            return
        if operator.is_view:
            return
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        on_device = [t for t in (*inputs, *outputs) if t.device.type == self._device.type]
        if on_device:
            self._compute(packet, args, kwargs, output, inputs, outputs)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Take note that the memory of a storage was freed or allocated again."""
        self.ledger.resized(storage)

    def _owner(self, namespace: str, name: str) -> str:
        if self._named_owner:
            return self._named_owner
        if self._phase == "build":
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

    def _compute(
        self, packet: Any, args: tuple[Any, ...], kwargs: Any, output: Any, inputs: list[Tensor], outputs: list[Tensor]
    ) -> None:
        flops = 0
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=output)
        product = None
        if packet in PRODUCTS:
            first, second = PRODUCTS[packet]
            a, b = args[first], args[second]
            product = a.numel() // a.shape[-1], a.shape[-1], b.shape[-1]
        # A fused kernel neither reads nor writes the results that are never in memory.
        moved_bytes = sum(t.nbytes for t in (*inputs, *outputs) if not self.ledger.hides(t))
        if self._hidden and not moved_bytes:
            return
        dtype = str((inputs or outputs)[0].dtype).removeprefix("torch.")
        stream = self.streams.current
        waits = stream.queue(len(self.works))
        self.works.append(Work(self.action, stream.name, str(packet), flops, moved_bytes, product, dtype, None, waits))

    def _send(self, operator: Any, name: str, args: tuple[Any, ...], kwargs: Any, outputs: list[Tensor]) -> None:
        # torch leaves out arguments at the end that have their default values.
        parameters = operator._schema.arguments
        defaults = {parameter.name: parameter.default_value for parameter in parameters}
        given = dict(zip(defaults, args, strict=False))
        named = defaults | given | kwargs
        group = named.get("process_group", named.get("group_name"))
        if isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        key = group if isinstance(group, str) else group.group_name
        axis, n_ranks = self.groups[key]
        if n_ranks == 1:
            return
        sizes = []
        for part in (*args, outputs):
            sizes.append(sum(t.nbytes for t in tree_leaves(part) if isinstance(t, Tensor)))
        kind = COLLECTIVES[name]
        number = len(self.works)
        current = self.streams.current
        stream = self.streams.of_group(axis)
        stream.wait_stream(current)
        is_pair = kind in ("send", "receive")
        peer = named.get("dst", named.get("src", -1)) if is_pair else -1
        message = Message(kind, axis, 2 if is_pair else n_ranks, max(sizes), peer)
        waits = stream.queue(number)
        dtype = str(outputs[0].dtype).removeprefix("torch.") if outputs else ""
        self.works.append(Work(self.action, stream.name, f"c10d.{name}", 0, 0, None, dtype, message, waits))
        if is_pair:
            return  # the simulator of schedules decides when a stage waits for its neighbours
        if outputs and "functional" in str(operator):
            self._results[outputs[0].untyped_storage()._cdata] = number
        elif named.get("async_op", named.get("asyncOp")):  # the second name is that of older torch
            self._outstanding.add(number)
        else:
            current.awaited.add(number)
            self._waits_for_itself = True

    def _wait_for(self, tensor: Tensor) -> None:
        number = self._results.pop(tensor.untyped_storage()._cdata, None)
        if number is not None:
            self.streams.current.awaited.add(number)

    @contextlib.contextmanager
    def waits_for_messages(self) -> Iterator[None]:
        """Take note of waits for asynchronous messages, inside the `with` block only."""
        wait = FakeWork.wait

        def noted(work: FakeWork, *args: Any, **kwargs: Any) -> bool:
            result = wait(work, *args, **kwargs)
            # A synchronous message waits only for itself, before any other message is sent.
            if not self._waits_for_itself:
                self.streams.current.awaited |= self._outstanding
                self._outstanding = set()
            self._waits_for_itself = False
            return result

        with patch.object(FakeWork, "wait", noted):
            yield


@functools.cache
def _returns_argument(operator: Any) -> bool:
    """True if all results of an operator are arguments that it has changed."""
    aliases = [result.alias_info for result in operator._schema.returns]
    return bool(aliases) and all(alias is not None and alias.is_write for alias in aliases)


def _nothing() -> None:
    """Do nothing: the default of `Recorder.name_storages`."""
