"""Paths and URLs as users write them: misspelled schemes, and credentials, which must not be copied or printed."""

from __future__ import annotations

import re

OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "adl", "azure", "abfs", "abfss")
SCHEMES = (*OBJECT_STORES, "file", "ftp", "hdfs", "hf", "http", "https", "memory", "sftp", "smb", "ssh", "webhdfs")
# Schemes that name a container or a user, which is no secret, before the @.
PUBLIC_USER = ("abfs", "abfss", "hdfs", "sftp", "smb", "ssh", "webhdfs")
MASK = "***"

START = re.compile(r"[a-zA-Z][\w+.-]*://")
# What stands before the last @ of a URL. A password may contain "/" and "@". A number after ":" is a port.
USER = re.compile(r"\b([a-zA-Z][\w+.-]*)://((?:[^/@:\s]*:(?!\d+(?:[/?#\s]|$))\S*|[^/\s]*)@)")
QUERY = re.compile(r"(\b[a-zA-Z][\w+.-]*://[^?#\s]+\?)\S+")
MISSPELLED = re.compile(rf"(?i)({'|'.join(SCHEMES)}):/*(.*)|({'|'.join(OBJECT_STORES)})//+(.*)", re.DOTALL)


def check(path: str, *, local: bool = False) -> str:
    """Return a path or a URL unchanged.

    Args:
        path: path or URL.
        local: whether only local paths are allowed.

    Raises:
        ValueError: a URL holds credentials, a query with values or a fragment, which the message does not repeat; the
            path begins with a scheme without its "://"; or `path` is a URL and `local` is True.
    """
    if holds_credentials(path) or re.match(rf"{START.pattern}[^?#]*(#|\?.*=)", path):
        shown = masked(path).partition("#")[0]
        raise ValueError(
            f"{shown} is given with credentials or a query: expected a URL without them, and credentials in the "
            f"environment"
        )
    if (found := MISSPELLED.fullmatch(path)) and not re.match(rf"({'|'.join(SCHEMES)})://", path):
        scheme, rest = (found[1] or found[3]).lower(), found[2] or found[4] or ""
        raise ValueError(
            f"expected {masked(f'{scheme}://{rest}')}, or ./ before the name of a folder, got a path that begins with "
            f"'{path[: len(path) - len(rest)]}'"
        )
    if local and START.match(path):
        raise ValueError(f"expected a local path, got the URL {masked(path)}")
    return path


def is_object_store(url: str) -> bool:
    """True if the URL's scheme belongs to an object store that obstore supports."""
    scheme, separator, _ = url.partition("://")
    return bool(separator) and scheme in OBJECT_STORES


def holds_credentials(text: str) -> bool:
    """True if a URL in the text has a user or a password before an @."""
    return any(_is_secret(found) for found in USER.finditer(text))


def masked(text: str) -> str:
    """A text without the users, passwords and queries of its URLs."""
    without_user = USER.sub(lambda found: f"{found[1]}://{MASK}@" if _is_secret(found) else found[0], text)
    return QUERY.sub(rf"\1{MASK}", without_user)


def _is_secret(found: re.Match[str]) -> bool:
    return found[1] not in PUBLIC_USER or ":" in found[2]
