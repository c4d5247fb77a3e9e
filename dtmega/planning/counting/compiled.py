"""Compiled blocks without a compiler: the graphs that Inductor would get, run operator by operator.

Dynamo captures a block, and AOT's partition decides what forward keeps for backward, as in a real run. Inside of a
block the peak is an upper bound: Inductor fuses chains of elementwise operators, whose results are never in memory,
while here each result counts until its last use.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """Let `torch.compile` make graphs that run operator by operator, inside the `with` block only."""
    backend = aot_autograd(
        fw_compiler=_run_as_it_is,
        bw_compiler=_run_as_it_is,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),  # the partition depends on them
    )
    torch._dynamo.reset()
    with patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)):
        yield
    torch._dynamo.reset()


def _run_as_it_is(graph: torch.fx.GraphModule, _: Any) -> Any:
    return make_boxed_func(graph.forward)
