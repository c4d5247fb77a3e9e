"""Tensors of any layout to and from a checkpoint's folder, on torch.distributed.checkpoint.

torch plans: which rank writes which box of which tensor (a replicated one once), and on load which saved boxes make
up what a rank holds now. Reading and writing are ours: raw bytes with digests and a JSON manifest, because torch's own
files are unpickled on load and notice no flipped bit (docs/reliability.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from dtmega.checkpoint import manifest
from dtmega.checkpoint.files import Disk, Remote
from dtmega.checkpoint.manifest import BLOCK_BYTES, Damaged, Entry, Manifest, StoredChunk
from dtmega.checkpoint.pieces import PiecesLoadPlanner, PiecesSavePlanner
from dtmega.checkpoint.reader import Checkpoint

T = TypeVar("T")


class Pace(Protocol):
    """A way for ranks that read for long to say so to the others, who would give them up: `startup.Startup`."""

    def at_work(self, items: Iterable[T]) -> Iterator[T]: ...

    def wait_for_all(self) -> None: ...


class Alone:
    """The pace of ranks that are not waited for."""

    def at_work(self, items: Iterable[T]) -> Iterator[T]:
        return iter(items)

    def wait_for_all(self) -> None:
        pass


class Failed(Exception):
    """A save failed; says why, for each rank that knows."""


class DataFile:
    """One data file as it is written: tensors one after the other, digested on the way."""

    def __init__(self, name: str, file: Any) -> None:
        self.name, self.n_bytes, self._file = name, 0, file

    def add(self, tensor: Tensor, offsets: Iterable[int]) -> StoredChunk:
        """Append `tensor`, the box at `offsets` of a larger one."""
        data = _bytes(tensor.detach().cpu().contiguous())
        digests = []
        for i in range(0, len(data), BLOCK_BYTES):
            block = data[i : i + BLOCK_BYTES]
            digests.append(manifest.digest(block))
            self._file.write(block)
        chunk = StoredChunk(tuple(offsets), tuple(tensor.shape), self.name, self.n_bytes, tuple(digests))
        self.n_bytes += len(data)
        return chunk


def save(
    files: Disk | Remote,
    folder: str,
    tensors: Mapping[str, Tensor],
    step: int,
    state: dict[str, Any],
    group: dist.ProcessGroup,
) -> Manifest | None:
    """Write data files into `folder`, made empty. All ranks call it; rank 0 gets the manifest, not written yet.

    Raises:
        Failed: on every rank, if any could not write.
    """
    writer = _Writer(files, folder, step, state)
    try:
        state_dict_saver.save(dict(tensors), storage_writer=writer, planner=PiecesSavePlanner(), process_group=group)
    except CheckpointException as error:  # a BaseException in torch
        raise Failed(_reasons(error)) from None
    return writer.manifest


def load_tensors(
    checkpoint: Checkpoint, tensors: Mapping[str, Tensor], group: dist.ProcessGroup, pace: Pace | None = None
) -> None:
    """Fill tensors in place, each rank with what it holds. All ranks call it, with the names that are theirs.

    Raises:
        Damaged: on every rank, if any read what does not match its digest.
    """
    try:
        state_dict_loader.load(
            dict(tensors),
            storage_reader=_Reader(checkpoint, pace or Alone()),
            planner=PiecesLoadPlanner(),
            process_group=group,
        )
    except CheckpointException as error:
        raise Damaged(_reasons(error)) from None


def _reasons(error: CheckpointException) -> str:
    """The errors that the ranks ran into, each once."""
    expected = Damaged, OSError
    causes = {str(e) if isinstance(e, expected) else f"{type(e).__name__}: {e}" for e, _ in error.failures.values()}
    return "; ".join(sorted(causes))


class _Writer(StorageWriter):
    """Each rank's data file `data-RANK.bin`; the coordinator puts the manifest together."""

    manifest: Manifest | None = None

    def __init__(self, files: Disk | Remote, folder: str, step: int, state: dict[str, Any]) -> None:
        self._files, self._folder, self._step, self._state = files, folder, step, state

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        # Where a dim is shorter than the axis that cuts it, some ranks hold nothing of it.
        items = [
            item
            for item in plan.items
            if (d := item.tensor_data) is not None and (math.prod(d.chunk.sizes) or not math.prod(d.size))
        ]
        return dataclasses.replace(plan, items=items)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._files.make(self._folder)
        return [dataclasses.replace(plan, storage_data=f"data-{rank:05d}.bin") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        if plan.items:
            with self._files.create(self._folder, plan.storage_data) as file:
                data = DataFile(plan.storage_data, file)
                for item in plan.items:
                    assert item.tensor_data is not None
                    tensor = planner.resolve_data(item)
                    assert isinstance(tensor, Tensor)
                    chunk = data.add(tensor, item.tensor_data.chunk.offsets)
                    n_bytes = math.prod(chunk.sizes) * tensor.dtype.itemsize
                    results.append(WriteResult(index=item.index, size_in_bytes=n_bytes, storage_data=chunk))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        chunks: dict[str, list[StoredChunk]] = defaultdict(list)
        files: dict[str, int] = defaultdict(int)
        for result in (result for each in results for result in each):
            chunks[result.index.fqn].append(result.storage_data)
            files[result.storage_data.file] += result.size_in_bytes
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            tensors[name] = Entry(entry.properties.dtype, tuple(entry.size), tuple(chunks[name]))
        self.manifest = Manifest(self._step, self._state, dict(files), tensors)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


class _Reader(StorageReader):
    def __init__(self, checkpoint: Checkpoint, pace: Pace) -> None:
        self._checkpoint, self._pace = checkpoint, pace

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=entry.dtype),
                    torch.Size(entry.shape),
                    [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks],
                )
                for name, entry in self._checkpoint.manifest.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            for item in self._pace.at_work(plan.items):
                self._read_item(item, planner)
        finally:
            # Before torch's collective, which would time out while the slowest rank still reads.
            self._pace.wait_for_all()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_item(self, item: ReadItem, planner: LoadPlanner) -> None:
        name, at = item.storage_index.fqn, item.storage_index.index
        assert at is not None
        chunk = self._checkpoint.manifest.tensors[name].chunks[at]
        box = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
        target = planner.resolve_tensor(item).detach()
        target.copy_(self._checkpoint.read_chunk(name, chunk, box))
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]
