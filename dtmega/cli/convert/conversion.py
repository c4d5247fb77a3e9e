"""`python -m dtmega convert --from FORMAT PATH --to FORMAT PATH`: convert weights between programs.

    --from hf DIR         a Hugging Face folder with safetensors
    --from dtmega PATH    a checkpoint, or a run directory (its newest checkpoint)
    --from dcp DIR        a folder written by plain torch.distributed.checkpoint, read without running its pickles
    --from megatron DIR   a checkpoint of Megatron-LM, Megatron-DeepSpeed or megatron-core, also read
                          without running its pickles
    --to dtmega DIR       a checkpoint that holds only weights, for [model] init_from. A checkpoint converted from
                          Megatron also contains a config.toml and, if Adam's moments are complete, the training state
                          from which a run can resume
    --to hf DIR           a folder that transformers' from_pretrained loads; under torchrun, all ranks write the folder
    --to megatron DIR     weights for Megatron-LM. With --format core, Megatron's current models load the weights on
                          any number of ranks. With --format legacy, Megatron's earlier models load the weights on
                          --tp times --pp ranks

If a run trained a Hugging Face model, --to hf writes the layout of the model's original directory. If this directory
has moved, --original names its new path. Tensors are converted one by one, so the model need not fit in memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dtmega import config, families
from dtmega.checkpoint import found
from dtmega.checkpoint.sources import check_stored
from dtmega.checkpoint.weights import Merged, is_hf_folder
from dtmega.cli.convert import card, to_checkpoint
from dtmega.cli.convert.sources import READERS, ConversionSource
from dtmega.cli.convert.to_checkpoint import Training
from dtmega.data.tokenizers.load import load_tokenizer
from dtmega.distributed.agreement import Startup
from dtmega.families.family import Family
from dtmega.interop import stored
from dtmega.interop.formats.sources import Cast, Renamed
from dtmega.interop.hf.files.peft import Adapters, write_peft
from dtmega.interop.hf.files.tensors import DTYPES
from dtmega.interop.megatron import write as for_megatron
from dtmega.interop.megatron import write_core as for_megatron_core

TARGETS = ("dtmega", "hf", "megatron")
LEGACY = "legacy"
# Value of --format (preferred value first) -> key of `Stored.formats`.
MEGATRON_FORMATS = {"core": "megatron-core", LEGACY: "megatron"}


def convert(args: argparse.Namespace, startup: Startup) -> None:
    """Read the weights that `--from` names, convert them, and write the target that `--to` names.

    Args:
        args: parsed command line of `python -m dtmega convert`.
        startup: `Startup` of the ranks that convert.

    Raises:
        Refused: the format is unknown, the source is missing or damaged, the weights belong to a different model, the
            model's directory has changed, or writing failed. Every rank raises this error, after the reason has been
            printed.
    """
    source = _open(args, startup)
    family = families.of(source.model)
    with startup.step("model"):
        model = _model_section(args, source, family)
        expected = families.shapes(model)
        if unknown := sorted(set(args.allow_nonfinite) - expected.keys()):
            known = ", ".join([*expected][:5])
            raise ValueError(f"the model has no tensor '{unknown[0]}'; it has {known}, ... (--allow-nonfinite)")
        left_out = _left_out(args, source, model, expected)
    if startup.rank == 0:
        if left_out:
            print(f"left out, as the model has no such parameter: {', '.join(left_out)}")
        for note in source.notes:
            print(note)
    with startup.step("output"):
        # Ranks that have nothing to write wait at the end of this step. Each writing rank sends a heartbeat before
        # each tensor, to show the waiting ranks that it is still writing.
        read = Renamed(source.weights, {name: name for name in expected}, startup.heartbeat)
        unchanged = families.stored_buffers(model)
        weights = Cast(read, args.source[1], _dtype(args.dtype), args.allow_nonfinite, unchanged=unchanged)
        if source.adapters is None or args.merge:
            _write(args, startup, source, family, model, weights)
        elif startup.rank == 0:
            _write_adapters(args, source, source.adapters, model)
    startup.leave()
    if startup.rank == 0:
        print(f"written: {args.target[1]}")


def _write(
    args: argparse.Namespace,
    startup: Startup,
    source: ConversionSource,
    family: Family,
    model: config.Model,
    weights: Cast,
) -> None:
    """Write the target. All ranks write a Hugging Face folder together; rank 0 alone writes any other target.

    Args:
        model: the [model] section, with the current path of the model's directory.
        weights: the tensors to write, in the target's dtype.
    """
    target, path = args.target
    tokenizer = args.tokenizer or source.tokenizer
    if target == "hf":
        folder = Path(path)
        options: dict[str, Any] = {"rank": startup.rank, "size": startup.size, "barrier": startup.wait_for_all}
        json = None
        if tokenizer:
            json, options["token_ids"] = stored.of(model).vocabulary(load_tokenizer(tokenizer), source.data)
        if source.end_ids:
            options["end_ids"] = source.end_ids
        if startup.rank == 0:  # only rank 0 writes the files other than weights
            directory = Path(model.directory) if family.directory else source.directory
            options["other_files"] = card.texts(directory, source.rows, name=folder.name)
        stored.of(model).export(weights, folder, model, json, **options)
        if startup.rank == 0 and (factor := getattr(model, "capacity_factor", 0)):
            print(
                f"[model] capacity_factor={factor} is not in the folder: transformers drops no token. So its losses "
                f"differ from those of training, as generated texts do not"
            )
    elif startup.rank == 0 and target == "megatron":
        _write_for_megatron(args, model, weights, tokenizer)
    elif startup.rank == 0:
        training = _finite(source.training, args)
        to_checkpoint.write(path, weights, model, family.digest(model), training, source.toml)


def _write_adapters(
    args: argparse.Namespace, source: ConversionSource, adapters: Adapters, model: config.Model
) -> None:
    """Write a run's adapters into a folder that peft can load.

    Args:
        model: the [model] section, with the current path of the model's directory.
    """
    folder = Path(args.target[1])
    theirs = stored.of(model).their_model(model, adapters.layers)
    if not is_hf_folder(adapters.base):
        print(
            f"{adapters.base} is the base, a checkpoint of dtmega; peft needs it as a folder of transformers: "
            f"dtmega convert --from dtmega {adapters.base} --to hf DIR"
        )
    files = card.texts(None, source.rows, name=folder.name)
    write_peft(folder, adapters, theirs, files)


def _write_for_megatron(args: argparse.Namespace, model: config.Model, weights: Cast, tokenizer: str) -> None:
    """Write a Megatron checkpoint in the format that `--format` names. The default is the family's first format.

    Raises:
        ValueError: the family does not support the format, or `--tp` or `--pp` is given although the format is not
            split by rank.
    """
    path = Path(args.target[1])
    record = stored.of(model)
    possible = [name for name, program in MEGATRON_FORMATS.items() if program in record.formats]
    chosen = args.format or next(iter(possible), LEGACY)
    if possible and chosen not in possible:
        raise ValueError(
            f"--format {chosen} is not for a model of name = '{model.name}', expected {' or '.join(possible)} "
            f"(--format, [model] name)"
        )
    their_args, theirs = record.as_stored(MEGATRON_FORMATS[chosen], weights, model)
    if chosen == LEGACY:
        for_megatron.write(path, theirs, their_args, args.tp, args.pp, tokenizer=tokenizer)
        return
    if (args.tp, args.pp) != (1, 1):
        raise ValueError(
            f"--tp={args.tp} and --pp={args.pp} are for --format legacy; what --format {chosen} writes, Megatron-LM "
            f"loads on any number of ranks, so leave them out (--tp, --pp)"
        )
    for_megatron_core.write(path, theirs, their_args, tokenizer=tokenizer)


def _open(args: argparse.Namespace, startup: Startup) -> ConversionSource:
    """Open the source that `--from` names; check that all ranks see the same source."""
    kind, path = args.source
    target = args.target[0]
    source = None
    # A run may save a newer checkpoint at any moment, so rank 0 alone looks for the newest checkpoint. All other
    # ranks open the path that rank 0 found.
    with startup.step("search of the source") as search:
        if kind not in READERS or target not in TARGETS:
            raise ValueError(
                f"--from is one of {', '.join(READERS)} and --to one of {', '.join(TARGETS)}; got {kind} and {target}"
            )
        if target != "megatron" and (args.tp, args.pp) != (1, 1):
            raise ValueError(f"--tp={args.tp} and --pp={args.pp} are for --to megatron; {target} has no ranks")
        if target != "megatron" and args.format:
            raise ValueError(f"--format is for --to megatron; got {target}")
        if target == "dtmega" and args.dtype:
            raise ValueError("--dtype is for --to hf and megatron; a checkpoint of dtmega keeps the source's dtypes")
        if startup.rank == 0:
            source = READERS[kind](path, args)
            search.send = source.path
    with startup.step("source") as step:
        source = source or READERS[kind](search.received, args)
        model = {f"[model] {key}": value for key, value in source.model.model_dump().items()}
        tensors = {name: [str(dtype), list(shape)] for name, (dtype, shape) in source.weights.tensors.items()}
        directory = {"digest of [model] path": source.digest}
        if source.adapters is None and args.merge:
            raise ValueError(f"--merge adds adapters to their weights, and {path} has none (--merge)")
        if source.adapters is not None and not args.merge and target != "hf":
            raise ValueError(
                f"{path} has adapters beside its weights, and --to {target} has no place for them: expected --merge, "
                f"which adds them to the weights (--merge)"
            )
        step.must_match = model | tensors | found.manifest_digests([source.weights]) | directory
    return source


def _model_section(args: argparse.Namespace, source: ConversionSource, family: Family) -> config.Model:
    """The source's [model] section. A directory given with `--original` replaces the directory in the section.

    Raises:
        ValueError: `--original` is given for a model without a directory, the directory has changed since the
            training, or the model's sizes do not fit the weights.
    """
    if args.original and not family.directory and not isinstance(source.weights, Merged):
        raise ValueError(
            f"--original is for a run with a [model] path; {args.source[1]} is of name = '{source.model.name}'"
        )
    moved = {"path": args.original} if args.original and family.directory else {}
    try:
        model = family.reread_directory(source.model.model_copy(update=moved), source.digest)
    except ValueError as error:
        raise ValueError(f"{error}; if the directory has moved, name it with --original DIR") from None
    check_stored(model, source.weights, f"{args.source[1]} ({args.config or 'its own config'})")
    return model


def _left_out(
    args: argparse.Namespace, source: ConversionSource, model: config.Model, expected: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """The names of stored tensors that the model does not have.

    Args:
        expected: shapes of the model's tensors, keyed by tensor name.

    Raises:
        ValueError: the source lacks a tensor of the model or stores it with a different shape.
    """
    left_out = sorted(source.weights.tensors)
    for name, shape in expected.items():
        if name not in source.weights.tensors:
            raise ValueError(
                f"{args.source[1]} has no '{name}' of the model ({args.config or 'its own config'}); it has "
                f"{', '.join(left_out[:5])}, ... (--config, --prefix)"
            )
        there = source.weights.tensors[name][1]
        # A Hugging Face folder stores the embedding without padding rows.
        is_unpadded = there[:1] == (model.vocab_size,)
        if there[1:] != shape[1:] or (there != shape and not is_unpadded):
            raise ValueError(f"{args.source[1]}: '{name}' is {list(there)}, the model's is {list(shape)} (--config)")
        left_out.remove(name)
    return left_out


def _dtype(name: str) -> torch.dtype | None:
    """The dtype that `--dtype` names; None if the option is not given, so that each tensor keeps its own dtype.

    Raises:
        ValueError: the option names a dtype that weights cannot have.
    """
    if not name:
        return None
    known = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    if name not in known:
        raise ValueError(f"--dtype is {' or '.join(known)}; got '{name}'")
    return known[name]


def _finite(training: Training | None, args: argparse.Namespace) -> Training | None:
    """Wrap Adam's moments in a check for NaN and infinity.

    The check raises an error when a moment with NaN or infinity is read, unless `--allow-nonfinite` names the tensor.
    """
    if training is None:
        return None
    moments = {
        kind: Cast(source, args.source[1], None, args.allow_nonfinite, kind)
        for kind, source in training.moments.items()
    }
    return training._replace(moments=moments)
