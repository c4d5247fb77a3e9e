"""torch's flight recorder: the last collectives of each rank, which tell why a job hangs.

torch keeps them in a ring in memory: group, number, shapes, state and the lines that called it. The watch
(`dtmega/distributed/watchdog.py`) writes them when it ends a process, a file for each rank; torch's reader compares
the ranks, and names the collective that some of them have not come to.

    switch_on(device)  # before the process group is made
    dump(Path("runs/bloom/flight-recorder/2026-11-25T14-03-20"), rank)

    torchfrtrace runs/bloom/flight-recorder/2026-11-25T14-03-20

nccl and gloo have a recorder each, and both can be read here. torch 2.11 and 2.13 record 2,000 collectives unless told
otherwise, on a CPU as well.
"""

from __future__ import annotations

import os
import pickle
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d

from dtmega.distributed.exit_codes import error_summary
from dtmega.files import atomic, console

# torch's variables for the number of collectives that are kept, the newer name first; 0 switches the recorder off.
BUFFER_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
FOLDER = "flight-recorder"  # in the run directory
ENTRIES = 2000  # 330 kB in a file, with stacks of 25 frames
PREFIX = "rank_"  # torchfrtrace takes the number after it as the rank
PATIENCE_S = 8.0


def switch_on(device: torch.device) -> None:
    """Switch on the recorder of nccl, unless the user has set its size. On a CPU, torch's default stays.

    torch reads the variable when the first process group is made. Where nccl itself writes its record when a collective
    times out stays as it is (TORCH_FR_DUMP_TEMP_FILE): the watch ends a process in half that time.
    """
    if device.type == "cuda" and not any(name in os.environ for name in BUFFER_SIZE):
        os.environ[BUFFER_SIZE[0]] = str(ENTRIES)


def dump(folder: Path, rank: int, patience_s: float = PATIENCE_S) -> str:
    """Write the record of this process. It raises nothing: an error is printed.

    Args:
        folder: folder for the files of all ranks, and for nothing else; it is made if it does not exist.
        rank: rank of this process.
        patience_s: seconds to wait for the disk, or for torch.

    Returns:
        The path of the file; '' if nothing was recorded, or it could not be written in time.
    """
    written: list[str] = []
    # A thread of its own, because a disk may hang. The process ends without it.
    writer = threading.Thread(target=_write, args=(folder, rank, written), name="flight recorder", daemon=True)
    writer.start()
    writer.join(patience_s)
    return written[0] if written else ""


def _write(folder: Path, rank: int, written: list[str]) -> None:
    """Write the record into `folder`, and append the file's path to `written`."""
    path = folder / f"{PREFIX}{rank}"
    try:
        # First without stacks, because torch imports its compiler to name the lines: 1 s here, and from a slow disk
        # perhaps longer than there is time.
        for with_stacks in (False, True):
            content = _record(with_stacks)
            if not content:
                return
            atomic.make_folder(folder)
            _replace(path, content)
            written.append(str(path))
    # Whatever fails here, the process is about to end for a reason of its own.
    except Exception as error:
        console.say(f"rank {rank}: flight recorder: {error_summary(error)}")


def _record(with_stacks: bool) -> bytes:
    """The pickled record of nccl, or of gloo if nccl has recorded nothing; b'' if neither has."""
    c10d = torch._C._distributed_c10d  # pyright: ignore[reportAttributeAccessIssue]  # missing in the stub
    # Only a build with CUDA has this function.
    of_nccl = getattr(c10d, "_dump_nccl_trace", None)
    if of_nccl is not None:
        content = of_nccl(includeStackTraces=with_stacks)
        if pickle.loads(content)["entries"]:
            return content
    record = pickle.loads(c10d._dump_fr_trace(includeStackTraces=with_stacks))
    return pickle.dumps(record | {"pg_config": _groups()}) if record["entries"] else b""


def _groups() -> dict[str, dict[str, Any]]:
    """The process groups as torchfrtrace expects them. gloo records them under empty names and without ranks."""
    groups = {}
    for group, name in distributed_c10d._world.pg_names.items():
        ranks = [*distributed_c10d._world.pg_group_ranks[group]]
        groups[name] = {"name": name, "desc": group.group_desc, "ranks": str(ranks)}
    return groups


def _replace(path: Path, content: bytes) -> None:
    """Write a file whole, or not at all."""
    # The main thread may be writing too, and be ended by the watch meanwhile: each thread has a name of its own. A name
    # that ends with a number, or contains PREFIX, would be a rank's for torchfrtrace.
    part = path.with_name(f"{path.name.removeprefix(PREFIX)}.{threading.get_ident()}.part")
    try:
        with atomic.created(part) as file:
            file.write(content)
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    atomic.sync_folder(path.parent)
