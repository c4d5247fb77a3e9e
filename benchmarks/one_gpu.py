"""Simulate a GPU (`one_gpu.cpp`), for scripts that compile for a GPU or count its memory on a machine without a GPU.

one_gpu.load()      # before torch is imported, because torch looks for a GPU only once
import torch
one_gpu.answer()    # from here on, torch.cuda reports an H100
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SHARED_BYTES = 227 * 1024  # CUDA C++ Programming Guide, compute capability 9.0
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


def torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def missing() -> str:
    """The reason why this machine cannot simulate a GPU; '' if it can."""
    if (torch_folder() / "lib" / "libtorch_cuda.so").exists():
        return "needs a torch that is built for CPUs: one for CUDA looks for a GPU"
    return "" if shutil.which("g++") else "needs g++"


def load() -> None:
    """Compile one_gpu.cpp and load it into this process."""
    libraries = torch_folder() / "lib"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "one_gpu.so")
        command = ["g++", "-shared", "-fPIC", "-std=c++20", str(Path(__file__).with_name("one_gpu.cpp"))]
        command += [f"-I{torch_folder() / 'include'}", f"-L{libraries}", "-lc10", "-ltorch_cpu", "-o", str(library)]
        subprocess.run(command, check=True)
        ctypes.CDLL(str(libraries / "libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(library))


class Stream:
    """The only stream, or an event in the stream. Nothing runs, so nothing waits."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> Stream:
        return self

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


def answer() -> None:
    """Make torch.cuda report an H100, for the rest of this process."""
    import torch

    stream = Stream()
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "get_device_capability": lambda device=None: (H100.major, H100.minor),
        "get_device_properties": lambda device=None: H100,
        "get_device_name": lambda device=None: H100.name,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "is_bf16_supported": lambda including_emulation=True: True,
        "synchronize": lambda device=None: None,
        "Stream": Stream,
        "Event": Stream,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": lambda each: stream,
    }
    for name, said in answers.items():
        setattr(torch.cuda, name, said)
    if not hasattr(torch._C, "_cuda_getCurrentRawStream"):
        # Set the function by name, because the type stubs of torch for CPUs lack it.
        setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)  # noqa: B010
