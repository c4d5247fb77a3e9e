"""Compile the kernels of a GPU on a machine without a GPU: `python benchmarks/gpu_kernels.py [bloom-560m ...]`.

    pip install triton -c constraints.txt
    python benchmarks/gpu_kernels.py               # published sizes, half a minute each; needs g++ and torch for CPUs

A model of two blocks runs its own forward on fake CUDA tensors in bf16, with the configured sequence length. Dynamo,
Inductor and Triton compile the blocks as in a run, forward and backward, to cubins for sm_90 (H100, H200). No kernel
runs.

For each model, the script prints the number of graphs (one, which the two blocks share), the number of kernels, and the
largest shared memory that a kernel requests (a thread block can have 227 KiB). The script then prints how many bytes
the passes of a block (all work except matrix products and attention) read and write, and the lower bound from a closed
form. The next lines are about the head and its loss, over two chunks with different numbers of tokens. The last lines
are about two blocks of BLOOM on the first rank of cp 2: FlexAttention with the block masks of the rank's two runs
(`gather`), or of all queries for half of the heads (`heads`). Collectives use torch's fake process group.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import one_gpu

os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # Inductor reads it when it is imported


def missing() -> str:
    """The reason why this machine cannot compile the kernels; '' if it can."""
    if importlib.util.find_spec("triton") is None:
        return "needs triton: pip install triton -c constraints.txt"
    return one_gpu.missing()


if reason := missing():
    sys.exit(f"compiles nothing: {reason}")
one_gpu.load()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from dtmega import config, families  # noqa: E402 (it imports torch)
from dtmega.config.families.llama import LlamaKeys  # noqa: E402
from dtmega.ops import compiled_softmax, cross_entropy  # noqa: E402
from dtmega.ops.context_parallel import ContextParallel  # noqa: E402
from dtmega.planning.counting.torch_cuda import SHARED_BYTES  # noqa: E402

SIZES = ("bloom-560m", "bloom-1b1", "bloom-3b", "bloom-7b1", "gpt2", "llama-3.2-1b", "llama-3-8b")
SHARED_SIZE = "bloom-560m"  # the model whose sequences two ranks share
# No kernel supports dropout of attention probabilities, so only this dropout is turned off.
NO_DROPOUT = ("--model.attention_dropout", "0")
VOCABULARIES = (50_257, 128_256)  # with more, a chunk has more than the 1e9 numbers that torch counts of a kernel
LOSS_TOKENS = 4096 + 1500  # a whole chunk and a shorter one


class Kernel(NamedTuple):
    """A compiled kernel.

    Attributes:
        name: name of the kernel.
        shared_bytes: largest shared memory of all configurations that a GPU would choose from.
        cubins: number of these configurations, each of which has a cubin.
    """

    name: str
    shared_bytes: int
    cubins: int


class Made:
    """The results of a compilation.

    Attributes:
        graphs: number of graphs that Dynamo has handed over.
        kernels: the compiled kernels.
        passes_bytes: bytes that the passes of each Inductor graph read and write, forward before backward. A buffer
            counts once for each kernel that uses the buffer. Products and attention are left out.
    """

    def __init__(self) -> None:
        self.graphs = 0
        self.kernels: list[Kernel] = []
        self.passes_bytes: list[int] = []

    def backend(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        """Compile a graph with Inductor, but return the uncompiled graph. Fake tensors need only the graph's shapes."""
        from torch._inductor import compile_fx

        self.graphs += 1
        compile_fx.compile_fx(graph, inputs)
        return graph.forward

    def count(self, scheduler: Any) -> None:
        """Add up the bytes that the passes of a graph move. Inductor must already have written the graph's kernels."""
        passes = [node for node in scheduler.nodes if not node.is_template() and not node.is_extern()]
        self.passes_bytes.append(sum(node.get_read_write_buffers_sizes() for node in passes))

    def precompile(self, autotuner: Any) -> None:
        """Replace Inductor's own method, which would load the compiled kernels into a device."""
        autotuner._precompile_worker()
        compiled = [result.kernel for result in autotuner.compile_results]
        assert all(kernel.asm["cubin"] for kernel in compiled), autotuner.fn.__name__
        most = max(kernel.metadata.shared for kernel in compiled)
        self.kernels.append(Kernel(autotuner.fn.__name__, most, len(compiled)))


