"""Run compiled blocks without a compiler: interpret the graphs that Inductor would compile.

As in a real run, Dynamo captures a block, and AOT's partition decides what forward keeps for backward. Inductor fuses
elementwise operators with the operators that read their results. This module therefore counts no memory for a result
that only elementwise operators and reductions read, although Inductor may write some of these results to memory.

A graph runs once for each kind of arguments. Later runs are replayed (`tapes.py`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from dtmega.ops.compiled_softmax import compiled_pass
from dtmega.planning.counting.recorder import Recorder
from dtmega.planning.counting.recording import Recording
from dtmega.planning.counting.tapes import Argument, Tape, kind_of

# Operators that Inductor fuses like elementwise operators, although torch does not tag them as pointwise.
FUSED_TOO = {
    torch.ops.aten.full.default,
    torch.ops.aten.scalar_tensor.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.copy.default,
    torch.ops.aten.copy_.default,
    torch.ops.prims.iota.default,
}


@contextlib.contextmanager
def counted(recorder: Recorder | None = None) -> Iterator[None]:
    """Inside the `with` block, make `torch.compile` return graphs that run operator by operator.

    Args:
        recorder: recorder that is informed about tensors that are never in memory. With a recorder, a graph is replayed
            if an earlier run had arguments of the same kind; with None, the graph runs every time.
    """
    compile_graph = functools.partial(_compile, recorder)
    backend = aot_autograd(
        fw_compiler=compile_graph,
        bw_compiler=compile_graph,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,  # as in Inductor, so that a changed argument needs no copy
        decompositions=select_decomp_table(),  # AOT's partition depends on the decompositions
    )
    # Without this reset, functions that the process compiled earlier would still run as Inductor's kernels.
    compiled_pass.cache_clear()
    torch._dynamo.reset()
    with patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)):
        yield
    compiled_pass.cache_clear()
    torch._dynamo.reset()


def _compile(recorder: Recorder | None, module: fx.GraphModule, _: Any) -> Any:
    """Return a function that runs the graph and, like Inductor's code, frees each value after its last use."""
    graph = _Graph(module, recorder)

    def run(args: list[Any]) -> Any:
        return graph.run(args)

    # By AOT's convention, the function empties the list of arguments, so that the arguments can be freed.
    run.__dict__["_boxed_call"] = True
    return run


class _Graph:
    """One of AOT's graphs, and the tapes of its runs.

    Args:
        module: graph to run.
        recorder: recorder that was passed to `counted`.
    """

    def __init__(self, module: fx.GraphModule, recorder: Recorder | None) -> None:
        self._module, self._recorder = module, recorder
        self._fused = _never_in_memory(module)
        self._placeholders = module.graph.find_nodes(op="placeholder")
        (output,) = module.graph.find_nodes(op="output")
        index = {node: i for i, node in enumerate(self._placeholders)}
        self._returned_arguments = [index.get(node, -1) for node in output.args[0]]
        # Kind of the arguments -> tape of a run; None if a replay could not return the graph's results.
        self._tapes: dict[tuple[Argument, ...], Tape | None] = {}

    def run(self, args: list[Any]) -> Any:
        """Run the graph or replay an earlier run on arguments of the same kind. Either way, empty `args`."""
        recorder = self._recorder
        if recorder is None or recorder.in_build:
            return _Run(self._module, self._fused, recorder).boxed_run(args)
        kind = kind_of(args)
        if kind not in self._tapes:
            return self._record(recorder, kind, args)
        tape = self._tapes[kind]
        if tape is None:
            return _Run(self._module, self._fused, recorder).boxed_run(args)
        return tape.play(args, recorder)

    def _record(self, recorder: Recorder, kind: tuple[Argument, ...], args: list[Any]) -> Any:
        recording = Recording(kind, args, self._placeholders, recorder.ledger)
        recorder.on_launch = recording.launched
        try:
            returned = _Run(self._module, self._fused, recorder, recording).boxed_run(args)
        finally:
            recorder.on_launch = None
        self._tapes[kind] = recording.finish(returned, self._returned_arguments)
        return returned


class _Run(fx.Interpreter):
    """One run of a graph, node by node.

    Args:
        module: graph to run.
        fused: nodes whose results are never in memory.
        recorder: recorder that was passed to `counted`.
        recording: recording that receives the graph's values; None to record nothing.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        fused: set[fx.Node],
        recorder: Recorder | None,
        recording: Recording | None = None,
    ) -> None:
        super().__init__(module)
        self._fused, self._recorder, self._recording = fused, recorder, recording
        self._before: fx.Node | None = None  # the previous node

    def run_node(self, n: fx.Node) -> Any:
        if self._recording is not None and self._before is not None:
            self._recording.let_go(self.user_to_last_uses.get(self._before, []))
        if self._recorder is not None:
            self._recorder.hidden, self._recorder.in_graph = n in self._fused, True
        try:
            value = super().run_node(n)
        finally:
            if self._recorder is not None:
                self._recorder.hidden = self._recorder.in_graph = False
        if self._recording is not None:
            self._recording.hold(n, value)
        self._before = n
        return value


def _never_in_memory(graph: fx.GraphModule) -> set[fx.Node]:
    """The graph's elementwise operators whose results are read only by elementwise operators and reductions."""
    needed: set[fx.Node] = set()
    fused: set[fx.Node] = set()
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
