"""DeepSpeed's bf16 optimizer: fp32 weights and moments as flat vectors, each data rank with a part of them.

    bf16_zero_pp_rank_D_mp_rank_XX_optim_states.pt
        optimizer_state_dict
            single_partition_of_fp32_groups    this data rank's part of each group of parameters, one vector each
            base_optimizer_state               {state: {group: {exp_avg, exp_avg_sq, step}}}, vectors as long
            param_slice_mappings               per group: name -> where its piece is in the vector

A name is the layer's number and the name in its file: 3.input_layernorm.weight; of what is tied, tied_modules.embed.
and the name in layer 1, which the last stage has once more.
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

from dtmega.foreign.inert import PickledObject, natural, of_type
from dtmega.megatron import names
from dtmega.megatron.adam import MOMENTS, NotWhole
from dtmega.megatron.parts import Part
from dtmega.megatron.saved import SavedFile, Stored, entries

OPTIMIZER_FILE = re.compile(r"bf16_zero_pp_rank_(\d{1,5})_mp_rank_(\d{2,5})_optim_states\.pt")
OWNER = re.compile(r"(?:tied_modules\.embed|(\d{1,5}))\.(.+)")
ADDRESSES = {
    f"deepspeed.{module} fragment_address"
    for module in ("utils.tensor_fragment", "utils.mixed_precision_linkage", "runtime.bf16_optimizer")
}
MASTER = "master"
VECTORS = (MASTER, *MOMENTS)


class Fragment(NamedTuple):
    """Elements `start` to `start + n` of a vector."""

    file: SavedFile
    vector: Stored
    start: int
    n: int


@dataclass(frozen=True)
class Gathered:
    """A tensor whose elements are pieces of vectors, one after the other."""

    pieces: tuple[Fragment, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def where(self) -> str:
        return str(self.pieces[0].file.path)

    def read(self) -> Tensor:
        read = [piece.file.read(piece.vector, [(piece.start, piece.start + piece.n)]) for piece in self.pieces]
        return torch.cat(read).view(self.shape)


Fragments = dict[tuple[str, int], dict[str, list[Fragment]]]  # (name, tp) -> kind -> pieces


def opened(
    folder: Path, weights: Mapping[str, Sequence[Part]], n_layers: int, n_stages: int
) -> tuple[dict[str, dict[str, list[Part]]], int]:
    """Masters and moments, name -> part of each tensor-parallel rank, and the updates that were made.

    Args:
        weights: the same of the layers' files.

    Raises:
        NotWhole: a file is missing, or elements of a tensor; a line says which.
        ValueError: damaged.
    """
    paths = {
        (int(match[1]), int(match[2])): path
        for path in sorted(folder.glob("bf16_zero_*"))
        if (match := OPTIMIZER_FILE.fullmatch(path.name))
    }
    if not paths:
        others = any(folder.glob("zero_pp_rank_*"))
        raise NotWhole(
            "ZeRO's partitions of float16 are not read" if others else "no file has a bf16 optimizer's state"
        )
    n_tp = max(map(len, weights.values()))
    n_data = 1 + max(data for data, _ in paths)
    found: Fragments = {}
    steps: set[int] = set()
    for mp_rank in range(n_tp * n_stages):
        mine: Fragments = {}
        for data in range(n_data):
            if (data, mp_rank) not in paths:
                name = f"bf16_zero_pp_rank_{data}_mp_rank_{mp_rank:02d}_optim_states.pt"
                raise NotWhole(f"{name} is missing, so the optimizer's state is not whole")
            _add(mine, steps, SavedFile(paths[data, mp_rank], ADDRESSES), mp_rank % n_tp, n_layers, n_data)
        for place, pieces in mine.items():
            found.setdefault(place, pieces)  # the last stage's copy of what is tied comes after the first stage's
    if len(steps) != 1:
        raise NotWhole(f"the optimizer says {len(steps)} numbers of updates, expected one")
    parts: dict[str, dict[str, list[Part]]] = {kind: {} for kind in VECTORS}
    for name, those in weights.items():
        for tp, weight in enumerate(those):
            for kind in VECTORS:
                pieces = tuple(found.get((name, tp), {}).get(kind, ()))
                n = sum(piece.n for piece in pieces)
                if n != math.prod(weight.shape):
                    raise NotWhole(f"the optimizer's state has {n} of {math.prod(weight.shape)} elements of '{name}'")
                parts[kind].setdefault(name, []).append(Gathered(pieces, weight.shape))
    return parts, steps.pop()


def _add(found: Fragments, steps: set[int], file: SavedFile, tp: int, n_layers: int, n_data: int) -> None:
    """The pieces in one data rank's file, behind those of the ranks before."""
    content = entries(entries(file.value, "the file").get("optimizer_state_dict"), "the optimizer")
    counts = content.get("partition_count")
    if counts not in ([n_data] * len(counts) if type(counts) is list else (n_data,), n_data):
        raise NotWhole(f"{file.path.name} is one of other than {n_data} data ranks' files, so some are missing")
    vectors = of_type(content.get("single_partition_of_fp32_groups"), list, "the fp32 weights")
    adam = entries(content.get("base_optimizer_state"), "the optimizer")
    state = entries(adam.get("state"), "the state of the optimizer")
    mappings = of_type(content.get("param_slice_mappings"), list, "the places of the parameters")
    for group, (vector, mapping) in enumerate(zip(vectors, mappings, strict=False)):
        its = entries(state.get(group), "the state of a group")
        said = {MASTER: vector, **{kind: its.get(kind) for kind in MOMENTS}}
        stored = {kind: file.tensor(made) for kind, made in said.items()}
        if type(its.get("step")) is int:
            steps.add(its["step"])
        for name, address in entries(mapping, "the places of a group").items():
            start, n = _address(address)
            for kind, whole in stored.items():
                if len(whole.shape) != 1 or whole.dtype != torch.float32 or start + n > whole.shape[0] or n < 1:
                    raise ValueError(f"{file.path}: {name!a:.200} is not in its vector, {list(whole.shape)}")
                pieces = found.setdefault((_whole_name(name, n_layers), tp), {}).setdefault(kind, [])
                pieces.append(Fragment(file, whole, start, n))


def _address(made: Any) -> tuple[int, int]:
    """First element, and how many."""
    if type(made) is not PickledObject or made.name not in ADDRESSES:
        raise ValueError("expected the place of a parameter in its vector")
    state = of_type(made.state, dict, "a place")
    return natural(state.get("start"), "start"), natural(state.get("numel"), "numel")


def _whole_name(name: Any, n_layers: int) -> str:
    match = OWNER.fullmatch(of_type(name, str, "a parameter's name"))
    prefix = names.layer_file_prefix(int(match[1] or 1), n_layers) if match else None
    if match is None or prefix is None:
        raise ValueError(f"{name!a:.200} is no parameter of a model with {n_layers} layers")
    return prefix + match[2]
