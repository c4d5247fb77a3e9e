"""Some of Python's own library in sentences, as BERT's samples are made of it; and bounds of chance."""

from __future__ import annotations

import functools
import math
from itertools import islice
from pathlib import Path

import numpy as np

from dtmega.data.indexed_files.dataset import IndexedDataset
from dtmega.data.indexed_files.writer import IndexedWriter
from dtmega.data.objectives.denoising.masked import specials
from dtmega.data.objectives.denoising.pairs import PairSamples
from dtmega.data.preparing import corpus, sentences
from dtmega.data.tokenizers.load import load_tokenizer

TOKENIZER = load_tokenizer("stdlib-wordpiece")
SPECIALS = specials(TOKENIZER)


@functools.cache
def library() -> list[list[list[int]]]:
    """The ids of the sentences of some documents; between them are documents that cannot be used."""
    found = []
    for name, text in islice(corpus.documents(), 0, None, 24):
        kind = sentences.PROSE if name.startswith(corpus.TOPICS) else sentences.BLOCKS
        found.append(sentences.encode(text, kind, TOKENIZER))
    return [
        [[7, 8, 9]],
        *found[:9],
        [[5] * 20, [6] * 513, [7] * 20],
        *found[9:],
        [],
        [[5] * 20, [], [7] * 20],
        [[7] * 512, [8] * 512],
        [[min(TOKENIZER.continuing_ids), *[9] * 600]],
    ]


def usable(document: list[list[int]]) -> bool:
    return len(document) > 1 and all(1 <= len(sentence) <= 512 for sentence in document)


def write(prefix: Path, documents: list[list[list[int]]], numbered: bool = False) -> IndexedDataset:
    """Documents in sentences.

    Args:
        numbered: each token is its place in the .bin instead.
    """
    with IndexedWriter(prefix, np.dtype(np.int32)) as writer:
        for document in documents:
            ids = [i for sentence in document for i in sentence]
            if numbered:
                ids = range(writer.n_tokens, writer.n_tokens + len(ids))
            writer.add(ids, [len(sentence) for sentence in document])
    return IndexedDataset(prefix)


def samples_of(dataset: IndexedDataset, seq_len: int, short_seq_prob: float = 0.1) -> PairSamples:
    """Those of all documents."""
    return PairSamples(dataset, (0, len(dataset.document_index) - 1), seq_len, short_seq_prob, 7, "train")


def is_likely(hits: int, tries: int, share: float) -> bool:
    """Within five standard deviations: of a million such questions one is answered wrongly."""
    return abs(hits - tries * share) <= 5 * math.sqrt(tries * share * (1 - share))
