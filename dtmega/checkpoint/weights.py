"""The weights of a model, whoever saved them: our checkpoint or a Hugging Face folder, as a `Source` of our names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dtmega import config
from dtmega.checkpoint import Source, manifest
from dtmega.checkpoint.dcp import Checkpoint
from dtmega.checkpoint.files import open_root
from dtmega.checkpoint.hf import HFFolder, check_config
from dtmega.checkpoint.manifest import Damaged
from dtmega.checkpoint.resume import SAME, finished, state_of


class Weights:
    """What a checkpoint holds under `model/`, as a `Source`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    @property
    def tensors(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        every = self.checkpoint.tensors
        return {name.removeprefix("model/"): every[name] for name in every if name.startswith("model/")}

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        return self.checkpoint.read(f"model/{name}", index)


def open_checkpoint(path: str) -> Checkpoint:
    """The checkpoint at `path`, or the newest intact one of the run (or of the folder of checkpoints) that is there.

    Raises:
        ValueError: nothing like that there.
        Damaged: nothing intact.
    """
    parent, _, folder = path.rstrip("/").rpartition("/")
    files = open_root(parent or ("/" if path.startswith("/") else "."))
    if folder in files.folders() and manifest.NAME in files.sizes(folder):
        return Checkpoint(files, folder)
    damage = []
    for root in (f"{path}/checkpoints", path):
        files = open_root(root)
        for folder in finished(files)[::-1]:
            try:
                return Checkpoint(files, folder)
            except Damaged as error:
                damage.append(f"{files.path(folder)}: {error}")
    if damage:
        raise Damaged("\n".join(damage))
    raise ValueError(f"{path} is neither a checkpoint nor a run directory with one")


def open_weights(model: config.Model, hf_keys: Mapping[str, str]) -> Source:
    """What `[model] init_from` names, checked against the rest of [model].

    Raises:
        ValueError: nothing there, or of another model.
        Damaged: a checkpoint, and not intact.
    """
    path = model.init_from
    if any(Path(path).glob("*.safetensors")) or Path(path, "config.json").exists():
        check_config(Path(path), model)
        return HFFolder(Path(path), hf_keys)
    checkpoint = open_checkpoint(path)
    there = state_of(checkpoint).config.get("model", {})
    for key in SAME:
        if key != "pad_vocab_to_multiple" and there.get(key) != getattr(model, key):
            raise ValueError(
                f"{checkpoint.path} is of a model with {key}={there.get(key)}, not {getattr(model, key)} "
                f"([model] init_from, [model] {key})"
            )
    return Weights(checkpoint)
