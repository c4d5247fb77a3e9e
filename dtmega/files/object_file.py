"""Read byte ranges of an object in an object store. Each read checks that the object has not changed since `open`.

    file = ObjectFile.open("s3://bucket/data/mine.bin", "[data] path")
    first, second = file.read([(0, 4096), (9_000_000, 9_004_096)])  # two concurrent requests

Ranges with small gaps between them are read in one request, because a request's latency equals the transfer time of
about 100 KB.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from typing import Any

from dtmega.files.object_requests import PARALLEL, PART_BYTES, check_usable, kind_of, open_store, reason, reported
from dtmega.files.outages import Unreachable, at_start

GAP_BYTES = 2**16  # one request reads two ranges if the gap between them is at most this large


class Changed(OSError):
    """Raised if an object has been replaced or deleted since it was opened."""


class ObjectFile:
    """An object in an object store, with the size and version that it had when it was opened.

    A pickled copy keeps the size and the version, so that all processes read the same content.

    Args:
        url: URL of the object.
        size: size of the object in bytes.
        version: ETag of the object, or the time of its last change if the store has no ETags.
    """

    def __init__(self, url: str, size: int, version: str) -> None:
        self.url, self.size, self.version = url, size, version
        self._folder, _, self._name = url.rpartition("/")
        self._store: Any = None

    @classmethod
    def open(cls, url: str, key: str) -> ObjectFile | None:
        """Ask the store for an object's size and version. Return None if the object does not exist.

        Args:
            url: URL of the object.
            key: configuration key or option that gave the URL, for messages.

        Raises:
            ValueError: the URL holds credentials, or names no object.
            Unreachable: the store does not answer.
        """
        check_usable(url, key)
        file = cls(url, 0, "")
        try:
            meta = file._request(lambda store: store.head(file._name))
        except Changed:
            return None
        except Unreachable as error:
            raise type(error)(f"cannot open {error} ({key})") from None
        except ValueError as error:
            raise ValueError(f"cannot open {url}: {error} ({key})") from None
        file.size, file.version = meta["size"], _version(meta)
        return file

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Read byte ranges (start, stop), with at most PARALLEL concurrent requests.

        Raises:
            Unreachable: the store does not answer.
            Changed: the object has been replaced or deleted since it was opened.
        """
        whole = merged(ranges)
        parts = [part for start, stop in whole for part in _parts(start, stop)]
        if len(parts) == 1:
            found = [self._range(*parts[0])]
        else:
            with ThreadPoolExecutor(max(1, min(PARALLEL, len(parts)))) as threads:
                found = list(threads.map(self._range, *zip(*parts, strict=True))) if parts else []
        by_part = dict(zip(parts, found, strict=True))
        buffers = {start: _joined([by_part[part] for part in _parts(start, stop)]) for start, stop in whole}
        firsts = list(buffers)
        read: list[memoryview] = []
        for start, stop in ranges:
            if start >= stop:
                read.append(memoryview(b""))
                continue
            first = firsts[bisect_right(firsts, start) - 1]
            read.append(buffers[first][start - first : stop - first])
        return read

    def pieces(self) -> Iterator[memoryview]:
        """Yield the whole object, PARALLEL parts at a time."""
        step = PARALLEL * PART_BYTES
        for start in range(0, self.size, step):
            yield self.read([(start, min(start + step, self.size))])[0]

    def __reduce__(self) -> tuple[type[ObjectFile], tuple[str, int, str]]:
        return ObjectFile, (self.url, self.size, self.version)

    def _range(self, start: int, stop: int) -> memoryview:
        """Read one range with one request."""

        def get(store: Any) -> tuple[dict[str, Any], Any]:
            result = store.get(self._name, options={"range": (start, stop)})
            return result.meta, result.bytes()

        meta, data = self._request(get)
        if (meta["size"], _version(meta)) != (self.size, self.version) or len(data) != stop - start:
            raise Changed(f"{self.url} has been replaced since it was opened")
        return memoryview(data)

    def _request(self, send: Any) -> Any:
        """Send a request and return the answer. Errors name the object, but quote nothing from the store's answer."""
        from obstore.exceptions import BaseError

        try:
            if self._store is None:
                self._store = open_store(self._folder)
            return send(self._store)
        except FileNotFoundError:
            raise Changed(f"{self.url} is gone") from None
        except (BaseError, Unreachable) as error:
            # S3, Google and Azure answer with this error if a range lies past the end of the object.
            if "InvalidRange" in str(error):
                raise Changed(f"{self.url} has been replaced since it was opened") from None
            raise kind_of(error)(f"{self.url}: {reason(error)}") from None


def matching(pattern: str, key: str) -> list[str]:
    """The URLs of the objects that match a pattern. `*`, `?` and `[...]` are wildcards only in the last part of a URL.

    Args:
        pattern: URL with a pattern as its last part.
        key: key or option that names the URL, for messages.

    Raises:
        ValueError: the URL holds credentials.
        Unreachable: the store does not answer.
    """
    folder, _, wanted = pattern.rpartition("/")
    check_usable(folder, key)
    try:
        store = open_store(folder)
        with reported():
            names = [entry["path"] for entry in store.list_with_delimiter()["objects"]]
    except (Unreachable, ValueError) as error:
        raise at_start(error, f"cannot list {folder}: {error} ({key})") from None
    return [f"{folder}/{name}" for name in names if fnmatchcase(name, wanted)]


def merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sort ranges, drop the empty ranges, and join ranges with a gap of at most GAP_BYTES between them."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if found and start <= found[-1][1] + GAP_BYTES:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def _parts(start: int, stop: int) -> list[tuple[int, int]]:
    """Cut a range into parts of at most PART_BYTES, because a larger answer could take longer than REQUEST_S."""
    return [(at, min(at + PART_BYTES, stop)) for at in range(start, stop, PART_BYTES)]


def _joined(parts: list[memoryview]) -> memoryview:
    return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


def _version(meta: Any) -> str:
    return meta["e_tag"] or meta["last_modified"].isoformat()