@contextlib.contextmanager
def compiling_for_it(made: Made) -> Iterator[None]:
    """Make Inductor and Triton compile for sm_90 without loading anything into a device."""
    import triton  # pyright: ignore[reportMissingImports]
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._inductor.scheduler import Scheduler
    from torch._subclasses import fake_tensor
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]

    write_kernels = Scheduler.codegen

    def write_and_count(scheduler: Scheduler) -> None:
        write_kernels(scheduler)
        made.count(scheduler)

    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
        utils=SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": SHARED_BYTES}),
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(type(triton.runtime.driver), "active", driver))
        stack.enter_context(patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        stack.enter_context(patch.object(fake_tensor, "init_gpu_context", lambda device: None))
        stack.enter_context(patch.object(CachingAutotuner, "precompile", lambda self, *a, **k: made.precompile(self)))
        stack.enter_context(patch.object(Scheduler, "codegen", write_and_count))
        # Inductor would trace its attention patterns with tensors on the device. These graphs contain no such pattern.
        stack.enter_context(patch.object(joint_graph, "lazy_init", lambda *a, **k: None))
        stack.enter_context(functorch_config.patch(force_non_lazy_backward_lowering=True))
        # Inductor would fold constants, and load cached graphs, on the device.
        stack.enter_context(inductor_config.patch(joint_graph_constant_folding=False, fx_graph_cache=False))
        stack.enter_context(inductor_config.patch(use_static_cuda_launcher=False))
        yield


def compile_blocks(arguments: Sequence[str], context: ContextParallel | None = None) -> Made:
    """Compile two blocks of a language model, forward and backward.

    Args:
        arguments: command line of a run.
        context: the cp ranks, among which the sequence is divided; None if one process has the whole sequence.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    cfg = config.load([*arguments, "--model.n_layers", "2"])
    device = torch.device("cuda", 0)
    with torch.device("meta"):
        model = families.build(cfg).to(torch.bfloat16)
    made = Made()
    torch._dynamo.reset()
    with compiling_for_it(made), FakeTensorMode(allow_non_fake_inputs=True):
        _allocate(model, device)
        for block in model.blocks():
            block.compile(backend=made.backend, fullgraph=True, dynamic=False)
        tokens = torch.zeros(1, cfg.data.seq_len, dtype=torch.int64, device=device)
        sample_ids = torch.zeros(1, dtype=torch.int64, device=device)
        rows = {"tokens": tokens, "labels": tokens, "sample_ids": sample_ids}
        if context is not None:
            rows = model.part_of(rows, context)
            model.context = context
        model(**rows)
    return made


@contextlib.contextmanager
def sharing(cp: int) -> Iterator[dist.ProcessGroup]:
    """Make this process the first of `cp` ranks. The other ranks do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=cp)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()


