"""Plan a whole job: one rank for each role, and the step's full number of microbatches from a shorter step.

    plan = plan_job(cfg, mesh.resolve(cfg.mesh, 384), torch.device("cuda", 0))
    plan.roles[0].peak.peak_bytes

Ranks that differ only along dp, cp or tp do alike; the first of them holds the largest parts. So the roles are the
places of the pipeline, and places whose stages hold alike pieces share a role.
"""

from __future__ import annotations

import math
import multiprocessing
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import torch

from dtmega import config, families
from dtmega.ops.cost import Piece
from dtmega.pipelining import schedule
from dtmega.pipelining.split import plan_stages
from dtmega.pipelining.table import Table, make_table
from dtmega.planning.ledger import Span
from dtmega.planning.recorder import BETWEEN_STAGES
from dtmega.planning.role import Role, plan_role
from dtmega.planning.work import Work

FEW = 3  # microbatches that show a step without a pipeline: the first one, one in the middle, and the last one


class Plan(NamedTuple):
    """The plan of a job.

    Attributes:
        cfg: the job's configuration.
        sizes: resolved size of each mesh axis.
        device: device that every rank has.
        n_microbatches: number of microbatches of a step on each rank.
        table: the pipeline's actions with all microbatches; None without a pipeline.
        stages: names of the pieces of each pipeline stage, and stage numbers of each place; None without a pipeline.
        roles: place in the pipeline -> plan of a rank at this place, with all microbatches. Places of one role share a
            plan.
        run_microbatches: number of microbatches that were run; if it is less than `n_microbatches`, the rest is
            extrapolated.
    """

    cfg: config.Config
    sizes: dict[str, int]
    device: torch.device
    n_microbatches: int
    table: Table | None
    stages: list[list[str]]
    roles: dict[int, Role]
    run_microbatches: int

    @property
    def fullest(self) -> Role:
        """The role with the highest peak."""
        return max(self.roles.values(), key=lambda role: role.peak.peak_bytes)


def plan_job(
    cfg: config.Config,
    sizes: Mapping[str, int],
    device: torch.device,
    on_role: Callable[[int, int], object] = lambda done, all_roles: None,
    run_role: Callable[[config.Config, dict[str, int], int, torch.device, int], Role] | None = None,
) -> Plan:
    """Plan all roles of a job.

    Args:
        cfg: the job's configuration, complete and checked for this layout (`parallelize.check`).
        sizes: resolved size of each mesh axis.
        device: the device that is pretended on every rank.
        on_role: function that is called before each role, with the number of roles that are done and of all roles.
        run_role: function that runs `plan_role`; None for `in_own_process`.
    """
    run_role = run_role or in_own_process
    sizes = dict(sizes)
    data_size = sizes["dp_replicate"] * sizes["dp_shard"]
    n = cfg.batch.global_batch_size // (data_size * cfg.batch.micro_batch_size)
    pieces = families.pieces(cfg.model)
    stages = [[piece.name for piece in pieces]]
    table = None
    n_run = min(n, FEW)
    kinds: list[object] = [0]
    if sizes["pp"] > 1:
        cut = plan_stages(cfg, pieces, sizes["pp"])
        stages = cut.pieces
        table = make_table(cfg.pipeline, sizes["pp"], n)
        n_run = enough_microbatches(cfg.pipeline, sizes["pp"], n)
        kinds = [_kind([stages[number] for number in numbers], pieces) for numbers in cut.ranks]
    ranks_per_place = math.prod(sizes.values()) // sizes["pp"]
    planned: dict[object, Role] = {}
    for place, kind in enumerate(kinds):
        if kind not in planned:
            on_role(len(planned), len(set(kinds)))
            role = run_role(cfg, sizes, place * ranks_per_place, device, n_run)
            planned[kind] = extrapolated(role, place, cfg.pipeline, sizes["pp"], n)
    roles = {place: planned[kind] for place, kind in enumerate(kinds)}
    return Plan(cfg, sizes, device, n, table, stages, roles, n_run)


