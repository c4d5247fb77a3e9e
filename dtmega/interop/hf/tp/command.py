"""The user interface for verifying a plan: `verify_plan`, and `python -m dtmega verify-plan DIR --tp 2`."""

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
from dtmega.interop.hf.files import config_json
from dtmega.interop.hf.tp.parallel import parallelize_hf, plan_for
from dtmega.interop.hf.tp.verify import Verification, verify

TIMEOUT = timedelta(minutes=5)


def verify_plan(
    model: Any,
    mesh: DeviceMesh,
    sequence_parallel: bool = True,
    loss_parallel: bool = True,
    *,
    generic: bool = False,
) -> Verification:
    """Compare a small clone of the model, cut over `mesh`, with an uncut clone: loss, logits and every gradient.

    Every rank of the mesh must call this function.

    Args:
        model: `transformers` model, real or on meta; only the model's class and config are used.
        mesh: mesh over which the clone is cut; argument of `parallelize_hf`.
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


def verify_directory(directory: Path, tp: int, **options: bool) -> int:
    """Print the plan for a directory's model, and the deviations between a small cut clone and an uncut clone.

    Under torchrun, the ranks are the processes that torchrun started. Otherwise this function starts the processes.

    Args:
        directory: directory with the model's config.json.
        tp: number of ranks.
        options: options of `parallelize_hf`.

    Returns:
        The exit code: 0 if all deviations are within the tolerance, and 1 if a deviation is too large.

    Raises:
        ValueError: the model has no plan, or torchrun did not start `tp` processes.
    """
    plan = plan_for(on_meta(directory), tp, **options)
    if "WORLD_SIZE" in os.environ:
        rank, size = rank_and_size()
        if size != tp:
            raise ValueError(f"torchrun started {counted(size, 'process')}, expected --tp {tp}")
        store = meet(rank, size, TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        verification = _verification(directory, tp, options)
        prints = rank == 0
        _leave()
    else:
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(_rank, (folder, directory, tp, options), nprocs=tp)  # pyright: ignore[reportPrivateImportUsage]
            # The file is safe to unpickle: our own rank 0 wrote it, in a folder that only this user can write to.
            verification = torch.load(Path(folder, "result"), weights_only=False)
            prints = True
            if isinstance(verification, ValueError):
                raise verification
    if prints:
        print(f"{plan}\n\n{verification}")
    return 0 if verification.ok else 1


def _rank(rank: int, folder: str, directory: Path, tp: int, options: dict[str, bool]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), tp)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=tp, timeout=TIMEOUT)
    try:
        result = _verification(directory, tp, options)
    except ValueError as error:
        # All ranks get the same error. The parent process raises the error once; if each rank raised the error here,
        # each rank would print a traceback.
        result = error
    if rank == 0:
        torch.save(result, Path(folder, "result"))
    _leave()


def _leave() -> None:
    # gloo aborts at exit if a tensor with pending work outlives the group.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def _verification(directory: Path, tp: int, options: dict[str, bool]) -> Verification:
    mesh = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
    return verify_plan(on_meta(directory), mesh, **options)


def on_meta(directory: Path) -> Any:
    """Build, on the meta device, the model that a directory's config.json describes.

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
