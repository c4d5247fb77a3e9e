"""Write Megatron's token files, document by document. Memory use does not grow with the number of documents."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtmega.data.indexed_files.dataset import CHUNK
from dtmega.data.indexed_files.idx_file import check_integer, index_pieces
from dtmega.data.indexed_files.record import ChatRecord, PartRecord, Record
from dtmega.data.indexed_files.spilled_array import SpilledArray
from dtmega.data.indexed_files.stored_output import local_folder, pair_files
from dtmega.data.tokenizers.tokenizer import Tokenizer


class IndexedWriter:
    """A writer for a `.bin/.idx` pair. A PREFIX.idx exists only next to the complete PREFIX.bin from the same write.

        with IndexedWriter(prefix, np.dtype("<u2")) as writer:
            writer.add(tokens)
            writer.about = text_of(tokenizer, writer)

    Args:
        prefix: path of the files without their suffixes, or a URL such as s3://bucket/data/mine.
        dtype: integer dtype of the tokens, see `token_dtype`.

    Attributes:
        about: content of PREFIX.meta.json (`record.py`), which the caller sets before the `with` block ends. If the
            content is empty, no PREFIX.meta.json is written, and an existing PREFIX.meta.json is deleted.
        n_tokens: number of tokens added so far.
        min_id, max_id: smallest and largest id added so far; None before the first token.

    Raises:
        ValueError: Megatron has no code for `dtype`.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[Any]) -> None:
        self.prefix, self.dtype = str(prefix), np.dtype(dtype)
        check_integer(self.prefix, self.dtype)
        folder = local_folder(self.prefix)
        self._sizes = SpilledArray("i", folder)
        # For each document, the number of sequences up to the document's end.
        self._ends = SpilledArray("q", folder)
        self.n_tokens = 0
        self.min_id: int | None = None
        self.max_id: int | None = None
        self.about = ""

    def __enter__(self) -> IndexedWriter:
        self._files = pair_files(self.prefix)
        self._bin = open(self._files.temporary("bin"), "xb", buffering=CHUNK)
        return self

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def n_documents(self) -> int:
        """Number of documents added so far."""
        return len(self._ends)

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
        if len(ids):
            self._note_range(int(ids.min()), int(ids.max()))
        self._bin.write(ids.astype(self.dtype, copy=False).tobytes())
        sizes = [len(ids)] if sizes is None else sizes
        assert sum(sizes) == len(ids), (sum(sizes), len(ids))
        self._sizes.extend(sizes)
        self._ends.extend([len(self)])
        self.n_tokens += len(ids)

    def _note_range(self, low: int, high: int) -> None:
        """Update `min_id` and `max_id` with the smallest and the largest id of a document.

        Raises:
            ValueError: an id does not fit the dtype.
        """
        bounds = np.iinfo(self.dtype)
        if not bounds.min <= low <= high <= bounds.max:
            raise ValueError(
                f"{self.prefix}: expected ids in [{bounds.min}, {bounds.max}] ({self.dtype}), got {low} to {high}"
            )
        self.min_id = low if self.min_id is None else min(low, self.min_id)
        self.max_id = high if self.max_id is None else max(high, self.max_id)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        try:
            with self._bin:
                if kind is None:
                    self._bin.flush()
                    os.fsync(self._bin.fileno())
            if kind is None:
                pieces = index_pieces(self.dtype, len(self), self.n_documents, self._sizes.pieces, self._ends.pieces)
                self._files.write("idx", pieces)
                if self.about:
                    self._files.write("meta.json", [self.about.encode()])
                self._files.publish()
        finally:
            self._files.discard()
            self._sizes.close()
            self._ends.close()


def text_of(
    tokenizer: Tokenizer,
    writer: IndexedWriter,
    *,
    append_eod: bool = False,
    first_id: int | None = None,
    sentences: bool = False,
    part: PartRecord | None = None,
    chat: ChatRecord | None = None,
) -> str:
    """Return the content of PREFIX.meta.json for a writer that has received all documents."""
    record = Record(
        tokenizer=tokenizer.name,
        fingerprint=tokenizer.fingerprint,
        eod_id=tokenizer.eod_id,
        append_eod=append_eod,
        first_id=first_id,
        sentences=sentences,
        documents=writer.n_documents,
        tokens=writer.n_tokens,
        min_id=writer.min_id,
        max_id=writer.max_id,
        part=part,
        chat=chat,
    )
    return record.text()
