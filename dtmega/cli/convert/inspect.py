"""`python -m dtmega inspect CKPT [OTHER]`: what a checkpoint is, if it is intact, and how two differ."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dtmega.checkpoint.manifest import Entry
from dtmega.checkpoint.reader import Checkpoint
from dtmega.checkpoint.resume import open_checkpoint, state_of
from dtmega.distributed import exit_codes
from dtmega.files.console import counted, printable

SHOWN = 10  # differing tensors


def show(path: str, other: str | None, verify: bool) -> int:
    """Print what a checkpoint is, or how two differ; returns the exit code, 1 if they do.

    Raises:
        ValueError: not a checkpoint.
        Damaged: not intact.
    """
    checkpoint = open_checkpoint(path)
    if other is not None:
        found = list(differences(checkpoint, open_checkpoint(other)))
        print("\n".join(map(printable, found)) or "no differences")
        return 1 if found else exit_codes.DONE
    print("\n".join(map(printable, describe_checkpoint(checkpoint))))
    if verify:
        started = time.perf_counter()
        checkpoint.verify()
        seconds = time.perf_counter() - started
        print(f"integrity   every digest matches ({checkpoint.bytes_read:,} bytes read in {seconds:.1f} s)")
    return exit_codes.DONE


def describe_checkpoint(checkpoint: Checkpoint) -> list[str]:
    """The facts about a checkpoint, one line each."""
    written, state = checkpoint.manifest, state_of(checkpoint)
    weights = {n: e for n, e in written.tensors.items() if n.startswith("model/")}
    others = {n: e for n, e in written.tensors.items() if n not in weights}
    seq_len = state.config.get("data", {}).get("seq_len", 0)
    tokens = state.progress.samples * (seq_len if isinstance(seq_len, int) else 0)
    return [
        f"checkpoint  {checkpoint.path}",
        f"step        {written.step:,}: {counted(state.progress.samples, 'sample')}, {counted(tokens, 'token')}, "
        f"{counted(state.progress.skipped, 'step')} skipped",
        f"model       {state.config.get('model', {}).get('name')}: {counted(_elements(weights), 'parameter')} in "
        f"{counted(len(weights), 'tensor')}, {_bytes(weights):,} bytes",
        f"optimizer   {counted(len(others), 'tensor')}, {_bytes(others):,} bytes, {counted(state.updates, 'update')}",
        f"written on  {', '.join(f'{axis}={size}' for axis, size in state.layout.items()) or 'no layout'}",
        f"written by  {', '.join(f'{what} {version}' for what, version in state.versions.items())}",
        f"identity    {', '.join(f'{key} {value}' for key, value in state.identity.items()) or 'weights only'}",
        f"files       {len(written.files)}, {sum(written.files.values()):,} bytes",
    ]


def differences(a: Checkpoint, b: Checkpoint) -> Iterator[str]:
    """The differences in `State` and in the tensors, one line each; tensors are compared as numbers."""
    states = [_flat(state_of(c).model_dump()) | {"step": c.manifest.step} for c in (a, b)]
    for key in sorted(states[0].keys() | states[1].keys()):
        here, there = (state.get(key) for state in states)
        if here != there:
            yield f"{key}: {here} | {there}"
    names = sorted(a.manifest.tensors.keys() | b.manifest.tensors.keys())
    found = [line for name in names if (line := _difference(a, b, name))]
    yield from found[:SHOWN]
    if len(found) > SHOWN:
        yield f"... and {counted(len(found) - SHOWN, 'more tensor')} of {len(names)}"


def _difference(a: Checkpoint, b: Checkpoint, name: str) -> str:
    here, there = a.manifest.tensors.get(name), b.manifest.tensors.get(name)
    if here is None or there is None or here.shape != there.shape or here.dtype != there.dtype:
        return f"{name}: {_kind(here)} | {_kind(there)}"
    if [(c.offsets, c.sizes, c.digests) for c in here.chunks] == [
        (c.offsets, c.sizes, c.digests) for c in there.chunks
    ]:
        return ""
    ours, theirs = a.read(name), b.read(name)
    if torch.equal(ours, theirs):
        return ""
    apart = (ours.double() - theirs.double()).abs()
    return f"{name}: {int((ours != theirs).sum()):,} of {ours.numel():,} elements differ, by at most {apart.max():.3g}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    flat = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _kind(entry: Entry | None) -> str:
    if entry is None:
        return "not there"
    return f"{str(entry.dtype).removeprefix('torch.')} {list(entry.shape)}"


def _elements(entries: Mapping[str, Entry]) -> int:
    return sum(entry.n_bytes // entry.dtype.itemsize for entry in entries.values())


def _bytes(entries: Mapping[str, Entry]) -> int:
    return sum(entry.n_bytes for entry in entries.values())
