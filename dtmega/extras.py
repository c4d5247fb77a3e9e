"""Libraries of others that only a part of dtmega needs, and the line that says what to install where one is missing.

    with extras.needed("hf", "[model] name = 'hf'"):
        import transformers     # ValueError: [model] name = 'hf' needs transformers, which is not installed: ...

Each is an extra of pyproject.toml, and is imported by what needs it only.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed(extra: str, who: str) -> Iterator[None]:
    """Say what to install where an import of this block fails.

    Args:
        extra: of pyproject.toml, that brings the library.
        who: needs it.

    Raises:
        ValueError: a library is missing.
    """
    try:
        yield
    except ImportError as error:
        raise ValueError(_missing(error.name or str(error), extra, who)) from None


def check(library: str, extra: str, who: str) -> None:
    """Refuse to go on without a library, which is not imported yet.

    Raises:
        ValueError: it is not installed.
    """
    if importlib.util.find_spec(library) is None:
        raise ValueError(_missing(library, extra, who))


def _missing(library: str, extra: str, who: str) -> str:
    return f"{who} needs {library}, which is not installed: pip install -e '.[{extra}]'"
