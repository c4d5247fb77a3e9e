"""The way from text to batches, every step a function of the seed and of what has been consumed.

    tokenize.py, text_files.py, sentences.py, merge.py    texts -> `.bin/.idx`; corpus.py: the text that Python carries
    tokenizer.py, wordpiece.py, tokenizer_json.py         vocabularies; exported.py: that of an exported model
    chat.py, tokenizer_trial.py, confined.py              conversations; what a stranger's file does, within limits
    indexed.py, idx_file.py, record.py, token_ids.py      the files, and how they were made
    order.py, samples.py, blend.py, prefixes.py           sample g of a text, and of several
    denoising/                                            samples of BERT and T5
    megatron/                                             samples in the order of a run of Megatron's
    objectives.py, rows.py, sums.py                       objectives of training: samples, rows, the loss
    text.py, loader.py                                    what a run reads, and its batches

This file has only the folder where all of them keep what can be made again.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def cache_dir() -> Path:
    """The folder for what can be made again; it exists on return.

    It is the first of these that can be written: `$XDG_CACHE_HOME/dtmega`, `~/.cache/dtmega`, a folder of this user in
    the temp directory.

    Raises:
        ValueError: none can be written.
    """
    user = os.getuid()
    temp = Path(tempfile.gettempdir()) / f"dtmega-{user}"
    bases = (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache"))
    folders = [*(Path(base) / "dtmega" for base in bases if os.path.isabs(base)), temp]
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # In a shared temp directory a stranger may have made the folder first.
            if os.access(folder, os.W_OK | os.X_OK) and (folder is not temp or folder.lstat().st_uid == user):
                return folder
    raise ValueError(f"expected a cache directory, cannot write {', '.join(map(str, folders))}; set XDG_CACHE_HOME")
