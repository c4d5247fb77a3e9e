"""One folder per checkpoint on a local file system: whole tensors in safetensors, numbers in JSON.

    checkpoints/step-00000100/{model-00000.safetensors, optimizer-00000.safetensors, state.json}

One part per pipeline rank; all ranks see one file system. A folder is written aside and renamed when everything is on
the disk, so it is complete or it does not exist. Names are those of the whole model; nothing depends on the layout, and
each rank reads only the rows and columns it holds.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from dtmega import config

# Keys of [model] that a checkpoint must agree with.
SHAPE = ("name", "vocab_size", "pad_vocab_to_multiple", "hidden_size", "n_layers", "n_heads", "ffn_hidden_size")


def save(
    root: Path,
    step: int,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    *,
    keep: int,
    part: int = 0,
    writes: bool = True,
) -> None:
    """Write `root/step-XXXXXXXX` and delete all but the newest `keep`. All ranks call it.

    Args:
        parameters: of this rank's stage, by name in the whole model.
        state: JSON; comes back from `load`.
        part: which stage this rank holds; each is a file of its own.
        writes: one rank of each stage does.
    """
    assert not optimizer.state or all(p in optimizer.state for p in parameters.values())
    moments = {f"{n}/{key}": value for n, p in parameters.items() for key, value in optimizer.state[p].items()}
    whole = {"model": _gather(parameters, keep=writes), "optimizer": _gather(moments, keep=writes)}
    final = root / name(step)
    aside = root / f".tmp-{final.name}"
    if dist.get_rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    dist.barrier()
    if writes:
        for kind, tensors in whole.items():
            path = aside / f"{kind}-{part:05d}.safetensors"
            save_file(tensors, path)
            _fsync(path)
    dist.barrier()
    if dist.get_rank() == 0:
        (aside / "state.json").write_text(json.dumps(state | {"step": step}, indent=1), encoding="utf-8")
        _fsync(aside / "state.json")
        _fsync(aside)
        shutil.rmtree(final, ignore_errors=True)  # the same step of a run that was wound back
        aside.rename(final)
        _fsync(root)
        for old in finished(root)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    dist.barrier()


def load(
    path: Path, parameters: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Fill parameters and optimizer in place and return the saved `state`.

    Raises:
        ValueError: not a checkpoint, or one of another model: names the tensor, its shape here and there.
    """
    parameters = list(parameters)
    state = load_model(path, parameters)
    with _Entries(path, "optimizer") as entries:
        for entry in entries.names:
            whole, (owner, _, key) = entries[entry], entry.rpartition("/")
            for p in (p for n, p in parameters if n == owner):  # two where one rank has both copies of a tied weight
                value = torch.zeros_like(p) if whole.get_shape() else torch.zeros((), device=p.device)
                _read(whole, value, entry, path)
                optimizer.state[p][key] = value
    return state


def load_model(path: Path, parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    """Only the weights; same errors as `load`."""
    check(path)
    with _Entries(path, "model") as entries:
        for n, p in parameters:
            if n not in entries.names:
                raise ValueError(f"{path} is of another model: it has no '{n}' ([model])")
            _read(entries[n], p, n, path)
    return json.loads((path / "state.json").read_text(encoding="utf-8"))


def name(step: int) -> str:
    return f"step-{step:08d}"


def check(path: Path) -> Path:
    """`path`, if it is a finished checkpoint."""
    if not (path / "state.json").is_file():
        raise ValueError(f"{path} is not a checkpoint: it has no state.json ([checkpoint] resume)")
    return path


def find(root: Path, cfg: config.Config) -> Path | None:
    """What `[checkpoint] resume` names: the newest under `root`, none, or a folder.

    Raises:
        ValueError: no such folder, or a checkpoint of a model of another shape.
    """
    resume = cfg.checkpoint.resume
    found = finished(root) if resume == "auto" else [] if resume == "none" else [check(Path(resume))]
    if not found:
        return None
    there = json.loads((found[-1] / "state.json").read_text(encoding="utf-8"))["config"]["model"]
    for key in SHAPE:
        here = getattr(cfg.model, key)
        if there[key] != here:
            raise ValueError(
                f"{found[-1]} is of a model with {key}={there[key]}, not {here} ([model] {key}; another [run] dir or "
                f"[checkpoint] resume = 'none' starts anew)"
            )
    return found[-1]


def finished(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(root.glob("step-" + "[0-9]" * 8))


def set_aside_newer(root: Path, step: int) -> None:
    """Move checkpoints of later steps out of the way of a run that starts again from `step`; nothing is deleted."""
    newer = [path for path in finished(root) if int(path.name.partition("-")[2]) > step]
    if not newer:
        return
    n = 1 + len(list(root.glob("superseded-*")))
    aside = root / f"superseded-{n}"
    aside.mkdir()
    for path in newer:
        path.rename(aside / path.name)


class _Entries:
    """The tensors of all parts of one kind, read lazily."""

    def __init__(self, path: Path, kind: str) -> None:
        self._stack = contextlib.ExitStack()
        files = [self._stack.enter_context(safe_open(f, "pt")) for f in sorted(path.glob(f"{kind}-*.safetensors"))]
        self.names: dict[str, Any] = {n: file for file in files for n in file.keys()}  # noqa: SIM118 - not a dict

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __getitem__(self, entry: str) -> Any:
        return self.names[entry].get_slice(entry)


def _gather(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Whole tensors in host memory; all ranks take part, and only those that `keep` them pay for the copies."""
    whole = {}
    for n, tensor in tensors.items():
        gathered = _whole(tensor.detach())
        if keep:
            whole[n] = gathered.cpu().contiguous()
    return whole


def _whole(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        # One axis at a time, the one that cut last first: torch warns when it is left to order two gathers itself.
        for axis in range(tensor.device_mesh.ndim):
            placements = [Replicate() if i <= axis else p for i, p in enumerate(tensor.placements)]
            tensor = tensor.redistribute(placements=placements)
        tensor = tensor.to_local()
    return tensor


@torch.no_grad()
def _read(whole: Any, target: Tensor, entry: str, path: Path) -> None:
    """Copy this rank's part of a safetensors slice into `target`."""
    if list(whole.get_shape()) != list(target.shape):
        raise ValueError(
            f"{path} is of another model: '{entry}' is {whole.get_shape()} there, {list(target.shape)} here ([model])"
        )
    if not isinstance(target, DTensor):
        target.copy_(whole[...])
    elif target.to_local().numel():
        (chunk,) = target.__create_chunk_list__()
        part = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        target.to_local().copy_(whole[part])


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
