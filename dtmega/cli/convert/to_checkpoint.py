"""Write a dtmega checkpoint from converted weights and, if available, another program's training state."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from dtmega import config
from dtmega.checkpoint import manifest
from dtmega.checkpoint.data_files import DataFile
from dtmega.checkpoint.files import Place
from dtmega.checkpoint.manifest import Entry, Manifest
from dtmega.checkpoint.resume import split_path
from dtmega.checkpoint.sources import Source
from dtmega.checkpoint.state import ELSEWHERE, Progress, ScaleState, State

CONFIG = "config.toml"


class Training(NamedTuple):
    """The training state of another program's run.

    Attributes:
        moments: sources of Adam's moments under dtmega's names, keyed by kind ("exp_avg" or "exp_avg_sq").
        progress: numbers of steps and samples that the run had completed.
        updates: number of updates that Adam has made.
        loss_scale: state of float16's loss scale; None if the run had no loss scale.
        sections: known sections of the run's configuration, keyed by section name.
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
    """Write a checkpoint, either completely or not at all.

    Args:
        path: path or URL of the checkpoint.
        source: weights under dtmega's names.
        model: the [model] section.
        digest: digest of the directory that the model is read from; '' if there is no directory.
        training: training state that a run resumes from; None to write only weights.
        toml: TOML text of a configuration to write next to the weights; '' to write no configuration.

    Raises:
        ValueError: the checkpoint already exists.
    """
    tensors = {f"model/{name}": (source, name) for name in source.tensors}
    sections = {"model": model.model_dump()}
    state = State.of(sections, digest=digest)
    if training is not None:
        for kind, moments in training.moments.items():
            tensors |= {f"optimizer/{kind}/{name}": (moments, name) for name in source.tensors}
        # Nothing in the other program's files identifies the data. ELSEWHERE records this fact, and a run that
        # resumes from the checkpoint must allow changed data.
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
        raise ValueError(f"{path} exists already (--to)")
    unpublished, attempt = files.unpublished(folder), files.new_attempt()
    try:
        files.make(unpublished)
        written = _fill(files, unpublished, f"data-00000{attempt}.bin", tensors, state)
        if toml:
            with files.create(unpublished, CONFIG) as file:
                file.write(toml.encode())
        if warning := files.publish(folder, manifest.dump(written), attempt):
            raise OSError(warning)
    except BaseException:
        # Ignore a failed deletion: the leftover files only take up space, and the user must see the first error.
        with contextlib.suppress(Exception):
            files.discard(folder, attempt)
        raise


def _fill(files: Place, folder: str, name: str, tensors: Mapping[str, tuple[Source, str]], state: State) -> Manifest:
    """Write the tensors one by one into a data file and return the manifest.

    Args:
        files: disk or object store that holds the folder.
        folder: name of the folder.
        name: name of the data file.
        tensors: mapping from each tensor's name in the checkpoint to a pair (source, name in the source).
        state: the run's state, to record in the manifest.
    """
    entries: dict[str, Entry] = {}
    n_bytes = 0
    for source, parameter in tensors.values():
        dtype, shape = source.tensors[parameter]
        n_bytes += math.prod(shape) * dtype.itemsize
    block_bytes = manifest.block_bytes_for(n_bytes)
    with files.create(folder, name) as file:
        data = DataFile(name, file, block_bytes)
        for saved_as, (source, parameter) in tensors.items():
            tensor = source.read(parameter)
            chunk = data.add(tensor, [0] * tensor.ndim)
            entries[saved_as] = Entry(tensor.dtype, tuple(tensor.shape), (chunk,))
    return Manifest(state.progress.step, state.model_dump(), {name: data.n_bytes}, entries, block_bytes)
