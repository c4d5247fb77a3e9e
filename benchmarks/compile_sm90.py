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

SHARED_BYTES = 227 * 1024
SIZES = ("bloom-560m", "bloom-1b1", "bloom-3b", "bloom-7b1")
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
# All that torch asks of a device, answered before Dynamo keeps the questions.
ANSWERS: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "_lazy_init": lambda: None,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "_exchange_device": lambda device: 0,
    "_maybe_exchange_device": lambda device: 0,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_properties": lambda device=None: H100,
    "get_device_name": lambda device=None: H100.name,
    "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
    "set_rng_state": lambda state, device=None: None,
    "is_bf16_supported": lambda including_emulation=True: True,
    "synchronize": lambda device=None: None,
}


class Made:
    """What has been compiled."""

    def __init__(self) -> None:
        self.graphs = 0
        self.kernels: dict[str, int] = {}

    def backend(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._inductor import compile_fx

        self.graphs += 1
        compile_fx.compile_fx(graph, inputs)
        return graph.forward  # on fake tensors, for the shapes of what follows

    def precompile(self, autotuner: Any) -> None:
        """In the place of Inductor's own, which loads what is made into a device."""
        autotuner._precompile_worker()
        for result in autotuner.compile_results:
            assert result.kernel.asm["cubin"]
            self.kernels[autotuner.fn.__name__] = result.kernel.metadata.shared


@contextlib.contextmanager
def fake_gpu(made: Made) -> Iterator[None]:
    """An H100, as far as torch and Triton look."""
    for name, answer in ANSWERS.items():
        setattr(torch.cuda, name, answer)
    if not hasattr(torch._C, "_cuda_getCurrentRawStream"):
        setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)  # noqa: B010
    import triton
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._subclasses import fake_tensor
    from triton.backends.compiler import GPUTarget

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
        stack.enter_context(functorch_config.patch(force_non_lazy_backward_lowering=True))
        stack.enter_context(inductor_config.patch(fx_graph_cache=False, use_static_cuda_launcher=False))
        yield


def blocks(name: str, made: Made) -> None:
    """Compile two blocks of one size, which share a graph."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from dtmega import config, families
    from dtmega.rule import alibi_slopes, attention_rule

    cfg = config.load(["--config", f"{name}.toml", "--model.attention_dropout", "0"])
    model_keys: Any = cfg.model
    device = torch.device("cuda", 0)
    shape = (1, cfg.data.seq_len)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.autograd.set_multithreading_enabled(False):
        with torch.device("meta"):
            model: Any = families.build(cfg).to(torch.bfloat16)
        model.to_empty(device=device)
        places = torch.zeros(shape, dtype=torch.int64, device=device)
        slopes = alibi_slopes(model_keys.n_heads).to(device)
        rule = attention_rule(places, causal=True, slopes=slopes)
        hidden = torch.empty(*shape, model_keys.hidden_size, dtype=torch.bfloat16, device=device, requires_grad=True)
        sample_ids = torch.zeros(1, dtype=torch.int64, device=device)
        for number in ("0", "1"):
            layer = torch.compile(model.layers[number], backend=made.backend, fullgraph=True, dynamic=False)
            layer(hidden, rule, model.head_ids, sample_ids, places)


def main(names: list[str]) -> int:
    wrong = 0
    for name in names or SIZES:
        made = Made()
        started_s = time.process_time()
        with fake_gpu(made):
            torch._dynamo.reset()
            blocks(name, made)
        most = max(made.kernels.values(), default=0)
        wrong += made.graphs != 1 or not made.kernels or most > SHARED_BYTES
        print(
            f"{name}: {made.graphs} graph for two blocks, {len(made.kernels)} kernels, at most {most / 1024:.0f} KiB "
            f"of shared memory, {time.process_time() - started_s:.0f} CPU s",
            flush=True,
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
