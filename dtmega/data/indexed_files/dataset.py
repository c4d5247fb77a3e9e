"""Megatron's token files: PREFIX.bin holds the tokens, and PREFIX.idx holds the position of each sequence.

Local files are memory-mapped; `stored.py` reads files in an object store. Both layouts of the .idx can be read
(`idx_file.py`). Only the MMIDIDX layout is written, byte for byte as Megatron writes it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dtmega import rooms
from dtmega.data.indexed_files.idx_file import read_index
from dtmega.files.untrusted_json import check_not_a_pointer, dangling
from dtmega.files.urls import is_object_store

if TYPE_CHECKING:
    from dtmega.data.indexed_files.stored import StoredPair, StoredTokens

CHUNK = 1 << 20  # number of entries checked at a time, to bound the memory needed to open a file


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype in which Megatron stores ids below `vocab_size` (`DType.optimal_dtype`)."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


class IndexedDataset:
    """A `.bin/.idx` pair, memory-mapped and checked when opened.

    Pickling keeps only the arguments; a worker process maps the files itself.

    Args:
        prefix: path of the two files without their suffixes, or a URL such as s3://bucket/data/mine.
        by_sequence: whether the caller reads only sequences, never documents. The document index is then not checked,
            because files that Megatron has merged have no usable document index.
        stored: objects at the URL `prefix`, already opened by another process; None to open the files or objects here.

    Attributes:
        dtype: dtype of the tokens.
        sizes: number of tokens in each sequence, int32 or int64 [n].
        pointers: start of each sequence in .bin, int64 [n], in bytes (MMIDIDX) or in tokens (TNTIDX).
        document_index: index of each document's first sequence, then the number of sequences, int64 [documents + 1].
        n_tokens: number of tokens, which may be 0.
        tokens: all tokens of .bin, [n_tokens] of `dtype`; a slice of `tokens` is an array.
        stored: objects of a data set in an object store; None for local files.

    Raises:
        ValueError: a file is missing, damaged or in another format, or the two files do not belong together.
    """

    def __init__(self, prefix: str | Path, *, by_sequence: bool = False, stored: StoredPair | None = None) -> None:
        self.prefix, self.by_sequence = str(prefix), by_sequence
        if stored is None and is_object_store(self.prefix):
            stored = rooms.stored_pairs().StoredPair.open(self.prefix)
        self.stored = stored
        self.tokens: NDArray[Any] | StoredTokens
        if stored is None:
            index, data = _map(self.prefix, ".idx"), _map(self.prefix, ".bin")
            self._load(index, data.size)
            self.tokens = data.view(self.dtype)
        else:
            stored.load(self._load)
            self.tokens = stored.tokens(self.dtype)

    def _load(self, index: NDArray[np.uint8], bin_bytes: int) -> None:
        """Set the attributes from the bytes of the .idx, and check them and the size of the .bin.

        Raises:
            ValueError: the .idx is damaged or in another format, or does not belong to the .bin.
        """
        idx_path, bin_path = f"{self.prefix}.idx", f"{self.prefix}.bin"
        arrays = read_index(idx_path, index)
        self.dtype = arrays.dtype
        self.sizes = arrays.sizes
        self.pointers = arrays.pointers
        self.document_index = arrays.document_index
        self._per_token = arrays.per_token
        self.n_tokens = self._check_sequences(idx_path)
        if not self.by_sequence:
            self._check_documents(idx_path)
        n_bytes = self.n_tokens * self.dtype.itemsize
        if bin_bytes != n_bytes:
            raise ValueError(
                f"{bin_path}: expected {n_bytes} bytes ({self.n_tokens} tokens of {self.dtype}, as {idx_path} says), "
                f"got {bin_bytes}"
            )

    def _check_sequences(self, path: str) -> int:
        """Check that the sequences fill .bin from its first byte without gaps; return the total token count.

        Raises:
            ValueError: a size is negative, or a sequence does not start where the sequence before it ends.
        """
        unit = "byte" if self._per_token > 1 else "token"
        end = 0
        for start in range(0, len(self), CHUNK):
            sizes, pointers = self.sizes[start : start + CHUNK], self.pointers[start : start + CHUNK]
            if sizes.min() < 0:
                i = int(np.argmax(sizes < 0))
                raise ValueError(f"{path}: expected sizes >= 0, got {sizes[i]} for sequence {start + i}")
            ends = end + np.cumsum(sizes, dtype=np.int64) * self._per_token
            begins = np.concatenate([[end], ends[:-1]])
            if not np.array_equal(pointers, begins):
                i = int(np.argmax(pointers != begins))
                raise ValueError(
                    f"{path}: expected sequence {start + i} at {unit} {begins[i]}, where the one before it ends, "
                    f"got {pointers[i]}"
                )
            end = int(ends[-1])
        return end // self._per_token

    def _check_documents(self, path: str) -> None:
        """Check that the document index starts at 0, never decreases, and ends at the number of sequences."""
        index, n = self.document_index, len(self)
        if len(index) == 0 or index[0] != 0 or index[-1] != n:
            raise ValueError(
                f"{path}: expected a document index from 0 to {n}, got {index[[0, -1]] if len(index) else []} (files "
                f"that Megatron has merged have lost it: merge their parts with python -m dtmega merge)"
            )
        for start in range(0, len(index) - 1, CHUNK):
            piece = index[start : start + CHUNK + 1]
            falls = piece[1:] < piece[:-1]
            if falls.any():
                d = start + int(np.argmax(falls))
                raise ValueError(
                    f"{path}: expected a document index that rises, got {index[d]}, {index[d + 1]} at entry {d}"
                )

    def __len__(self) -> int:
        return len(self.sizes)

    def get(self, i: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Tokens of sequence i: a read-only view of the file, [length].

        Args:
            i: index of the sequence.
            offset: index, within the sequence, of the first token to return.
            length: number of tokens to return; None for all tokens up to the end of the sequence.

        Raises:
            IndexError: there is no sequence i, or the requested tokens are not all inside the sequence.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"{self.prefix}: sequence {i} of {len(self)}")
        size = int(self.sizes[i])
        length = size - offset if length is None else length
        if not 0 <= offset <= offset + length <= size:
            raise IndexError(f"{self.prefix}: tokens {offset} to {offset + length} of the {size} in sequence {i}")
        start = int(self.pointers[i]) // self._per_token + offset
        return self.tokens[start : start + length]

    def read(self, slices: Sequence[tuple[int, int]]) -> list[NDArray[Any]]:
        """Read the tokens of several slices (start, stop) of .bin; an object store receives one batch of requests."""
        if isinstance(self.tokens, np.ndarray):
            return [self.tokens[start:stop] for start, stop in slices]
        return self.tokens.read([slice(*where).indices(self.n_tokens)[:2] for where in slices])

    def first_token(self, documents: NDArray[Any]) -> NDArray[np.int64]:
        """Index in .bin of each document's first token, [d] -> [d].

        An index one past the last document gives the end of .bin.
        """
        return self.tokens_before(self.document_index[documents])

    def tokens_before(self, sequences: NDArray[Any]) -> NDArray[np.int64]:
        """Number of tokens in .bin before each sequence; `sequences` may have any shape.

        An index one past the last sequence gives the total number of tokens.
        """
        starts = np.full(sequences.shape, self.n_tokens)
        inside = sequences < len(self)
        starts[inside] = self.pointers[sequences[inside]] // self._per_token
        return starts

    def sequence_of(self, token: int) -> int:
        """Index of the sequence that contains the token with index `token` in .bin."""
        return int(np.searchsorted(self.pointers, token * self._per_token, side="right")) - 1

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(IndexedDataset, self.prefix, by_sequence=self.by_sequence, stored=self.stored), ()

    @property
    def index_path(self) -> str:
        """Absolute path of the .idx with links resolved; for an object store, the URL of the .idx."""
        return os.path.realpath(f"{self.prefix}.idx") if self.stored is None else self.stored.idx.url

    @property
    def index_state(self) -> str:
        """Path, size and modification time (or version) of the .idx; any change may mean a new data set."""
        if self.stored is not None:
            return self.stored.index_state
        stat = os.stat(self.index_path)
        return f"{self.index_path} {stat.st_size} {stat.st_mtime_ns}"


def _map(prefix: str, suffix: str) -> NDArray[np.uint8]:
    """The bytes of a file, memory-mapped.

    Raises:
        ValueError: the file is unreadable or is a Git LFS pointer.
    """
    path = f"{prefix}{suffix}"
    try:
        # numpy refuses to map an empty file, and the .bin of a data set without tokens is empty.
        content = np.asarray(np.memmap(path, np.uint8, "r")) if os.path.getsize(path) else np.zeros(0, np.uint8)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}{dangling(path)} ({_advice(prefix)})") from None
    check_not_a_pointer(content[:64].tobytes(), path)
    return content


def _advice(prefix: str) -> str:
    """Suffix for the message about a missing file; the suffix explains how to set [data] path."""
    if prefix.endswith((".bin", ".idx")):
        return f"[data] path is the PREFIX of PREFIX.bin and PREFIX.idx: {prefix[:-4]}"
    if "," in prefix or prefix.startswith("["):
        listed = rooms.refusals().as_list(prefix)
        return f"several prefixes are a list, [data] path = {listed}, or --data.path '{listed}'"
    if os.path.exists(f"{prefix}.bin"):
        return f"{prefix}.bin is there, but useless without its .idx; dtmega tokenize writes both"
    return "[data] path is the PREFIX of PREFIX.bin and PREFIX.idx, as dtmega tokenize writes them"
