"""The safetensors of a directory, and what stands beside them, written by all ranks: the one writer of the project.

NAME/model.safetensors, or model-00001-of-0000N.safetensors, ... and model.safetensors.index.json
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dtmega import durable
from dtmega.formats.sources import Source
from dtmega.hf.files.tensors import DTYPES, INDEX, SINGLE

MAX_FILE_BYTES = 5 * 10**9


class Out(NamedTuple):
    """A tensor of a directory."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def outs(source: Source) -> list[Out]:
    """The tensors to write of a source, in its order.

    Raises:
        ValueError: a dtype that safetensors of weights do not have.
    """
    found = [Out(name, dtype, shape) for name, (dtype, shape) in source.tensors.items()]
    for out in found:
        if out.dtype not in DTYPES.values():
            raise ValueError(f"'{out.name}' is of {out.dtype}, expected one of {list(DTYPES.values())}")
    return found


def widest(dtypes: Iterable[torch.dtype]) -> str:
    """The name of the dtype that a model of tensors of these dtypes has."""
    return str(functools.reduce(torch.promote_types, dtypes)).removeprefix("torch.")


def write(
    source: Source,
    folder: Path,
    tensors: list[Out],
    others: Mapping[str, bytes],
    *,
    rank: int,
    size: int,
    barrier: Callable[[], None],
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write `folder`; all ranks call it.

    Which tensors are in which file follows from names and sizes alone. Rank r writes files r, r + size, ..., reads only
    what is in them, and holds one tensor in memory at a time. The folder appears whole, by one rename, or not at all.

    Args:
        source: has the tensors, by the names they shall have.
        others: file -> content of everything that is not weights.
        rank, size: of the processes that write, which see one file system.
        barrier: of them; may raise at its first call, where a rank has refused that therefore does not come.
        max_file_bytes: of the tensors in one file, unless a single one is larger.

    Raises:
        ValueError: on every rank, before anything is written: the folder is there and not empty.
        OSError: writing failed on this rank; on rank 0, on any.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} is there already; expected a new folder, or an empty one")
    by_name = {out.name: out for out in tensors}
    # In a file the wider dtypes come first: so each tensor starts at a multiple of its own width.
    parts = {
        file: sorted((by_name[name] for name in names), key=lambda out: -out.dtype.itemsize)
        for file, names in split({out.name: out.n_bytes for out in tensors}, max_file_bytes).items()
    }
    others = dict(others)
    if len(parts) > 1:
        weight_map = {out.name: file for file, held in parts.items() for out in held}
        others[INDEX] = to_json({"metadata": {"total_size": sum(o.n_bytes for o in tensors)}, "weight_map": weight_map})
    folder = folder.absolute()
    aside = folder.with_name(f".tmp-{folder.name}")

    def prepare() -> None:
        if rank == 0:
            durable.empty_folder(aside)

    def write_weights() -> None:
        for file in list(parts)[rank::size]:
            # Under another name until it is whole: so rank 0 can tell.
            with durable.created(aside / f"part-{file}") as stream:
                stream.write(header(parts[file]))
                for out in parts[file]:
                    tensor = source.read(out.name)
                    stream.write(tensor.contiguous().flatten().view(torch.uint8).numpy())
            os.rename(aside / f"part-{file}", aside / file)

    def publish() -> None:
        if rank == 0:
            if missing := sorted(file for file in parts if not (aside / file).is_file()):
                raise OSError(f"{folder} was not written: {missing[0]} is missing, as the rank that writes it says")
            for file, content in others.items():
                with durable.created(aside / file) as stream:
                    stream.write(content)
            durable.sync_folder(aside)
            os.rename(aside, folder)
            durable.sync_folder(folder.parent)

    barrier()  # so that nothing is made if any rank has refused
    # From here on, whatever fails on one rank, each comes to every barrier: nobody waits there in vain.
    errors: list[Exception] = []
    for step in (prepare, write_weights, publish):
        try:
            step()
        except Exception as error:
            errors.append(error)
        barrier()
    if errors:
        if rank == 0:
            with contextlib.suppress(OSError):  # what cannot be deleted takes room, no more
                durable.remove_folder(aside)
        raise errors[0]


def header(tensors: list[Out]) -> bytes:
    """The header of a safetensors file of these tensors: its length in 8 bytes, then JSON.

    Written here and not by the library, which takes all of a file's tensors at once and gives the file mode 0600.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    names = {dtype: name for name, dtype in DTYPES.items()}
    end = 0
    for out in tensors:
        start, end = end, end + out.n_bytes
        entries[out.name] = {"dtype": names[out.dtype], "shape": out.shape, "data_offsets": [start, end]}
    content = json.dumps(entries, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content


def split(n_bytes: Mapping[str, int], max_file_bytes: int) -> dict[str, list[str]]:
    """File -> the names in it: in their order, a new file where the next tensor would make one too large."""
    files: list[list[str]] = []
    filled = 0
    for name, size in n_bytes.items():
        if not files or filled + size > max_file_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": names for i, names in enumerate(files, 1)}


def to_json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
