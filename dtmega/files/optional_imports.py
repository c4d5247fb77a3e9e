"""Optional libraries: if a library is missing, the error names the command that installs the library.

    with optional_imports.needed("hf", "[model] name = 'hf'"):
        import transformers     # ValueError: [model] name = 'hf' needs transformers, which is not installed: ...

Each optional library belongs to an extra in pyproject.toml, and only the code that needs the library imports it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed(extra: str, who: str) -> Iterator[None]:
    """Turn a failed import inside the `with` block into a ValueError that names the library to install.

    Args:
        extra: name of the pyproject.toml extra that contains the library.
        who: key or command that needs the library, as the user writes it.

    Raises:
        ValueError: a library is missing.
    """
    try:
        yield
    except ImportError as error:
        raise ValueError(_missing(error.name or str(error), extra, who)) from None


def check(library: str, extra: str, who: str) -> None:
    """Check that a library is installed, without importing it.

    Args:
        library: import name of the library.
        extra: name of the pyproject.toml extra that contains the library.
        who: key or command that needs the library, as the user writes it.

    Raises:
        ValueError: the library is not installed.
    """
    if importlib.util.find_spec(library) is None:
        raise ValueError(_missing(library, extra, who))


def _missing(library: str, extra: str, who: str) -> str:
    return f"{who} needs {library}, which is not installed: pip install -e '.[{extra}]'"
