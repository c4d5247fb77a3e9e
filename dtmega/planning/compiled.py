"""Compiled blocks without a compiler: the graphs that Inductor would get, run operator by operator.

Dynamo captures a block, and AOT's partition decides what forward keeps for backward, as in a real run. Inductor would
fuse chains of elementwise operators, so results that stay inside of such a chain are never in memory.
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


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """Let `torch.compile` make graphs that run operator by operator, inside the `with` block only."""
    backend = aot_autograd(
        fw_compiler=_run_as_it_is,
        bw_compiler=_run_as_it_is,
        partition_fn=min_cut_rematerialization_partition,
    )
    torch._dynamo.reset()
    with patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)):
        yield
    torch._dynamo.reset()


def _run_as_it_is(graph: torch.fx.GraphModule, _: Any) -> Any:
    return make_boxed_func(graph.forward)
