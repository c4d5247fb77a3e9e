"""Model weights from any `Source` that uses dtmega's names: each rank reads the parts that it holds."""

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
from dtmega.files.untrusted_json import download
from dtmega.formats.sources import BY_TOKEN, Source
from dtmega.ops.shards import Box, boxes

# Keys of [model] that may differ between a run and the checkpoint that supplies the run's initial weights.
FREE_FOR_NEW_RUN = ("init_from", "init_std", "pad_vocab_to_multiple")


class Weights:
    """The weights in a checkpoint (its tensors under `model/`), as a `Source` whose names lack this prefix."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    @property
    def tensors(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """(dtype, shape) of each weight, by name."""
        tensors = self.checkpoint.tensors
        return {name.removeprefix("model/"): tensors[name] for name in tensors if name.startswith("model/")}

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        return self.checkpoint.read(f"model/{name}", index)


def is_hf_folder(path: str) -> bool:
    """True if a folder holds a Hugging Face model rather than a checkpoint or a run."""
    return any(Path(path).glob("*.safetensors")) or Path(path, "config.json").exists()


def open_checkpoint_weights(model: config.Model, digest: str = "") -> Source:
    """Open the checkpoint that `[model] init_from` names, and check that its weights fit the other keys of [model].

    Args:
        model: the run's [model] section.
        digest: digest of the directory that the model is read from; '' if there is no such directory.

    Raises:
        ValueError: `[model] init_from` has no checkpoint, or the checkpoint belongs to a different model.
        Damaged: the checkpoint is not intact.
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
    for change in changes.differing("model", state.config.get("model", {}), model):
        if changes.kind_of("model", change.key) == "refused" and change.key not in FREE_FOR_NEW_RUN:
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
    """Fill parameters in place, casting weights to the parameters' dtypes. Each rank fills the parts that it holds.

    Args:
        source: weights, under their names in the whole model.
        parameters: pairs (name in the whole model, tensor or DTensor). If a name appears twice, both tensors are
            filled.
        vocab: value of `[model] vocab_size`. Tensors in BY_TOKEN may have padding rows after the first `vocab` rows,
            and the source may have more or fewer padding rows. Rows that the source lacks are filled with zeros.

    Raises:
        ValueError: the source lacks a parameter, or holds a parameter in a different shape.
    """
    for name, parameter in parameters:
        if name not in source.tensors:
            raise ValueError(f"the weights to start with have no '{name}' ([model] n_layers, [model] init_from)")
        source_shape = source.tensors[name][1]
        shape = tuple(parameter.shape)
        differs_in_padding_only = name in BY_TOKEN and source_shape[1:] == shape[1:] and source_shape[0] >= vocab
        if source_shape != shape and not differs_in_padding_only:
            raise ValueError(f"'{name}' is {list(source_shape)} there, {list(shape)} here ([model], [model] init_from)")
        for offsets, part in boxes(parameter):
            # Number of this part's rows that the source has; the remaining rows are padding.
            rows = max(0, min(part.shape[0], source_shape[0] - offsets[0]))
            part[rows:] = 0
            if rows:
                part[:rows].copy_(source.read(name, Box(offsets, part[:rows]).where))
