"""Compiled blocks without a compiler: the graphs that Inductor would get, run operator by operator.

Dynamo captures a block, and AOT's partition decides what forward keeps for backward, as in a real run. Inductor fuses
elementwise operators with the operators that read their results. So a result that only elementwise operators and
reductions read takes no memory here. Inductor may write some of these results to memory nevertheless.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from dtmega.ops.softmax import compiled_pass

# Operators that Inductor fuses as elementwise ones, although torch does not tag them so.
FUSED_TOO = {
    torch.ops.aten.full.default,
    torch.ops.aten.scalar_tensor.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.copy.default,
    torch.ops.aten.copy_.default,
    torch.ops.prims.iota.default,
}
Hiding = Callable[[], AbstractContextManager[object]]


@contextlib.contextmanager
def counted(hiding: Hiding = contextlib.nullcontext) -> Iterator[None]:
    """Let `torch.compile` make graphs that run operator by operator, inside the `with` block only.

    Args:
        hiding: function that returns a context manager, inside which new tensors take no memory.
    """
    compile_graph = functools.partial(_compile, hiding)
    backend = aot_autograd(
        fw_compiler=compile_graph,
        bw_compiler=compile_graph,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,  # as Inductor does: a changed argument needs no copy
        decompositions=select_decomp_table(),  # the partition depends on them
    )
    # Functions that the process has compiled before would still run as Inductor's kernels.
    compiled_pass.cache_clear()
    torch._dynamo.reset()
    with patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)):
        yield
    compiled_pass.cache_clear()
    torch._dynamo.reset()


def _compile(hiding: Hiding, graph: torch.fx.GraphModule, _: Any) -> Any:
    """Return a function that runs the graph, and frees each value after its last use, as Inductor's code does."""
    fused = _never_in_memory(graph)

    def run(args: list[Any]) -> Any:
        return _Run(graph, fused, hiding).boxed_run(args)

    # By AOT's convention, the list of arguments is emptied, so that arguments can be freed.
    run.__dict__["_boxed_call"] = True
    return run


class _Run(torch.fx.Interpreter):
    """One run of a graph."""

    def __init__(self, graph: torch.fx.GraphModule, fused: set[torch.fx.Node], hiding: Hiding) -> None:
        super().__init__(graph)
        self._fused, self._hiding = fused, hiding

    def run_node(self, n: torch.fx.Node) -> Any:
        if n not in self._fused:
            return super().run_node(n)
        with self._hiding():
            return super().run_node(n)


def _never_in_memory(graph: torch.fx.GraphModule) -> set[torch.fx.Node]:
    """The elementwise operators of a graph whose results only elementwise operators and reductions read."""
    needed: set[torch.fx.Node] = set()
    fused: set[torch.fx.Node] = set()
    for node in reversed(graph.graph.nodes):
        tags = getattr(node.target, "tags", ())
        is_view = getattr(node.target, "is_view", False)
        is_fusible = torch.Tag.pointwise in tags or node.target in FUSED_TOO
        if is_fusible and node not in needed:
            fused.add(node)
        reads_from_memory = not (is_fusible or is_view or torch.Tag.reduction in tags)
        if reads_from_memory or (is_view and node in needed):
            needed.update(node.all_input_nodes)
    return fused
