"""torch's flight recorder: a record of each rank's last collectives, which shows why a job hangs.

torch keeps the record in a ring buffer in memory: group, number, shapes, state and call stack of each collective. The
watch (`dtmega/distributed/watchdog.py`) writes this rank's record to a file before it ends the process. torch's tool
torchfrtrace compares the files of all ranks and names the collective that some ranks have not reached.

    switch_on(device)  # before the process group is made
    dump(Path("runs/bloom/flight-recorder/2026-11-25T14-03-20"), rank)

    torchfrtrace runs/bloom/flight-recorder/2026-11-25T14-03-20

nccl and gloo have separate recorders, and this module reads both. By default, torch 2.11 and 2.13 record 2,000
collectives, even on a CPU.
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

# Environment variables for the number of collectives that torch keeps; 0 turns the recorder off. Newer name first.
BUFFER_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
FOLDER = "flight-recorder"  # subfolder of the run directory
ENTRIES = 2000  # number of collectives to keep; their record takes 330 kB with stacks of 25 frames
PREFIX = "rank_"  # torchfrtrace takes the number after this prefix as the rank
PATIENCE_S = 8.0


def switch_on(device: torch.device) -> None:
    """Switch on nccl's recorder, unless the user has set its buffer size. On a CPU, torch's default is left unchanged.

    Call this function before the first process group is made, because torch reads the environment variable then.

    nccl also writes a record by itself when a collective times out. The path of this record (TORCH_FR_DUMP_TEMP_FILE)
    is left unchanged, because the watchdog ends a hanging process after half of nccl's timeout.
    """
    if device.type == "cuda" and not any(name in os.environ for name in BUFFER_SIZE):
        os.environ[BUFFER_SIZE[0]] = str(ENTRIES)


def dump(folder: Path, rank: int, patience_s: float = PATIENCE_S) -> str:
    """Write the record of this process to a file. Errors are printed, not raised.

    Args:
        folder: folder that holds only the ranks' records, created if it does not exist.
        rank: rank of this process.
        patience_s: maximum time, in seconds, to wait until the file is written; the disk or torch may hang.

    Returns:
        The path of the file; '' if nothing was recorded, or if the file could not be written in time.
    """
    written: list[str] = []
    # A separate thread writes the file, because the disk may hang. The process can exit while this thread hangs.
    writer = threading.Thread(target=_write, args=(folder, rank, written), name="flight recorder", daemon=True)
    writer.start()
    writer.join(patience_s)
    return written[0] if written else ""


def _write(folder: Path, rank: int, written: list[str]) -> None:
    """Write the record into `folder` and append the file's path to `written`."""
    path = folder / f"{PREFIX}{rank}"
    try:
        # Write the record without call stacks first. For the stacks, torch imports its compiler, which took 1 s when
        # measured and may take longer than patience_s from a slow disk.
        for with_stacks in (False, True):
            content = _record(with_stacks)
            if not content:
                return
            atomic.make_folder(folder)
            _replace(path, content)
            written.append(str(path))
    # The process is about to exit for another reason, and an error here must not hide that reason.
    except Exception as error:
        console.say(f"rank {rank}: flight recorder: {error_summary(error)}")


def _record(with_stacks: bool) -> bytes:
    """nccl's pickled record, or gloo's if nccl recorded nothing; b'' if gloo recorded nothing either."""
    c10d = torch._C._distributed_c10d  # pyright: ignore[reportAttributeAccessIssue]  # missing in the stub
    # Only builds of torch with CUDA have this function.
    of_nccl = getattr(c10d, "_dump_nccl_trace", None)
    if of_nccl is not None:
        content = of_nccl(includeStackTraces=with_stacks)
        if pickle.loads(content)["entries"]:
            return content
    record = pickle.loads(c10d._dump_fr_trace(includeStackTraces=with_stacks))
    return pickle.dumps(record | {"pg_config": _groups()}) if record["entries"] else b""


def _groups() -> dict[str, dict[str, Any]]:
    """The process groups in torchfrtrace's format. gloo's own record lacks the groups' names and ranks."""
    groups = {}
    for group, name in distributed_c10d._world.pg_names.items():
        ranks = [*distributed_c10d._world.pg_group_ranks[group]]
        groups[name] = {"name": name, "desc": group.group_desc, "ranks": str(ranks)}
    return groups


def _replace(path: Path, content: bytes) -> None:
    """Write a file completely or not at all."""
    # The main thread and the watch may write this file at the same time, so each thread uses its own temporary name.
    # torchfrtrace would mistake a name that ends with a number or contains PREFIX for the name of a rank's record.
    part = path.with_name(f"{path.name.removeprefix(PREFIX)}.{threading.get_ident()}.part")
    try:
        with atomic.created(part) as file:
            file.write(content)
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    atomic.sync_folder(path.parent)
