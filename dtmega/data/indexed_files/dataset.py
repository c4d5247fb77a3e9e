"""Megatron's token files: PREFIX.bin holds the tokens, and PREFIX.idx holds the position of each sequence.

The files are memory-mapped. Both layouts of the .idx can be read (`idx_file.py`). Only the MMIDIDX layout is written,
byte for byte as Megatron writes it.
"""

from __future__ import annotations

import os
import secrets
from array import array
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtmega.config.reading import as_list
from dtmega.data.indexed_files.idx_file import DTYPE_OF_CODE, HEADER, MAGIC, read_index
from dtmega.files.atomic import sync_folder
from dtmega.files.untrusted_json import check_not_a_pointer, dangling

CHUNK = 1 << 20  # entries checked at a time, to bound the memory needed to open a file


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype in which Megatron stores ids below `vocab_size` (`DType.optimal_dtype`)."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


class IndexedDataset:
    """A `.bin/.idx` pair, memory-mapped and checked when opened.

    Pickling keeps only the arguments; a worker process maps the files itself.

    Args:
        prefix: path of the two files without their suffixes.
        by_sequence: whether the caller reads sequences and never documents. The document index is then not
            checked, because files that Megatron has merged have no usable document index.

    Attributes:
        dtype: dtype of the tokens.
        sizes: number of tokens in each sequence, int32 or int64 [n].
        pointers: start of each sequence in .bin, int64 [n], in bytes (MMIDIDX) or in tokens (TNTIDX).
        document_index: first sequence of each document, then the number of sequences, int64 [documents + 1].
        n_tokens: number of tokens, which may be 0.
        tokens: all tokens of .bin, [n_tokens] of `dtype`.

    Raises:
        ValueError: a file is missing, damaged or in another format, or the two files do not belong together.
    """

    def __init__(self, prefix: str | Path, *, by_sequence: bool = False) -> None:
        self.prefix, self.by_sequence = str(prefix), by_sequence
        idx_path, bin_path = f"{self.prefix}.idx", f"{self.prefix}.bin"
        index, data = _map(self.prefix, ".idx"), _map(self.prefix, ".bin")
        arrays = read_index(idx_path, index)
        self.dtype = arrays.dtype
        self.sizes = arrays.sizes
        self.pointers = arrays.pointers
        self.document_index = arrays.document_index
        self._per_token = arrays.per_token
        self.n_tokens = self._check_sequences(idx_path)
        if not by_sequence:
            self._check_documents(idx_path)
        n_bytes = self.n_tokens * self.dtype.itemsize
        if len(data) != n_bytes:
            raise ValueError(
                f"{bin_path}: expected {n_bytes} bytes ({self.n_tokens} tokens of {self.dtype}, as {idx_path} says), "
                f"got {len(data)}"
            )
        self.tokens: NDArray[Any] = data.view(self.dtype)

    def _check_sequences(self, path: str) -> int:
        """Check that the sequences fill .bin from the first byte on, without gaps; return the total token count.

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
            offset: first token of the range, counted from the start of the sequence.
            length: number of tokens; None for all tokens up to the end of the sequence.

        Raises:
            IndexError: there is no sequence i, or the range is not inside the sequence.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"{self.prefix}: sequence {i} of {len(self)}")
        size = int(self.sizes[i])
        length = size - offset if length is None else length
        if not 0 <= offset <= offset + length <= size:
            raise IndexError(f"{self.prefix}: tokens {offset} to {offset + length} of the {size} in sequence {i}")
        start = int(self.pointers[i]) // self._per_token + offset
        return self.tokens[start : start + length]

    def first_token(self, documents: NDArray[Any]) -> NDArray[np.int64]:
        """Position of each document's first token in .bin, in tokens, [d] -> [d].

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
        return partial(IndexedDataset, self.prefix, by_sequence=self.by_sequence), ()


