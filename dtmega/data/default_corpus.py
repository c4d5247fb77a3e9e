"""The files of the default corpus ([data] path = "stdlib"), which `preparing/corpus.py` makes if they are missing.

There is one pair for each Python version and vocabulary, and separately as whole documents and as sentences.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dtmega import rooms
from dtmega.data import cache_dir
from dtmega.data.indexed_files.dataset import IndexedDataset, token_dtype
from dtmega.data.tokenizers.tokenizer import Tokenizer
from dtmega.files.lock import Lock

# Increase FORMAT when a code change alters the corpus for an unchanged Python and vocabulary. Increase SENTENCES_FORMAT
# when a code change alters only the corpus of sentences. Files in an earlier format are no longer read.
FORMAT = 2
SENTENCES_FORMAT = 1


def prepare(tokenizer: Tokenizer, *, in_sentences: bool = False) -> str:
    """Build the tokenised corpus if it is missing or damaged. Returns its prefix. Several processes may do so at once.

    Args:
        tokenizer: tokenizer of the corpus.
        in_sentences: whether each sequence is one sentence or block (`corpus.sentence_documents`). Otherwise, each
            sequence is a whole document that ends with `eod_id`.

    Raises:
        ValueError: this Python lacks the library's sources, or no cache directory is writable.
    """
    version = ".".join(map(str, sys.version_info[:3]))
    form = f"-sentences-v{SENTENCES_FORMAT}" if in_sentences else ""
    prefix = str(cache_dir() / f"stdlib-py{version}-{tokenizer.fingerprint}-v{FORMAT}{form}")
    if not _is_intact(prefix, tokenizer):
        with Lock(Path(f"{prefix}.lock")):
            if not _is_intact(prefix, tokenizer):  # another process may have built the corpus in the meantime
                rooms.stdlib_corpus().build(prefix, tokenizer, in_sentences)
    return prefix


def _is_intact(prefix: str, tokenizer: Tokenizer) -> bool:
    """True if the `.bin/.idx` pair exists, is undamaged and not empty, and has the tokenizer's dtype."""
    try:
        dataset = IndexedDataset(prefix)
    except ValueError:
        return False
    return len(dataset) > 0 and dataset.dtype == token_dtype(tokenizer.vocab_size)
