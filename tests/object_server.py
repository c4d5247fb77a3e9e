"""A small object store on the loopback interface: the requests of S3 that obstore sends, in memory, with faults."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bucket"


class Object(NamedTuple):
    data: bytes
    modified: datetime


class Request(NamedTuple):
    """A request that has arrived.

    Attributes:
        number: number of requests before this request.
        method: HTTP method.
        key: name of the object; '' for a listing.
        user: the sender's `AWS_ACCESS_KEY_ID`.
    """

    number: int
    method: str
    key: str
    user: str


class Server(ThreadingHTTPServer):
    """The store.

    Attributes:
        objects: the objects, by key.
        seen: requests so far.
        bytes_sent: number of bytes of objects that have been sent.
        fault: fault that a request meets: "503" and "silence" before it is done, "cut" after it is done, "flip" of a
            bit in the middle of its answer, '' for none.
        after: called with each request once it is done, before it is answered.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.RLock()
        self.objects: dict[str, Object] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.seen: list[Request] = []
        self.bytes_sent = 0
        self.fault: Callable[[Request], str] = lambda request: ""
        self.after: Callable[[Request], None] = lambda request: None
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables that lead a client of S3 to this store."""
        return {"AWS_ENDPOINT_URL": self.url, "AWS_ACCESS_KEY_ID": "user", "AWS_SECRET_ACCESS_KEY": "hunter2"}

    @staticmethod
    def now() -> datetime:
        """The time, as the store tells it."""
        return datetime.now(timezone.utc)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a client that goes away is no error of the server."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server
    # Without this, the kernel holds back a body that follows its headers (Nagle), for 40 ms.
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def handle_one_request(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle_one_request()

    def do_any(self) -> None:
        server, url = self.server, urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        key = unquote(url.path).removeprefix(f"/{BUCKET}").removeprefix("/")
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        with server.lock:
            signed = re.search(r"Credential=([^/]*)", self.headers.get("Authorization", ""))
            request = Request(len(server.seen), self.command, key, signed[1] if signed else "")
            server.seen.append(request)
            fault = server.fault(request)
        if fault == "silence":
            server.closing.wait()
            self.close_connection = True
        elif fault == "503":
            self.answer(503)
        else:
            with server.lock:
                status, headers, answer = self.done(key, query, body)
                server.bytes_sent += len(answer) if self.command == "GET" and key else 0
            server.after(request)
            if fault == "flip":
                middle = len(answer) // 2
                answer = answer[:middle] + bytes([answer[middle] ^ 1]) + answer[middle + 1 :]
            if fault == "cut":
                self.close_connection = True
                self.connection.close()
            else:
                self.answer(status, headers, answer)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_any

    def answer(self, status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def done(self, key: str, query: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Do what a request asks, and return the answer's status, headers and body."""
        objects, method = self.server.objects, self.command
        if method in ("GET", "HEAD"):
            return self.listed(query) if not key else self.read(key)
        if method == "DELETE":
            removed = self.server.uploads if "uploadId" in query else objects
            removed.pop(query.get("uploadId", key), None)
            return 204, {}, b""
        if method == "POST":
            return self.posted(key, query, body)
        if "partNumber" in query:
            self.server.uploads[query["uploadId"]][int(query["partNumber"])] = body
            return 200, {"ETag": tag(body)}, b""
        if source := self.headers.get("x-amz-copy-source"):
            body = objects[unquote(source).removeprefix("/").removeprefix(f"{BUCKET}/")].data
            self.keep(key, body)
            return 200, {}, f"<CopyObjectResult><ETag>{tag(body)}</ETag></CopyObjectResult>".encode()
        creates = self.headers.get("If-None-Match") == "*" or self.headers.get("x-goog-if-generation-match") == "0"
        if creates and key in objects:
            return 412, {}, b"<Error><Code>PreconditionFailed</Code></Error>"
        self.keep(key, body)
        return 200, {"ETag": tag(body)}, b""

    def keep(self, key: str, data: bytes) -> None:
        self.server.objects[key] = Object(data, self.server.now())

    def read(self, key: str) -> tuple[int, dict[str, str], bytes]:
        if key not in self.server.objects:
            return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"
        data, modified = self.server.objects[key]
        headers = {"ETag": tag(data), "Last-Modified": format_datetime(modified, usegmt=True)}
        if given := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            first, last = int(given[1]), min(int(given[2]), len(data) - 1)
            if first >= len(data):
                return 416, {}, b"<Error><Code>InvalidRange</Code></Error>"
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            return 206, headers, data[first : last + 1]
        return 200, headers, data

    def listed(self, query: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        folders: set[str] = set()
        found = ""
        for key, (data, modified) in sorted(self.server.objects.items()):
            if not key.startswith(prefix):
                continue
            head, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if cut:
                folders.add(prefix + head + delimiter)
                continue
            found += (
                f"<Contents><Key>{escape(key)}</Key><LastModified>{modified:%Y-%m-%dT%H:%M:%S.000Z}</LastModified>"
                f"<ETag>{tag(data)}</ETag><Size>{len(data)}</Size></Contents>"
            )
        for folder in sorted(folders):
            found += f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
        whole = f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>"
        return 200, {"Content-Type": "application/xml"}, whole.encode()

    def posted(self, key: str, query: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        server = self.server
        if "delete" in query:
            keys = re.findall("<Key>(.*?)</Key>", body.decode())
            for key in keys:
                server.objects.pop(key, None)
            deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            return 200, {}, f"<DeleteResult>{deleted}</DeleteResult>".encode()
        if "uploads" in query:
            upload = str(len(server.seen))
            server.uploads[upload] = {}
            start = "<InitiateMultipartUploadResult>{}</InitiateMultipartUploadResult>"
            return 200, {}, start.format(f"<UploadId>{upload}</UploadId>").encode()
        parts = server.uploads.pop(query["uploadId"], None)
        if parts is None:
            return 404, {}, b"<Error><Code>NoSuchUpload</Code></Error>"
        data = b"".join(parts[number] for number in sorted(parts))
        self.keep(key, data)
        ended = f"<CompleteMultipartUploadResult><ETag>{tag(data)}</ETag></CompleteMultipartUploadResult>"
        return 200, {}, ended.encode()


@functools.lru_cache(maxsize=16)
def tag(data: bytes) -> str:
    """The ETag of an object. Kept, as a client may ask for many ranges of a large object."""
    return f'"{hashlib.md5(data).hexdigest()}"'


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """A store that listens during the `with` block."""
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()
