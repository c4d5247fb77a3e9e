"""The folder of a Megatron-DeepSpeed checkpoint: a file for each layer and tensor-parallel rank; stages do not show.

    global_step1000/layer_XX-model_TT-model_states.pt     01 the embedding, 03 to L + 2 the layers, L + 4 the last norm
    global_step1000/mp_rank_XX_model_states.pt            arguments and counts; XX is stage * TP + rank
    global_step1000/bf16_zero_pp_rank_D_mp_rank_XX_optim_states.pt      see zero.py

02 and L + 3 are functions and have no file, nor has the tied head.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from dtmega.megatron import names
from dtmega.megatron.parts import Part, Shard
from dtmega.megatron.ranks import arguments, check_agreed
from dtmega.megatron.saved import SavedFile, check_apart, entries, plain

LAYER = re.compile(r"layer_(\d{2,4})-model_(\d{2,4})-model_states\.pt")
RANK = re.compile(r"mp_rank_(\d{2,5})_model_states\.pt")


class Layers(NamedTuple):
    """The contents of a folder besides an optimizer.

    Attributes:
        parts: name in the whole model -> part of each tensor-parallel rank.
        args: as plain values; empty where no mp_rank file is there.
        content: of the first mp_rank file.
        vocab_size: of the tokenizer; 0: it does not say.
    """

    parts: dict[str, list[Part]]
    args: dict[str, Any]
    content: dict[Any, Any]
    vocab_size: int


def holds(folder: Path) -> bool:
    return any(LAYER.fullmatch(path.name) for path in folder.glob("layer_*"))


def opened(folder: Path) -> Layers:
    """Every file of `global_step...` but those of the optimizer.

    Raises:
        ValueError: a file is missing, unknown, no checkpoint's, or disagrees with the others; with its name.
    """
    args, content = _described(folder)
    paths = {
        (int(match[1]), int(match[2])): path
        for path in sorted(folder.glob("layer_*"))
        if (match := LAYER.fullmatch(path.name))
    }
    n_tp = 1 + max(tp for _, tp in paths)
    n_layers = args.get("num_layers", max(number for number, _ in paths) - 4)
    said = args.get("tensor_model_parallel_size")
    if said not in (None, n_tp):
        raise ValueError(f"{folder}: tensor_model_parallel_size={said!r:.80} by its arguments, but there are {n_tp}")
    if type(n_layers) is not int or n_layers > len(paths):
        raise ValueError(f"{folder} has {len(paths)} files of layers, too few for num_layers={n_layers!r:.80}")
    expected = {number for number in range(n_layers + 5) if names.layer_file_prefix(number, n_layers)}
    for place in sorted({*paths} ^ {(number, tp) for number in expected for tp in range(n_tp)}):
        name = f"layer_{place[0]:02d}-model_{place[1]:02d}-model_states.pt"
        what = "has no place in" if place in paths else "is missing of"
        raise ValueError(f"{folder}/{name} {what} a model with {n_layers} layers on {n_tp} ranks")
    parts: dict[str, list[Part]] = {}
    for (number, tp), path in sorted(paths.items()):
        for name, part in _layer(path, names.layer_file_prefix(number, n_layers) or "").items():
            parts.setdefault(name, []).append(part)
            if len(parts[name]) != tp + 1:
                raise ValueError(f"{path}: '{name}' is in this file and not in that of the rank before")
    if lost := next((name for name, those in parts.items() if len(those) != n_tp), ""):
        raise ValueError(f"{folder}: '{lost}' is in the files of {len(parts[lost])} ranks, expected {n_tp}")
    counted = content.get("checkpoint_info")
    vocab_size = 0 if counted is None else plain(entries(counted, "checkpoint_info").get("original_vocab_size"))
    return Layers(parts, args, content, vocab_size if type(vocab_size) is int and vocab_size > 0 else 0)


def _layer(path: Path, prefix: str) -> dict[str, Part]:
    """The tensors of one file by their names in the whole model."""
    file = SavedFile(path)
    found: dict[str, Part] = {}
    for name, made in entries(file.value, f"{path}: the layer").items():
        if type(name) is not str or not name.isprintable() or len(name) > 200:
            raise ValueError(f"{path}: expected tensors by their names")
        found[prefix + name] = Shard(file, file.tensor(made))
    check_apart(path, (part.stored for part in found.values() if isinstance(part, Shard)))
    return found


def _described(folder: Path) -> tuple[dict[str, Any], dict[Any, Any]]:
    """Arguments, and the first rank's file; both empty where no such file is there."""
    paths = [path for path in sorted(folder.glob("mp_rank_*")) if RANK.fullmatch(path.name)]
    args: dict[str, Any] = {}
    content: dict[Any, Any] = {}
    for number, path in enumerate(paths):
        there = entries(SavedFile(path).value, f"{path}: the checkpoint")
        version = there.get("checkpoint_version", 3)
        if type(version) not in (int, float) or version < 2:
            raise ValueError(f"{path}: checkpoint_version={plain(version)!r:.80}, expected 2 or 3")
        its = arguments(there)
        if number:
            check_agreed(args, paths[0], its, path)
        else:
            args, content = its, there
    return args, content
