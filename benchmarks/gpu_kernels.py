"""The kernels that a GPU would be given, made without one: `python benchmarks/gpu_kernels.py [bloom-560m ...]`.

    pip install triton -c constraints.txt
    python benchmarks/gpu_kernels.py               # published sizes, half a minute each; needs g++ and a torch for CPUs

Two blocks of each model go through its own forward on fake CUDA tensors in bf16, with a sequence of the configuration's
length, and are compiled as a run compiles them, forward and backward, by Dynamo, Inductor and Triton, to cubins for
sm_90 (H100, H200). None of them runs. A line says how many graphs the two blocks took (one, which they share), how many
kernels each direction has, and the most shared memory that one asks for, of which a block of threads may have 227 KiB;
then what the passes of a block (all but matrix products and attention) read and write, beside a closed form's least.
The head and its loss follow, over two chunks of tokens of different length, in the same words.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # Inductor reads it when it is imported


def missing(torch_folder: Path) -> str:
    """The reason why nothing can be compiled here; '' if it can."""
    if importlib.util.find_spec("triton") is None:
        return "needs triton: pip install triton -c constraints.txt"
    if (torch_folder / "lib" / "libtorch_cuda.so").exists():
        return "needs a torch that is built for CPUs: one for CUDA looks for a GPU"
    return "" if shutil.which("g++") else "needs g++"


def load_gpu(torch_folder: Path) -> None:
    """Compile one_gpu.cpp and load it into this process."""
    libraries = torch_folder / "lib"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "one_gpu.so")
        command = ["g++", "-shared", "-fPIC", "-std=c++20", str(ROOT / "benchmarks" / "one_gpu.cpp")]
        command += [f"-I{torch_folder / 'include'}", f"-L{libraries}", "-lc10", "-ltorch_cpu", "-o", str(library)]
        subprocess.run(command, check=True)
        ctypes.CDLL(str(libraries / "libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(library))


# Before torch is imported, which asks once whether there is a GPU.
found = importlib.util.find_spec("torch")
assert found is not None
assert found.origin is not None
if reason := missing(Path(found.origin).parent):
    sys.exit(f"compiles nothing: {reason}")
load_gpu(Path(found.origin).parent)

import torch  # noqa: E402

from dtmega import config, families  # noqa: E402 (it imports torch)
from dtmega.ops import cross_entropy, softmax  # noqa: E402

SHARED_BYTES = 227 * 1024  # CUDA C++ Programming Guide, compute capability 9.0
SIZES = ("bloom-560m", "bloom-1b1", "bloom-3b", "bloom-7b1", "gpt2", "llama-3.2-1b", "llama-3-8b")
# No kernel takes a mask of dropped probabilities; the other dropout stays.
NO_DROPOUT = ("--model.attention_dropout", "0")
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 * 2**30,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block_optin=SHARED_BYTES,
    shared_memory_per_multiprocessor=SHARED_BYTES + 1024,
    L2_cache_size=50 * 2**20,
    gcnArchName="",
)
VOCABULARIES = (50_257, 128_256)  # with more, a chunk has more than the 1e9 numbers that torch counts of a kernel
LOSS_TOKENS = 4096 + 1500  # a whole chunk and a shorter one
# What torch asks of a device.
ANSWERS: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "_lazy_init": lambda: None,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "_exchange_device": lambda device: 0,
    "_maybe_exchange_device": lambda device: 0,
    "get_device_capability": lambda device=None: (H100.major, H100.minor),
    "get_device_properties": lambda device=None: H100,
    "get_device_name": lambda device=None: H100.name,
    "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
    "set_rng_state": lambda state, device=None: None,
    "is_bf16_supported": lambda including_emulation=True: True,
    "synchronize": lambda device=None: None,
}


class Kernel(NamedTuple):
    """
    Attributes:
        shared_bytes: of the configuration, among those that a GPU would choose from, that asks for the most.
        cubins: how many of these there are.
    """

    name: str
    shared_bytes: int
    cubins: int


class Made:
    """What has been compiled.

    Attributes:
        graphs: how many Dynamo has handed over.
        passes_bytes: of each of Inductor's graphs, forward before backward, what its passes read and write: each buffer
            once for each kernel; nothing of products and of attention.
    """

    def __init__(self) -> None:
        self.graphs = 0
        self.kernels: list[Kernel] = []
        self.passes_bytes: list[int] = []

    def backend(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        """Inductor, whose kernels are made and not called: what follows needs shapes alone."""
        from torch._inductor import compile_fx

        self.graphs += 1
        compile_fx.compile_fx(graph, inputs)
        return graph.forward

    def count(self, scheduler: Any) -> None:
        """Add up what a graph moves, whose kernels have been written."""
        passes = [node for node in scheduler.nodes if not node.is_template() and not node.is_extern()]
        self.passes_bytes.append(sum(node.get_read_write_buffers_sizes() for node in passes))

    def precompile(self, autotuner: Any) -> None:
        """In the place of Inductor's own, which loads what is made into a device."""
        autotuner._precompile_worker()
        compiled = [result.kernel for result in autotuner.compile_results]
        assert all(kernel.asm["cubin"] for kernel in compiled), autotuner.fn.__name__
        most = max(kernel.metadata.shared for kernel in compiled)
        self.kernels.append(Kernel(autotuner.fn.__name__, most, len(compiled)))


