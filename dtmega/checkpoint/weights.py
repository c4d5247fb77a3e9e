"""The weights of a model, whoever saved them: from a `Source` of our names, each rank what it holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from dtmega import config
from dtmega.checkpoint import changes
from dtmega.checkpoint.manifest import Damaged
from dtmega.checkpoint.reader import Checkpoint
from dtmega.checkpoint.resume import open_checkpoint, state_of
from dtmega.formats.sources import BY_TOKEN, Source
from dtmega.shards import Box, boxes
from dtmega.strangers import download

# Keys of [model] that another run with the same weights may have otherwise.
OF_THE_RUN = ("init_from", "init_std", "pad_vocab_to_multiple")


class Weights:
    """The tensors that a checkpoint holds under `model/`, as a `Source`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    @property
    def tensors(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        every = self.checkpoint.tensors
        return {name.removeprefix("model/"): every[name] for name in every if name.startswith("model/")}

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        return self.checkpoint.read(f"model/{name}", index)


def is_hf_folder(path: str) -> bool:
    """Tell whether a folder is Hugging Face's, and not a checkpoint or a run."""
    return any(Path(path).glob("*.safetensors")) or Path(path, "config.json").exists()


def open_checkpoint_weights(model: config.Model, digest: str = "") -> Source:
    """The checkpoint that `[model] init_from` names, checked against the rest of [model].

    Args:
        digest: of the directory that the model is read from; '' where there is none.

    Raises:
        ValueError: nothing there, or of another model.
        Damaged: it is not intact.
    """
    try:
        checkpoint = open_checkpoint(model.init_from)
    except Damaged:
        raise
    except ValueError as error:
        raise ValueError(
            f"{error}, nor a folder of Hugging Face's ([model] init_from){download(model.init_from)}"
        ) from None
    state = state_of(checkpoint)
    there = state.config.get("model", {})
    for change in changes.differing("model", there, model):
        if changes.kind_of("model", change.key) == "refused" and change.key not in OF_THE_RUN:
            raise ValueError(
                f"{checkpoint.path} is of a model with {change.key}={change.was}, not {change.now} "
                f"([model] init_from, [model] {change.key})"
            )
    if digest != state.digest:
        raise ValueError(
            f"{checkpoint.path} is of a model whose config.json has the digest '{state.digest}', not '{digest}' "
            f"([model] init_from, [model] path)"
        )
    return Weights(checkpoint)


@torch.no_grad()
def load_weights(source: Source, parameters: Iterable[tuple[str, Tensor]], vocab: int) -> None:
    """Fill parameters in place, each rank with the part it holds; of two of one name, both. Casts to their dtype.

    Args:
        parameters: name in the whole model -> DTensor, or a whole tensor.
        vocab: `[model] vocab_size`. Rows of BY_TOKEN beyond it are padding, of which there may be more or fewer here
            than in the source; those that the source does not have are filled with zeros.

    Raises:
        ValueError: a parameter that the source does not have, or has in another shape.
    """
    for name, parameter in parameters:
        if name not in source.tensors:
            raise ValueError(f"the weights to start with have no '{name}' ([model] n_layers, [model] init_from)")
        there = source.tensors[name][1]
        here = tuple(parameter.shape)
        padded_otherwise = name in BY_TOKEN and there[1:] == here[1:] and there[0] >= vocab
        if there != here and not padded_otherwise:
            raise ValueError(f"'{name}' is {list(there)} there, {list(here)} here ([model], [model] init_from)")
        for offsets, part in boxes(parameter):
            rows = max(0, min(part.shape[0], there[0] - offsets[0]))
            part[rows:] = 0
            if rows:
                part[:rows].copy_(source.read(name, Box(offsets, part[:rows]).where))
