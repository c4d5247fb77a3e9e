"""Replacements for torch.cuda functions, for a fake GPU.

This module imports no part of Dynamo, because Dynamo keeps the functions that torch.cuda had when Dynamo was imported.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from dtmega.planning.counting.queues import Event, Stream, Streams

SHARED_BYTES = 227 * 1024  # CUDA C++ Programming Guide, compute capability 9.0

# The properties of a Hopper GPU that the trainer, torch and Triton read.
PROPERTIES = SimpleNamespace(
    name="fake GPU",
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


def answers_of_cuda(streams: Streams) -> dict[str, Callable[..., Any] | type]:
    """Replacements for the functions of torch.cuda that the trainer and torch call, for one fake device.

    Args:
        streams: streams of the device.
    """
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_name": lambda device=None: PROPERTIES.name,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "is_bf16_supported": lambda including_emulation=True: True,
        "synchronize": lambda device=None: None,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: streams.current,
        "default_stream": lambda device=None: streams.default,
        "stream": streams.use,
        "set_stream": streams.set_current,
    }
