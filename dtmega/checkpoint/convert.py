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
import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from dtmega import config
from dtmega.checkpoint import found, manifest
from dtmega.checkpoint.dcp import DataFile
from dtmega.checkpoint.files import Disk, Remote
from dtmega.checkpoint.foreign import DCPFolder
from dtmega.checkpoint.manifest import Entry, Manifest
from dtmega.checkpoint.resume import ELSEWHERE, Progress, State, open_checkpoint, split, state_of
from dtmega.checkpoint.weights import Weights
from dtmega.data.exported import Vocabulary
from dtmega.data.tokenizer import Tokenizer, load_tokenizer
from dtmega.formats.sources import Renamed, Source
from dtmega.loss_scale import ScaleState
from dtmega.megatron import folder, recipe, vocabulary
from dtmega.megatron import write as for_megatron
from dtmega.startup import Startup

CONFIG = "config.toml"
TARGETS = ("dtmega", "hf", "megatron")


class Family(Protocol):
    """A record of families.py, as far as a conversion needs it."""

    @property
    def directory(self) -> bool: ...

    def digest(self, model: config.Model) -> str: ...

    def described(self, model: config.Model, trained: str) -> config.Model: ...

    def vocabulary(self, tokenizer: Tokenizer, data: config.Data) -> Vocabulary: ...
    def read(self, program: str, source: Source, model: config.Model, where: str) -> Source: ...

    def as_stored(self, program: str, source: Source, model: config.Model) -> tuple[dict[str, Any], Source]: ...

    def export(
        self, source: Source, folder: Path, model: config.Model, tokenizer: str | None, **options: Any
    ) -> None: ...


class Families(Protocol):
    """The module families.py, which stands above this one."""

    def of(self, model: config.Model) -> Family: ...

    def shapes(self, model: config.Model) -> Mapping[str, tuple[int, ...]]: ...

    def open_folder(self, path: Path, model: config.Model | None) -> tuple[Source, config.Model]: ...

    def described(
        self,
        program: str,
        names: Collection[str],
        theirs: Mapping[str, Any],
        where: str,
        asked: config.Model | None = None,
    ) -> config.Model: ...


class Training(NamedTuple):
    """How far the run was that wrote a checkpoint.

    Attributes:
        moments: Adam's, by their keys; sources by our names.
        sections: of the configuration, as far as they are known.
    """

    moments: Mapping[str, Source]
    progress: Progress
    updates: int
    loss_scale: ScaleState | None
    sections: dict[str, dict[str, Any]]


class Opened(NamedTuple):
    """What `--from` names: weights, the model they are of, and a tokenizer.json or the spec of a tokenizer.

    The tokenizer is '' where there is none, or none but that of the directory which the model is of.

    Attributes:
        path: where exactly it was found, for the other ranks.
        digest: of the directory that the model was read from; '' where that is not known.
        data: the [data] section that it was trained with; where that is not known, all defaults.
        training: None where there are weights only.
        toml: a configuration to write beside them.
        notes: lines for the user.
    """

    path: str
    source: Source
    model: config.Model
    tokenizer: str
    digest: str = ""
    data: config.Data = config.Data()
    training: Training | None = None
    toml: str = ""
    notes: tuple[str, ...] = ()


def main(args: argparse.Namespace, families: Families, startup: Startup) -> None:
    """Args:
        args: of `python -m dtmega convert`.
        startup: of the ranks that take part.

    Raises:
        Refused: on every rank, after it was said: unknown formats, nothing there, another model, a directory that has
            changed, a source that is damaged, a disk.
    """
    opened = _open(args, families, startup)
    family = families.of(opened.model)
    with startup.step("model"):
        model = _described(args, opened, family)
        expected = families.shapes(model)
        left_out = _left_out(args, opened, model, expected)
    if startup.rank == 0:
        if left_out:
            print(f"left out, as the model has no such parameter: {', '.join(left_out)}")
        for note in opened.notes:
            print(note)
    with startup.step("output"):
        # Ranks that have nothing to write wait for those that do.
        source = Renamed(opened.source, {name: name for name in expected}, startup.work)
        if args.target[0] == "hf":
            folder = Path(args.target[1])
            tokenizer = args.tokenizer or opened.tokenizer
            ranks = {"rank": startup.rank, "size": startup.size, "barrier": startup.wait_for_all}
            options: dict[str, Any] = {**ranks, "dtype": _dtype(args.dtype)}
            json = None
            if tokenizer:
                json, options["token_ids"] = family.vocabulary(load_tokenizer(tokenizer), opened.data)
            family.export(source, folder, model, json, **options)
        elif startup.rank == 0 and args.target[0] == "megatron":
            described, theirs = family.as_stored("megatron", source, model)
            options = {"tokenizer": args.tokenizer or opened.tokenizer, "dtype": _dtype(args.dtype)}
            for_megatron.write(Path(args.target[1]), theirs, described, args.tp, args.pp, **options)
        elif startup.rank == 0:
            write(args.target[1], source, model, family.digest(model), opened.training, opened.toml)
    startup.leave()
    if startup.rank == 0:
        print(f"written: {args.target[1]}")


