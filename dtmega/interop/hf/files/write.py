"""Writes a folder of safetensors and other files; all ranks take part. No other module writes safetensors.

The weights go into model.safetensors, or into model-00001-of-0000N.safetensors, ... with model.safetensors.index.json.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dtmega.checkpoint.sources import Source
from dtmega.files import atomic
from dtmega.interop.hf.files.tensors import DTYPES, INDEX, SINGLE

MAX_FILE_BYTES = 5 * 10**9


class TensorSpec(NamedTuple):
    """The name, dtype and shape of a tensor to write."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def tensor_specs(source: Source) -> list[TensorSpec]:
    """Specs of a source's tensors, in the source's order.

    Raises:
        ValueError: a tensor has a dtype that is not allowed for weights.
    """
    specs = [TensorSpec(name, dtype, shape) for name, (dtype, shape) in source.tensors.items()]
    for spec in specs:
        if spec.dtype not in DTYPES.values():
            raise ValueError(f"'{spec.name}' is of {spec.dtype}, expected one of {list(DTYPES.values())}")
    return specs


def widest(dtypes: Iterable[torch.dtype]) -> str:
    """The name of the dtype that all given dtypes promote to; config.json names one dtype for the whole model."""
    return str(functools.reduce(torch.promote_types, dtypes)).removeprefix("torch.")


def write(
    source: Source,
    folder: Path,
    tensors: list[TensorSpec],
    other_files: Mapping[str, bytes],
    *,
    rank: int,
    size: int,
    barrier: Callable[[], None],
    max_file_bytes: int = MAX_FILE_BYTES,
    single: str = SINGLE,
) -> None:
    """Write a folder of safetensors. All ranks must call this function together.

    The names and sizes of the tensors alone decide which file holds which tensors. Rank r writes files r, r + size, and
    so on, reads only the tensors in these files, and holds one tensor in memory at a time. The folder appears complete,
    through a single rename, or not at all.

    Args:
        source: tensors under the names that the files will use.
        folder: output folder, new or empty.
        tensors: specs of the source's tensors, in the order in which the files are filled.
        other_files: content of each file that holds no weights, keyed by file name.
        rank: rank of this process.
        size: number of processes that write; all processes see the same file system.
        barrier: function that waits for all processes that write. The first call may raise an error if another rank
            failed earlier and never reaches the barrier.
        max_file_bytes: maximum number of tensor bytes in one file, unless a single tensor is larger.
        single: name of the weights file if there is only one.

    Raises:
        ValueError: the folder exists and is not empty. Every rank raises this error before anything is written.
        OSError: writing failed on this rank. Rank 0 raises this error if writing failed on any rank.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} exists already; expected a new folder, or an empty one")
    contents = _contents(tensors, max_file_bytes)
    other_files = dict(other_files)
    if len(contents) > 1:
        other_files[INDEX] = _index(contents)
    elif contents:
        contents = {single: contents[SINGLE]}
    writer = _Writer(source, folder.absolute(), contents, other_files, rank, size)
    barrier()  # ensures that no rank creates anything if any rank has refused
    # From here on, every rank reaches every barrier, even after its own error, because the other ranks wait there.
    errors: list[Exception] = []
    for step in (writer.prepare, writer.write_weights, writer.publish):
        try:
            step()
        except Exception as error:
            errors.append(error)
        barrier()
    if errors:
        writer.clean_up()
        raise errors[0]


def _contents(tensors: Sequence[TensorSpec], max_file_bytes: int) -> dict[str, list[TensorSpec]]:
    """Assign the tensors to files. Return the tensors of each file, in file order, keyed by file name."""
    by_name = {tensor.name: tensor for tensor in tensors}
    n_bytes = {tensor.name: tensor.n_bytes for tensor in tensors}
    contents: dict[str, list[TensorSpec]] = {}
    for file, names in split(n_bytes, max_file_bytes).items():
        # Wider dtypes come first in a file, so that each tensor starts at a multiple of its element size.
        contents[file] = sorted((by_name[name] for name in names), key=lambda tensor: -tensor.dtype.itemsize)
    return contents


def _index(contents: Mapping[str, Sequence[TensorSpec]]) -> bytes:
    """The content of model.safetensors.index.json."""
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for file, tensors in contents.items():
        weight_map |= {tensor.name: file for tensor in tensors}
        total_bytes += sum(tensor.n_bytes for tensor in tensors)
    return to_json({"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


@dataclass(frozen=True)
class _Writer:
    """Writes a folder in steps that all ranks take together. A barrier follows each step.

    Attributes:
        folder: absolute final path of the folder.
        contents: tensors of each weights file, keyed by file name.
        other_files: content of each file that holds no weights, keyed by file name.
    """

    source: Source
    folder: Path
    contents: Mapping[str, Sequence[TensorSpec]]
    other_files: Mapping[str, bytes]
    rank: int
    size: int

    @property
    def temporary(self) -> Path:
        """Path of the temporary folder to which all ranks write. The temporary folder is next to the final folder."""
        return self.folder.with_name(f".tmp-{self.folder.name}")

    def prepare(self) -> None:
        if self.rank == 0:
            atomic.empty_folder(self.temporary)

    def write_weights(self) -> None:
        for file in list(self.contents)[self.rank :: self.size]:
            # The file gets its final name only when it is complete, so that `publish` on rank 0 notices a failure here.
            with atomic.created(self.temporary / f"part-{file}") as stream:
                stream.write(header(self.contents[file]))
                for spec in self.contents[file]:
                    tensor = self.source.read(spec.name)
                    stream.write(tensor.contiguous().flatten().view(torch.uint8).numpy())
            os.rename(self.temporary / f"part-{file}", self.temporary / file)

    def publish(self) -> None:
        """On rank 0, write the files without weights. If all weights files exist, give the folder its final name."""
        if self.rank != 0:
            return
        temporary, folder = self.temporary, self.folder
        if missing := sorted(file for file in self.contents if not (temporary / file).is_file()):
            raise OSError(f"{folder} was not written: {missing[0]} is missing, as the rank that writes it says")
        for file, content in self.other_files.items():
            with atomic.created(temporary / file) as stream:
                stream.write(content)
        atomic.sync_folder(temporary)
        os.rename(temporary, folder)
        atomic.sync_folder(folder.parent)

    def clean_up(self) -> None:
        """Remove the leftovers of a failed write, if possible; a folder that cannot be removed only takes up space."""
        if self.rank == 0:
            with contextlib.suppress(OSError):
                atomic.remove_folder(self.temporary)


def header(tensors: Sequence[TensorSpec]) -> bytes:
    """The header of a safetensors file that holds `tensors`: 8 bytes with the length of the JSON, then the JSON.

    The safetensors library is not used for writing, because it needs all tensors of a file at once and creates files
    with mode 0600.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    names = {dtype: name for name, dtype in DTYPES.items()}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.n_bytes
        entries[tensor.name] = {"dtype": names[tensor.dtype], "shape": tensor.shape, "data_offsets": [start, end]}
    content = json.dumps(entries, separators=(",", ":")).encode()
    # Padding makes the data begin at a multiple of 8 bytes.
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content


def split(n_bytes: Mapping[str, int], max_file_bytes: int) -> dict[str, list[str]]:
    """Distribute tensors among files, in order. A new file begins when the current file would become too large.

    Args:
        n_bytes: size of each tensor in bytes, keyed by tensor name.
        max_file_bytes: maximum size of a file, unless a single tensor is larger.

    Returns:
        The names of the tensors in each file, keyed by file name.
    """
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
