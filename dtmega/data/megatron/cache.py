"""Indices that the originals have left beside their data, as .npy files: whoever has them must follow them.

Megatron-LM and Megatron-DeepSpeed name them by what they were asked for,
PREFIX_train_indexmap_3200ns_256sl_1234s_{doc,sample,shuffle}_idx.npy; megatron-core puts them into
PREFIX/cache/GPTDataset_indices, under the md5 of a description that lies beside them.
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
from dtmega.data.megatron.index import Asked, Indices
from dtmega.files.untrusted_json import read_object

MAX_BYTES = 1 << 20  # of a description
NAMED = ("doc_idx", "sample_idx", "shuffle_idx")
DESCRIBED = ("document_index", "sample_index", "shuffle_index")


class FoundIndices(NamedTuple):
    """The files that lie beside the data.

    Attributes:
        indices: those that were asked for; None: not there.
        note: a line for people; '' if nothing is there.
    """

    indices: Indices | None
    note: str


class OrderName(NamedTuple):
    """The name that the original gives the order of a part.

    Attributes:
        name: of its group of corpora.
        split: "train", "valid" or "test".
        matrix: where each split begins and ends, as fractions; None where the splits have data of their own.
        is_described: its caches lie under descriptions; else under names.
    """

    name: str
    split: str
    matrix: tuple[tuple[float, float] | None, ...] | None
    is_described: bool

    def find(self, asked: Asked) -> FoundIndices:
        """The files for this part that lie beside the data.

        Raises:
            ValueError: a cache is there, and damaged or of other data.
        """
        return described_caches(asked, self.split, self.matrix) if self.is_described else named_caches(asked, self.name)


def named_caches(asked: Asked, name: str) -> FoundIndices:
    """The cache of Megatron-LM and Megatron-DeepSpeed for the split of that name.

    Raises:
        ValueError: it is there, and damaged or of other data.
    """
    stem = f"{asked.dataset.prefix}_{name}_indexmap_"
    wanted = f"{stem}{asked.samples}ns_{asked.seq_len}sl_{asked.seed}s"
    paths = [f"{wanted}_{index}.npy" for index in NAMED]
    missing = [path for path in paths if not Path(path).is_file()]
    if not missing:
        return FoundIndices(_load(paths, asked), f"the order of '{name}' is that of {wanted}_*.npy")
    others = sorted(glob.glob(f"{glob.escape(stem)}*_doc_idx.npy"))
    if not others:
        return FoundIndices(None, "")
    there = others[0].removesuffix("_doc_idx.npy")
    expected = missing[0] if there == wanted else f"{wanted}_*.npy"
    return FoundIndices(None, f"the order of '{name}' is computed: expected {expected}, there is {there}_*.npy")


def described_caches(asked: Asked, split: str, matrix: Sequence[tuple[float, float] | None] | None) -> FoundIndices:
    """The cache of megatron-core for "train", "valid" or "test".

    Args:
        matrix: where each split begins and ends; None where the splits have data of their own.

    Raises:
        ValueError: it is there, and damaged or of other data.
    """
    if matrix is None and asked.sequences != (0, len(asked.dataset)):
        return FoundIndices(None, "")  # it has no ranges of corpora
    folder = Path(asked.dataset.prefix, "cache", "GPTDataset_indices")
    wanted = {
        "class": "GPTDataset",
        "num_samples": asked.samples,
        "index_split": split,
        "random_seed": asked.seed,
        "sequence_length": asked.seq_len,
        "split_matrix": matrix and [list(ends) if ends else None for ends in matrix],
    }
    descriptions = sorted(folder.glob(f"*-GPTDataset-{split}-description.txt"))
    for path in descriptions:
        found = read_object(path, MAX_BYTES)
        stem = str(path).removesuffix("-description.txt")
        paths = [f"{stem}-{index}.npy" for index in DESCRIBED]
        if all(found.get(key) == value for key, value in wanted.items()) and all(Path(p).is_file() for p in paths):
            return FoundIndices(_load(paths, asked), f"the order of '{split}' is that of {stem}-*.npy")
    if not descriptions and not any(folder.glob(f"*-GPTDataset-{split}-*.npy")):
        return FoundIndices(None, "")
    there = descriptions[0] if descriptions else f"{folder}, without a description"
    return FoundIndices(None, f"the order of '{split}' is computed: expected {json.dumps(wanted)}, there is {there}")


def _load(paths: list[str], asked: Asked) -> Indices:
    """The indices in these files, checked.

    Raises:
        ValueError: they are no indices, not of each other, or not of this part of the data.
    """
    indices = Indices(*(_array(path) for path in paths))
    documents, samples, shuffle = indices
    n = len(shuffle)
    shapes = [array.shape for array in indices]
    if documents.ndim != 1 or not len(documents) or shapes[1:] != [(n + 1, 2), (n,)]:
        raise ValueError(f"{paths[0]}: expected indices of shapes [d], [n + 1, 2] and [n], got {shapes}")
    if n < asked.samples:
        raise ValueError(f"{paths[2]}: expected {asked.samples} samples or more, got {n}")
    start, stop = asked.sequences
    _check(paths[0], documents, start, stop, f"sequences {start} to {stop - 1}, the part that [data] split gives")
    _check(paths[1], samples[:, 0], 0, len(documents), f"entries of {paths[0]}")
    _check(paths[1], samples[:, 1], 0, int(asked.dataset.sizes.max()), "places in a sequence")
    _check(paths[2], shuffle, 0, n, f"numbers below {n}")
    return indices


def _array(path: str) -> NDArray[Any]:
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
    for i in range(0, len(values), CHUNK):
        piece = values[i : i + CHUNK]
        if piece.min() < start or piece.max() >= stop:
            outside = piece.min() if piece.min() < start else piece.max()
            raise ValueError(f"{path}: expected {what}, got {outside} (without this file it is computed)")
