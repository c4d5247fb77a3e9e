"""The search itself: estimate the legal layouts, plan the fastest layouts that may fit, and rank the plans.

Training's own checks determine the legal layouts (`layouts.py`). Closed forms estimate the memory and the time of each
legal layout (`estimate.py`). The fastest layouts among those that may fit are planned: their real steps run on fake
devices (`plan.plan_job`), and their time is simulated (`plan.time_step`). Only plans are ranked.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch

from dtmega import config
from dtmega.planning.answers.job import check_imbalance, with_dtype
from dtmega.planning.plan import Plan, time_step
from dtmega.planning.prices.fabric import Fabric
from dtmega.planning.prices.step_time import StepTime
from dtmega.planning.search.estimate import Estimate, Estimator
from dtmega.planning.search.layout import SECTIONS, Layout, describe, with_layout
from dtmega.planning.search.layouts import Layouts, Reason
from dtmega.planning.search.planners import Planners, TooLarge
from dtmega.planning.search.shortlist import Entry, Shortlist

AT_ONCE = 2  # number of plans made at once


class Progress(NamedTuple):
    """The state of a search.

    Attributes:
        doing: current phase of the search.
        done, all: numbers of processed layouts and of all layouts; `all` is 0 while the number is unknown.
        left_s: estimated time until the search ends; None while the time is unknown.
        best: best plan so far.
    """

    doing: str
    done: int
    all: int
    left_s: float | None
    best: Result | None

    def __str__(self) -> str:
        line = f"{self.doing}: {self.done:,}" + (f" of {self.all:,}" if self.all else "")
        if self.left_s is not None:
            line += f", about {self.left_s:.0f} s left"
        if self.best is not None and self.best.fits:
            line += f"; best so far {self.best.tokens_per_s:,.0f} tokens/s"
        return line


class Summary(NamedTuple):
    """The memory of a plan's fullest rank.

    Attributes:
        place: index of the rank in its pipeline.
        peak_bytes: peak memory of the rank.
        action: action of the schedule during which the peak occurs.
        at_peak: bytes in use at the peak, keyed by purpose, such as "gradients".
    """

    place: int
    peak_bytes: int
    action: str
    at_peak: dict[str, int]


class Result(NamedTuple):
    """A layout that was planned.

    Attributes:
        overrides: keys and values of the layout, as in `--section.key value`.
        layout: layout that was planned.
        estimate: estimate by which the layout was chosen.
        summary: memory of the fullest rank.
        time: predicted time of a step.
        tokens_per_s: predicted tokens per second of all ranks.
        fits: whether the peak and the reserve together fit into the memory.
    """

    overrides: dict[str, Any]
    layout: Layout
    estimate: Estimate
    summary: Summary
    time: StepTime
    tokens_per_s: float
    fits: bool


class Planned(NamedTuple):
    """The plans made so far.

    Attributes:
        results: results of the layouts that were planned.
        failed: layouts whose plans were abandoned, with the reason (a rank does not fit or cannot be planned).
    """

    results: list[Result]
    failed: list[tuple[Entry, ValueError]]


class Found(NamedTuple):
    """The result of a search.

    Attributes:
        ranked: planned layouts. Layouts that fit come first, ordered by tokens per second; the rest follow, ordered by
            peak. A layout whose plan was abandoned because one rank does not fit is counted in `fallen` instead.
        fallen: reasons why the remaining layouts were rejected, with the number of layouts for each reason.
        estimated: fastest layouts by estimate, if the search was interrupted before any layout was planned.
        fixed: keys that were not varied, with their values.
        world: number of ranks.
        n_layouts, n_legal: number of all layouts, and number of layouts that training accepts.
        memory_bytes, reserve_bytes: memory of a device, and the part of the memory that tensors cannot use.
        seconds: duration of the search.
        interrupted: whether the user ended the search early.
        imbalance: largest load of a rank's experts in the plans with ep, as a multiple of the mean load in the rank's
            ep group.
    """

    ranked: list[Result]
    fallen: list[Reason]
    estimated: list[Entry]
    fixed: dict[str, Any]
    world: int
    n_layouts: int
    n_legal: int
    memory_bytes: int
    reserve_bytes: int
    seconds: float
    interrupted: bool
    imbalance: float = 1.0

    @property
    def best(self) -> Result | None:
        """The fastest layout among the planned layouts that fit; None if no planned layout fits."""
        return self.ranked[0] if self.ranked and self.ranked[0].fits else None


def _ignore(progress: Progress) -> None:
    """Report nothing. This function is the default of `on_progress`."""


def search(
    cfg: config.Config,
    fixed_keys: Collection[str],
    world: int,
    fabric: Fabric,
    memory_bytes: int,
    reserve_bytes: int,
    top: int = 10,
    device: torch.device | None = None,
    on_progress: Callable[[Progress], object] = _ignore,
    imbalance: float = 1.0,
) -> Found:
    """Search for the fastest layout that fits.

    A KeyboardInterrupt ends the search early, and the results so far are returned.

    Args:
        cfg: configuration, completed by `families.resolve`. The global batch, and all keys that the search does not
            vary, keep their values.
        fixed_keys: additional keys, such as "mesh.tp", that the search must not vary.
        world: number of ranks.
        fabric: fabric of the cluster.
        memory_bytes: memory of a device.
        reserve_bytes: part of the memory that tensors cannot use.
        top: number of layouts to plan.
        device: fake device of every rank; None for a GPU.
        on_progress: function that is called repeatedly while the search runs.
        imbalance: largest load of a rank's experts in the plans with ep, as a multiple of the mean load in the rank's
            ep group; at most the size of the group. Estimates assume even loads.

    Raises:
        ValueError: a fixed key is not among the varied keys, the fixed sizes of the mesh do not divide the number of
            ranks, the fabric has no speed for the dtype, or no layout can have the load `imbalance`.
    """
    started_s = time.monotonic()
    device = device or torch.device("cuda", 0)
    cfg = with_dtype(cfg, device)
    layouts = Layouts(cfg, fixed_keys, world, device)
    check_imbalance(imbalance, layouts.fixed.get("ep", max(1, layouts.n_experts)))
    shortlist = Shortlist(memory_bytes - reserve_bytes, top)
    planned = Planned([], [])
    interrupted = False
    try:
        estimator = Estimator(cfg, layouts.pieces, fabric)
        shortlist.take(layouts, estimator, lambda n: on_progress(Progress("estimating layouts", n, 0, None, None)))
        _plan_best(cfg, shortlist, fabric, device, planned, on_progress, imbalance)
    except KeyboardInterrupt:
        interrupted = True
    done = {result.layout: result.estimate.seconds for result in planned.results}
    done |= {entry.layout: entry.estimate.seconds for entry, _ in planned.failed}
    shortlist.count_others(done, min(done.values(), default=0.0))
    for entry, error in planned.failed:
        why = str(error)
        if not isinstance(error, TooLarge):
            why = f"cannot be planned: {error} ({describe(entry.layout)})"
        shortlist.fallen.add(why)
    return Found(
        ranked=sorted(planned.results, key=_rank),
        fallen=shortlist.fallen.reasons,
        estimated=[] if planned.results else shortlist.chosen()[:top],
        fixed={f"{SECTIONS[key]}.{key}": value for key, value in layouts.fixed.items()},
        world=world,
        n_layouts=shortlist.n_refused + shortlist.n_legal,
        n_legal=shortlist.n_legal,
        memory_bytes=memory_bytes,
        reserve_bytes=reserve_bytes,
        seconds=time.monotonic() - started_s,
        interrupted=interrupted,
        imbalance=imbalance,
    )


def _rank(result: Result) -> tuple[bool, float]:
    return not result.fits, -result.tokens_per_s if result.fits else result.summary.peak_bytes


def _plan_best(
    cfg: config.Config,
    shortlist: Shortlist,
    fabric: Fabric,
    device: torch.device,
    planned: Planned,
    on_progress: Callable[[Progress], object],
    imbalance: float,
) -> None:
    """Plan the first `top` layouts. If none of these layouts fits, plan more layouts until one fits.

    Each result is added to `planned` immediately, so that no result is lost if the search is interrupted.
    """
    started_s = time.monotonic()
    chosen = shortlist.chosen()
    n_begun = n_done = 0
    n_all = min(shortlist.top, len(chosen))
    finish = functools.partial(result_of, fabric=fabric, room_bytes=shortlist.room_bytes)
    with Planners[Entry, Result](AT_ONCE, shortlist.room_bytes) as planners:
        while True:
            if not any(result.fits for result in planned.results):
                n_all = min(len(chosen), max(n_all, n_done + AT_ONCE))
            while planners.n_running < AT_ONCE and n_begun < n_all:
                entry = chosen[n_begun]
                end = functools.partial(finish, layout=entry.layout, estimate=entry.estimate)
                job = with_layout(cfg, entry.layout), entry.layout.sizes, device
                planners.begin(entry, *job, end, min(imbalance, entry.layout.ep))
                n_begun += 1
            if not planners.n_running:
                return
            left_s = (time.monotonic() - started_s) / n_done * (n_all - n_done) if n_done else None
            best = min(planned.results, key=_rank, default=None)
            on_progress(Progress("planning layouts", n_done, n_all, left_s, best))
            for entry, result in planners.done():
                n_done += 1
                if isinstance(result, ValueError):
                    planned.failed.append((entry, result))
                else:
                    planned.results.append(result)


def result_of(plan: Plan, layout: Layout, estimate: Estimate, fabric: Fabric, room_bytes: int) -> Result:
    """The result of a plan.

    Args:
        plan: plan of the job.
        layout: layout that was planned.
        estimate: estimate of the layout.
        fabric: fabric of the cluster.
        room_bytes: memory that tensors can use.

    Raises:
        ValueError: the fabric has no speed for the dtype.
    """
    time_of_step = time_step(plan, fabric)
    place = max(plan.roles, key=lambda number: plan.roles[number].peak.peak_bytes)
    peak = plan.roles[place].peak
    summary = Summary(place, peak.peak_bytes, peak.action, peak.at_peak)
    tokens = plan.cfg.batch.global_batch_size * plan.cfg.data.seq_len
    fits = peak.peak_bytes <= room_bytes
    tokens_per_s = tokens / time_of_step.seconds
    return Result(layout.overrides, layout, estimate, summary, time_of_step, tokens_per_s, fits)
