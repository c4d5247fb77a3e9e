"""A trial of a tokenizer.json in a confined process, before this one reads it.

The library is written in Rust: what a hostile file makes it do may be a panic, which is no Exception, an abort of the
process, or a text that grows until memory ends.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import tokenizers

from dtmega.data import cache_dir
from dtmega.data.confined import Confined

SAMPLE = " [CLS] [SEP] [MASK] [PAD] a aa\tAB, b.\n\n  if x == 10: # é 中文 \U0001f600"
DECODED = 1000  # ids


def check(path: str, fingerprint: str) -> None:
    """Refuse a file that fails in a confined process. A file that passed is remembered by its fingerprint.

    Raises:
        ValueError: names the file.
    """
    memory: Path | None = None
    with contextlib.suppress(ValueError):
        memory = cache_dir() / f"tokenizer-{fingerprint}-{tokenizers.__version__}"
    if memory is not None and memory.exists():
        return
    child = Confined("dtmega.data.tokenizer_trial:try_out", os.path.abspath(path), where=path)
    try:
        child.start()
    finally:
        child.close()
    if memory is not None:
        with contextlib.suppress(OSError):
            memory.touch()


def try_out(path: str) -> Callable[[str], int]:
    """Read a file, encode and decode: all that a tokenizer is asked for. Runs in the confined process.

    A text that a tokenizer refuses is no fault of the file: a vocabulary may have no [UNK].
    """
    try:
        loaded = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"expected a Hugging Face tokenizer.json, got '{error}'") from None
    loaded.no_truncation()
    loaded.no_padding()
    with contextlib.suppress(Exception):
        loaded.encode(SAMPLE, add_special_tokens=False)
    ids = sorted(loaded.get_vocab(with_added_tokens=True).values())
    with contextlib.suppress(Exception):
        loaded.decode(ids[:DECODED], skip_special_tokens=False)
        for i in ids[:DECODED]:
            loaded.decode([i], skip_special_tokens=False)
    return len
