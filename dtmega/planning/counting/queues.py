"""The fake device's streams and events, which run nothing and only record what each work item waits for."""

from __future__ import annotations

from typing import Any, ClassVar

from dtmega.planning.work import COMPUTE


class Stream:
    """A queue of work, with the interface of `torch.cuda.Stream`.

    Attributes:
        name: name of the stream in `Work.stream`.
        last: index of the last work item on the stream; -1 if the stream has no work item yet.
        awaited: indices of work items on other streams that the next work item on this stream waits for.
    """

    all: ClassVar[list[Stream]] = []
    _streams: ClassVar[Streams]  # the device's streams, set by `Streams`

    def __init__(self, *_: Any, name: str = "", **__: Any) -> None:
        self.name = name or f"stream {len(Stream.all)}"
        Stream.all.append(self)
        self.last = -1
        self.awaited: set[int] = set()

    def wait_stream(self, stream: Stream) -> None:
        """Make later work on this stream wait for all work that is on `stream` now."""
        if stream is not self:
            self.awaited |= stream.before_next()

    def wait_event(self, event: Event) -> None:
        """Make later work on this stream wait for the work that the event marks."""
        self.awaited |= event.works

    def record_event(self, event: Event | None = None) -> Event:
        """Mark the work that is on this stream now."""
        event = event or Event()
        event.works = self.before_next()
        return event

    def before_next(self) -> set[int]:
        """The indices of work items that end before the next work item on this stream begins."""
        last = {self.last} if self.last >= 0 else set()
        return last | self.awaited

    def queue(self, number: int) -> tuple[int, ...]:
        """Queue a work item on the stream. Return the indices of the items on other streams that must end first."""
        waits = tuple(sorted(self.awaited))
        self.last = number
        self.awaited = set()
        return waits

    def synchronize(self) -> None:
        """Do nothing, because a plan does not time waits on the host."""


class Event:
    """A mark in a stream, with the interface of `torch.cuda.Event`.

    Attributes:
        works: indices of the work items that end before the mark.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        self.works: set[int] = set()

    def record(self, stream: Stream | None = None) -> Event:
        """Mark the work that is now on `stream`; None means the current stream."""
        return (stream or Stream._streams.current).record_event(self)

    def wait(self, stream: Stream | None = None) -> None:
        """Make later work on a stream wait for the marked work."""
        (stream or Stream._streams.current).wait_event(self)

    def query(self) -> bool:
        """Return True, because nothing runs and so no work is pending."""
        return True

    def synchronize(self) -> None:
        """Do nothing, because a plan does not time waits on the host."""


class Streams:
    """The streams of one fake device.

    Attributes:
        default: stream on which kernels run unless the program chooses a different stream.
        current: stream on which kernels run now.
    """

    def __init__(self) -> None:
        Stream.all = []
        self.default = Stream(name=COMPUTE)
        self.current = self.default
        self._of_groups: dict[str, Stream] = {}
        Stream._streams = self

    def of_group(self, name: str) -> Stream:
        """The stream on which a process group sends its messages."""
        if name not in self._of_groups:
            self._of_groups[name] = Stream(name=f"messages over {name}")
        return self._of_groups[name]

    def restart(self) -> None:
        """Forget all work. Call this method when the indices of work items start again at 0."""
        for stream in Stream.all:
            stream.last = -1
            stream.awaited = set()

    def use(self, stream: Stream | None) -> Using:
        """A context manager that makes a stream the current stream (`torch.cuda.stream`)."""
        return Using(self, stream)

    def set_current(self, stream: Stream) -> None:
        """Make a stream the current stream (`torch.cuda.set_stream`)."""
        self.current = stream


class Using:
    """Changes the current stream inside a `with` block."""

    def __init__(self, streams: Streams, stream: Stream | None) -> None:
        self._streams, self._stream = streams, stream
        self._before = streams.current

    def __enter__(self) -> None:
        self._before = self._streams.current
        if self._stream is not None:
            self._streams.current = self._stream

    def __exit__(self, *_: object) -> None:
        self._streams.current = self._before
