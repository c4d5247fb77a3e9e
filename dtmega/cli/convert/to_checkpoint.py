"""A checkpoint of ours that no run has written: weights alone, or with how far the run of another program was."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from dtmega import config
from dtmega.checkpoint import manifest
from dtmega.checkpoint.files import Disk, Remote
from dtmega.checkpoint.manifest import Entry, Manifest
from dtmega.checkpoint.resume import ELSEWHERE, Progress, State, split_path
from dtmega.checkpoint.tensor_files import DataFile
from dtmega.formats.sources import Source
from dtmega.ops.loss_scale import ScaleState

CONFIG = "config.toml"


class Training(NamedTuple):
    """The progress of the run that wrote a checkpoint.

    Attributes:
        moments: Adam's, by their keys; sources by our names.
        sections: of the configuration, as far as they are known.
    """

    moments: Mapping[str, Source]
    progress: Progress
    updates: int
    loss_scale: ScaleState | None
    sections: dict[str, dict[str, Any]]


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
    files, folder = split_path(path)
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
    """Write every tensor, one by one, and then the manifest.

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
