"""The base of a run with frozen parameters: initial weights that the run's checkpoints leave out.

With [lora] or [train] freeze, a checkpoint holds the trained parameters, the path of the base, and a digest of each
frozen tensor. The digests are computed while the base is loaded, so that nothing is read twice:

    digest(T) = sum of bits(T[i, j, ...]) * a_i * b_j * ...  modulo 2^64

The sum runs over all elements, converted to fp32. Each factor depends on the tensor's name, the dim, and the index
along the dim. The digests of the ranks' shards therefore add up to the same number on every layout. The digest detects
an accidentally wrong base, but does not protect against an attacker who constructs a different base with the same
digest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dtmega import config
from dtmega.checkpoint.sources import BY_TOKEN, Slices, Source
from dtmega.ops import keyed

AT_A_TIME = 2**20  # number of elements to convert to int64 at a time
MOVED = "if it has moved, [lora] base_path says where it is"


class Base(NamedTuple):
    """The base of a run, as recorded in the run's checkpoints.

    Attributes:
        path: directory or checkpoint of the base.
        digests: name of each tensor that the run's checkpoints leave out -> digest of the tensor.
        transposed: names of the layers that have adapters and whose weights are stored as [in, out].
        elements: number of elements in the tensors of `digests`.
    """

    path: str
    digests: dict[str, str]
    transposed: tuple[str, ...] = ()
    elements: int = 0

    def check(self, digests: Mapping[str, str], where: str) -> None:
        """Refuse weights whose digests differ from the recorded digests.

        Args:
            digests: name of each tensor that was read -> digest of the tensor.
            where: path that the weights were read from.

        Raises:
            ValueError: a digest differs.
        """
        other = [name for name, digest in digests.items() if self.digests[name] != digest]
        if other:
            name = other[0]
            raise ValueError(
                f"{where} is not the base of this run: {len(other)} of {len(digests)} tensors differ; '{name}' has the "
                f"digest {digests[name]}, expected {self.digests[name]} ({MOVED})"
            )


class Digesting:
    """A source that computes the digests of the tensors read from it.

    Args:
        source: wrapped source, with dtmega's names.
        vocab: value of [model] vocab_size. In the tensors in BY_TOKEN, which have one row per token, the rows after the
            first `vocab` rows are padding and do not enter the digest.
        names: names of the tensors whose digests are computed; None for all tensors.
    """

    def __init__(self, source: Source, vocab: int, names: Collection[str] | None = None) -> None:
        self.source = source
        self.vocab = vocab
        self._names = names
        # Tensor name -> start of a slice -> digest of the slice. A slice that is read repeatedly counts once.
        self._parts: dict[str, dict[tuple[int, ...], int]] = {}

    @property
    def tensors(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        return self.source.tensors

    def read(self, name: str, index: Slices | None = None) -> Tensor:
        part = self.source.read(name, index)
        if self._names is not None and name not in self._names:
            return part
        shape = self.source.tensors[name][1]
        starts = tuple(side.indices(size)[0] for side, size in zip(index, shape, strict=True)) if index else ()
        starts = starts or (0,) * len(shape)
        counted = part
        if name in BY_TOKEN:
            counted = part[: max(0, self.vocab - starts[0])]
        digest = part_digest(name, counted, starts)
        if part.shape == shape:
            self._parts[name] = {starts: digest}
        else:
            self._parts.setdefault(name, {})[starts] = digest
        return part

    def digests(self, counted: Collection[str], group: dist.ProcessGroup | None = None) -> dict[str, str]:
        """Return the digests of whole tensors, keyed by name.

        Args:
            counted: names of the tensors for which this process contributes the slices that it has read. If several
                ranks have read the same slice, exactly one of them contributes it.
            group: process group of the ranks whose slices together make up each tensor; None if this process alone has
                read all of each tensor.
        """
        mine = {name: sum(self._parts[name].values()) for name in counted if name in self._parts}
        every: list[Any] = [mine]
        if group is not None:
            every = [None] * dist.get_world_size(group)
            dist.all_gather_object(every, mine, group=group)
        totals: dict[str, int] = {}
        for sums in every:
            for name, number in sums.items():
                totals[name] = totals.get(name, 0) + number
        return {name: f"{total % 2**64:016x}" for name, total in sorted(totals.items())}


def part_digest(name: str, part: Tensor, starts: tuple[int, ...]) -> int:
    """The digest of a part of a tensor, as a number modulo 2^64.

    Args:
        name: name of the tensor.
        part: elements of the part.
        starts: position of the part in the whole tensor, one index for each dim.
    """
    if part.numel() == 0:
        return 0
    factors = [_factors(name, dim, starts[dim], size) for dim, size in enumerate(part.shape)]
    if not factors:
        return int(_bits(part.view(1)).item()) * int(_factors(name, 0, 0, 1).item()) % 2**64
    n_rows = max(1, AT_A_TIME // part[0].numel())
    total = 0
    for start in range(0, part.shape[0], n_rows):
        # int64 sums and products wrap around, so they are correct modulo 2^64.
        sums = _bits(part[start : start + n_rows])
        for of_dim in factors[:0:-1]:
            sums = (sums * of_dim).sum(-1)
        total += int((sums * factors[0][start : start + n_rows]).sum().item())
    return total % 2**64


def _bits(part: Tensor) -> Tensor:
    """The bit pattern of each element in fp32, as an int64 tensor."""
    return part.detach().cpu().float().contiguous().view(torch.int32).to(torch.int64)


def _factors(name: str, dim: int, start: int, size: int) -> Tensor:
    """The digest's factors, random odd numbers, for the indices [start, start + size) along a dim, int64 [size]."""
    key = np.array([keyed.key64(f"{name}/{dim}")], dtype=np.uint64)
    drawn = keyed.draws(key, "digest of a base", np.arange(start, start + size)) | np.uint64(1)
    return torch.from_numpy(drawn.view(np.int64))


def location(model: config.Model, source: Source) -> str:
    """The path of the checkpoint that `source` reads, or of the initial weights if `source` reads no checkpoint."""
    checkpoint = getattr(source, "checkpoint", None)
    path = checkpoint.path if checkpoint is not None else model.init_from or getattr(model, "directory", "")
    return path if "://" in path else str(Path(path).absolute())


def open_base(
    was: Base,
    model: config.Model,
    model_then: Mapping[str, Any],
    base_path: str,
    weights_of: Callable[[config.Model], Source | None],
) -> tuple[str, Source]:
    """Open the base of a run, to resume the run or to read its weights.

    Args:
        was: description of the base in the run's checkpoint.
        model: current [model] section.
        model_then: [model] section in the checkpoint.
        base_path: value of [lora] base_path; '' if the base has not moved.
        weights_of: function `weights` of `interop/stored.py`.

    Returns:
        Tuple (path of the base, weights of the base).

    Raises:
        ValueError: the base is missing or belongs to a different model.
    """
    path = base_path
    named_now = {key: getattr(model, key, "") for key in ("init_from", "path")}
    if not path and all(model_then.get(key, "") == value for key, value in named_now.items()):
        path = was.path
    try:
        source = weights_of(model.model_copy(update={"init_from": path}) if path else model)
    except (ValueError, OSError) as error:
        raise ValueError(f"the base of this run cannot be read: {error}; {MOVED}") from None
    if source is None:
        raise ValueError(f"the base of this run, {was.path}, has no weights any more; {MOVED}")
    return path or location(model, source), source
