"""Megatron's memory-mapped token files, to the byte: PREFIX.bin holds tokens, PREFIX.idx says where each sequence is.

Both layouts of the .idx are read (`idx_file.py`), and MMIDIDX is written.
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

from dtmega.data.idx_file import DTYPE_OF_CODE, HEADER, MAGIC, read_index
from dtmega.durable import sync_folder
from dtmega.sections import as_list
from dtmega.strangers import check_not_a_pointer, dangling

CHUNK = 1 << 20  # entries checked at a time: bounds the memory that opening a file of any size takes


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype in which Megatron stores ids below `vocab_size` (`DType.optimal_dtype`)."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


class IndexedDataset:
    """A `.bin/.idx` pair, memory-mapped, checked at opening. Pickling carries the prefix: a worker maps the files anew.

    Args:
        by_sequence: whoever asks reads sequences, and no documents: the document index may be anything. Files that
            Megatron has merged from several have lost it.

    Attributes:
        sizes: [n], tokens per sequence.
        pointers: int64 [n], where each sequence starts in .bin, as the file has it: in bytes, or in tokens (TNTIDX).
        document_index: int64 [documents + 1]; document d is sequences document_index[d] to document_index[d + 1].
        tokens: [n_tokens] of `dtype`, the whole .bin; n_tokens = 0 is allowed here.

    Raises:
        ValueError: a file is missing, damaged, of another format, or the two do not belong together.
    """

    def __init__(self, prefix: str | Path, *, by_sequence: bool = False) -> None:
        self.prefix, self.by_sequence = str(prefix), by_sequence
        idx_path, bin_path = f"{self.prefix}.idx", f"{self.prefix}.bin"
        index, data = _map(self.prefix, ".idx"), _map(self.prefix, ".bin")
        found = read_index(idx_path, index)
        self.dtype, self.sizes, self.pointers = found.dtype, found.sizes, found.pointers
        self.document_index = found.document_index
        self._per_token = found.per_token
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
        """The tokens of all sequences, which lie one after the other from the first byte on."""
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
        """Tokens [length] of sequence i from `offset` on, to its end by default: a read-only view of the file.

        Raises:
            IndexError: no such sequence, or the range leaves it.
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
        """The tokens of the .bin file before each of these documents; all of them for one past the last."""
        return self.tokens_before(self.document_index[documents])

    def tokens_before(self, sequences: NDArray[Any]) -> NDArray[np.int64]:
        """The tokens of the .bin file before each of these sequences; all of them for one past the last."""
        starts = np.full(sequences.shape, self.n_tokens)
        inside = sequences < len(self)
        starts[inside] = self.pointers[sequences[inside]] // self._per_token
        return starts

    def sequence_of(self, token: int) -> int:
        """The sequence that has this token of the .bin file."""
        return int(np.searchsorted(self.pointers, token * self._per_token, side="right")) - 1

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(IndexedDataset, self.prefix, by_sequence=self.by_sequence), ()


def _map(prefix: str, suffix: str) -> NDArray[np.uint8]:
    path = f"{prefix}{suffix}"
    try:
        # numpy refuses to map an empty file, which the .bin of a data set without tokens is.
        content = np.asarray(np.memmap(path, np.uint8, "r")) if os.path.getsize(path) else np.zeros(0, np.uint8)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}{dangling(path)} ({_meant(prefix)})") from None
    check_not_a_pointer(content[:64].tobytes(), path)
    return content


def _meant(prefix: str) -> str:
    """Explain [data] path to whoever has named files that are not there."""
    if prefix.endswith((".bin", ".idx")):
        return f"[data] path is the PREFIX of PREFIX.bin and PREFIX.idx: {prefix[:-4]}"
    if "," in prefix or prefix.startswith("["):
        return f"several prefixes are a list, [data] path = {as_list(prefix)}, or --data.path '{as_list(prefix)}'"
    if os.path.exists(f"{prefix}.bin"):
        return f"{prefix}.bin alone says nothing of its tokens; dtmega tokenize writes it with its .idx"
    return "[data] path is the PREFIX of PREFIX.bin and PREFIX.idx, as dtmega tokenize writes them"


def check_free(prefix: str, overwrite: bool) -> None:
    """Refuse to write over token files, unless that was asked for.

    Raises:
        ValueError: there are some of that name.
    """
    for path in (f"{prefix}.bin", f"{prefix}.idx"):
        if os.path.lexists(path) and not overwrite:
            raise ValueError(f"{path} is there: expected another --output, or --overwrite to replace it")


class IndexedWriter:
    """A writer of a pair, such that PREFIX.idx only ever stands beside the finished PREFIX.bin of the same write.

        with IndexedWriter("data/mine", token_dtype(vocab_size)) as writer:
            writer.add([5, 7, 2])  # a document
            writer.add([8, 6, 4, 9, 2], sizes=[3, 2])  # a document of two sentences

    An exception inside the block leaves what stood under PREFIX before; a crash leaves `PREFIX.*.tmp` at most.
    Two processes that write the same PREFIX at the same time need a lock of their own.

    Attributes:
        about: the content of PREFIX.meta.json, see `record.py`; to be set before the block ends. Without it there is no
            such file, nor one of an earlier write.

    Raises:
        ValueError: `dtype` is none of Megatron's integers, or `add` gets what it cannot hold.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[Any]) -> None:
        self.prefix, self.dtype = str(prefix), np.dtype(dtype)
        codes = {known: code for code, known in DTYPE_OF_CODE.items() if known.kind in "iu"}
        if self.dtype not in codes:
            raise ValueError(f"{self.prefix}: expected a dtype in {[str(d) for d in codes]}, got {self.dtype}")
        self._code = codes[self.dtype]
        self._sizes = array("i")
        self._documents = array("q", [0])  # sequences before each document, and in the end all
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
        return len(self._documents) - 1

    def add(self, tokens: Sequence[int] | NDArray[Any], sizes: Sequence[int] | None = None) -> None:
        """Append one document.

        Args:
            tokens: integers [length], 0 <= length < 2**31.
            sizes: tokens of each of its sequences, which add up to length; None: it is one sequence.
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
        """Append the documents of a data set of the same dtype, in any layout."""
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
        folder, idx, about = Path(self.prefix).parent, Path(f"{self.prefix}.idx"), Path(f"{self.prefix}.meta.json")
        # The old index goes first, and durably: after no crash does it stand beside the new .bin, or without what is
        # said of it. The new one comes last: where there is a data set, there is what is said of it.
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
