"""`python -m dtmega convert --from FORMAT PATH --to FORMAT PATH`: weights from one house into another.

    --from hf DIR         a Hugging Face folder with safetensors
    --from dtmega PATH    a checkpoint, or a run directory (its newest)
    --from dcp DIR        a folder of plain torch.distributed.checkpoint, read without running its pickles
    --to dtmega DIR       a checkpoint of weights only, for [model] init_from
    --to hf DIR           a folder that transformers' from_pretrained loads; under torchrun all ranks write it

A run of a model of transformers ([model] name = "hf") becomes a directory like the one it is of, which --original names
where it has moved since. Tensors pass one by one, so no model has to fit in memory.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtmega import config
from dtmega.checkpoint import Source, hf, hf_copy, hf_export, manifest
from dtmega.checkpoint.dcp import DataFile
from dtmega.checkpoint.files import Disk, Remote, open_root
from dtmega.checkpoint.foreign import DCPFolder
from dtmega.checkpoint.manifest import Entry, Manifest
from dtmega.checkpoint.resume import State, open_checkpoint, state_of
from dtmega.checkpoint.weights import Weights


class World(NamedTuple):
    """Who takes part; alone unless torchrun started several."""

    rank: int = 0
    size: int = 1
    barrier: Callable[[], None] = lambda: None


class Found(NamedTuple):
    """What `--from` names: weights, the model they are of, and a tokenizer.json or the spec of a tokenizer.

    The tokenizer is '' where there is none, or none but that of the directory which the model is of.
    """

    source: Source
    model: config.Model
    tokenizer: str


def main(
    args: argparse.Namespace,
    hf_keys: Mapping[str, str],
    shapes: Callable[[config.Model], Mapping[str, tuple[int, ...]]],
    described: Callable[[config.Model], tuple[config.Model, str, Mapping[str, str]]],
    load_tokenizer: Callable[[str], tuple[str, int]],
    world: World,
) -> None:
    """Args:
        args: of `python -m dtmega convert`.
        hf_keys: our name -> theirs.
        shapes: of a model's parameters, in order.
        described: of a [model] section: what its directory makes of it, transformers' class, our name -> theirs.
        load_tokenizer: spec -> tokenizer.json and the id of end-of-document.

    Raises:
        ValueError: unknown formats, nothing there, another model, a directory that has changed; names what is missing.
        Damaged: a source is not intact.
    """
    readers = {"hf": _from_hf, "dtmega": _from_dtmega, "dcp": _from_dcp}
    kind, target = args.source[0], args.target[0]
    if kind not in readers or target not in ("dtmega", "hf"):
        raise ValueError(f"--from is one of {', '.join(readers)} and --to one of dtmega, hf; got {kind} and {target}")
    found = readers[kind](args, hf_keys)
    if args.original and found.model.name != "hf":
        raise ValueError(f"--original is for a run with [model] name = 'hf'; {args.source[1]} is of BLOOM")
    path = args.original or found.model.path
    try:
        model, architecture, stored = described(found.model.model_copy(update={"path": path}))
    except ValueError as error:
        raise ValueError(f"{error}; --original DIR names the directory where it is now") from None
    if model.n_layers > len(found.source.tensors):
        raise ValueError(
            f"{args.source[1]}: n_layers={model.n_layers} of the model ({args.config or 'its own config'}), but "
            f"{len(found.source.tensors)} tensors are stored"
        )
    expected, left_out = shapes(model), sorted(found.source.tensors)
    for name, shape in expected.items():
        if name not in found.source.tensors:
            raise ValueError(
                f"{args.source[1]} has no '{name}' of the model ({args.config or 'its own config'}); it has "
                f"{', '.join(left_out[:5])}, ... (--config, --prefix)"
            )
        there = found.source.tensors[name][1]
        # A Hugging Face vocabulary is not padded.
        if there[1:] != shape[1:] or (there != shape and there[:1] != (model.vocab_size,)):
            raise ValueError(f"{args.source[1]}: '{name}' is {list(there)}, the model's is {list(shape)} (--config)")
        left_out.remove(name)
    if left_out and world.rank == 0:
        print(f"left out, as the model has no such parameter: {', '.join(left_out)}")
    source = Renamed(found.source, {name: name for name in expected})
    if target == "hf":
        tokenizer, folder = args.tokenizer or found.tokenizer, Path(args.target[1])
        json, eod_id = load_tokenizer(tokenizer) if tokenizer else (None, None)
        options: dict[str, Any] = {**world._asdict(), "eod_id": eod_id, "dtype": _dtype(args.dtype)}
        if model.name == "hf":
            hf_copy.export(source, folder, Path(model.path), architecture, stored, json, **options)
        else:
            hf_export.export(source, folder, model, hf_keys, json, **options)
    elif world.rank == 0:
        write(args.target[1], source, model)
    world.barrier()
    if world.rank == 0:
        print(f"written: {args.target[1]}")


def write(path: str, source: Source, model: config.Model) -> None:
    """A checkpoint of weights only, complete or not there."""
    parent, _, folder = path.rstrip("/").rpartition("/")
    files = open_root(parent or ("/" if path.startswith("/") else "."))
    if folder in files.folders():
        raise ValueError(f"{path} is there already (--to)")
    aside = f".tmp-{folder}" if files.renames else folder
    try:
        files.make(aside)
        _fill(files, aside, source, model)
        if files.renames:
            files.sync(aside)
            files.rename(aside, folder)
            files.sync("")
    except BaseException:
        with contextlib.suppress(OSError):  # what cannot be deleted takes room, no more
            files.remove(aside)
        raise


def _fill(files: Disk | Remote, folder: str, source: Source, model: config.Model) -> None:
    """Every tensor of a source, one by one, and then the manifest."""
    name, tensors = "data-00000.bin", {}
    with files.create(folder, name) as file:
        data = DataFile(name, file)
        for parameter in source.tensors:
            tensor = source.read(parameter)
            chunk = data.add(tensor, [0] * tensor.ndim)
            tensors[f"model/{parameter}"] = Entry(tensor.dtype, tuple(tensor.shape), (chunk,))
    state = State.of({"model": model.model_dump()})
    with files.create(folder, manifest.NAME) as file:
        file.write(manifest.dump(Manifest(0, state.model_dump(), {name: data.n_bytes}, tensors)))


def _from_hf(args: argparse.Namespace, hf_keys: Mapping[str, str]) -> Found:
    path = Path(args.source[1])
    model = _model(args.config) if args.config else config.Model(**hf.model_section(path))
    hf.check_config(path, model)
    tokenizer = path / "tokenizer.json"
    return Found(hf.HFFolder(path, hf_keys), model, str(tokenizer) if tokenizer.exists() else "")


def _from_dtmega(args: argparse.Namespace, hf_keys: Mapping[str, str]) -> Found:
    checkpoint = open_checkpoint(args.source[1])
    there = state_of(checkpoint).config
    model = config.Model(**there.get("model", {}))
    tokenizer = there.get("data", {}).get("tokenizer", "")
    own = model.name == "hf" and Path(tokenizer) == Path(model.path, "tokenizer.json")
    return Found(Weights(checkpoint), model, "" if own else tokenizer)


def _from_dcp(args: argparse.Namespace, hf_keys: Mapping[str, str]) -> Found:
    if not args.config:
        raise ValueError("--from dcp needs --config NAME.toml: nothing in such a folder says what model it is of")
    folder = DCPFolder(Path(args.source[1]))
    names = {name.removeprefix(args.prefix): name for name in folder.tensors if name.startswith(args.prefix)}
    return Found(Renamed(folder, names), _model(args.config), "")


def _model(name: str) -> config.Model:
    return config.load(["--config", name]).model


def _dtype(name: str) -> torch.dtype | None:
    dtype = getattr(torch, name, None)
    if name and not isinstance(dtype, torch.dtype):
        raise ValueError(f"--dtype is one of torch's, such as bfloat16; got '{name}'")
    return dtype if name else None


class Renamed:
    """Some tensors of a source under other names: {new: old}."""

    def __init__(self, source: Source, names: Mapping[str, str]) -> None:
        self._source, self._names = source, names

    @property
    def tensors(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {new: self._source.tensors[old] for new, old in self._names.items()}

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        return self._source.read(self._names[name], index)
