"""`python -m dtmega convert --from FORMAT PATH --to FORMAT PATH`: weights from one house into another.

    --from hf DIR         a Hugging Face folder with safetensors
    --from dtmega PATH    a checkpoint, or a run directory (its newest)
    --from dcp DIR        a folder of plain torch.distributed.checkpoint, read without running its pickles
    --from megatron DIR   a checkpoint of Megatron-LM or Megatron-DeepSpeed, likewise
    --to dtmega DIR       a checkpoint of weights only, for [model] init_from; of Megatron's one to go on from where
                          Adam's moments are whole, and a config.toml beside it
    --to hf DIR           a folder that transformers' from_pretrained loads; under torchrun all ranks write it
    --to megatron DIR     weights for the ranks of Megatron-LM, --tp times --pp of them

A run of a model of transformers becomes a directory like the one it is of, which --original names where it has moved
since. Tensors pass one by one, so no model has to fit in memory. Of several ranks, rank 0 looks for the newest
checkpoint, which may be another a moment later, and the others open that one.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dtmega import config, families
from dtmega.checkpoint import found
from dtmega.cli.convert import card, to_checkpoint
from dtmega.cli.convert.sources import READERS, Opened
from dtmega.cli.convert.to_checkpoint import Training
from dtmega.data.tokenizers.tokenizer import load_tokenizer
from dtmega.distributed.agreement import Startup
from dtmega.formats.sources import Cast, Renamed
from dtmega.formats.whole import check_stored
from dtmega.interop.hf.files.tensors import DTYPES
from dtmega.interop.megatron import write as for_megatron
from dtmega.models.family import Family

TARGETS = ("dtmega", "hf", "megatron")


def convert(args: argparse.Namespace, startup: Startup) -> None:
    """Write the weights that `--from` names as `--to` says.

    Args:
        args: of `python -m dtmega convert`.
        startup: of the ranks that take part.

    Raises:
        Refused: on every rank, after it was said: unknown formats, nothing there, another model, a directory that has
            changed, a source that is damaged, a disk.
    """
    opened = _open(args, startup)
    family = families.of(opened.model)
    with startup.step("model"):
        model = _described(args, opened, family)
        expected = families.shapes(model)
        if unknown := sorted(set(args.allow_nonfinite) - expected.keys()):
            known = ", ".join([*expected][:5])
            raise ValueError(f"the model has no tensor '{unknown[0]}'; it has {known}, ... (--allow-nonfinite)")
        left_out = _left_out(args, opened, model, expected)
    if startup.rank == 0:
        if left_out:
            print(f"left out, as the model has no such parameter: {', '.join(left_out)}")
        for note in opened.notes:
            print(note)
    with startup.step("output"):
        # Ranks that have nothing to write wait for those that do.
        stored = Renamed(opened.source, {name: name for name in expected}, startup.work)
        unchanged = families.stored_buffers(model)
        source = Cast(stored, args.source[1], _dtype(args.dtype), args.allow_nonfinite, unchanged=unchanged)
        if args.target[0] == "hf":
            folder = Path(args.target[1])
            tokenizer = args.tokenizer or opened.tokenizer
            ranks = {"rank": startup.rank, "size": startup.size, "barrier": startup.wait_for_all}
            options: dict[str, Any] = ranks
            json = None
            if tokenizer:
                json, options["token_ids"] = family.vocabulary(load_tokenizer(tokenizer), opened.data)
            if startup.rank == 0:  # which alone writes what is not weights
                directory = Path(model.directory) if family.directory else opened.directory
                options["beside"] = card.texts(directory, opened.rows, name=folder.name)
            family.export(source, folder, model, json, **options)
        elif startup.rank == 0 and args.target[0] == "megatron":
            described, theirs = family.as_stored("megatron", source, model)
            tokenizer = args.tokenizer or opened.tokenizer
            for_megatron.write(Path(args.target[1]), theirs, described, args.tp, args.pp, tokenizer=tokenizer)
        elif startup.rank == 0:
            digest = family.digest(model)
            training = _finite(opened.training, args)
            to_checkpoint.write(args.target[1], source, model, digest, training, opened.toml)
    startup.leave()
    if startup.rank == 0:
        print(f"written: {args.target[1]}")


def _open(args: argparse.Namespace, startup: Startup) -> Opened:
    """The source that `--from` names, the same on all ranks."""
    kind, path = args.source
    opened = None
    with startup.step("search of the source") as first:
        if kind not in READERS or args.target[0] not in TARGETS:
            raise ValueError(
                f"--from is one of {', '.join(READERS)} and --to one of {', '.join(TARGETS)}; got {kind} and "
                f"{args.target[0]}"
            )
        if args.target[0] != "megatron" and (args.tp, args.pp) != (1, 1):
            raise ValueError(f"--tp={args.tp} and --pp={args.pp} are of --to megatron; {args.target[0]} has no ranks")
        if args.target[0] == "dtmega" and args.dtype:
            raise ValueError("--dtype is of --to hf and megatron; a checkpoint of dtmega keeps the source's dtypes")
        if startup.rank == 0:
            opened = READERS[kind](path, args)
            first.tell = opened.path
    with startup.step("source") as step:
        opened = opened or READERS[kind](first.told, args)
        model = {f"[model] {key}": value for key, value in opened.model.model_dump().items()}
        tensors = {name: [str(dtype), list(shape)] for name, (dtype, shape) in opened.source.tensors.items()}
        directory = {"digest of [model] path": opened.digest}
        step.same = model | tensors | found.manifest_digests([opened.source]) | directory
    return opened


def _described(args: argparse.Namespace, opened: Opened, family: Family) -> config.Model:
    """The [model] section, with the directory that `--original` names."""
    if args.original and not family.directory:
        raise ValueError(
            f"--original is for a run with a [model] path; {args.source[1]} is of name = '{opened.model.name}'"
        )
    moved = {"path": args.original} if args.original else {}
    try:
        model = family.reread_directory(opened.model.model_copy(update=moved), opened.digest)
    except ValueError as error:
        raise ValueError(f"{error}; --original DIR names the directory where it is now") from None
    check_stored(model, opened.source, f"{args.source[1]} ({args.config or 'its own config'})")
    return model


def _left_out(
    args: argparse.Namespace, opened: Opened, model: config.Model, expected: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Names of stored tensors that are no parameters of the model.

    Raises:
        ValueError: a parameter is not stored, or has another shape.
    """
    left_out = sorted(opened.source.tensors)
    for name, shape in expected.items():
        if name not in opened.source.tensors:
            raise ValueError(
                f"{args.source[1]} has no '{name}' of the model ({args.config or 'its own config'}); it has "
                f"{', '.join(left_out[:5])}, ... (--config, --prefix)"
            )
        there = opened.source.tensors[name][1]
        # A Hugging Face vocabulary is not padded.
        if there[1:] != shape[1:] or (there != shape and there[:1] != (model.vocab_size,)):
            raise ValueError(f"{args.source[1]}: '{name}' is {list(there)}, the model's is {list(shape)} (--config)")
        left_out.remove(name)
    return left_out


def _dtype(name: str) -> torch.dtype | None:
    """The dtype that `--dtype` names; None: each tensor keeps its own.

    Raises:
        ValueError: it is no dtype of weights.
    """
    if not name:
        return None
    known = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    if name not in known:
        raise ValueError(f"--dtype is {' or '.join(known)}; got '{name}'")
    return known[name]


def _finite(training: Training | None, args: argparse.Namespace) -> Training | None:
    """The progress of a run whose moments are refused where they are not finite."""
    if training is None:
        return None
    moments = {
        kind: Cast(source, args.source[1], None, args.allow_nonfinite, kind)
        for kind, source in training.moments.items()
    }
    return training._replace(moments=moments)
