"""Requests to an object store, with time limits and retries, and without secrets in error messages."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from dtmega.files import optional_imports, urls
from dtmega.files.outages import Denied, Unreachable

CONNECT_S = 10
REQUEST_S = 30  # time limit for one response, including its body
RETRY_S = 120  # after this time, a failed request is not retried
MAX_RETRIES = 6
PAUSE_S = 0.2  # pause before the first retry; doubled for each further retry
PUBLISH_TRIES = 3
PARALLEL = 8  # number of concurrent requests
PART_BYTES = 8 * 2**20  # size of an upload's parts (at most 10,000 parts, 80 GiB), and largest range of one request


def check_usable(url: str, key: str) -> None:
    """Refuse a URL that holds credentials, because the URL is copied into config.toml, logs and trackers.

    Args:
        url: the URL.
        key: key or option that names the URL, for the message.

    Raises:
        ValueError: `urls.check` refuses the URL; or it is of an object store, and obstore is not installed.
    """
    try:
        urls.check(url)
    except ValueError as error:
        raise ValueError(f"{error} ({key})") from None
    if urls.is_object_store(url):
        optional_imports.check("obstore", "s3", f"{url} ({key})")


def open_store(url: str) -> Any:
    """Open the object store at a URL, with credentials from the environment. No request is sent yet.

    Raises:
        ValueError: the URL is not of this form.
    """
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    scheme, _, rest = url.partition("://")
    # obstore does not accept the scheme gcs.
    spelled = f"gs://{rest}" if scheme == "gcs" else url
    options: dict[str, Any] = {"client_options": _client_options(), "retry_config": _retries()}
    try:
        return from_url(spelled, **options)
    except BaseError as error:
        raise ValueError(reason(error)) from None


def put_new(store: Any, key: str, data: bytes) -> None:
    """Create an object, unless the store already has an object with this key.

    Raises:
        FileExistsError: the store has an object with this key and different content.
        Unreachable: the store did not answer.
    """
    from obstore.exceptions import AlreadyExistsError, BaseError

    for tries_left in reversed(range(PUBLISH_TRIES)):
        try:
            store.put(key, data, mode="create", use_multipart=False)
            return
        except BaseError as error:
            # If the request succeeded and only the answer was lost, the store already holds this data under the key.
            with reported(), contextlib.suppress(FileNotFoundError):
                if bytes(store.get(key).bytes()) == data:
                    return
            if isinstance(error, AlreadyExistsError):
                raise FileExistsError(f"{key} exists already") from None
            if not tries_left:
                raise kind_of(error)(reason(error)) from None


def kind_of(error: Exception) -> type[Unreachable]:
    """The class of the `Unreachable` to raise for an error of obstore."""
    from obstore import exceptions

    wrong_request = (
        exceptions.InvalidPathError,
        exceptions.PermissionDeniedError,
        exceptions.UnauthenticatedError,
        exceptions.UnknownConfigurationKeyError,
    )
    return Denied if isinstance(error, (*wrong_request, Denied)) else Unreachable


def reason(error: Exception) -> str:
    """Describe an obstore error in one line, without the addresses, queries and other text that the error quotes."""
    text = str(error)
    head = re.sub(r"\b(?!s3|gs|az)\w+://\S+", "a request", text.partition("\n")[0].partition("<")[0]).strip(" :")
    code = re.search(r"<Code>(\w+)</Code>", text)
    return f"{head} ({code[1]})" if code else head


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Turn obstore's errors about missing objects into FileNotFoundError, and all other errors into `Unreachable`.

    The new messages do not name the endpoint. A FileExistsError from `put_new` and an `Unreachable` pass unchanged.
    """
    from obstore.exceptions import BaseError

    try:
        yield
    except (FileExistsError, Unreachable):
        raise
    except FileNotFoundError as error:
        raise FileNotFoundError(reason(error)) from None
    # obstore's writers raise plain OSErrors, which quote the endpoint.
    except (BaseError, OSError) as error:
        raise kind_of(error)(reason(error)) from None


def _client_options() -> dict[str, Any]:
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
    return {
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "timeout": timedelta(seconds=REQUEST_S),
        # As in other libraries, unencrypted HTTP is allowed if the user chose an http:// endpoint.
        "allow_http": endpoint.startswith("http://"),
    }


def _retries() -> dict[str, Any]:
    backoff = {"init_backoff": timedelta(seconds=PAUSE_S), "max_backoff": timedelta(seconds=10), "base": 2}
    return {"max_retries": MAX_RETRIES, "retry_timeout": timedelta(seconds=RETRY_S), "backoff": backoff}