def in_own_process(cfg: config.Config, sizes: dict[str, int], rank: int, device: torch.device, n: int) -> Role:
    """Run `plan_role` in a process of its own, because DTensor's caches keep the process groups of an earlier role."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dtmega.planning.role"])
    with ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(plan_role, cfg, sizes, rank, device, n).result()


def _kind(stages: Sequence[Sequence[str]], pieces: Sequence[Piece]) -> tuple[object, ...]:
    """A key that is equal for places with the same work: the costs of their pieces, and whether they are at an end."""
    costs = {piece.name: piece._replace(name="") for piece in pieces}
    key: list[object] = []
    for stage in stages:
        is_first = pieces[0].name in stage
        is_last = pieces[-1].name in stage
        key.append((is_first, is_last, tuple(costs[name] for name in stage)))
    return tuple(key)


def in_flight(table: Table) -> list[int]:
    """The most microbatches whose forward has run and whose backward has not ended, counted over the stages of a rank.

    Returns:
        The number for each rank.
    """
    most = []
    for row in table:
        now = highest = 0
        for action in row:
            now += {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind]
            highest = max(highest, now)
        most.append(highest)
    return most


def enough_microbatches(pipeline: config.Pipeline, pp: int, n: int) -> int:
    """The smallest number of microbatches that shows the steady state of a step with n microbatches.

    It has as many microbatches in flight on every rank, or, in schedules that keep all microbatches in flight, enough
    to extrapolate.
    """
    if pipeline.csv:
        return n
    wanted = in_flight(make_table(pipeline, pp, n))
    for fewer in range(FEW, n):
        if schedule.broken_rule(pipeline, pp, fewer):
            continue
        if fewer > 2 * pp or in_flight(make_table(pipeline, pp, fewer)) == wanted:
            return fewer
    return n


def extrapolated(role: Role, place: int, pipeline: config.Pipeline, pp: int, n: int) -> Role:
    """The plan of a rank for n microbatches, from a plan of a step with fewer microbatches.

    Buffers between stages grow with the number of microbatches, and activations with the number in flight. All
    microbatches but the first and the last do alike, so the works of one of them are repeated.

    Args:
        role: plan of the shorter step.
        place: place of the rank in the pipeline.
        pipeline: the [pipeline] section of the configuration.
        pp: number of ranks in the pipeline.
        n: number of microbatches.
    """
    n_run = role.n_microbatches
    if n == n_run:
        return role
    flight = 1.0
    if pp > 1:
        before, after = (in_flight(make_table(pipeline, pp, m))[place] for m in (n_run, n))
        flight = after / before
    spans = []
    for span in role.spans:
        at_peak = {}
        for owner, n_bytes in span.at_peak.items():
            factor = 1.0
            if owner == BETWEEN_STAGES:
                factor = n / n_run
            elif owner.startswith("activations"):
                factor = flight
            at_peak[owner] = round(n_bytes * factor)
        added = sum(at_peak.values()) - sum(span.at_peak.values())
        spans.append(Span(span.action, span.peak_bytes + added, at_peak, span.held_bytes + added))
    held = dict(role.held)
    held[BETWEEN_STAGES] = round(held.get(BETWEEN_STAGES, 0) * n / n_run)
    return role._replace(n_microbatches=n, held=held, spans=spans, repeated=n - n_run)


class Totals(NamedTuple):
    """Totals of one rank's step, over all microbatches.

    Attributes:
        flops: floating-point operations by operator.
        messages: number of messages by (axis, collective, bytes of one message).
    """

    flops: dict[str, int]
    messages: dict[tuple[str, str, int], int]


def totals(role: Role) -> Totals:
    """Add up the works of a rank's step, those of repeated microbatches included."""
    flops: dict[str, float] = defaultdict(float)
    messages: dict[tuple[str, str, int], float] = defaultdict(float)
    n_run = role.n_microbatches - role.repeated
    for work in role.works:
        times = times_repeated(work, n_run, role.n_microbatches)
        flops[work.operator] += work.flops * times
        if work.message is not None:
            message = work.message
            messages[message.axis, message.collective, message.n_bytes] += times
    whole_flops = {operator: round(n) for operator, n in flops.items() if n}
    whole_messages = {key: round(times) for key, times in messages.items()}
    return Totals(whole_flops, whole_messages)


def times_repeated(work: Work, n_run: int, n: int) -> float:
    """How often a work of the shorter step happens in the whole step.

    Args:
        work: the work.
        n_run: number of microbatches of the shorter step.
        n: number of microbatches of the whole step.
    """
    if work.message is not None and work.message.peer >= 0:
        return n / n_run
    middle = str(n_run // 2)
    _, letter, microbatch = work.action.partition(work.action.strip("0123456789"))
    if letter in ("F", "B", "I", "W") and microbatch == middle:
        return 1 + n - n_run
    return 1