def _open(args: argparse.Namespace, families: Families, startup: Startup) -> Opened:
    """The source that `--from` names, the same on all ranks."""
    readers = {"hf": _from_hf, "dtmega": _from_dtmega, "dcp": _from_dcp, "megatron": _from_megatron}
    kind, path = args.source
    opened = None
    with startup.step("search of the source") as first:
        if kind not in readers or args.target[0] not in TARGETS:
            raise ValueError(
                f"--from is one of {', '.join(readers)} and --to one of {', '.join(TARGETS)}; got {kind} and "
                f"{args.target[0]}"
            )
        if args.target[0] != "megatron" and (args.tp, args.pp) != (1, 1):
            raise ValueError(f"--tp={args.tp} and --pp={args.pp} are of --to megatron; {args.target[0]} has no ranks")
        if startup.rank == 0:
            opened = readers[kind](path, args, families)
            first.tell = opened.path
    with startup.step("source") as step:
        opened = opened or readers[kind](first.told, args, families)
        model = {f"[model] {key}": value for key, value in opened.model.model_dump().items()}
        tensors = {name: [str(dtype), list(shape)] for name, (dtype, shape) in opened.source.tensors.items()}
        step.same = model | tensors | found.digests([opened.source]) | {"digest of [model] path": opened.digest}
    return opened


def _described(args: argparse.Namespace, opened: Opened, family: Family) -> config.Model:
    """The [model] section, with the directory that `--original` names."""
    if args.original and not family.directory:
        raise ValueError(
            f"--original is for a run with a [model] path; {args.source[1]} is of name = '{opened.model.name}'"
        )
    moved = {"path": args.original} if args.original else {}
    try:
        model = family.described(opened.model.model_copy(update=moved), opened.digest)
    except ValueError as error:
        raise ValueError(f"{error}; --original DIR names the directory where it is now") from None
    if model.n_layers > len(opened.source.tensors):
        raise ValueError(
            f"{args.source[1]}: n_layers={model.n_layers} of the model ({args.config or 'its own config'}), but "
            f"{len(opened.source.tensors)} tensors are stored"
        )
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


def write(
    path: str,
    source: Source,
    model: config.Model,
    digest: str = "",
    training: Training | None = None,
    toml: str = "",
) -> None:
    """Write a checkpoint, complete or not there; of weights only unless it says how far a run was.

    Args:
        digest: of the directory that the model is read from; '' where there is none.
        toml: a configuration to write beside it.
    """
    tensors = {f"model/{name}": (source, name) for name in source.tensors}
    sections = {"model": model.model_dump()}
    state = State.of(sections, digest=digest)
    if training is not None:
        for kind, moments in training.moments.items():
            tensors |= {f"optimizer/{kind}/{name}": (moments, name) for name in source.tensors}
        state = State.of(
            {**training.sections, **sections},
            progress=training.progress,
            updates=training.updates,
            loss_scale=training.loss_scale,
            identity=ELSEWHERE,
            digest=digest,
        )
    files, folder = split(path)
    if folder in files.folders():
        raise ValueError(f"{path} is there already (--to)")
    aside = f".tmp-{folder}" if isinstance(files, Disk) else folder
    try:
        files.make(aside)
        _fill(files, aside, tensors, state)
        if toml:
            with files.create(aside, CONFIG) as file:
                file.write(toml.encode())
        if isinstance(files, Disk):
            files.sync(aside)
            files.rename(aside, folder)
            files.sync("")
    except BaseException:
        with contextlib.suppress(Exception):  # what cannot be deleted takes room, no more
            files.remove(aside)
        raise


