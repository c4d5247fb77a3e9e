"""The error of a run whose tokens can no longer be read."""

from __future__ import annotations


class DataLost(OSError):
    """Raised if tokens that a run needs cannot be read from an object store, or if a data worker has died.

    Attributes:
        is_temporary: whether the store just did not answer, or the worker was killed, so that the run can continue
            later. Otherwise, the object has been replaced or deleted since the run began, or the worker has failed.
    """

    def __init__(self, reason: str, is_temporary: bool) -> None:
        super().__init__(reason)
        self.is_temporary = is_temporary

    def __reduce__(self) -> tuple[type[DataLost], tuple[str, bool]]:
        return DataLost, (str(self), self.is_temporary)
