"""Tensors with several separate slices on one rank, for torch's checkpoint planners.

An example is GPT-2's fused weight [q | k | v]: sharded over tp, each rank holds a slice of q, one of k and one of v.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from dtmega.ops.shards import boxes, in_parts


class Pieces:
    """A tensor with several slices ("boxes") on this rank, in the form that torch's checkpoint planners expect.

    For a DTensor, torch plans a single slice per rank. The two methods with double underscores are torch's protocol for
    tensors that list their own slices (`torch.distributed.checkpoint.planner_helpers`).
    """

    def __init__(self, tensor: DTensor) -> None:
        self.size = tensor.size
        self._dtype = tensor.dtype
        self._parts = {torch.Size(box.offsets): box.part.detach() for box in boxes(tensor)}

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, part.shape) for offsets, part in self._parts.items()]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(dtype=self._dtype), self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def at(self, index: MetadataIndex) -> Tensor:
        """The slice of the tensor that begins at `index.offset`."""
        assert index.offset is not None
        return self._parts[index.offset]


def _as_pieces(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Wrap each tensor with several slices on this rank in a `Pieces` object; keep all other tensors."""
    replaced: dict[str, Any] = {}
    for name, tensor in tensors.items():
        replaced[name] = Pieces(tensor) if isinstance(tensor, DTensor) and in_parts(tensor) else tensor
    return replaced


class PiecesSavePlanner(DefaultSavePlanner):
    """torch's planner for saving, extended to handle `Pieces`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(_as_pieces(state_dict), storage_meta, is_coordinator)

    def lookup_object(self, index: MetadataIndex) -> Any:
        tensor = self.state_dict[index.fqn]
        return tensor.at(index) if isinstance(tensor, Pieces) else super().lookup_object(index)


class PiecesLoadPlanner(DefaultLoadPlanner):
    """torch's planner for loading, extended to handle `Pieces`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False) -> None:
        # torch's own set-up handles only tensors, so the `Pieces` objects are inserted afterwards.
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict = _as_pieces(state_dict)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        tensor = self.state_dict[index.fqn]
        return tensor.at(index) if isinstance(tensor, Pieces) else super().lookup_tensor(index)
