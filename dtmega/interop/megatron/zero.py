"""Read the states of DeepSpeed's bf16 optimizer: fp32 weights and moments in flat vectors, sharded by data rank.

    bf16_zero_pp_rank_D_mp_rank_XX_optim_states.pt
        optimizer_state_dict
            single_partition_of_fp32_groups    this data rank's shard of each parameter group, one vector per group
            base_optimizer_state               {state: {group: {exp_avg, exp_avg_sq, step}}}; each moment is a vector
            param_slice_mappings               per group: parameter name -> offset and length of its slice of the vector

A parameter is named after its layer number and its name in the layer file, as in `3.input_layernorm.weight`. A tied
parameter's name is `tied_modules.embed.` plus its name in layer 1. The last stage has a second copy of each tied
parameter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtmega.interop.megatron import names
from dtmega.interop.megatron.adam import MOMENTS, IncompleteMoments
from dtmega.interop.megatron.parts import Part
from dtmega.interop.megatron.saved import SavedFile, Stored, entries
from dtmega.interop.torch_files.inert import PickledObject, natural, of_type

OPTIMIZER_FILE = re.compile(r"bf16_zero_pp_rank_(\d{1,5})_mp_rank_(\d{2,5})_optim_states\.pt")
PARAMETER = re.compile(r"(?:tied_modules\.embed|(\d{1,5}))\.(.+)")
# Class names that an entry of param_slice_mappings may have; the module depends on DeepSpeed's version.
ADDRESSES = {
    f"deepspeed.{module} fragment_address"
    for module in ("utils.tensor_fragment", "utils.mixed_precision_linkage", "runtime.bf16_optimizer")
}
MASTER = "master"
KINDS = (MASTER, *MOMENTS)


class Fragment(NamedTuple):
    """A range of a flat vector: `n` elements, beginning at index `start`."""

    file: SavedFile
    vector: Stored
    start: int
    n: int


@dataclass(frozen=True)
class Gathered:
    """A tensor made by concatenating slices of flat vectors."""

    pieces: tuple[Fragment, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def where(self) -> str:
        return str(self.pieces[0].file.path)

    def read(self) -> Tensor:
        pieces = [piece.file.read(piece.vector, [(piece.start, piece.start + piece.n)]) for piece in self.pieces]
        return torch.cat(pieces).view(self.shape)


Fragments = dict[tuple[str, int], dict[str, list[Fragment]]]  # (name, tp) -> kind -> slices, in order


def open_optimizer(
    folder: Path, weights: Mapping[str, Sequence[Part]], n_layers: int, n_stages: int
) -> tuple[dict[str, dict[str, list[Part]]], int]:
    """Open the masters and moments of a Megatron-DeepSpeed checkpoint, without reading the vectors yet.

    Args:
        weights: mapping from each weight's name to its parts in the layer files, one part per tensor-parallel rank.
        n_layers: number of layers in the model.
        n_stages: number of pipeline stages in the run.

    Returns:
        Nested dicts, kind ("master" or a moment) -> name -> one part for each tensor-parallel rank; and the number of
        updates that the optimizer has made.

    Raises:
        IncompleteMoments: a file or some elements of a tensor are missing, or the files disagree about the number of
            updates. The message gives the reason.
        ValueError: a file is damaged.
    """
    paths = _optimizer_files(folder)
    n_tp = max(map(len, weights.values()))
    n_data = 1 + max(data for data, _ in paths)
    fragments: Fragments = {}
    steps: set[int] = set()
    for mp_rank in range(n_tp * n_stages):
        fragments_of_rank: Fragments = {}
        for data in range(n_data):
            if (data, mp_rank) not in paths:
                name = f"bf16_zero_pp_rank_{data}_mp_rank_{mp_rank:02d}_optim_states.pt"
                raise IncompleteMoments(f"{name} is missing, so the optimizer's state is not complete")
            file = SavedFile(paths[data, mp_rank], ADDRESSES)
            _add_fragments(fragments_of_rank, steps, file, mp_rank % n_tp, n_layers, n_data)
        for place, kinds in fragments_of_rank.items():
            # The loop visits stages in order, so a tied parameter gets the first stage's copy, not the last stage's.
            fragments.setdefault(place, kinds)
    if len(steps) != 1:
        raise IncompleteMoments(f"the optimizer has {len(steps)} different numbers of updates, expected one")
    parts: dict[str, dict[str, list[Part]]] = {kind: {} for kind in KINDS}
    for name, parts_of_weight in weights.items():
        for tp, weight in enumerate(parts_of_weight):
            for kind in KINDS:
                pieces = tuple(fragments.get((name, tp), {}).get(kind, ()))
                n = sum(piece.n for piece in pieces)
                expected = math.prod(weight.shape)
                if n != expected:
                    raise IncompleteMoments(f"the optimizer's state has {n} of {expected} elements of '{name}'")
                parts[kind].setdefault(name, []).append(Gathered(pieces, weight.shape))
    return parts, steps.pop()


def _optimizer_files(folder: Path) -> dict[tuple[int, int], Path]:
    """The paths of the bf16 optimizer's files: (data rank, model-parallel rank) -> path.

    Raises:
        IncompleteMoments: the folder has no file from a bf16 optimizer.
    """
    paths: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.glob("bf16_zero_*")):
        if match := OPTIMIZER_FILE.fullmatch(path.name):
            paths[int(match[1]), int(match[2])] = path
    if not paths:
        has_float16 = any(folder.glob("zero_pp_rank_*"))
        raise IncompleteMoments(
            "ZeRO's partitions of float16 are not read" if has_float16 else "no file has a bf16 optimizer's state"
        )
    return paths


def _add_fragments(fragments: Fragments, steps: set[int], file: SavedFile, tp: int, n_layers: int, n_data: int) -> None:
    """Append one data rank's slices of the parameters to `fragments`, and its update count to `steps`.

    Args:
        fragments: slices from the earlier data ranks.
        steps: update counts from the earlier ranks, without duplicates.
        file: the data rank's file.
        tp: index of the tensor-parallel rank.
        n_layers: number of layers in the model.
        n_data: number of data ranks, according to the file names.
    """
    content = entries(entries(file.value, "the file").get("optimizer_state_dict"), "the optimizer")
    counts = content.get("partition_count")
    expected = [n_data] * len(counts) if type(counts) is list else (n_data,)
    if counts not in (expected, n_data):
        raise IncompleteMoments(f"{file.path.name} is not one of {n_data} data ranks' files, so some are missing")
    vectors = of_type(content.get("single_partition_of_fp32_groups"), list, "the fp32 weights")
    adam = entries(content.get("base_optimizer_state"), "the optimizer")
    state = entries(adam.get("state"), "the state of the optimizer")
    mappings = of_type(content.get("param_slice_mappings"), list, "the places of the parameters")
    for group, (master, mapping) in enumerate(zip(vectors, mappings, strict=False)):
        group_state = entries(state.get(group), "the state of a group")
        stored = {MASTER: file.tensor(master)}
        for kind in MOMENTS:
            stored[kind] = file.tensor(group_state.get(kind))
        if type(group_state.get("step")) is int:
            steps.add(group_state["step"])
        for name, address in entries(mapping, "the places of a group").items():
            start, n = _address(address)
            for kind, vector in stored.items():
                if len(vector.shape) != 1 or vector.dtype != torch.float32 or start + n > vector.shape[0] or n < 1:
                    raise ValueError(f"{file.path}: {name!a:.200} is not in its vector, {list(vector.shape)}")
                kinds = fragments.setdefault((_whole_name(name, n_layers), tp), {})
                kinds.setdefault(kind, []).append(Fragment(file, vector, start, n))


def _address(pickled: Any) -> tuple[int, int]:
    """The offset and the element count of a parameter's slice of the flat vector."""
    if type(pickled) is not PickledObject or pickled.name not in ADDRESSES:
        raise ValueError("expected the place of a parameter in its vector")
    state = of_type(pickled.state, dict, "a place")
    return natural(state.get("start"), "start"), natural(state.get("numel"), "numel")


def _whole_name(name: Any, n_layers: int) -> str:
    """Convert a parameter's name in the optimizer to its whole-model name. A tied parameter gets its layer-1 name."""
    match = PARAMETER.fullmatch(of_type(name, str, "a parameter's name"))
    prefix = names.layer_file_prefix(int(match[1] or 1), n_layers) if match else None
    if match is None or prefix is None:
        raise ValueError(f"{name!a:.200} is not a parameter of a model with {n_layers} layers")
    return prefix + match[2]
