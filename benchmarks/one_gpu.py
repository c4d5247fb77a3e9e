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
import sys
import tempfile
from pathlib import Path


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


def answer() -> None:
    """Let torch.cuda speak of an H100, for the rest of this process. Dynamo must not have been imported yet."""
    import torch

    from dtmega.planning.counting.queues import Streams
    from dtmega.planning.counting.torch_cuda import answers_of_cuda

    assert "torch._dynamo.device_interface" not in sys.modules, "Dynamo keeps the functions that torch.cuda has now"
    for name, said in answers_of_cuda(Streams()).items():
        setattr(torch.cuda, name, said)
    if not hasattr(torch._C, "_cuda_getCurrentRawStream"):
        # Set the function by name, because the type stubs of torch for CPUs lack it.
        setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)  # noqa: B010
