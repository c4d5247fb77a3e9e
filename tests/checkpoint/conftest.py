"""An object store for the tests of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.checkpoint.object_server import Server, serving


@pytest.fixture
def object_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """An empty object store on the loopback interface, which s3:// URLs lead to."""
    with serving() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server
