"""Try out a tokenizer.json in a confined process before this process reads the file.

The `tokenizers` library is written in Rust. A hostile file can make the library panic (not a Python Exception), abort
the process, or fill the memory with text that keeps growing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import tokenizers

from dtmega.data import cache_dir
from dtmega.files.confined import Confined

SAMPLE = " [CLS] [SEP] [MASK] [PAD] a aa\tAB, b.\n\n  if x == 10: # é 中文 \U0001f600"
DECODED = 1000  # number of ids that the trial decodes


def check(path: str, fingerprint: str) -> None:
    """Check, in a confined process, that a tokenizer.json can be used.

    A file that passes is not tried again: the cache directory then holds an empty file named after the fingerprint.

    Raises:
        ValueError: the trial failed; the message names the file.
    """
    passed: Path | None = None
    with contextlib.suppress(ValueError):
        passed = cache_dir() / f"tokenizer-{fingerprint}-{tokenizers.__version__}"
    if passed is not None and passed.exists():
        return
    child = Confined("dtmega.data.tokenizers.tokenizer_trial:try_out", os.path.abspath(path), where=path)
    try:
        child.start()
    finally:
        child.close()
    if passed is not None:
        with contextlib.suppress(OSError):
            passed.touch()


def try_out(path: str) -> Callable[[str], int]:
    """Use a tokenizer.json in every way that dtmega does: read, encode, decode. Runs in the confined process.

    An error while encoding or decoding does not fail the trial: a valid vocabulary without [UNK] refuses some texts.

    Returns:
        A dummy function, which is never called; `Confined` expects the result to be a function.
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
