"""`python -m dtmega inspect CKPT [OTHER]`: describe and verify a checkpoint; compare two checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dtmega.checkpoint.manifest import Entry
from dtmega.checkpoint.reader import Checkpoint
from dtmega.checkpoint.resume import open_checkpoint, state_of
from dtmega.checkpoint.state import State
from dtmega.distributed import exit_codes
from dtmega.files.console import counted, printable

SHOWN = 10  # maximum number of differing tensors to list; the rest are only counted


def show(path: str, other: str | None, verify: bool) -> int:
    """Print facts about a checkpoint, or the differences between two checkpoints.

    Args:
        path: path of a checkpoint, or of a run directory, whose newest checkpoint is used.
        other: path of a second checkpoint to compare with; None to describe only the first checkpoint.
        verify: whether to read the whole checkpoint and check all digests.

    Returns:
        The exit code: 1 if the two checkpoints differ, otherwise `exit_codes.DONE`.

    Raises:
        ValueError: a path does not name a checkpoint.
        Damaged: the checkpoint is not intact.
    """
    checkpoint = open_checkpoint(path)
    if other is not None:
        lines = list(differences(checkpoint, open_checkpoint(other)))
        print("\n".join(map(printable, lines)) or "no differences")
        return 1 if lines else exit_codes.DONE
    print("\n".join(map(printable, describe_checkpoint(checkpoint))))
    if verify:
        started = time.perf_counter()
        checkpoint.verify()
        seconds = time.perf_counter() - started
        print(f"integrity   every digest matches ({checkpoint.bytes_read:,} bytes read in {seconds:.1f} s)")
    return exit_codes.DONE


def describe_checkpoint(checkpoint: Checkpoint) -> list[str]:
    """Facts about a checkpoint, one fact per line."""
    manifest, state = checkpoint.manifest, state_of(checkpoint)
    weights = {name: entry for name, entry in manifest.tensors.items() if name.startswith("model/")}
    others = {name: entry for name, entry in manifest.tensors.items() if name not in weights}
    seq_len = state.config.get("data", {}).get("seq_len", 0)
    tokens = state.progress.samples * (seq_len if isinstance(seq_len, int) else 0)
    return [
        f"checkpoint  {checkpoint.path}",
        f"step        {manifest.step:,}: {counted(state.progress.samples, 'sample')}, {counted(tokens, 'token')}, "
        f"{counted(state.progress.skipped, 'step')} skipped",
        f"model       {state.config.get('model', {}).get('name')}: {counted(_elements(weights), 'parameter')} in "
        f"{counted(len(weights), 'tensor')}, {_bytes(weights):,} bytes",
        *_about_base(state),
        f"optimizer   {counted(len(others), 'tensor')}, {_bytes(others):,} bytes, {counted(state.updates, 'update')}",
        f"written on  {', '.join(f'{axis}={size}' for axis, size in state.layout.items()) or 'no layout'}",
        f"written by  {', '.join(f'{program} {version}' for program, version in state.versions.items())}",
        f"identity    {', '.join(f'{key} {value}' for key, value in state.identity.items()) or 'weights only'}",
        f"files       {len(manifest.files)}, {sum(manifest.files.values()):,} bytes",
    ]


def _about_base(state: State) -> list[str]:
    """Lines about adapters and about frozen weights that the checkpoint lacks; [] if the checkpoint has all weights."""
    if state.base is None:
        return []
    lora = state.config.get("lora", {})
    lines = [
        f"base        {state.base.path}: {counted(state.base.elements, 'frozen parameter')} in "
        f"{counted(len(state.base.digests), 'tensor')}, not in the checkpoint"
    ]
    if lora.get("rank"):
        lines.insert(0, f"adapters    rank {lora['rank']}, alpha {lora['alpha']}, on {lora['targets']}")
    return lines


def differences(a: Checkpoint, b: Checkpoint) -> Iterator[str]:
    """Compare the states and tensors of two checkpoints by value and yield a line about each difference."""
    state_a, state_b = (_flat(state_of(c).model_dump()) | {"step": c.manifest.step} for c in (a, b))
    for key in sorted(state_a.keys() | state_b.keys()):
        if state_a.get(key) != state_b.get(key):
            yield f"{key}: {state_a.get(key)} | {state_b.get(key)}"
    names = sorted(a.manifest.tensors.keys() | b.manifest.tensors.keys())
    lines = [line for name in names if (line := _difference(a, b, name))]
    yield from lines[:SHOWN]
    if len(lines) > SHOWN:
        yield f"... and {counted(len(lines) - SHOWN, 'more tensor')} of {len(names)}"


def _difference(a: Checkpoint, b: Checkpoint, name: str) -> str:
    """A line about a tensor that differs between two checkpoints; '' if the tensor is equal in both checkpoints."""
    entry_a, entry_b = a.manifest.tensors.get(name), b.manifest.tensors.get(name)
    if entry_a is None or entry_b is None or entry_a.shape != entry_b.shape or entry_a.dtype != entry_b.dtype:
        return f"{name}: {_kind(entry_a)} | {_kind(entry_b)}"
    # If all chunks and digests are equal, the tensors need not be read. Otherwise the values may still be equal,
    # because different layouts divide a tensor into different chunks.
    if _digests(entry_a) == _digests(entry_b):
        return ""
    tensor_a, tensor_b = a.read(name), b.read(name)
    if torch.equal(tensor_a, tensor_b):
        return ""
    largest = (tensor_a.double() - tensor_b.double()).abs().max()
    n_different = int((tensor_a != tensor_b).sum())
    return f"{name}: {n_different:,} of {tensor_a.numel():,} elements differ, by at most {largest:.3g}"


def _digests(entry: Entry) -> list[tuple[Any, ...]]:
    """The position, size and digests of each chunk of a tensor."""
    return [(chunk.offsets, chunk.sizes, chunk.digests) for chunk in entry.chunks]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings: {"a": {"b": 1}} -> {"a.b": 1}."""
    flat = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _kind(entry: Entry | None) -> str:
    """A tensor's dtype and shape, as text."""
    if entry is None:
        return "not there"
    return f"{str(entry.dtype).removeprefix('torch.')} {list(entry.shape)}"


def _elements(entries: Mapping[str, Entry]) -> int:
    return sum(entry.n_bytes // entry.dtype.itemsize for entry in entries.values())


def _bytes(entries: Mapping[str, Entry]) -> int:
    return sum(entry.n_bytes for entry in entries.values())
