"""Find the indices that Megatron has cached as .npy files next to its data. A run uses the cached indices, if any.

Megatron-LM and Megatron-DeepSpeed put the settings into the file names, such as
PREFIX_train_indexmap_3200ns_256sl_1234s_{doc,sample,shuffle}_idx.npy. megatron-core puts the files into
PREFIX/cache/GPTDataset_indices, next to a description of the settings. The file names begin with the md5 of this
description.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtmega.data.indexed_files.dataset import CHUNK
from dtmega.data.megatron.index import Indices, OrderSettings
from dtmega.files.untrusted_json import read_object

MAX_BYTES = 1 << 20  # maximum size of a file that describes the settings of a cache
# Endings of the file names: NAMED in Megatron-LM and Megatron-DeepSpeed, DESCRIBED in megatron-core.
NAMED = ("doc_idx", "sample_idx", "shuffle_idx")
DESCRIBED = ("document_index", "sample_index", "shuffle_index")


class FoundIndices(NamedTuple):
    """The result of a search for cached indices.

    Attributes:
        indices: the cached indices; None if no cache has the right settings.
        note: a line for the user about the caches that were found; '' if no cache was found.
    """

    indices: Indices | None
    note: str


class OrderName(NamedTuple):
    """The name under which Megatron caches the order of a corpus part.

    Attributes:
        name: name of the split or mixture that the part belongs to.
        split: "train", "valid" or "test".
        matrix: range (start, end) of each split, as fractions of the corpus; None for an empty split. The whole matrix
            is None if the splits read different corpora.
        is_described: flag; if True, description files hold the settings of a cache, as in megatron-core; if False, the
            names of the cache's files contain the settings.
    """

    name: str
    split: str
    matrix: tuple[tuple[float, float] | None, ...] | None
    is_described: bool

    def find(self, settings: OrderSettings) -> FoundIndices:
        """Find the indices that Megatron has cached under this name.

        Raises:
            ValueError: the cached indices are damaged or belong to different data.
        """
        if self.is_described:
            return described_caches(settings, self.split, self.matrix)
        return named_caches(settings, self.name)


def named_caches(settings: OrderSettings, name: str) -> FoundIndices:
    """Find the indices that Megatron-LM or Megatron-DeepSpeed has cached for a split or mixture.

    Raises:
        ValueError: the cached indices are damaged or belong to different data.
    """
    stem = f"{settings.dataset.prefix}_{name}_indexmap_"
    wanted = f"{stem}{settings.samples}ns_{settings.seq_len}sl_{settings.seed}s"
    paths = [f"{wanted}_{index}.npy" for index in NAMED]
    missing = [path for path in paths if not Path(path).is_file()]
    if not missing:
        return FoundIndices(_load(paths, settings), f"the order of '{name}' is that of {wanted}_*.npy")
    # No cache has the right settings, so the order will be computed. If there is a cache with other settings, mention
    # this cache to the user, because one of the run's settings may be a mistake.
    others = sorted(glob.glob(f"{glob.escape(stem)}*_doc_idx.npy"))
    if not others:
        return FoundIndices(None, "")
    other = others[0].removesuffix("_doc_idx.npy")
    expected = missing[0] if other == wanted else f"{wanted}_*.npy"
    return FoundIndices(None, f"the order of '{name}' is computed: expected {expected}, there is {other}_*.npy")


def described_caches(
    settings: OrderSettings, split: str, matrix: Sequence[tuple[float, float] | None] | None
) -> FoundIndices:
    """Find the indices that megatron-core has cached for a split.

    Args:
        settings: settings that determine the order.
        split: "train", "valid" or "test".
        matrix: ranges of the splits, as in `OrderName`.

    Raises:
        ValueError: the cached indices are damaged or belong to different data.
    """
    # If `matrix` is None, megatron-core reads whole corpora, so it never caches the order of a part of a corpus.
    if matrix is None and settings.sequences != (0, len(settings.dataset)):
        return FoundIndices(None, "")
    folder = Path(settings.dataset.prefix, "cache", "GPTDataset_indices")
    wanted = {
        "class": "GPTDataset",
        "num_samples": settings.samples,
        "index_split": split,
        "random_seed": settings.seed,
        "sequence_length": settings.seq_len,
        "split_matrix": matrix and [list(ends) if ends else None for ends in matrix],
    }
    descriptions = sorted(folder.glob(f"*-GPTDataset-{split}-description.txt"))
    for path in descriptions:
        description = read_object(path, MAX_BYTES)
        stem = str(path).removesuffix("-description.txt")
        paths = [f"{stem}-{index}.npy" for index in DESCRIBED]
        is_wanted = all(description.get(key) == value for key, value in wanted.items())
        if is_wanted and all(Path(p).is_file() for p in paths):
            return FoundIndices(_load(paths, settings), f"the order of '{split}' is that of {stem}-*.npy")
    if not descriptions and not any(folder.glob(f"*-GPTDataset-{split}-*.npy")):
        return FoundIndices(None, "")
    other = descriptions[0] if descriptions else f"{folder}, without a description"
    return FoundIndices(None, f"the order of '{split}' is computed: expected {json.dumps(wanted)}, there is {other}")


def _load(paths: list[str], settings: OrderSettings) -> Indices:
    """Memory-map the index files and check the indices.

    Args:
        paths: paths of the doc, sample and shuffle indices.
        settings: settings of the corpus part that the indices must belong to.

    Raises:
        ValueError: a file holds no index, or the three indices belong to different orders or to different data.
    """
    indices = Indices(*(_array(path) for path in paths))
    documents, samples, shuffle = indices
    n = len(shuffle)
    shapes = [array.shape for array in indices]
    if documents.ndim != 1 or not len(documents) or shapes[1:] != [(n + 1, 2), (n,)]:
        raise ValueError(f"{paths[0]}: expected indices of shapes [d], [n + 1, 2] and [n], got {shapes}")
    if n < settings.samples:
        raise ValueError(f"{paths[2]}: expected {settings.samples} samples or more, got {n}")
    start, stop = settings.sequences
    _check(paths[0], documents, start, stop, f"sequences {start} to {stop - 1}, the part that [data] split gives")
    _check(paths[1], samples[:, 0], 0, len(documents), f"entries of {paths[0]}")
    _check(paths[1], samples[:, 1], 0, int(settings.dataset.sizes.max()), "places in a sequence")
    _check(paths[2], shuffle, 0, n, f"numbers below {n}")
    return indices


def _array(path: str) -> NDArray[Any]:
    """Memory-map the array of integers in an .npy file.

    Raises:
        ValueError: the file is damaged or does not hold an array of integers.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(
            f"{path}: expected an array of numbers, got '{error}' (without this file it is computed)"
        ) from None
    if array.dtype.kind not in "iu":
        raise ValueError(f"{path}: expected integers, got {array.dtype} (without this file it is computed)")
    return array


def _check(path: str, values: NDArray[Any], start: int, stop: int, what: str) -> None:
    """Check that all values are in [start, stop); `what` names the expected values in the message."""
    for i in range(0, len(values), CHUNK):
        piece = values[i : i + CHUNK]
        if piece.min() < start or piece.max() >= stop:
            outside = piece.min() if piece.min() < start else piece.max()
            raise ValueError(f"{path}: expected {what}, got {outside} (without this file it is computed)")
