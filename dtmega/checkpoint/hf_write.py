"""A folder of safetensors with a model's other files, written by all ranks: what every export to Hugging Face is.

NAME/model.safetensors, or model-00001-of-0000N.safetensors, ... and model.safetensors.index.json
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dtmega.checkpoint import Source
from dtmega.checkpoint.files import Disk
from dtmega.hf.files import DTYPES, INDEX

MAX_FILE_BYTES = 5 * 10**9


class Out(NamedTuple):
    """A tensor of a folder.

    Attributes:
        name: there.
        of: its name in the source, of whose tensor `shape` may leave out the last rows.
    """

    name: str
    of: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def outs(
    source: Source,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype | None,
    rename: Callable[[str], str] = str,
) -> list[Out]:
    """What to write of a source, in the order of `shapes`.

    Args:
        dtype: of the written tensors; None leaves each as it is.

    Raises:
        ValueError: a dtype that safetensors of weights do not have.
    """
    found = [Out(rename(name), name, dtype or source.tensors[name][0], shape) for name, shape in shapes.items()]
    for out in found:
        if out.dtype not in DTYPES.values():
            raise ValueError(f"'{out.of}' is of {out.dtype}, expected one of {list(DTYPES.values())}")
    return found


def widest(tensors: Sequence[Out]) -> str:
    """Name of the dtype that a model of these tensors has."""
    return str(functools.reduce(torch.promote_types, (out.dtype for out in tensors))).removeprefix("torch.")


def write(
    source: Source,
    folder: Path,
    tensors: Sequence[Out],
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
    disk, aside = Disk(str(folder.parent)), f".tmp-{folder.name}"

    def prepare() -> None:
        if rank == 0:
            disk.make(aside)

    def write_weights() -> None:
        for file in list(parts)[rank::size]:
            # Under another name until it is whole: so rank 0 can tell.
            with disk.create(aside, f"part-{file}") as stream:
                stream.write(header([(out.name, out.dtype, out.shape) for out in parts[file]]))
                for out in parts[file]:
                    tensor = source.read(out.of, tuple(slice(0, n) for n in out.shape)).to(out.dtype)
                    stream.write(tensor.contiguous().flatten().view(torch.uint8).numpy())
            disk.rename(f"{aside}/part-{file}", f"{aside}/{file}")

    def publish() -> None:
        if rank == 0:
            if missing := sorted(parts.keys() - disk.sizes(aside).keys()):
                raise OSError(f"{folder} was not written: {missing[0]} is missing, as the rank that writes it says")
            for file, content in others.items():
                with disk.create(aside, file) as stream:
                    stream.write(content)
            disk.sync(aside)
            disk.rename(aside, folder.name)
            disk.sync(".")

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
                disk.remove(aside)
        raise errors[0]


def header(tensors: list[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """What stands in a safetensors file before the data of these tensors: its length in 8 bytes, then JSON.

    Written here and not by the library, which takes all of a file's tensors at once and gives the file mode 0600.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    names = {dtype: name for name, dtype in DTYPES.items()}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": names[dtype], "shape": shape, "data_offsets": [start, end]}
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
        return {"model.safetensors": files[0]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": names for i, names in enumerate(files, 1)}


def to_json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
