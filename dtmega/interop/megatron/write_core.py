"""Write a `release` folder for megatron-core: a distributed checkpoint of weights, loadable on any number of ranks.

    OUT/latest_checkpointed_iteration.txt    "release"
    OUT/release/metadata.json                the backend that wrote the tensors: torch.distributed.checkpoint
    OUT/release/common.pt                    the model's arguments; Megatron-LM compares them with its own arguments
    OUT/release/.metadata, __*.distcp        the tensors: one file for each layer, and one file for all other tensors

Tensors that exist in every layer are stacked, [L, ...], which is megatron-core's default. Each layer is a chunk of the
stack. Transformer Engine's modules have an extra state, which is empty except in fp8. An empty state is written for
each such module, because Megatron-LM's default models on GPUs do not load without the state; other models ignore it.

Source: `dist_checkpointing/` and `transformer/transformer_block.py` of megatron-core 0.16.1, and
`megatron/training/checkpointing.py` in Megatron-LM's versions from 2024 to 2026.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from dtmega.checkpoint.sources import Source
from dtmega.files import atomic
from dtmega.interop.megatron.core import BACKEND, COMMON, LAYER, METADATA
from dtmega.interop.megatron.core_forms import (
    BY_TOKEN,
    LAYERS,
    NORMS_OF_HEADS,
    STATEFUL_AT_END,
    STATEFUL_IN_LAYER,
    WORDS,
)
from dtmega.interop.megatron.write import MULTIPLE, RELEASE, Layout, args_of_files, check_new, new_release, os_errors

BACKENDS = {"sharded_backend": BACKEND, "sharded_backend_version": 1, "common_backend": "torch"}
BACKENDS["common_backend_version"] = 1
# Arguments that follow from the file format.
FORM: Mapping[str, Any] = {"ckpt_format": BACKEND, "add_position_embedding": True}


class Entry(NamedTuple):
    """A tensor chunk or an extra state that will be written to the checkpoint.

    Attributes:
        item: description of the chunk or state, for torch.distributed.checkpoint's save plan.
        read: function that returns the chunk's values, or the state's bytes.
    """

    item: WriteItem
    read: Callable[[], Tensor | io.BytesIO]


def write(
    folder: Path,
    source: Source,
    args: Mapping[str, Any],
    *,
    tokenizer: str = "",
    work: Callable[[], object] = int,
) -> None:
    """Write a checkpoint completely, or not at all. Only one layer is in memory at a time.

    Args:
        folder: path of the checkpoint, a new or empty folder.
        source: tensors of the whole model, named as in core_forms.py, without duplicates or vocabulary padding.
        args: the model's arguments, under Megatron's names.
        tokenizer: the model's tokenizer spec. Megatron's loader checks the kind of tokenizer if the loading run has a
            vocabulary.
        work: function that is called before each tensor is read.

    Raises:
        ValueError: the folder is not empty. Nothing has been written.
        OSError: writing failed.
    """
    check_new(folder)
    dtype, (n_tokens, *_) = source.tensors[WORDS]
    # The padding multiple depends on the number of ranks. If the loading run pads to a different multiple,
    # megatron-core loads the rows that exist with both paddings, and fills any further rows with zeros.
    padded = -(-n_tokens // MULTIPLE) * MULTIPLE
    all_args = {**args, **args_of_files(Layout(1, 1), padded, dtype, tokenizer), **FORM}
    content = {"args": argparse.Namespace(**all_args), "checkpoint_version": 3.0, "iteration": 0}
    with new_release(folder) as temporary:
        release = temporary / RELEASE
        atomic.make_folder(release)
        with os_errors():
            _write_tensors(release, _entries(source, padded, work))
            with atomic.created(release / COMMON) as file:
                torch.save(content, file)
        with atomic.created(release / METADATA) as file:
            file.write(json.dumps(BACKENDS).encode())
        atomic.sync_folder(release)


def _entries(source: Source, padded: int, work: Callable[[], object]) -> list[list[Entry]]:
    """The tensor chunks and extra states to write, one list per file.

    Args:
        padded: number of vocabulary rows, including padding.
        work: function that is called before each tensor is read.
    """
    layers: dict[int, list[Entry]] = {}
    others: list[Entry] = []
    numbers = [int(match["number"][:-1]) for name in source.tensors if (match := LAYER.fullmatch(name))]
    n_layers = 1 + max(numbers)
    for name, (dtype, shape) in source.tensors.items():

        def read(name: str = name) -> Tensor:
            work()
            return source.read(name).contiguous()

        match = LAYER.fullmatch(name)
        if match is not None:
            number = int(match["number"][:-1])
            stack = f"{LAYERS}{match['inner']}"
            layers.setdefault(number, []).append(_layer_entry(stack, dtype, shape, number, n_layers, read))
        else:
            others += _whole_entries(name, dtype, shape, padded if name in BY_TOKEN else shape[0], read)
    stateful = [*STATEFUL_IN_LAYER]
    stateful += [norm for norm in NORMS_OF_HEADS if f"{LAYERS}0.{norm}.weight" in source.tensors]
    for number, entries in layers.items():
        entries += [_state(f"{LAYERS}{module}", number, n_layers) for module in stateful]
    others.append(_state(STATEFUL_AT_END, 0, 1))
    return [others, *layers.values()]


def _layer_entry(
    stack: str, dtype: torch.dtype, shape: tuple[int, ...], number: int, n_layers: int, read: Callable[[], Tensor]
) -> Entry:
    """One layer's chunk of a tensor that is stacked over the layers, [L, ...].

    Args:
        stack: name of the stacked tensor.
        shape: shape of the layer's tensor.
        number: index of the layer.
        read: function that returns the layer's tensor.
    """
    offsets = (number, *[0] * len(shape))
    item = _item(stack, dtype, (n_layers, *shape), offsets, (1, *shape))
    return Entry(item, lambda: read().unsqueeze(0))


def _whole_entries(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], n_rows: int, read: Callable[[], Tensor]
) -> Iterator[Entry]:
    """Yield the chunk of a tensor outside the layers, then, if the tensor needs padding rows, a chunk for these rows.

    Args:
        n_rows: number of rows, including padding.
        read: function that returns the tensor without padding.
    """
    rows, *columns = shape
    whole = (n_rows, *columns)
    first = [0] * len(shape)
    yield Entry(_item(name, dtype, whole, tuple(first), shape), read)
    if n_rows > rows:
        padding = (n_rows - rows, *columns)
        yield Entry(_item(name, dtype, whole, (rows, *first[1:]), padding), lambda: torch.zeros(padding, dtype=dtype))


def _item(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> WriteItem:
    """The write item for one chunk.

    Args:
        shape: shape of the whole tensor.
        offsets: start index of the chunk in each dim of the whole tensor.
        sizes: shape of the chunk.
    """
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(shape))
    return WriteItem(MetadataIndex(name, torch.Size(offsets)), WriteItemType.SHARD, tensor_data=data)


def _state(module: str, number: int, n_layers: int) -> Entry:
    """The entry for the empty extra state of a Transformer Engine module.

    Args:
        module: name of the module in the checkpoint.
        number: index of the layer; 0 if the module is outside the layers.
        n_layers: number of layers that have this module; 1 if the module is outside the layers.
    """

    def read() -> io.BytesIO:
        pickled = io.BytesIO()
        # megatron-core stores a list. All versions of Transformer Engine treat None as "no state".
        torch.save([None], pickled)
        return pickled

    name = f"{module}._extra_state/shard_{number}_{n_layers}"
    return Entry(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO), read)


class _Planner(DefaultSavePlanner):
    """A planner that reads an item's contents only when the writer reaches the item."""

    def __init__(self, contents: Mapping[MetadataIndex, Callable[[], Tensor | io.BytesIO]]) -> None:
        super().__init__()
        self._contents = contents

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self._contents[write_item.index]()


class _Writer(FileSystemWriter):
    """A writer that leaves the folder's path out of the metadata, because the folder still has a temporary name."""

    def storage_meta(self) -> None:
        return None


def _write_tensors(folder: Path, files: list[list[Entry]]) -> None:
    """Write the tensors with torch.distributed.checkpoint.

    Args:
        files: entries to write, one list per file.
    """
    contents = {entry.item.index: entry.read for entries in files for entry in entries}
    plans = [SavePlan([entry.item for entry in entries]) for entries in files]
    plans, metadata = create_default_global_save_plan(plans)
    writer = _Writer(folder)
    writer.set_up_storage_writer(True)
    planner = _Planner(contents)
    # Write each plan to its own file: while the writer writes a file, it keeps some of that file's tensors in memory.
    results = [writer.write_data(plan, planner).value() for plan in writer.prepare_global_plan(plans)]
    writer.finish(metadata, results)
