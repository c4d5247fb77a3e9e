"""Choose the layouts that a search plans: the fastest layouts by estimate, among those that may fit."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from dtmega.planning.search.estimate import MARGIN, Estimate, Estimator
from dtmega.planning.search.layout import Layout
from dtmega.planning.search.layouts import Fallen, Layouts

EVERY_S = 0.5  # time between two progress reports
ROUNDS = 3  # the shortlist has ROUNDS times `top` layouts, in case none of the first layouts fits
KEPT = 3  # estimation keeps KEPT x as many layouts as the shortlist, because some layouts differ only in schedule
GIB = 2**30


class Entry(NamedTuple):
    """A layout with its estimate. A larger entry is a faster layout or, at equal speed, a layout with a smaller peak.

    Attributes:
        speed: negative time of a step.
        room: negative peak.
        number: number of the layout, which breaks ties.
        layout: layout that was estimated.
        estimate: estimate of the layout.
    """

    speed: float
    room: int
    number: int
    layout: Layout
    estimate: Estimate


class Shortlist:
    """The fastest layouts by estimate.

    The estimated peak and the planner's peak are assumed to differ by a factor of at most MARGIN. A layout is therefore
    rejected only if its estimate exceeds the memory by more than this factor.

    Args:
        room_bytes: memory that tensors can use.
        top: number of layouts to plan.

    Attributes:
        fallen: reasons why layouts were rejected.
        n_refused: number of layouts that training refuses.
        n_legal: number of layouts that training accepts.
        n_may_fit: number of legal layouts that may fit.
    """

    def __init__(self, room_bytes: int, top: int) -> None:
        self.room_bytes, self.top = room_bytes, top
        self.fallen = Fallen()
        self.n_refused = self.n_legal = self.n_may_fit = 0
        self._numbers = itertools.count()
        # Three heaps: layouts that fit even if the planner's peak exceeds the estimate by MARGIN, layouts whose
        # estimate fits, and layouts that may fit although their estimate does not.
        self._certain: list[Entry] = []
        self._likely: list[Entry] = []
        self._doubtful: list[Entry] = []

    def take(self, layouts: Layouts, estimator: Estimator, on_estimated: Callable[[int], object]) -> None:
        """Estimate all legal layouts.

        Args:
            layouts: all layouts of the job.
            estimator: estimator of memory and time.
            on_estimated: function that is called every EVERY_S seconds with the number of layouts estimated so far.

        Raises:
            ValueError: the fabric has no speed for the dtype.
        """
        told_s = time.monotonic()
        n_too_large = smallest_bytes = 0
        try:
            for layout in layouts.legal(self.fallen):
                self.n_legal += 1
                estimate = estimator.estimate(layout)
                if estimate.peak_bytes > MARGIN * self.room_bytes:
                    n_too_large += 1
                    smallest_bytes = min(smallest_bytes or estimate.peak_bytes, estimate.peak_bytes)
                else:
                    self._keep(layout, estimate)
                if time.monotonic() - told_s > EVERY_S:
                    told_s = time.monotonic()
                    on_estimated(self.n_legal)
        finally:
            self.n_refused = self.fallen.n
            if n_too_large:
                least, room = smallest_bytes / GIB, self.room_bytes / GIB
                self.fallen.add(f"does not fit by estimate: {least:.1f} GiB or more of {room:.1f} GiB", n_too_large)

    def _keep(self, layout: Layout, estimate: Estimate) -> None:
        self.n_may_fit += 1
        entry = Entry(-estimate.seconds, -estimate.peak_bytes, next(self._numbers), layout, estimate)
        heap = self._doubtful
        if MARGIN * estimate.peak_bytes <= self.room_bytes:
            heap = self._certain
        elif estimate.peak_bytes <= self.room_bytes:
            heap = self._likely
        if len(heap) < KEPT * ROUNDS * self.top:
            heapq.heappush(heap, entry)
        else:
            heapq.heappushpop(heap, entry)

    def chosen(self) -> list[Entry]:
        """The layouts to plan, in order.

        The first `top` layouts are the fastest, except that half of them must be layouts that are estimated to fit.
        More layouts follow, in case planning shows that none of the first layouts fits; among these, the layouts that
        certainly fit come first. If several equally fast layouts differ only in their schedule, only the layout with
        the smallest peak is kept.
        """
        likely = _without_equals([*self._certain, *self._likely])
        doubtful = _without_equals(self._doubtful)
        half = self.top - self.top // 2
        others = sorted([*likely[half:], *doubtful], reverse=True)
        n_others = self.top - len(likely[:half])
        first = sorted([*likely[:half], *others[:n_others]], reverse=True)
        certain = set(self._certain)
        rest = sorted(others[n_others:], key=lambda entry: (entry in certain, entry), reverse=True)
        return [*first, *rest][: ROUNDS * self.top]

    def count_others(self, planned: Collection[Layout], fastest_s: float) -> None:
        """Count the layouts that may fit but were not planned.

        Args:
            planned: layouts that the search planned or failed to plan.
            fastest_s: shortest estimated step time of a planned layout.
        """
        n = self.n_may_fit - len(planned)
        if n == 0:
            return
        message = "not planned"
        others = [entry for entry in (*self._certain, *self._likely, *self._doubtful) if entry.layout not in planned]
        if planned and others:
            times = -max(others).speed / fastest_s
            message = f"not planned: a step takes {times:.3g} times as long as the fastest by estimate, or longer"
        self.fallen.add(message, n)


def _without_equals(heap: Collection[Entry]) -> list[Entry]:
    """The entries of a heap, fastest first.

    If several entries differ only in schedule and peak, only the entry with the smallest peak is kept.
    """
    kept: dict[tuple[Layout, float], Entry] = {}
    for entry in sorted(heap, reverse=True):
        kept.setdefault((entry.layout._replace(schedule=""), entry.speed), entry)
    return list(kept.values())
