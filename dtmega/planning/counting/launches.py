"""Summarize an operator that a rank launches: a kernel, a message, a wait, or an operator that takes no time."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from dtmega.planning.counting.ledger import Ledger, local_part
from dtmega.planning.work import Message, Work

# Name of a torch communication operator, without "c10d::" or "_c10d_functional::" -> kind of the message.
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
# Operators that allocate memory without writing to it.
WITHOUT_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
PRODUCTS = {
    torch.ops.aten.mm: (0, 1),
    torch.ops.aten.addmm: (1, 2),
    torch.ops.aten.bmm: (0, 1),
    torch.ops.aten.baddbmm: (1, 2),
}


class Launch(NamedTuple):
    """One operator, without the properties that depend on the moment of its launch.

    Attributes:
        work: kernel or message, without its action, stream and waits; None for an operator that takes no time.
        is_async: whether later work may run during the message, until the program waits for the message explicitly.
        result: address of the storage that receives a message's result, if the program waits for the message with
            `wait_tensor`; otherwise 0.
        awaited: address of the storage whose message this operator waits for; 0 if the operator is not a wait.
    """

    work: Work | None = None
    is_async: bool = False
    result: int = 0
    awaited: int = 0


class Operator(NamedTuple):
    """The names and properties of a torch operator.

    Attributes:
        packet: operator without its overload, such as `torch.ops.aten.mm`.
        text: name of the packet, such as "aten.mm".
        name: name without its namespace, such as "mm".
        sends: whether the operator sends a message between ranks.
        is_functional: whether the operator sends a message whose result is a new tensor.
        returns_argument: whether all results are arguments that the operator has changed.
        is_view: whether the results are views of an argument.
        parameters: name of each parameter -> its default value.
    """

    packet: Any
    text: str
    name: str
    sends: bool
    is_functional: bool
    returns_argument: bool
    is_view: bool
    parameters: dict[str, Any]


@functools.cache
def described(operator: Any) -> Operator:
    """The names and properties of a torch operator."""
    packet = operator._overloadpacket
    text = str(packet)
    namespace, _, name = text.partition(".")
    aliases = [result.alias_info for result in operator._schema.returns]
    returns_argument = bool(aliases) and all(alias is not None and alias.is_write for alias in aliases)
    parameters = {parameter.name: parameter.default_value for parameter in operator._schema.arguments}
    sends = name in COLLECTIVES and "c10d" in namespace
    is_functional = "functional" in namespace
    return Operator(packet, text, name, sends, is_functional, returns_argument, operator.is_view, parameters)


def launched(
    operator: Operator,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
    ledger: Ledger,
    groups: Mapping[str, tuple[str, int]],
    hidden: bool,
) -> Launch:
    """Summarize an operator that has run.

    Args:
        operator: operator that has run.
        args: arguments of the operator.
        kwargs: keyword arguments of the operator.
        output: result of the operator.
        ledger: the device's ledger, which records the tensors that are never in memory.
        groups: torch's name for each process group -> (our name for the group, size of the group).
        hidden: whether the operator's results are never in memory.
    """
    if operator.name == "wait_tensor":
        return Launch(awaited=args[0].untyped_storage()._cdata)
    outputs = tensors_in(output)
    if operator.sends:
        return _message(operator, args, kwargs, outputs, groups)
    if operator.is_view or operator.name in WITHOUT_KERNEL:
        return Launch()
    read_or_written = tensors_in((args, kwargs)) + outputs
    on_device = [tensor.device.type == ledger.device_type for tensor in read_or_written]
    if not any(on_device) or (operator.name == "device_put" and all(on_device)):
        return Launch()
    # A fused kernel neither reads nor writes the results that are never in memory.
    moved_bytes = sum(local_part(tensor).nbytes for tensor in read_or_written if not ledger.hides(tensor))
    if hidden and not moved_bytes:
        return Launch()
    flops = 0
    if operator.packet in flop_registry:
        flops = flop_registry[operator.packet](*args, **kwargs, out_val=output)
    product = None
    if operator.packet in PRODUCTS:
        first, second = PRODUCTS[operator.packet]
        a, b = args[first], args[second]
        product = a.numel() // a.shape[-1], a.shape[-1], b.shape[-1]
    return Launch(Work("", "", operator.text, flops, moved_bytes, product, _dtype(read_or_written)))


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in the arguments or the result of an operator."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    found: list[Tensor] = []
    for each in value:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, (tuple, list, dict)):
            found += tensors_in(each)
    return found


def _message(
    operator: Operator,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: list[Tensor],
    groups: Mapping[str, tuple[str, int]],
) -> Launch:
    # torch leaves out trailing arguments that have their default values.
    given = dict(zip(operator.parameters, args, strict=False))
    named = operator.parameters | given | kwargs
    group = named.get("process_group", named.get("group_name"))
    if isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    assert group is not None
    key = group if isinstance(group, str) else group.group_name
    axis, n_ranks = groups[key]
    if n_ranks == 1:
        return Launch()
    sizes = []
    for part in (*args, outputs):
        sizes.append(sum(tensor.nbytes for tensor in tensors_in(part)))
    kind = COLLECTIVES[operator.name]
    is_pair = kind in ("send", "receive")
    peer = named.get("dst", named.get("src", -1)) if is_pair else -1
    message = Message(kind, axis, 2 if is_pair else n_ranks, max(sizes), peer)
    work = Work("", "", f"c10d.{operator.name}", 0, 0, None, _dtype(outputs), message)
    if outputs and operator.is_functional:
        return Launch(work, result=outputs[0].untyped_storage()._cdata)
    # Older versions of torch call this parameter "asyncOp".
    return Launch(work, is_async=bool(named.get("async_op", named.get("asyncOp"))))


def _dtype(tensors: list[Tensor]) -> str:
    """The name of the first tensor's dtype, such as "bfloat16"; '' if there are no tensors."""
    return str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
