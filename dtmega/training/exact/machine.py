"""Description of a machine for exact runs: its processor, the settings of its libraries, and the bits of products.

A setting has a name, which a message needs. But no list of names is complete, and some settings (flushing of denormal
numbers) cannot be read. So products of fixed numbers are recorded too: whatever changes their bits changes a run's.

Sources of the names: Intel's "Conditional Numerical Reproducibility" for MKL; oneDNN's "CPU Dispatcher Control" and
"Primitive Attributes: floating-point math mode"; `aten/src/ATen/native/DispatchStub.cpp` for ATEN_CPU_CAPABILITY.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.nn import functional

VARIABLES = (
    *("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS"),
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"),
    "ATEN_CPU_CAPABILITY",
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Rows, input and output channels of the products. Libraries choose kernels by size, and treat the last few numbers of
# a vector apart.
SIZES = ((64, 96, 48), (7, 33, 5), (16, 256, 64))


def prepare(device: torch.device) -> dict[str, Any]:
    """Limit this process to one thread, and describe what decides the bits of its products.

    The number of threads is one of these things, so it is the same for each run.

    Args:
        device: device on which the rank computes.

    Returns:
        Name -> value, which JSON can represent. No name begins with a bracket, as a configuration key does.
    """
    torch.set_num_threads(1)
    precision = torch.backends.mkldnn.matmul.fp32_precision  # pyright: ignore[reportAttributeAccessIssue]  # documented
    return {
        "torch's version": torch.__version__,
        "the kind of processor": kind_of_processor(device),
        "the number of threads": torch.get_num_threads(),
        **{name: os.environ.get(name, "") for name in VARIABLES},
        # "none" means that nothing was set, and that float32 stays float32.
        "torch.set_float32_matmul_precision": "ieee" if precision == "none" else precision,
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch.backends.mkldnn": torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
        "torch.backends.cuda.enable_flash_sdp": torch.backends.cuda.flash_sdp_enabled(),  # counts on CPUs too
        **{f"the bits of products in {dtype}".replace("torch.", ""): digest(device, dtype) for dtype in DTYPES},
    }


def kind_of_processor(device: torch.device) -> str:
    """The name of the GPU, or the name of the CPU and the instruction set that torch uses on this CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.machine()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
            break
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def digest(device: torch.device, dtype: torch.dtype) -> str:
    """A digest of what a small layer computes: product, norm, GELU and attention, with their gradients, in hexadecimal.

    Args:
        device: device on which to compute.
        dtype: floating dtype of all tensors.
    """
    found = xxhash.xxh3_64()

    def fixed(*shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        return torch.linspace(-3, 3, count, device=device).sin().to(dtype).view(shape).requires_grad_()

    for rows, inner, outer in SIZES:
        x, weight = fixed(rows, inner), fixed(outer, inner)
        hidden = functional.gelu(functional.layer_norm(x @ weight.mT, [outer]))
        heads = hidden.view(1, 1, rows, outer)
        attended = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        # Denormal numbers are zeros if the processor flushes them.
        tiny = x * torch.finfo(dtype).tiny @ weight.mT
        for tensor in (attended, tiny, *torch.autograd.grad(attended.sum(), (x, weight))):
            found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