def _allocate(model: torch.nn.Module, device: torch.device) -> None:
    """Put parameters and buffers of a meta model on a device. `to_empty` fails for fake tensors (torch 2.13)."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, torch.nn.Parameter(torch.empty_like(parameter, device=device)))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=device))


def least_bytes(model: config.NativeModel, seq_len: int) -> tuple[int, int]:
    """The lower bounds of the bytes that the passes of a block move in forward and backward, for one sequence in bf16.

    Between products and attention, each pass reads its inputs once and writes its results once. Three kinds of work
    move no extra bytes: sums over tokens (for biases and norms) share a pass that reads the summed tensor anyway,
    dropout masks are hashed again, and the gradients of queries, keys and values stay where attention writes them.
    """
    stream = seq_len * model.hidden_size
    ffn = seq_len * model.ffn
    gated = rotated = 0
    if isinstance(model, LlamaKeys):
        gated = 1
        rotated = round(stream * (1 + model.kv_heads / model.n_heads))
    norm, norm_of_sum, add = 2, 4, 3
    forward = (norm + norm_of_sum + add) * stream + (2 + gated) * ffn + 2 * rotated
    # The backward of a norm reads the output's gradient, the norm's input, and the gradient of the residual connection.
    backward = 2 * 4 * stream + (3 + 2 * gated) * ffn + 2 * rotated
    if isinstance(model, config.DropoutModel):
        # With dropout, the gradient at the end of a branch is a tensor of its own. Without dropout, only the sum for
        # the last bias reads this gradient.
        backward += (3 if model.hidden_dropout else 1) * stream
    return 2 * forward, 2 * backward


def compile_loss(n_tokens: int, hidden_size: int, vocab_size: int) -> Made:
    """Compile the passes of the head's loss, forward and derivatives. Chunks of all lengths share these passes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    made = Made()
    torch._dynamo.reset()

    @functools.cache
    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, backend=made.backend, fullgraph=True, dynamic=True)

    with compiling_for_it(made), FakeTensorMode(), patch.object(compiled_softmax, "compiled_pass", compiled):
        on_it = {"device": torch.device("cuda", 0), "dtype": torch.bfloat16, "requires_grad": True}
        h, weight = torch.empty(n_tokens, hidden_size, **on_it), torch.empty(vocab_size, hidden_size, **on_it)
        labels = torch.zeros(n_tokens, dtype=torch.int64, device=h.device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a warning about the address of a fake tensor
            cross_entropy.linear_cross_entropy(h, weight, labels, passes=compiled_softmax.CompiledPasses)
    return made


def main(names: list[str]) -> int:
    one_gpu.answer()
    for name in names or SIZES:
        started_s = time.process_time()
        arguments = ["--config", f"{name}.toml", *(() if name.startswith("llama") else NO_DROPOUT)]
        made = compile_blocks(arguments)
        describe(f"{name}: {made.graphs} graph for two blocks", made, started_s)
        cfg = config.load(arguments)
        least = least_bytes(cfg.model, cfg.data.seq_len)
        for way, moved, at_least in zip(("forward", "backward"), made.passes_bytes, least, strict=True):
            print(f"  {way}: passes move {moved / 2**20:.1f} MiB, at least {at_least / 2**20:.1f}", flush=True)
    for vocab_size in VOCABULARIES:
        started_s = time.process_time()
        made = compile_loss(LOSS_TOKENS, 1024, vocab_size)
        describe(f"loss, V {vocab_size:,}: {made.graphs} graphs for chunks of two lengths", made, started_s)
        logits_bytes = 2 * cross_entropy.CHUNK_TOKENS["cuda"] * vocab_size
        for way, moved, least in zip(("sums", "derivatives"), made.passes_bytes, (1, 2), strict=True):
            print(f"  {way}: {moved / logits_bytes:.3f} times the logits of a chunk, at least {least}", flush=True)
    with sharing(cp=2) as group:
        for form in ("gather", "heads"):
            started_s = time.process_time()
            context = ContextParallel(group, by_heads=form == "heads")
            made = compile_blocks(["--config", f"{SHARED_SIZE}.toml", *NO_DROPOUT], context)
            describe(f"{SHARED_SIZE} over cp 2, {form}: {made.graphs} graph for two blocks", made, started_s)
            attention = [kernel for kernel in made.kernels if kernel.name.startswith("triton_tem")]
            most = " + ".join(f"{kernel.shared_bytes / 1024:.0f}" for kernel in attention)
            print(f"  FlexAttention: {len(attention)} kernels, KiB of shared memory {most}", flush=True)
    return 0


def describe(what: str, made: Made, started_s: float) -> None:
    most = max(made.kernels, key=lambda kernel: kernel.shared_bytes)
    n_cubins = sum(kernel.cubins for kernel in made.kernels)
    print(
        f"{what}, {len(made.kernels)} kernels in {n_cubins} configurations, at most {most.shared_bytes / 1024:.0f} KiB "
        f"of shared memory ({most.name}), {time.process_time() - started_s:.0f} CPU s",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
