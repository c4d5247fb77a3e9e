"""The work of one rank in one training step: kernels and messages, in the order in which the host launches them."""

from __future__ import annotations

from typing import NamedTuple

COMPUTE = "compute"  # name of the stream on which kernels run unless the program chooses another one


class Message(NamedTuple):
    """One collective, or one message between two ranks.

    Attributes:
        collective: kind of the message: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast",
            "send" or "receive".
        axis: name of the process group in `World.groups`, for example "tp" or "fsdp"; "world" for all ranks.
        n_ranks: number of ranks in the group; 2 for "send" and "receive".
        n_bytes: size of the largest buffer that one rank holds for the message. For an all-gather this is the output,
            for a reduce-scatter the input, for all other kinds either one.
        peer: rank of the other process for "send" and "receive"; -1 for collectives.
    """

    collective: str
    axis: str
    n_ranks: int
    n_bytes: int
    peer: int = -1


class Work(NamedTuple):
    """One kernel or message.

    Attributes:
        action: the pipeline's action that launches the work, such as "1F0"; without a pipeline "0F0" and "0B0" for
            the microbatches in turn; outside of them the name of the phase, such as "counts" or "optimizer".
        stream: name of the stream that the work is queued on. Work on one stream runs in order.
        operator: name of torch's operator, such as "aten.mm" or "c10d.allreduce_".
        flops: floating-point operations; 0 for messages and for operators without products.
        moved_bytes: bytes of all inputs and outputs, which a kernel reads or writes at least once; 0 for messages.
        product: (m, k, n) of a matrix product [m, k] x [k, n] (a batch counts as further rows m); None otherwise.
        dtype: dtype of the first input, such as "bfloat16".
        message: the message; None for kernels.
        waits: indices of earlier works, in the list of works, that must have ended before this work can begin. The
            previous work on the same stream is not listed.
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
