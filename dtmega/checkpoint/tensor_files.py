"""Write and read tensors of any layout in a checkpoint's folder, following the plans of torch.distributed.checkpoint.

For a save, torch plans which rank writes which slice ("box") of which tensor; a replicated tensor is written once. For
a load, torch plans which saved boxes make up each shard that a rank now holds. dtmega itself reads and writes the
bytes: raw data with digests, and a JSON manifest. torch's own file format is not used: torch unpickles its files and
does not detect flipped bits in the files (docs/reliability.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future as Reading
from concurrent.futures import ThreadPoolExecutor
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
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from dtmega.checkpoint import manifest
from dtmega.checkpoint.data_files import DataFile, Extent, extent, side_by_side
from dtmega.checkpoint.files import Place
from dtmega.checkpoint.manifest import Damaged, Entry, Manifest, StoredChunk
from dtmega.checkpoint.pieces import PiecesLoadPlanner, PiecesSavePlanner
from dtmega.checkpoint.reader import Checkpoint
from dtmega.files.object_requests import PART_BYTES
from dtmega.files.outages import Unreachable

T = TypeVar("T")


class Pace(Protocol):
    """Heartbeats that a rank sends during a long read. Without heartbeats, the other ranks would give up on this rank.

    `distributed.agreement.Startup` implements this protocol.
    """

    def with_heartbeats(self, items: Iterable[T]) -> Iterator[T]: ...

    def wait_for_all(self) -> None: ...


class NobodyWaits:
    """A `Pace` that reports nothing, for a rank that no other rank waits for."""

    def with_heartbeats(self, items: Iterable[T]) -> Iterator[T]:
        return iter(items)

    def wait_for_all(self) -> None:
        pass


class Failed(Exception):
    """Raised if a save fails. The message has the reasons from all failed ranks."""


def save(
    files: Place,
    folder: str,
    tensors: Mapping[str, Tensor],
    step: int,
    state: dict[str, Any],
    group: dist.ProcessGroup,
    attempt: str = "",
) -> Manifest | None:
    """Make a folder and write the data files of all ranks into it. All ranks call this function.

    Args:
        files: disk or object store that holds the checkpoints.
        folder: name of the folder to make; leftovers under this name are deleted.
        tensors: this rank's shards of the tensors, keyed by name in the checkpoint.
        step: step number to record in the manifest.
        state: state of the run as a JSON object, to record in the manifest.
        group: process group of all ranks; nothing else may use this group during the save.
        attempt: suffix for the names of the data files, from `files.new_attempt`; only rank 0's suffix is used.

    Returns:
        The manifest on rank 0, for the caller to write; None on all other ranks.

    Raises:
        Failed: at least one rank could not write. Every rank raises this error.
    """
    writer = _Writer(files, folder, step, state, attempt)
    try:
        state_dict_saver.save(dict(tensors), storage_writer=writer, planner=PiecesSavePlanner(), process_group=group)
    # CheckpointException derives from BaseException, so `except Exception` would not catch it.
    except CheckpointException as error:
        raise Failed(_reasons(error)) from None
    return writer.manifest


def load_tensors(
    checkpoint: Checkpoint, tensors: Mapping[str, Tensor], group: dist.ProcessGroup, pace: Pace | None = None
) -> None:
    """Fill tensors in place. Each rank reads its own shards. All ranks call this function.

    Args:
        checkpoint: checkpoint to read.
        tensors: tensors to fill, keyed by name in the checkpoint. The names differ between pipeline stages.
        group: process group of all ranks.
        pace: heartbeats for the ranks that wait for this rank; None if no rank waits.

    Raises:
        Damaged: a rank has read a block that does not match its digest. Every rank raises this error.
        Unreachable: a rank could not read from an object store. Every rank raises this error, because the checkpoint
            may be intact.
    """
    try:
        state_dict_loader.load(
            dict(tensors),
            storage_reader=_Reader(checkpoint, pace or NobodyWaits()),
            planner=PiecesLoadPlanner(),
            process_group=group,
        )
    except CheckpointException as error:
        if any(isinstance(cause, Unreachable) for cause, _ in error.failures.values()):
            raise Unreachable(f"{checkpoint.path}: {_reasons(error)}") from None
        raise Damaged(_reasons(error)) from None


def _reasons(error: CheckpointException) -> str:
    """The error messages of all ranks, without duplicates."""
    expected = Damaged, OSError
    causes = {str(e) if isinstance(e, expected) else f"{type(e).__name__}: {e}" for e, _ in error.failures.values()}
    return "; ".join(sorted(causes))


class _Writer(StorageWriter):
    """The storage side of a save: each rank writes `data-RANK.bin`, and the coordinator (rank 0) makes the manifest.

    Attributes:
        manifest: finished manifest on the coordinator; None on all other ranks, and before `finish` has run.
    """

    manifest: Manifest | None = None
    _block_bytes = 0  # size of a block; set only on the coordinator

    def __init__(self, files: Place, folder: str, step: int, state: dict[str, Any], attempt: str) -> None:
        self._files, self._folder, self._step, self._state, self._attempt = files, folder, step, state, attempt

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Drop empty boxes, which some ranks hold if a dim has fewer elements than the mesh axis has ranks."""
        items = []
        for item in plan.items:
            data = item.tensor_data
            if data is None:
                continue
            # A tensor without any elements keeps its empty box, so that the manifest lists the tensor.
            has_elements = math.prod(data.chunk.sizes) > 0
            tensor_is_empty = math.prod(data.size) == 0
            if has_elements or tensor_is_empty:
                items.append(item)
        return dataclasses.replace(plan, items=items)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the checkpoint's folder; choose the block size and the name of each rank's data file.

        Runs on the coordinator, before any rank writes.
        """
        self._files.make(self._folder)
        self._block_bytes = manifest.block_bytes_for(sum(_n_bytes(item) for plan in plans for item in plan.items))
        named = []
        for rank, plan in enumerate(plans):
            name = f"data-{rank:05d}{self._attempt}.bin"
            named.append(dataclasses.replace(plan, storage_data=(name, self._block_bytes)))
        return named

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's data file. A rank that holds nothing writes no file."""
        results = []
        if plan.items:
            name, block_bytes = plan.storage_data
            with self._files.create(self._folder, name) as file:
                data = DataFile(name, file, block_bytes)
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
        """Make the manifest from the chunks that all ranks have written. Runs on the coordinator."""
        chunks: dict[str, list[StoredChunk]] = defaultdict(list)
        file_sizes: dict[str, int] = defaultdict(int)
        for results_of_rank in results:
            for result in results_of_rank:
                chunks[result.index.fqn].append(result.storage_data)
                file_sizes[result.storage_data.file] += result.size_in_bytes
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            tensors[name] = Entry(entry.properties.dtype, tuple(entry.size), tuple(chunks[name]))
        self.manifest = Manifest(self._step, self._state, dict(file_sizes), tensors, self._block_bytes)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


