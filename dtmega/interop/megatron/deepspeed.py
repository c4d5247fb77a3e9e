"""The folder of a Megatron-DeepSpeed checkpoint: one file for each layer and tensor-parallel rank.

    global_step1000/layer_XX-model_TT-model_states.pt     weights of layer XX on tensor-parallel rank TT
    global_step1000/mp_rank_XX_model_states.pt            arguments and counts; here XX is stage * TP + TT
    global_step1000/bf16_zero_pp_rank_D_mp_rank_XX_optim_states.pt      see zero.py

Layers are numbered across the whole model, so pipeline stages do not matter here. Layer 01 is the embedding, layers 03
to L + 2 are the transformer layers, and layer L + 4 is the last norm. Layers 02 and L + 3 are functions without
parameters and have no files. The tied head has no file either.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dtmega.interop.megatron import names
from dtmega.interop.megatron.parts import Part, Shard
from dtmega.interop.megatron.ranks import arguments, check_agreed
from dtmega.interop.megatron.saved import SavedFile, check_apart, entries, plain

LAYER = re.compile(r"layer_(\d{2,4})-model_(\d{2,4})-model_states\.pt")
RANK = re.compile(r"mp_rank_(\d{2,5})_model_states\.pt")


class Layers(NamedTuple):
    """The contents of a checkpoint's folder, except for the optimizer.

    Attributes:
        parts: mapping from each tensor's whole-model name to its parts, one per tensor-parallel rank, in rank order.
        args: the run's arguments as plain values; empty if there is no mp_rank file.
        content: contents of the first mp_rank file; empty if there is no mp_rank file.
        vocab_size: number of ids in the tokenizer; 0 if the files do not give the number.
    """

    parts: dict[str, list[Part]]
    args: dict[str, Any]
    content: dict[Any, Any]
    vocab_size: int


def is_checkpoint(folder: Path) -> bool:
    """True if Megatron-DeepSpeed wrote the folder."""
    return any(LAYER.fullmatch(path.name) for path in folder.glob("layer_*"))


def open_layers(folder: Path) -> Layers:
    """Open all files in a `global_step...` folder except the optimizer's files, without reading the tensors yet.

    Raises:
        ValueError: a file is missing, is unexpected, is not part of a checkpoint, or disagrees with the other files.
            The message names the file.
    """
    args, content = _read_arguments(folder)
    paths: dict[tuple[int, int], Path] = {}  # (layer, tp)
    for path in sorted(folder.glob("layer_*")):
        if match := LAYER.fullmatch(path.name):
            paths[int(match[1]), int(match[2])] = path
    n_tp = 1 + max(tp for _, tp in paths)
    n_layers = args.get("num_layers", max(number for number, _ in paths) - 4)
    tp_of_args = args.get("tensor_model_parallel_size")
    if tp_of_args not in (None, n_tp):
        raise ValueError(
            f"{folder}: tensor_model_parallel_size={tp_of_args!r:.80} in its arguments, but the files have {n_tp}"
        )
    if type(n_layers) is not int or n_layers > len(paths):
        raise ValueError(f"{folder} has {len(paths)} files of layers, too few for num_layers={n_layers!r:.80}")
    _check_files(folder, paths, n_layers, n_tp)
    parts = _join_layers(folder, paths, n_layers, n_tp)
    info = content.get("checkpoint_info")
    vocab_size = 0 if info is None else plain(entries(info, "checkpoint_info").get("original_vocab_size"))
    return Layers(parts, args, content, vocab_size if type(vocab_size) is int and vocab_size > 0 else 0)


def _check_files(folder: Path, paths: Mapping[tuple[int, int], Path], n_layers: int, n_tp: int) -> None:
    """Check that a folder has every layer file of a model, and no other layer files.

    Raises:
        ValueError: a layer file is missing, or is for a layer or rank that the model does not have.
    """
    expected: set[tuple[int, int]] = set()
    for number in range(n_layers + 5):
        if names.layer_file_prefix(number, n_layers):
            expected |= {(number, tp) for tp in range(n_tp)}
    for place in sorted({*paths} ^ expected):
        name = f"layer_{place[0]:02d}-model_{place[1]:02d}-model_states.pt"
        fault = "has no place in" if place in paths else "is missing from"
        raise ValueError(f"{folder}/{name} {fault} a model with {n_layers} layers on {n_tp} ranks")


def _join_layers(
    folder: Path, paths: Mapping[tuple[int, int], Path], n_layers: int, n_tp: int
) -> dict[str, list[Part]]:
    """Map each tensor's whole-model name to the tensor's parts, one part per tensor-parallel rank, in rank order.

    Raises:
        ValueError: a rank lacks a tensor that another rank has.
    """
    parts: dict[str, list[Part]] = {}
    # Sorting makes a layer's files consecutive, in rank order, so each file must add one part to each of the layer's
    # tensors.
    for (number, tp), path in sorted(paths.items()):
        for name, part in _read_layer(path, names.layer_file_prefix(number, n_layers) or "").items():
            parts.setdefault(name, []).append(part)
            if len(parts[name]) != tp + 1:
                raise ValueError(f"{path}: '{name}' is in this file, but not in the file of the rank before")
    for name, parts_of_name in parts.items():
        if len(parts_of_name) != n_tp:
            raise ValueError(f"{folder}: '{name}' is in the files of {len(parts_of_name)} ranks, expected {n_tp}")
    return parts


def _read_layer(path: Path, prefix: str) -> dict[str, Part]:
    """The tensors in one file, keyed by whole-model name."""
    file = SavedFile(path)
    parts: dict[str, Part] = {}
    for name, pickled in entries(file.value, f"{path}: the layer").items():
        if type(name) is not str or not name.isprintable() or len(name) > 200:
            raise ValueError(f"{path}: expected tensors by their names")
        parts[prefix + name] = Shard(file, file.tensor(pickled))
    check_apart(path, (part.stored for part in parts.values() if isinstance(part, Shard)))
    return parts


def _read_arguments(folder: Path) -> tuple[dict[str, Any], dict[Any, Any]]:
    """The run's arguments, and the whole contents of the first mp_rank file; both are empty if no such file exists."""
    paths = [path for path in sorted(folder.glob("mp_rank_*")) if RANK.fullmatch(path.name)]
    first_args: dict[str, Any] = {}
    first_content: dict[Any, Any] = {}
    for number, path in enumerate(paths):
        content = entries(SavedFile(path).value, f"{path}: the checkpoint")
        version = content.get("checkpoint_version", 3)
        if type(version) not in (int, float) or version < 2:
            raise ValueError(f"{path}: checkpoint_version={plain(version)!r:.80}, expected 2 or 3")
        args = arguments(content)
        if number == 0:
            first_args, first_content = args, content
        else:
            check_agreed(first_args, paths[0], args, path)
    return first_args, first_content
