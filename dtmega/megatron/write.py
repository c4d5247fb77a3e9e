"""A `release` folder of Megatron-LM: weights alone, cut for its ranks, in pickles that its `load_checkpoint` takes.

    OUT/latest_checkpointed_iteration.txt        "release"
    OUT/release/mp_rank_01/model_optim_rng.pt    tensor-parallel rank 1; mp_rank_01_000 of stage 0, with stages

A numbered folder without optimizer and generators would make that loader exit. It compares what the arguments in a file
say of the model and of the layout with its own. Files are in the form of version 3.0, names those of v2.1 and later.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtmega import durable
from dtmega.formats.sources import Slices, Source
from dtmega.megatron.names import COPY_FOR_HEAD, by_token, cut_dim
from dtmega.megatron.translate import WORDPIECE_OF

MULTIPLE = 128  # of rows of the vocabulary on each rank: their default
TRACKER = "latest_checkpointed_iteration.txt"
FILE = "model_optim_rng.pt"
STACKS = ("encoder", "decoder")
WORDS = "embedding.word_embeddings.weight"
WORDS_FOR_HEAD = f"{COPY_FOR_HEAD}weight"


class Layout(NamedTuple):
    """The layout of a model on their ranks.

    Attributes:
        split: the stage where the decoder begins, of a model with two stacks on several stages; else 0.
    """

    tp: int
    pp: int
    split: int = 0

    def stages_of(self, stack: str) -> range:
        """The stages that hold layers of a stack."""
        if not self.split:
            return range(self.pp)
        return range(self.split) if stack == "encoder" else range(self.split, self.pp)

    def folder(self, rank: int, stage: int) -> str:
        return f"mp_rank_{rank:02d}" if self.pp == 1 else f"mp_rank_{rank:02d}_{stage:03d}"


def write(
    folder: Path,
    source: Source,
    args: Mapping[str, Any],
    tp: int,
    pp: int,
    *,
    tokenizer: str = "",
    work: Callable[[], object] = int,
) -> None:
    """Write `folder`, whole or not at all. One rank's file is in memory at a time.

    Args:
        source: a whole model by Megatron's names, each tensor once, without padding of the vocabulary.
        args: of the model, in their words.
        tokenizer: the spec of its tokenizer; their loader compares which kind it is, if it is given a vocabulary.
        work: called before each tensor.

    Raises:
        ValueError: before anything is written: the folder is there and not empty, or no such layout of this model.
        OSError: writing failed.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} is there already; expected a new folder, or an empty one (--to)")
    layout = _layout(source, args, tp, pp)
    rows = MULTIPLE * tp
    padded = -(-source.tensors[WORDS][1][0] // rows) * rows
    stages = [_stage(source, layout, stage) for stage in range(pp)]
    folder = folder.absolute()
    aside = folder.with_name(f".tmp-{folder.name}")
    durable.empty_folder(aside)
    try:
        told = {**args, **_args_of_layout(layout, padded, source.tensors[WORDS][0], tokenizer)}
        for stage, names in enumerate(stages):
            for rank in range(tp):
                tensors: dict[str, Tensor] = {}
                for local, name in names.items():
                    work()
                    tensors[local] = _part(source, name, rank, tp, padded)
                inside = aside / "release" / layout.folder(rank, stage)
                durable.make_folder(inside)
                _save(inside / FILE, told, tensors)
                durable.sync_folder(inside)
        with durable.created(aside / TRACKER) as file:
            file.write(b"release")
        durable.sync_folder(aside)
        os.rename(aside, folder)
        durable.sync_folder(folder.parent)
    except BaseException:
        with contextlib.suppress(OSError):  # what cannot be deleted takes room, no more
            durable.remove_folder(aside)
        raise


def _layout(source: Source, args: Mapping[str, Any], tp: int, pp: int) -> Layout:
    """The layout for tp times pp ranks.

    Raises:
        ValueError: heads, the feed-forward or layers do not come out even.
    """
    for key, ours in (("num_attention_heads", "n_heads"), ("ffn_hidden_size", "ffn_hidden_size")):
        if args[key] % tp:
            raise ValueError(f"tp={tp} does not divide {ours}={args[key]} (--tp, [model] {ours})")
    depths = {stack: _depth(source, stack) for stack in STACKS}
    layout = Layout(tp, pp)
    if depths["decoder"] and pp > 1:
        # As many stages for each layer of one stack as for one of the other.
        layout = Layout(tp, pp, split=pp * depths["encoder"] // sum(depths.values()))
    for stack, depth in depths.items():
        n_stages = len(layout.stages_of(stack))
        if depth and (not n_stages or depth % n_stages):
            raise ValueError(
                f"pp={pp} gives {n_stages} stages to the {depth} layers of the {stack}, which it does not divide "
                f"(--pp, [model] n_layers)"
            )
    return layout


def _depth(source: Source, stack: str) -> int:
    """The number of layers of a stack; 0: there is no such stack."""
    return len({name.split(".")[2] for name in source.tensors if name.startswith(f"{stack}.layers.")})


def _stage(source: Source, layout: Layout, stage: int) -> dict[str, str]:
    """The tensors of a stage: name there, where layers count from 0 -> whole name."""
    last = stage == layout.pp - 1
    embeds = stage == 0 or stage == layout.split
    found: dict[str, str] = {}
    for name in source.tensors:
        section = name.partition(".")[0]
        if section == "embedding":
            here = embeds
        elif section not in STACKS:
            here = last
        else:
            stages = layout.stages_of(section)
            per_stage = _depth(source, section) // len(stages)
            layer = re.match(rf"{section}\.layers\.(\d+)\.", name)
            # A final LayerNorm belongs to the last stage of its stack.
            its = int(layer[1]) // per_stage if layer else len(stages) - 1
            here = stage == stages[its]
            if layer and here:
                found[name.replace(f".{layer[1]}.", f".{int(layer[1]) % per_stage}.", 1)] = name
                continue
        if here:
            found[name] = name
    if last and not embeds and "output_layer.weight" not in source.tensors:
        found[WORDS_FOR_HEAD] = WORDS
    return found


def _part(source: Source, name: str, rank: int, tp: int, padded: int) -> Tensor:
    """A rank's part of a tensor, in memory of its own; rows of padding are zeros."""
    dtype, shape = source.tensors[name]
    dim = cut_dim(name)
    full = (padded, *shape[1:]) if by_token(name) else shape
    n = 0 if dim is None else full[dim] // tp
    box: Slices = tuple(slice(rank * n, rank * n + n) if d == dim else slice(0, size) for d, size in enumerate(full))
    part = torch.zeros([s.stop - s.start for s in box], dtype=dtype)
    if dim is None or box[dim].start < shape[dim]:
        read = source.read(name, tuple(slice(s.start, min(s.stop, size)) for s, size in zip(box, shape, strict=True)))
        part[tuple(slice(0, size) for size in read.shape)] = read
    return part


def _args_of_layout(layout: Layout, padded: int, dtype: torch.dtype, tokenizer: str) -> dict[str, Any]:
    found = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "padded_vocab_size": padded,
        "make_vocab_size_divisible_by": MULTIPLE,
        "params_dtype": dtype,
        "fp16": dtype == torch.float16,
        "bf16": dtype == torch.bfloat16,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
    }
    if layout.split:
        found["pipeline_model_parallel_split_rank"] = layout.split
    kinds = {spec: kind for kind, spec in WORDPIECE_OF.items()}
    if (spec := tokenizer.partition(":")[0]) in kinds:
        found["tokenizer_type"] = kinds[spec]
    return found


def _save(path: Path, args: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """One rank's file, as torch.save makes it."""
    with _position_types() as kinds, durable.created(path) as file:
        said = dict(args)
        if said.get("position_embedding_type") is not None:
            said["position_embedding_type"] = kinds[said["position_embedding_type"]]
        content = {
            "args": argparse.Namespace(**said),
            "checkpoint_version": 3.0,
            "iteration": 0,
            "model": _nested(tensors),
        }
        try:
            torch.save(content, file)
        except RuntimeError as error:  # of the end of a file that could not be written
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def _nested(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Dicts in dicts, as the modules that load them ask for theirs."""
    model: dict[str, Any] = {"language_model": {}}
    for name, tensor in tensors.items():
        section, _, rest = name.partition(".")
        owner = model if section in ("lm_head", "binary_head", COPY_FOR_HEAD.rstrip(".")) else model["language_model"]
        table = owner.setdefault(section, {})
        if section == "embedding":
            each, _, rest = rest.partition(".")
            table = table.setdefault(each, {})
        table[rest] = tensor
    return model


@contextlib.contextmanager
def _position_types() -> Iterator[type[enum.Enum]]:
    """The enum of BigScience's fork, which its loader compares, under the name that a pickle gives it there."""
    module = types.ModuleType("megatron.enums")
    members = {"rotary": 1, "absolute": 2, "alibi": 3}
    kinds = enum.Enum("PositionEmbeddingType", members, module=module.__name__)
    module.PositionEmbeddingType = kinds  # pyright: ignore[reportAttributeAccessIssue]
    stand_ins = {"megatron": types.ModuleType("megatron"), module.__name__: module}
    before = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    try:
        yield kinds
    finally:
        for name, there in before.items():
            if there is None:
                del sys.modules[name]
            else:
                sys.modules[name] = there