class _Reader(StorageReader):
    """The storage side of a load: each rank reads and verifies the saved boxes that make up its shards."""

    def __init__(self, checkpoint: Checkpoint, pace: Pace) -> None:
        self._checkpoint, self._pace = checkpoint, pace

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The manifest's tensors and chunks, in torch's metadata types."""
        tensors: dict[str, Any] = {}
        for name, entry in self._checkpoint.manifest.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks]
            properties = TensorProperties(dtype=entry.dtype)
            tensors[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
        return Metadata(tensors)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            for item, content in self._pace.with_heartbeats(self._contents(plan.items)):
                target = planner.resolve_tensor(item).detach()
                target.copy_(content)
                planner.commit_tensor(item, target)
        finally:
            # torch's next collective would time out while the slowest rank is still reading, so all ranks
            # wait for each other here first.
            self._pace.wait_for_all()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _contents(self, items: list[ReadItem]) -> Iterator[tuple[ReadItem, Tensor]]:
        """Yield (item, content) pairs in any order, with up to `files.parallel_reads` concurrent reads."""
        extents = [self._extent(item) for item in items]
        groups = deque(side_by_side(extents, PART_BYTES))
        at_once = self._checkpoint.files.parallel_reads
        if at_once == 1:
            for group in groups:
                contents = self._checkpoint.read_extents([extents[i] for i in group])
                yield from zip([items[i] for i in group], contents, strict=True)
            return
        waiting: deque[tuple[list[int], Reading[list[Tensor]]]] = deque()
        with ThreadPoolExecutor(at_once, "checkpoint reads") as threads:
            while groups or waiting:
                while groups and len(waiting) < at_once:
                    group = groups.popleft()
                    together = [extents[i] for i in group]
                    waiting.append((group, threads.submit(self._checkpoint.read_extents, together)))
                group, contents = waiting.popleft()
                yield from zip([items[i] for i in group], contents.result(), strict=True)

    def _extent(self, item: ReadItem) -> Extent:
        """The location of one box's bytes in a stored chunk."""
        name, number = item.storage_index.fqn, item.storage_index.index
        assert number is not None
        chunk = self._checkpoint.manifest.tensors[name].chunks[number]
        box = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
        return extent(self._checkpoint.manifest, name, chunk, box)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


def _n_bytes(item: WriteItem) -> int:
    """The size in bytes of a box to write."""
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