def answer() -> None:
    """Let torch.cuda speak of an H100, for the rest of this process."""
    for name, said in ANSWERS.items():
        setattr(torch.cuda, name, said)
    if not hasattr(torch._C, "_cuda_getCurrentRawStream"):
        setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)  # noqa: B010


@contextlib.contextmanager
def compiling_for_it(made: Made) -> Iterator[None]:
    """Inductor and Triton compile for sm_90, and load nothing."""
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
        # Its patterns for attention, which these graphs have none of, are traced with tensors on the device.
        stack.enter_context(patch.object(joint_graph, "lazy_init", lambda *a, **k: None))
        stack.enter_context(functorch_config.patch(force_non_lazy_backward_lowering=True))
        # Constants are folded, and cached graphs loaded, on the device.
        stack.enter_context(inductor_config.patch(joint_graph_constant_folding=False, fx_graph_cache=False))
        stack.enter_context(inductor_config.patch(use_static_cuda_launcher=False))
        yield


def compile_blocks(arguments: Sequence[str]) -> Made:
    """Compile two blocks of a model of tokens, as the command line `arguments` says it, forward and backward."""
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
        model(tokens=tokens, labels=tokens, sample_ids=sample_ids)
    return made


def _allocate(model: torch.nn.Module, device: torch.device) -> None:
    """Put parameters and buffers of a meta model on a device. `to_empty` cannot where tensors are fake (torch 2.13)."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, torch.nn.Parameter(torch.empty_like(parameter, device=device)))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=device))


def least_bytes(model: config.NativeModel, seq_len: int) -> tuple[int, int]:
    """The least that the passes of a block move, forward and backward, for one sequence in bf16.

    Products and attention read what is written and write what is read; each pass in between reads its inputs once and
    writes its results once. Sums over tokens (of biases and norms) come with a pass that reads the same, which places
    are dropped is hashed again, and gradients of queries, keys and values stay where they are written.
    """
    stream = seq_len * model.hidden_size
    ffn = seq_len * model.ffn
    gated = rotated = 0
    if isinstance(model, config.Llama):
        gated = 1
        rotated = round(stream * (1 + model.kv_heads / model.n_heads))
    norm, norm_of_sum, add = 2, 4, 3
    forward = (norm + norm_of_sum + add) * stream + (2 + gated) * ffn + 2 * rotated
    # A norm's gradient reads that of its output, its input, and the gradient that passes it by.
    backward = 2 * 4 * stream + (3 + 2 * gated) * ffn + 2 * rotated
    if isinstance(model, config.DropoutModel):
        # Where a branch ends its gradient is one with dropped places; without, the sum of the last bias reads it.
        backward += (3 if model.hidden_dropout else 1) * stream
    return 2 * forward, 2 * backward


def compile_loss(n_tokens: int, hidden_size: int, vocab_size: int) -> Made:
    """Compile the passes of the head's loss, forward and derivatives, which chunks of any length share."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    made = Made()
    torch._dynamo.reset()

    @functools.cache
    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, backend=made.backend, fullgraph=True, dynamic=True)

    with compiling_for_it(made), FakeTensorMode(), patch.object(softmax, "_compiled", compiled):
        on_it = {"device": torch.device("cuda", 0), "dtype": torch.bfloat16, "requires_grad": True}
        h, weight = torch.empty(n_tokens, hidden_size, **on_it), torch.empty(vocab_size, hidden_size, **on_it)
        labels = torch.zeros(n_tokens, dtype=torch.int64, device=h.device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of the address of a fake tensor
            cross_entropy.linear_cross_entropy(h, weight, labels, compiled=True)
    return made


def main(names: list[str]) -> int:
    answer()
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
