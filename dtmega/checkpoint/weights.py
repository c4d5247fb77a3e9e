"""The weights of a model, whoever saved them: our checkpoint or a Hugging Face folder, as a `Source` of our names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dtmega import config
from dtmega.checkpoint import Source, changes
from dtmega.checkpoint.reader import Checkpoint
from dtmega.checkpoint.resume import open_checkpoint, state_of

# Keys of [model] that another run with the same weights may have otherwise.
OF_THE_RUN = ("init_from", "init_std", "pad_vocab_to_multiple")


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


def is_hf_folder(path: str) -> bool:
    """Is this Hugging Face's, and not a checkpoint or a run?"""
    return any(Path(path).glob("*.safetensors")) or Path(path, "config.json").exists()


def open_checkpoint_weights(model: config.Model) -> Source:
    """The checkpoint that `[model] init_from` names, checked against the rest of [model].

    Raises:
        ValueError: nothing there, or of another model.
        Damaged: it is not intact.
    """
    checkpoint = open_checkpoint(model.init_from)
    there = state_of(checkpoint).config.get("model", {})
    for change in changes.differing("model", there, model):
        if changes.kind_of("model", change.key) == "refused" and change.key not in OF_THE_RUN:
            raise ValueError(
                f"{checkpoint.path} is of a model with {change.key}={change.was}, not {change.now} "
                f"([model] init_from, [model] {change.key})"
            )
    return Weights(checkpoint)