def _fill(files: Disk | Remote, folder: str, tensors: Mapping[str, tuple[Source, str]], state: State) -> None:
    """Every tensor, one by one, and then the manifest.

    Args:
        tensors: name -> where it is, and its name there.
    """
    name, entries = "data-00000.bin", {}
    with files.create(folder, name) as file:
        data = DataFile(name, file)
        for saved_as, (source, parameter) in tensors.items():
            tensor = source.read(parameter)
            chunk = data.add(tensor, [0] * tensor.ndim)
            entries[saved_as] = Entry(tensor.dtype, tuple(tensor.shape), (chunk,))
    with files.create(folder, manifest.NAME) as file:
        file.write(manifest.dump(Manifest(state.progress.step, state.model_dump(), {name: data.n_bytes}, entries)))


def _from_hf(name: str, args: argparse.Namespace, families: Families) -> Opened:
    path = Path(name)
    asked = _model(args.config) if args.config else None
    source, model = families.open_folder(path, asked)
    tokenizer = path / "tokenizer.json"
    return Opened(name, source, model, str(tokenizer) if tokenizer.exists() else "")


def _from_dtmega(name: str, args: argparse.Namespace, families: Families) -> Opened:
    checkpoint = open_checkpoint(name)
    state = state_of(checkpoint)
    model = config.model_section(state.config.get("model", {}), checkpoint.path)
    tokenizer = state.config.get("data", {}).get("tokenizer", "")
    own = families.of(model).directory and Path(tokenizer) == Path(model.directory, "tokenizer.json")
    data = config.Data.model_validate(state.config.get("data", {}))
    return Opened(checkpoint.path, Weights(checkpoint), model, "" if own else tokenizer, state.digest, data)


def _from_dcp(name: str, args: argparse.Namespace, families: Families) -> Opened:
    if not args.config:
        raise ValueError("--from dcp needs --config NAME.toml: nothing in such a folder says what model it is of")
    folder = DCPFolder(Path(name))
    names = {name.removeprefix(args.prefix): name for name in folder.tensors if name.startswith(args.prefix)}
    return Opened(name, Renamed(folder, names), _model(args.config), "")


def _from_megatron(name: str, args: argparse.Namespace, families: Families) -> Opened:
    asked = _model(args.config) if args.config else None
    contents = folder.opened(Path(name), asked, average=args.average_copies)
    where = str(contents.path)
    padded = vocabulary.padded(contents, asked)
    theirs = {**contents.args, "padded_vocab_size": contents.rows}
    if contents.args or padded is None:
        padded = families.described("megatron", contents.weights.tensors, theirs, where, padded)
    if padded.n_layers > len(contents.weights.tensors):  # before so many are built
        raise ValueError(
            f"{where} has n_layers={padded.n_layers}, but {len(contents.weights.tensors)} tensors (--config)"
        )
    n_ids = asked.vocab_size if asked else args.vocab_size
    if args.tokenizer and not n_ids:
        n_ids = vocabulary.ids(contents, load_tokenizer(args.tokenizer))
    model, notes = vocabulary.unpadded(padded, contents, n_ids)

    def ours(source: Source) -> Source:
        return families.of(padded).read("megatron", source, padded, where)

    text, sections = recipe.written(contents.args, model, contents.order if contents.moments else "")
    training = None
    notes += contents.notes
    if contents.moments:
        moments = {kind: ours(source) for kind, source in contents.moments.items()}
        training = Training(moments, contents.progress, contents.updates, contents.loss_scale, sections)
        if args.target[0] == "dtmega":
            notes += (recipe.goes_on(contents.progress, args.target[1]),)
    if args.target[0] == "hf" and not args.tokenizer:
        notes += ("no tokenizer is written: --tokenizer names one",)
    return Opened(where, ours(contents.weights), model, "", training=training, toml=text, notes=notes)


def _model(name: str) -> config.Model:
    return config.load(["--config", name]).model


def _dtype(name: str) -> torch.dtype | None:
    dtype = getattr(torch, name, None)
    if name and not isinstance(dtype, torch.dtype):
        raise ValueError(f"--dtype is one of torch's, such as bfloat16; got '{name}'")
    return dtype if name else None
