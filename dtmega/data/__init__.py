"""From text to batches. Every batch is a function of the seed and of the number of samples consumed so far.

    tokenizers/       vocabularies, and the chat templates of conversations
    preparing/        text -> `.bin/.idx` files; the default corpus, made of the text that ships with Python
    indexed_files/    these token files, and the record of how they were made
    sampling/         the tokens of sample g, from one corpus or a blend
    megatron/         samples in the order of a Megatron run
    objectives/       training objectives: their samples, tensors and sums of the loss
    text.py           the tokenizer and the corpora of a run, opened and checked
    loader.py         the batches of a run

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
