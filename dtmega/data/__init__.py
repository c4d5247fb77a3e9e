"""The way from text to batches.

`tokenize` and `corpus` write `.bin/.idx` pairs, `indexed` reads them, `samples` and `pairs` cut them, `loader` serves
batches. This file has only the folder where all of them keep what can be made again.
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
