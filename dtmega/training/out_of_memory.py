"""Explain an out-of-memory error in one line: the phase, the peak, and the configuration keys to change first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dtmega.config import Config
from dtmega.training.device_peaks import PeakMemory

# torch's CPU allocator raises a plain RuntimeError whose message contains one of these strings.
CPU_ALLOCATOR = ("DefaultCPUAllocator", "not enough memory")


def find(error: BaseException | None) -> BaseException | None:
    """Find the out-of-memory error that caused an exception. torch's pipelines wrap such an error in other exceptions.

    Returns:
        The allocator's error; None if the exception has another cause.
    """
    while error is not None:
        text = str(error)
        of_cpu = isinstance(error, RuntimeError) and any(words in text for words in CPU_ALLOCATOR)
        if of_cpu or isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return error
        error = error.__cause__ or error.__context__
    return None


def explain(error: BaseException, cfg: Config, where: str, peak_memory: PeakMemory) -> str:
    """Explain an out-of-memory error to the user in one line.

    Args:
        error: error that the allocator raised.
        cfg: configuration of the run.
        where: point in the run at which memory ran out, such as "in step 3, in forward+backward".
        peak_memory: memory counter of this process.
    """
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    peak_gib = peak_memory.since_start_bytes() / 2**30
    keys = ", ".join(keys_to_turn(cfg)[:3])
    return f"out of memory {where} ({reason}); the peak was {peak_gib:.3g} GiB; turn first: {keys}"


def keys_to_turn(cfg: Config) -> list[str]:
    """Configuration keys that can save memory, cheapest first. Keys that can save no more memory are left out."""
    keys = []
    if cfg.batch.micro_batch_size > 1:
        keys.append(f"[batch] micro_batch_size (now {cfg.batch.micro_batch_size})")
    if cfg.recompute.mode == "none":
        keys.append("[recompute] mode = 'selective' or 'full'")
    elif cfg.recompute.mode == "selective":
        keys.append("[recompute] mode = 'full'")
    if cfg.precision.params == "float32":
        keys.append("[precision] params = 'bfloat16'")
    if cfg.fsdp.accumulate == "whole" and (cfg.mesh.dp_shard, cfg.mesh.cp) != (1, 1):
        keys.append("[fsdp] accumulate = 'sharded'")
    keys.append("[mesh] dp_shard, more ranks that share parameters and optimizer state")
    keys.append("[mesh] cp, more ranks that share each sequence")
    keys.append("[mesh] tp, more ranks that share each layer")
    keys.append(f"[data] seq_len (now {cfg.data.seq_len})")
    return keys


@contextmanager
def refused(cfg: Config, device: torch.device, doing: str) -> Iterator[None]:
    """Turn an out-of-memory error in the `with` block into a ValueError that explains the error.

    Args:
        cfg: configuration of the run.
        device: device on which this rank computes.
        doing: description of the block's work, such as "the model is built".

    Raises:
        ValueError: the `with` block runs out of memory.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        cause = find(error)
        if cause is None:
            raise
        raise ValueError(explain(cause, cfg, f"while {doing}", PeakMemory(device))) from None
