"""Presents a directory's weights under a model's parameter names, for dtmega's models and for transformers models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dtmega.checkpoint.sources import Source
from dtmega.interop.formats.whole import Deduplicated
from dtmega.interop.hf.files.tensors import TensorFiles


class Folder(Deduplicated):
    """A directory's weights as a `Source`, with each parameter under one of its names in the model.

    Attributes:
        bytes_read: number of tensor bytes that have been read from the files.
    """

    def __init__(
        self, files: TensorFiles, weights: Source, copies: Mapping[str, Sequence[str]], otherwise: str
    ) -> None:
        """Prepare to read the weights; see `Deduplicated`.

        Args:
            files: safetensors files that `weights` reads.
            weights, copies, otherwise: arguments of `Deduplicated`.
        """
        super().__init__(weights, copies, str(files.path), otherwise)
        self._files = files

    @property
    def bytes_read(self) -> int:
        return self._files.bytes_read


def keys_of(files: TensorFiles, name_of: Callable[[str], str | None], model: str) -> dict[str, str]:
    """Map each tensor's name in the model to the tensor's key in the files.

    Args:
        files: safetensors files of one directory.
        name_of: function that maps a key to the tensor's name in the model, to "" if the key is to be left out, or to
            None if the key is unknown.
        model: name of the model, for messages.

    Raises:
        ValueError: a key belongs to no tensor of the model, or two keys have the same name in the model.
    """
    keys: dict[str, str] = {}
    unknown: list[str] = []
    for key in files.tensors:
        name = name_of(key)
        if name is None:
            unknown.append(key)
        elif name in keys:
            raise ValueError(f"{files.path}: '{keys[name]}' and '{key}' are stored; expected one tensor for {name}")
        elif name:
            keys[name] = key
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise ValueError(
            f"{files.path} holds another model than its config.json says: {model} has no place for "
            f"{', '.join(unknown[:3])}{more}"
        )
    return keys
