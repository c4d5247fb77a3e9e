"""The user interface for verifying a plan: `verify_plan`, and `python -m dtmega verify-plan DIR --tp 2` (or --ep)."""

from __future__ import annotations

import functools
import gc
import os
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtmega.distributed.rendezvous import meet, rank_and_size
from dtmega.files.console import counted
from dtmega.interop.hf.directory import experts_of
from dtmega.interop.hf.expert_parallel import send_to_experts
from dtmega.interop.hf.files import config_json
from dtmega.interop.hf.tp.parallel import parallelize_hf, plan_for
from dtmega.interop.hf.tp.verify import Verification, verify
from dtmega.ops.expert_parallel import check_divisible, divide

TIMEOUT = timedelta(minutes=5)


def verify_plan(
    model: Any,
    mesh: DeviceMesh,
    sequence_parallel: bool = True,
    loss_parallel: bool = True,
    *,
    generic: bool = False,
) -> Verification:
    """Compare a small sharded copy of the model with an unsharded copy: loss, logits and every gradient.

    Every rank of the mesh must call this function.

    Args:
        model: `transformers` model, real or on meta; only the model's class and config are used.
        mesh: mesh over which the copy is sharded; argument of `parallelize_hf`.
        sequence_parallel: argument of `parallelize_hf`.
        loss_parallel: argument of `parallelize_hf`.
        generic: argument of `parallelize_hf`.

    Returns:
        The result of the comparison. `print` shows a table; `.ok` is True if all deviations are within the tolerance.

    Raises:
        ValueError: `parallelize_hf` refuses the model or the mesh.
    """
    options: dict[str, Any] = {
        "sequence_parallel": sequence_parallel,
        "loss_parallel": loss_parallel,
        "generic": generic,
    }
    return verify(model, mesh, functools.partial(parallelize_hf, verify_native=False, **options))


def verify_experts(model: Any, mesh: DeviceMesh) -> Verification:
    """Compare a small copy of the model whose experts are divided over `mesh` with a copy that is not divided.

    Each rank has its own batch. Every rank of the mesh must call this function.

    Args:
        model: `transformers` model, real or on meta; only the model's class and config are used.
        mesh: 1-D mesh of the ranks over which each layer's experts are divided.

    Raises:
        ValueError: the model has no experts that the ranks can share evenly, or no small copy can be built.
    """

    def divided(clone: Any, mesh: DeviceMesh) -> Any:
        for experts in experts_of(clone):
            send_to_experts(experts, mesh.size())
            divide(experts, mesh)
        return clone

    if not experts_of(model):
        raise ValueError(
            f"'{model.config.model_type}' has no experts that transformers can compute on other ranks, expected a "
            f"mixture (--ep)"
        )
    # The small copy and the model may have different numbers of experts.
    for experts in experts_of(model):
        check_divisible(experts, mesh.size())
    return verify(model, mesh, divided, own_batches=True)


def verify_directory(directory: Path, axis: str, n: int, **options: bool) -> int:
    """Print a model's plan, and the deviations of a small sharded copy of the model from an unsharded copy.

    Under torchrun, the ranks are the processes that torchrun started. Otherwise this function starts the processes.

    Args:
        directory: directory with the model's config.json.
        axis: "tp" or "ep", the axis that is verified.
        n: number of ranks along the axis.
        options: keyword arguments of `parallelize_hf`, for tp only.

    Returns:
        The exit code: 0 if all deviations are within the tolerance, and 1 if a deviation is too large.

    Raises:
        ValueError: the model has no plan, or torchrun did not start `n` processes.
    """
    model = on_meta(directory)
    plan = plan_for(model, n, **options) if axis == "tp" else f"ep {n}: {len(experts_of(model))} layers of experts"
    if "WORLD_SIZE" in os.environ:
        rank, size = rank_and_size()
        if size != n:
            raise ValueError(f"torchrun started {counted(size, 'process')}, expected --{axis} {n}")
        store = meet(rank, size, TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        verification = _verification(directory, axis, n, options)
        prints = rank == 0
        _leave()
    else:
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(_rank, (folder, directory, axis, n, options), nprocs=n)  # pyright: ignore[reportPrivateImportUsage]
            # The file is safe to unpickle: our own rank 0 wrote it, in a folder that only this user can write to.
            verification = torch.load(Path(folder, "result"), weights_only=False)
            prints = True
            if isinstance(verification, ValueError):
                raise verification
    if prints:
        print(f"{plan}\n\n{verification}")
    return 0 if verification.ok else 1


def _rank(rank: int, folder: str, directory: Path, axis: str, n: int, options: dict[str, bool]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), n)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=TIMEOUT)
    try:
        result = _verification(directory, axis, n, options)
    except ValueError as error:
        # All ranks get the same error. The parent process raises the error once; if each rank raised the error here,
        # each rank would print a traceback.
        result = error
    if rank == 0:
        torch.save(result, Path(folder, "result"))
    _leave()


def _leave() -> None:
    # gloo aborts at exit if a tensor with pending work outlives the process group.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def _verification(directory: Path, axis: str, n: int, options: dict[str, bool]) -> Verification:
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=(axis,))
    if axis == "ep":
        return verify_experts(on_meta(directory), mesh)
    return verify_plan(on_meta(directory), mesh, **options)


def on_meta(directory: Path) -> Any:
    """Build a model on the meta device from a directory's config.json.

    Raises:
        ValueError: config.json is missing, refers to custom code, or names a class that transformers does not have.
    """
    import transformers

    config = config_json.make_config(directory, config_json.read_plain(directory))
    (name, *_) = config.architectures or (None,)
    model_class = getattr(transformers, name, None) if isinstance(name, str) else None
    if not isinstance(model_class, type) or not issubclass(model_class, transformers.PreTrainedModel):
        raise ValueError(
            f"{directory}/config.json: architectures={config.architectures} names no model class of transformers"
        )
    try:
        with torch.device("meta"):
            return model_class._from_config(config)
    except Exception as error:  # each family checks its sizes in its own way
        raise ValueError(
            f"{directory}/config.json cannot be built as {name}: {type(error).__name__}: {error}"
        ) from None
