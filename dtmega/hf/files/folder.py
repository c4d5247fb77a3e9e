"""The weights of a directory by the names of a model, whoever wrote the model: files, names, ties."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dtmega.formats.sources import Source
from dtmega.formats.whole import Deduplicated
from dtmega.hf.files.tensors import TensorFiles


class Folder(Deduplicated):
    """The weights of a directory as a `Source`, by our names.

    Attributes:
        bytes_read: of tensors, by this object.
    """

    def __init__(
        self, files: TensorFiles, weights: Source, copies: Mapping[str, Sequence[str]], otherwise: str
    ) -> None:
        """Take the weights as `Deduplicated` does.

        Args:
            weights, copies, otherwise: see `Deduplicated`.
        """
        super().__init__(weights, copies, str(files.path), otherwise)
        self._files = files

    @property
    def bytes_read(self) -> int:
        return self._files.bytes_read


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
