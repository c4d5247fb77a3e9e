"""Write a `release` folder for Megatron-LM's legacy models: weights sharded by tp and pp, one file per rank.

    OUT/latest_checkpointed_iteration.txt        "release"
    OUT/release/mp_rank_01/model_optim_rng.pt    tensor-parallel rank 1 (mp_rank_01_000 for its stage 0 if pp > 1)

The folder is a release, because Megatron's loader exits if a numbered iteration lacks the states of the optimizer and
the random number generators. The loader also compares each file's model and layout arguments with the loading run's
arguments. Files are written in checkpoint version 3.0, with the names of Megatron-LM v2.1 and later.
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

from dtmega.checkpoint.sources import Slices, Source
from dtmega.files import atomic
from dtmega.interop.megatron.launch.corpora import WORDPIECE_OF
from dtmega.interop.megatron.names import COPY_FOR_HEAD, by_token, cut_dim

# The number of vocabulary rows on each rank is a multiple of MULTIPLE, Megatron's default for
# --make-vocab-size-divisible-by.
MULTIPLE = 128
TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
FILE = "model_optim_rng.pt"
STACKS = ("encoder", "decoder")
WORDS = "embedding.word_embeddings.weight"
WORDS_FOR_HEAD = f"{COPY_FOR_HEAD}weight"


class Layout(NamedTuple):
    """The layout of a model on Megatron's ranks.

    Attributes:
        tp: number of tensor-parallel ranks.
        pp: number of pipeline stages.
        split: index of the stage where the decoder begins; 0 if there is no decoder or only one stage.
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
        """The name of the folder that holds one rank's file."""
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
    """Write a checkpoint completely, or not at all. Only one rank's file is in memory at a time.

    Args:
        folder: path of the checkpoint, a new or empty folder.
        source: tensors of the whole model, under Megatron's names, without duplicates or vocabulary padding.
        args: the model's arguments, under Megatron's names.
        tp: number of tensor-parallel ranks.
        pp: number of pipeline stages.
        tokenizer: the model's tokenizer spec. Megatron's loader checks the kind of tokenizer if the loading run has a
            vocabulary.
        work: function that is called before each tensor is copied.

    Raises:
        ValueError: the folder is not empty, or the model cannot have this layout. Nothing has been written.
        OSError: writing failed.
    """
    check_new(folder)
    layout = _layout(source, args, tp, pp)
    rows = MULTIPLE * tp
    padded = -(-source.tensors[WORDS][1][0] // rows) * rows
    stages = [_names_of_stage(source, layout, stage) for stage in range(pp)]
    all_args = {**args, **args_of_files(layout, padded, source.tensors[WORDS][0], tokenizer)}
    with new_release(folder) as temporary:
        for stage, names in enumerate(stages):
            for rank in range(tp):
                tensors: dict[str, Tensor] = {}
                for local_name, name in names.items():
                    work()
                    tensors[local_name] = _part(source, name, rank, tp, padded)
                rank_folder = temporary / RELEASE / layout.folder(rank, stage)
                atomic.make_folder(rank_folder)
                _save(rank_folder / FILE, all_args, tensors)
                atomic.sync_folder(rank_folder)


def check_new(folder: Path) -> None:
    """Check that a checkpoint can be written to a folder.

    Raises:
        ValueError: the folder is not empty or is a file.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} exists already; expected a new folder, or an empty one (--to)")


@contextlib.contextmanager
def new_release(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder in which the `with` block writes a release.

    If the block succeeds, the temporary folder is renamed to `folder`. If the block fails, the temporary folder is
    deleted.

    Args:
        folder: final path of the checkpoint; the block writes `RELEASE` inside the temporary folder.
    """
    folder = folder.absolute()
    temporary = folder.with_name(f".tmp-{folder.name}")
    atomic.empty_folder(temporary)
    try:
        yield temporary
        with atomic.created(temporary / TRACKER) as file:
            file.write(RELEASE.encode())
        atomic.sync_folder(temporary)
        os.rename(temporary, folder)
        atomic.sync_folder(folder.parent)
    except BaseException:
        # If deleting fails as well, the leftovers only take up space. Report the first error.
        with contextlib.suppress(OSError):
            atomic.remove_folder(temporary)
        raise


@contextlib.contextmanager
def os_errors() -> Iterator[None]:
    """If a write fails, raise the write's OSError instead of the later error that torch raises on close."""
    try:
        yield
    except RuntimeError as error:
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def _layout(source: Source, args: Mapping[str, Any], tp: int, pp: int) -> Layout:
    """The layout of a model on tp times pp ranks.

    Raises:
        ValueError: the heads, the feed-forward or the layers cannot be divided evenly among the ranks.
    """
    for key, ours in (("num_attention_heads", "n_heads"), ("ffn_hidden_size", "ffn_hidden_size")):
        if args[key] % tp:
            raise ValueError(f"tp={tp} does not divide {ours}={args[key]} (--tp, [model] {ours})")
    depths = {stack: _depth(source, stack) for stack in STACKS}
    layout = Layout(tp, pp)
    if depths["decoder"] and pp > 1:
        # Divide the stages between the two stacks, in proportion to the stacks' layer counts.
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
    """The number of layers in a stack; 0 if the model has no such stack."""
    return len({name.split(".")[2] for name in source.tensors if name.startswith(f"{stack}.layers.")})


def _names_of_stage(source: Source, layout: Layout, stage: int) -> dict[str, str]:
    """Map each tensor's name in a stage's files, which number layers from 0, to the tensor's whole-model name."""
    last = stage == layout.pp - 1
    embeds = stage == 0 or stage == layout.split
    names: dict[str, str] = {}
    for name in source.tensors:
        section = name.partition(".")[0]
        if section in STACKS:
            stages = layout.stages_of(section)
            per_stage = _depth(source, section) // len(stages)
            layer = re.match(rf"{section}\.layers\.(\d+)\.", name)
            # A stack's final LayerNorm, which has no layer number, belongs to the stack's last stage.
            position = int(layer[1]) // per_stage if layer else len(stages) - 1
            if stage == stages[position]:
                local_name = name
                if layer:
                    local_name = name.replace(f".{layer[1]}.", f".{int(layer[1]) % per_stage}.", 1)
                names[local_name] = name
        else:
            is_here = embeds if section == "embedding" else last
            if is_here:
                names[name] = name
    # A model with a tied head computes its logits on the last stage, from a copy of the embedding.
    if last and not embeds and "output_layer.weight" not in source.tensors:
        names[WORDS_FOR_HEAD] = WORDS
    return names


def _part(source: Source, name: str, rank: int, tp: int, padded: int) -> Tensor:
    """Copy a rank's shard of a tensor, or a replicated tensor, into a new tensor. Padding rows are zeros.

    Args:
        name: name in the whole model.
        padded: number of vocabulary rows on all ranks together, including padding.
    """
    dtype, shape = source.tensors[name]
    dim = cut_dim(name)
    padded_shape = (padded, *shape[1:]) if by_token(name) else shape
    bounds = [(0, size) for size in padded_shape]
    if dim is not None:
        n = padded_shape[dim] // tp
        bounds[dim] = (rank * n, rank * n + n)
    part = torch.zeros([stop - start for start, stop in bounds], dtype=dtype)
    # If a rank has only padding rows, as the last ranks may, nothing is read.
    if dim is None or bounds[dim][0] < shape[dim]:
        box: Slices = tuple(slice(start, min(stop, size)) for (start, stop), size in zip(bounds, shape, strict=True))
        values = source.read(name, box)
        part[tuple(slice(0, size) for size in values.shape)] = values
    return part


def args_of_files(layout: Layout, padded: int, dtype: torch.dtype, tokenizer: str) -> dict[str, Any]:
    """The arguments that depend on the layout, the dtype and the tokenizer rather than on the model."""
    args = {
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
        args["pipeline_model_parallel_split_rank"] = layout.split
    kinds = {spec: kind for kind, spec in WORDPIECE_OF.items()}
    if (spec := tokenizer.partition(":")[0]) in kinds:
        args["tokenizer_type"] = kinds[spec]
    return args


def _save(path: Path, args: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write one rank's file with torch.save."""
    with _position_types() as position_types, atomic.created(path) as file:
        all_args = dict(args)
        if all_args.get("position_embedding_type") is not None:
            all_args["position_embedding_type"] = position_types[all_args["position_embedding_type"]]
        content = {
            "args": argparse.Namespace(**all_args),
            "checkpoint_version": 3.0,
            "iteration": 0,
            "model": _nested(tensors),
        }
        with os_errors():
            torch.save(content, file)


def _nested(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Nest the tensors in dicts, as Megatron's modules expect when they load their state."""
    model: dict[str, Any] = {"language_model": {}}
    for name, tensor in tensors.items():
        section, _, inner_name = name.partition(".")
        is_outside = section in ("lm_head", "binary_head", COPY_FOR_HEAD.rstrip("."))
        owner = model if is_outside else model["language_model"]
        table = owner.setdefault(section, {})
        if section == "embedding":
            embedding, _, inner_name = inner_name.partition(".")
            table = table.setdefault(embedding, {})
        table[inner_name] = tensor
    return model


@contextlib.contextmanager
def _position_types() -> Iterator[type[enum.Enum]]:
    """Yield a stand-in for the position-embedding enum in BigScience's fork, whose loader compares enum members.

    A pickle refers to an enum by module and name. Inside the `with` block, a stand-in module `megatron.enums` holds the
    enum, so torch.save pickles the members as members of the fork's enum.
    """
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
        for name, module_before in before.items():
            if module_before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module_before
