"""The weights of a directory by the names of a model, whoever wrote the model: files, names, ties."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from dtmega.formats.sources import Index, Source
from dtmega.hf.files import TensorFiles


class Folder:
    """The weights of a directory as a `Source`, by our names.

    Attributes:
        tensors: name -> dtype in the file and shape; of tied parameters the first name.
        bytes_read: of tensors, by this object.
    """

    def __init__(
        self, files: TensorFiles, weights: Source, copies: Mapping[str, Sequence[str]], otherwise: str
    ) -> None:
        """Args:
        weights: the files' tensors as ours.
        copies: name -> names in `weights`, several where tied ones are all stored.
        otherwise: for a message, after "are stored with different values, but".
        """
        self._files = files
        self._weights = weights
        self._copies = copies
        self._otherwise = otherwise
        self.tensors = {name: weights.tensors[stored[0]] for name, stored in copies.items()}

    @property
    def bytes_read(self) -> int:
        return self._files.bytes_read

    def read(self, name: str, index: Index | None = None) -> Tensor:
        """That part (None: all) of a tensor, in the file's dtype.

        Raises:
            ValueError: parameters that the model ties are stored with other values in that part.
        """
        first, *others = self._copies[name]
        part = self._weights.read(first, index)
        for other in others:
            second = self._weights.read(other, index)
            dtype = torch.promote_types(part.dtype, second.dtype)
            if not torch.equal(part.to(dtype), second.to(dtype)):
                raise ValueError(
                    f"{self._files.path}: '{first}' and '{other}' are stored with different values, but "
                    f"{self._otherwise}"
                )
        return part


def keys_of(files: TensorFiles, name_of: Callable[[str], str | None], model: str) -> dict[str, str]:
    """Name -> key in the files, of every tensor there.

    Args:
        name_of: of a key; "" if it is to be left out, None if it has no place.
        model: for messages.

    Raises:
        ValueError: keys that have no place, or two that have the same.
    """
    found: dict[str, str] = {}
    unknown: list[str] = []
    for key in files.tensors:
        name = name_of(key)
        if name is None:
            unknown.append(key)
        elif name in found:
            raise ValueError(f"{files.path}: '{found[name]}' and '{key}' are there; expected one tensor for {name}")
        elif name:
            found[name] = key
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise ValueError(
            f"{files.path} is of another model than its config.json says: {model} has no place for "
            f"{', '.join(unknown[:3])}{more}"
        )
    return found


def aliases(model: nn.Module) -> list[tuple[nn.Parameter, list[str]]]:
    """Each parameter once, with all names it has."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return list(names.items())