def _map(prefix: str, suffix: str) -> NDArray[np.uint8]:
    """The bytes of a file, memory-mapped.

    Raises:
        ValueError: the file cannot be read, or is a Git LFS pointer.
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
        return f"several prefixes are a list, [data] path = {as_list(prefix)}, or --data.path '{as_list(prefix)}'"
    if os.path.exists(f"{prefix}.bin"):
        return f"{prefix}.bin is there, but useless without its .idx; dtmega tokenize writes both"
    return "[data] path is the PREFIX of PREFIX.bin and PREFIX.idx, as dtmega tokenize writes them"


def check_free(prefix: str, overwrite: bool) -> None:
    """Check that no token files would be replaced, unless `overwrite` is True.

    Raises:
        ValueError: PREFIX.bin or PREFIX.idx exists, and `overwrite` is False.
    """
    for path in (f"{prefix}.bin", f"{prefix}.idx"):
        if os.path.lexists(path) and not overwrite:
            raise ValueError(f"{path} is there: expected another --output, or --overwrite to replace it")


class IndexedWriter:
    """A writer for a `.bin/.idx` pair. A PREFIX.idx exists only next to the complete PREFIX.bin from the same write.

        with IndexedWriter("data/mine", token_dtype(vocab_size)) as writer:
            writer.add([5, 7, 2])  # a document
            writer.add([8, 6, 4, 9, 2], sizes=[3, 2])  # a document of two sentences

    An exception inside the block leaves earlier files with that PREFIX unchanged. A crash may leave `PREFIX.*.tmp`
    files behind. Two processes that write the same PREFIX at the same time need a lock.

    Args:
        prefix: path of the two files without their suffixes.
        dtype: integer dtype of the tokens, see `token_dtype`.

    Attributes:
        about: content of PREFIX.meta.json (`record.py`), to be set before the block ends. If the content is empty, no
            PREFIX.meta.json is written, and an existing PREFIX.meta.json is deleted.
        n_tokens: number of tokens added so far.

    Raises:
        ValueError: Megatron has no code for `dtype`.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[Any]) -> None:
        self.prefix, self.dtype = str(prefix), np.dtype(dtype)
        codes = {known: code for code, known in DTYPE_OF_CODE.items() if known.kind in "iu"}
        if self.dtype not in codes:
            raise ValueError(f"{self.prefix}: expected a dtype in {[str(d) for d in codes]}, got {self.dtype}")
        self._code = codes[self.dtype]
        self._sizes = array("i")
        self._documents = array("q", [0])  # first sequence of each document, then the number of sequences
        self.n_tokens = 0
        self.about = ""

    def __enter__(self) -> IndexedWriter:
        Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
        tag = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._temps = {suffix: Path(f"{self.prefix}.{suffix}.{tag}.tmp") for suffix in ("bin", "idx", "meta.json")}
        self._bin = open(self._temps["bin"], "xb", buffering=CHUNK)
        return self

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def n_documents(self) -> int:
        """Number of documents added so far."""
        return len(self._documents) - 1

    def add(self, tokens: Sequence[int] | NDArray[Any], sizes: Sequence[int] | None = None) -> None:
        """Append one document.

        Args:
            tokens: ids of the document, integers [length] with 0 <= length < 2**31.
            sizes: number of tokens in each of the document's sequences; the sizes add up to length. None if the
                document is a single sequence.

        Raises:
            ValueError: the tokens are not integers, there are too many tokens, or a token does not fit the dtype.
        """
        ids = np.asarray(tokens) if len(tokens) else np.zeros(0, self.dtype)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or len(ids) >= 2**31:
            raise ValueError(f"{self.prefix}: expected fewer than 2**31 integers, got {ids.dtype} {list(ids.shape)}")
        bounds = np.iinfo(self.dtype)
        if len(ids) and not bounds.min <= ids.min() <= ids.max() <= bounds.max:
            raise ValueError(
                f"{self.prefix}: expected ids in [{bounds.min}, {bounds.max}] ({self.dtype}), "
                f"got {ids.min()} to {ids.max()}"
            )
        self._bin.write(ids.astype(self.dtype, copy=False).tobytes())
        sizes = [len(ids)] if sizes is None else sizes
        assert sum(sizes) == len(ids), (sum(sizes), len(ids))
        self._sizes.extend(sizes)
        self._documents.append(len(self))
        self.n_tokens += len(ids)

    def add_all(self, dataset: IndexedDataset) -> None:
        """Append all documents of a data set with the writer's dtype; the data set's .idx may have either layout."""
        assert dataset.dtype == self.dtype, (dataset.dtype, self.dtype)
        for start in range(0, dataset.n_tokens, CHUNK):
            self._bin.write(dataset.tokens[start : start + CHUNK].tobytes())
        self._documents.frombytes((dataset.document_index[1:] + len(self)).tobytes())
        self._sizes.frombytes(dataset.sizes.astype("<i4").tobytes())
        self.n_tokens += dataset.n_tokens

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        try:
            with self._bin:
                if kind is None:
                    self._bin.flush()
                    os.fsync(self._bin.fileno())
            if kind is None:
                self._write_index()
                if self.about:
                    self._write_about()
                self._publish()
        finally:
            for temp in self._temps.values():
                temp.unlink(missing_ok=True)

    def _write_index(self) -> None:
        n = len(self)
        sizes = np.array(self._sizes, dtype="<i4")
        pointers = np.zeros(n, dtype="<i8")
        np.cumsum(sizes[:-1], dtype="<i8", out=pointers[1:])
        pointers *= self.dtype.itemsize
        documents = np.array(self._documents, dtype="<i8")
        with open(self._temps["idx"], "xb") as file:
            file.write(HEADER.pack(MAGIC, 1, self._code, n, len(documents)))
            for values in (sizes, pointers, documents):
                file.write(values.data)
            file.flush()
            os.fsync(file.fileno())

    def _write_about(self) -> None:
        with open(self._temps["meta.json"], "x", encoding="utf-8") as file:
            file.write(self.about)
            file.flush()
            os.fsync(file.fileno())

    def _publish(self) -> None:
        """Rename the finished files into place."""
        folder = Path(self.prefix).parent
        idx = Path(f"{self.prefix}.idx")
        about = Path(f"{self.prefix}.meta.json")
        # Even if a crash interrupts these steps, an .idx must never be next to a .bin or .meta.json from another write.
        # So the old index is deleted first, the new index is renamed last, and the folder is synced between the steps.
        idx.unlink(missing_ok=True)
        sync_folder(folder)
        os.replace(self._temps["bin"], f"{self.prefix}.bin")
        if self.about:
            os.replace(self._temps["meta.json"], about)
        else:
            about.unlink(missing_ok=True)
        sync_folder(folder)
        os.replace(self._temps["idx"], idx)
        sync_folder(folder)
