"""Data sets on a disk and in the object store of `object_server.py`: for the tests of both, and their benchmark."""

from __future__ import annotations

from pathlib import Path

from tests.object_server import BUCKET, Object, Server

SUFFIXES = (".bin", ".idx", ".meta.json")


def store(server: Server, prefix: str, name: str) -> str:
    """Put the files of a data set into the store, and return the URL of their prefix."""
    for suffix in SUFFIXES:
        path = Path(f"{prefix}{suffix}")
        if path.exists():
            server.objects[f"{name}{suffix}"] = Object(path.read_bytes(), server.now())
    return f"s3://{BUCKET}/{name}"


def reads(server: Server, name: str = ".bin") -> int:
    """Number of requests for content of objects whose name ends so."""
    return sum(request.method == "GET" and request.key.endswith(name) for request in server.seen)
