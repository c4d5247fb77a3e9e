"""Rows of samples whose tokens are in an object store: the tokens of a range of samples are read in one batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from dtmega.data.indexed_files.stored import fetched, planned
from dtmega.data.objectives.rows import Rows
from dtmega.data.sampling.samples import AnySamples


@dataclass(frozen=True)
class StoredRows(Rows):
    """`Rows` that make the samples twice: first to record which tokens the samples need, then from the fetched tokens.

    This works because no objective looks at the tokens to decide which tokens of the files a sample needs.
    """

    rows: Rows
    samples: AnySamples
    is_stored = True

    def __getitem__(self, indices: range) -> dict[str, Tensor]:
        """The rows of a range of samples.

        Raises:
            DataLost: a store does not answer, or an object has changed.
        """
        with planned() as plan:
            for g in indices:
                self.samples[g]
        with fetched(plan):
            return self.rows[indices]

    def in_turn(self, slices: Iterator[range]) -> Generator[dict[str, Tensor], None, None]:
        """Make the rows of each range in this process, in order; a thread reads one range ahead of the caller.

        Raises:
            DataLost: a store does not answer, or an object has changed.
        """
        reader = ThreadPoolExecutor(1, "read-ahead")
        ahead: deque[Future[dict[str, Tensor]]] = deque()
        try:
            for indices in slices:
                ahead.append(reader.submit(self.__getitem__, indices))
                if len(ahead) > 1:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            reader.shutdown(wait=False, cancel_futures=True)
