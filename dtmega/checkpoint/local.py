"""One folder per checkpoint on a local file system: whole tensors in safetensors, numbers in JSON.

    checkpoints/step-00000100/{model.safetensors, optimizer.safetensors, state.json}

A folder is written aside and renamed when everything is on the disk, so it is complete or it does not exist. Names are
the parameters' own; nothing depends on the layout, and each rank reads only the rows and columns it holds.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def save(
    root: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], keep: int
) -> None:
    """Write `root/step-XXXXXXXX` and delete all but the newest `keep`; all ranks call it, rank 0 writes.

    `state` is JSON and comes back from `load`.
    """
    parameters = dict(model.named_parameters())
    weights = {n: _whole(p) for n, p in parameters.items()}
    moments = {
        f"{n}/{key}": _whole(value) for n, p in parameters.items() for key, value in optimizer.state.get(p, {}).items()
    }
    final = root / name(step)
    if dist.get_rank() == 0:
        aside = root / f".tmp-{final.name}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        save_file(weights, aside / "model.safetensors")
        save_file(moments, aside / "optimizer.safetensors")
        (aside / "state.json").write_text(json.dumps(state | {"step": step}, indent=1), encoding="utf-8")
        for path in (*aside.iterdir(), aside):
            _fsync(path)
        shutil.rmtree(final, ignore_errors=True)  # the same step of a run that was wound back
        aside.rename(final)
        _fsync(root)
        for old in finished(root)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    dist.barrier()


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Fill model and optimizer in place and return the saved `state`.

    Raises:
        ValueError: not a checkpoint, or one of another model: names the tensor, its shape here and there.
    """
    state = load_model(path, model)
    with safe_open(path / "optimizer.safetensors", "pt") as file:
        parameters = dict(model.named_parameters())
        for entry in file.keys():  # noqa: SIM118 - not a dict
            n, _, key = entry.rpartition("/")
            p = parameters[n]
            whole = file.get_slice(entry)
            value = torch.zeros_like(p) if whole.get_shape() else torch.zeros((), device=p.device)
            _read(whole, value, entry, path)
            optimizer.state[p][key] = value
    return state


def load_model(path: Path, model: nn.Module) -> dict[str, Any]:
    """Only the weights; same errors as `load`."""
    check(path)
    with safe_open(path / "model.safetensors", "pt") as file:
        parameters = dict(model.named_parameters())
        if missing := sorted(parameters.keys() ^ set(file.keys())):
            raise ValueError(f"{path} is of another model: {len(missing)} names differ, first '{missing[0]}' ([model])")
        for n, p in parameters.items():
            _read(file.get_slice(n), p, n, path)
    return json.loads((path / "state.json").read_text(encoding="utf-8"))


def name(step: int) -> str:
    return f"step-{step:08d}"


def check(path: Path) -> Path:
    """`path`, if it is a finished checkpoint."""
    if not (path / "state.json").is_file():
        raise ValueError(f"{path} is not a checkpoint: it has no state.json ([checkpoint] resume)")
    return path


def finished(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(root.glob("step-" + "[0-9]" * 8))


def set_aside_newer(root: Path, step: int) -> Path | None:
    """Move checkpoints of later steps out of the way of a run that starts again from `step`; nothing is deleted."""
    newer = [path for path in finished(root) if int(path.name.partition("-")[2]) > step]
    if not newer:
        return None
    n = 1 + len(list(root.glob("superseded-*")))
    aside = root / f"superseded-{n}"
    aside.mkdir()
    for path in newer:
        path.rename(aside / path.name)
    return aside


def _whole(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu().contiguous()


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
