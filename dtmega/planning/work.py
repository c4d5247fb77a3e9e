"""The work of one rank in one training step: kernels and messages, in the order in which the host launches them."""

from __future__ import annotations

from typing import NamedTuple

COMPUTE = "compute"  # name of the stream on which kernels run unless the program chooses a different stream


class Message(NamedTuple):
    """One collective, or one message between two ranks.

    Attributes:
        collective: kind of message, namely "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast",
            "send" or "receive".
        axis: name of the process group in `World.groups`, for example "tp" or "fsdp"; "world" for all ranks.
        n_ranks: number of ranks in the group; 2 for "send" and "receive".
        n_bytes: size of the largest buffer that one rank holds for the message: the output of an all-gather, the input
            of a reduce-scatter, and either the input or the output of all other kinds.
        peer: rank of the sender or receiver at the other end, for "send" and "receive"; -1 for collectives.
    """

    collective: str
    axis: str
    n_ranks: int
    n_bytes: int
    peer: int = -1


class Work(NamedTuple):
    """One work item: a kernel or a message.

    Attributes:
        action: name of the pipeline action that launches the item, such as "1F0"; without a pipeline, "0F0", "0B0", ...
            for the microbatches; outside forward and backward, the name of the phase, such as "counts" or "optimizer".
        stream: name of the stream on which the item is queued. Work items on one stream run in order.
        operator: name of the torch operator, such as "aten.mm" or "c10d.allreduce_".
        flops: number of floating-point operations; 0 for messages and for operators without products.
        moved_bytes: bytes of all inputs and outputs, which a kernel reads or writes at least once; 0 for messages.
        product: sizes (m, k, n) of a product [m, k] x [k, n], where m counts the rows of a whole batch; None otherwise.
        dtype: dtype of the first input, such as "bfloat16".
        message: description of the message; None for kernels.
        waits: indices, in the list of work items, of earlier items that must end before this item can begin. The
            previous item on the same stream is not listed.
    """

    action: str
    stream: str
    operator: str
    flops: int = 0
    moved_bytes: int = 0
    product: tuple[int, int, int] | None = None
    dtype: str = ""
    message: Message | None = None
    waits: tuple[int, ...] = ()
