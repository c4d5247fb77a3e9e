"""From text to batches. Every batch is a function of the seed and of the number of samples consumed so far.

    tokenize.py, text_files.py, sentences.py, merge.py    text -> `.bin/.idx` files
    corpus.py                                             the default corpus: the text that ships with Python
    tokenizer.py, wordpiece.py, tokenizer_json.py         vocabularies
    exported.py                                           the tokenizer of an exported model
    chat.py, tokenizer_trial.py, confined.py              conversations; untrusted files, read within limits
    indexed.py, idx_file.py, record.py, token_ids.py      the token files, and the record of how they were made
    order.py, samples.py, blend.py, prefixes.py           sample g of one corpus, and of several
    denoising/                                            samples for BERT and T5
    megatron/                                             samples in the order of a Megatron run
    objectives.py, rows.py, sums.py                       training objectives: their samples, rows and losses
    text.py, loader.py                                    the corpora that a run reads, and its batches

This file itself holds only the cache directory, where all of them keep files that can be made again.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def cache_dir() -> Path:
    """The folder for files that can be made again; it exists on return.

    The first writable one of `$XDG_CACHE_HOME/dtmega`, `~/.cache/dtmega` and this user's folder in the temp directory.

    Raises:
        ValueError: none of the three is writable.
    """
    user = os.getuid()
    temp = Path(tempfile.gettempdir()) / f"dtmega-{user}"
    bases = (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache"))
    folders = [*(Path(base) / "dtmega" for base in bases if os.path.isabs(base)), temp]
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # In a shared temp directory another user may have made the folder first.
            if os.access(folder, os.W_OK | os.X_OK) and (folder is not temp or folder.lstat().st_uid == user):
                return folder
    raise ValueError(f"expected a cache directory, cannot write {', '.join(map(str, folders))}; set XDG_CACHE_HOME")
