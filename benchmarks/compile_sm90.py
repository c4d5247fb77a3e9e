"""The kernels that a GPU would be given, made without one: `python benchmarks/compile_sm90.py [bloom-560m ...]`.

Blocks of the published sizes are traced on fake CUDA tensors in bf16 and compiled, forward and backward, by Dynamo,
Inductor and Triton, to cubins for sm_90, an H100 or H200; none of them runs. For each size: graphs, kernels, and the
most shared memory of a kernel, of which a block of threads may have 227 KiB. Needs `triton`
(pip install triton; torch's builds for CUDA bring it), one core and a minute a size.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
import triton
from torch._inductor import compile_fx
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget

from dtmega import config, families
from dtmega.rule import alibi_slopes, attention_rule

SHARED_BYTES = 227 * 1024
SIZES = ("bloom-560m", "bloom-1b1", "bloom-3b", "bloom-7b1", "llama-3.2-1b", "llama-3-8b")
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


class Made:
    """What has been compiled since it was last asked."""

    def __init__(self) -> None:
        self.graphs = 0
        self.kernels: dict[str, Any] = {}

    def backend(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        compile_fx.compile_fx(graph, inputs)
        return graph.forward  # on fake tensors, for the shapes of what follows

    def precompile(self, autotuner: Any, *args: Any, **kwargs: Any) -> None:
        """In the place of Inductor's own, which loads what is made into a device."""
        autotuner._precompile_worker()
        for result in autotuner.compile_results:
            assert result.kernel.asm["cubin"]
            self.kernels[autotuner.fn.__name__] = result.kernel.metadata.shared


@contextlib.contextmanager
def fake_gpu(made: Made) -> Iterator[None]:
    """All that torch and Triton ask of a device, answered for an H100."""
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
        get_benchmarker=lambda: None,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: H100,
        "get_device_name": lambda device=None: H100.name,
        "synchronize": lambda device=None: None,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        stack.enter_context(patch.object(triton.runtime.driver, "_active", driver, create=True))
        stack.enter_context(patch.object(CachingAutotuner, "precompile", lambda self, *a, **k: made.precompile(self)))
        stack.enter_context(torch._functorch.config.patch(force_non_lazy_backward_lowering=True))
        stack.enter_context(torch._inductor.config.patch(fx_graph_cache=False))
        yield


def block(name: str, made: Made) -> None:
    """Compile two blocks of one size, which share a graph."""
    cfg = families.resolve(config.load(["--config", f"{name}.toml", "--model.init_from", ""]))
    device = torch.device("cuda", 0)
    n_tokens = (1, min(cfg.data.seq_len, 2048))
    with FakeTensorMode(allow_non_fake_inputs=True), device:
        model: Any = families.build(cfg).to(torch.bfloat16)
        places = torch.zeros(n_tokens, dtype=torch.int64)
        slopes = alibi_slopes(cfg.model.n_heads).to(device) if "bloom" in name else None
        rule = attention_rule(places, causal=True, slopes=slopes)
        hidden = torch.empty(*n_tokens, cfg.model.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        others = [torch.empty(1, dtype=torch.int64), places]
        for number in ("0", "1"):
            layer = torch.compile(model.layers[number], backend=made.backend, fullgraph=True, dynamic=False)
            layer(hidden, rule, model.head_ids, *others)


def main(names: list[str]) -> int:
    wrong = 0
    for name in names or SIZES:
        made = Made()
        torch._dynamo.reset()
        started_s = time.process_time()
        with fake_gpu(made):
            block(name, made)
        most = max(made.kernels.values(), default=0)
        wrong += made.graphs != 1 or most > SHARED_BYTES
        print(
            f"{name}: {made.graphs} graph for two blocks, {len(made.kernels)} kernels, at most {most / 1024:.0f} KiB "
            f"of shared memory, {time.process_time() - started_s:.0f} CPU s",
            flush=True,
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
