"""The data pipeline, from text to batches. A batch depends only on the seed and the number of samples consumed so far.

    tokenizers/       vocabularies, and the chat templates of conversations
    preparing/        text -> `.bin/.idx` files; the default corpus, made from text that ships with Python
    indexed_files/    readers and writers of token files, and the record of how a token file was made
    sampling/         the tokens of sample g, from one corpus or a blend
    megatron/         samples in the order of a Megatron run
    objectives/       training objectives: samples, tensors, and the sums that make up the loss
    text.py           opens and checks a run's tokenizer and corpora
    default_corpus.py the files of the default corpus
    loader.py         a run's batches; workers.py makes them in other processes
    lost.py           the error of tokens that can no longer be read

This file defines only the cache directory, which holds files that can be rebuilt.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def cache_dir() -> Path:
    """Return the directory for files that can be rebuilt; create the directory if it is missing.

    The result is the first writable directory among `$XDG_CACHE_HOME/dtmega`, `~/.cache/dtmega` and this user's folder
    in the temp directory.

    Raises:
        ValueError: none of these three directories is writable.
    """
    user = os.getuid()
    temp = Path(tempfile.gettempdir()) / f"dtmega-{user}"
    bases = (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache"))
    folders = [*(Path(base) / "dtmega" for base in bases if os.path.isabs(base)), temp]
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # In a shared temp directory, another user may have made the folder first.
            if os.access(folder, os.W_OK | os.X_OK) and (folder is not temp or folder.lstat().st_uid == user):
                return folder
    raise ValueError(f"expected a cache directory, cannot write {', '.join(map(str, folders))}; set XDG_CACHE_HOME")
