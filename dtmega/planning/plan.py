"""Plan a whole job: run one rank for each role, and extrapolate a shorter step to the full number of microbatches.

    plan = plan_job(cfg, mesh.resolve(cfg.mesh, 384), torch.device("cuda", 0))
    plan.roles[0].peak.peak_bytes

Ranks that differ only along dp, cp or tp do the same work, and the first of these ranks holds the largest shards. So
there is at most one role per pp rank. The pp ranks whose stages hold equal pieces of the model share a role, and the
one with the most microbatches in flight is run. `place` stands for a rank's coordinate on the pp axis.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dtmega import config, families
from dtmega.distributed import own_process
from dtmega.ops.cost import Piece
from dtmega.pipelining.split import plan_stages
from dtmega.pipelining.table import Table, make_table, sent_after
from dtmega.planning.counting.role import Role, plan_role
from dtmega.planning.extrapolation import enough_microbatches, extrapolated, in_flight, repeats
from dtmega.planning.prices.fabric import Fabric
from dtmega.planning.prices.step_time import StepTime, step_time

# Memory that a microbatch holds between its backward for inputs and its backward for weights, relative to its memory
# between forward and backward. Only used to choose which of several pp ranks to run.
HELD_BETWEEN_PARTS = 0.5
RunRole = Callable[..., Role]  # function that runs `plan_role`


class Plan(NamedTuple):
    """The plan of a job.

    Attributes:
        cfg: configuration of the job.
        sizes: resolved size of each mesh axis.
        device: device of every rank.
        n_microbatches: number of microbatches in a step on each rank.
        table: pipeline actions for all microbatches; None without a pipeline.
        stages: names of the model's pieces in each pipeline stage.
        roles: pp rank -> plan of a rank with this pp rank, over all microbatches. The pp ranks that share a role share
            a plan.
        run_microbatches: number of microbatches in the longest step that was run; if it is less than
            `n_microbatches`, the remaining microbatches are extrapolated.
        imbalance: load of each planned rank's experts, as a multiple of the mean load in the rank's ep group.
    """

    cfg: config.Config
    sizes: dict[str, int]
    device: torch.device
    n_microbatches: int
    table: Table | None
    stages: list[list[str]]
    roles: dict[int, Role]
    run_microbatches: int
    imbalance: float = 1.0

    @property
    def assumptions(self) -> list[str]:
        """Sentences that state the plan's assumptions about the data."""
        ep = self.cfg.mesh.ep
        if ep == 1:
            return []
        loads = "even loads: each of the ranks that share the experts"
        if self.imbalance > 1:
            loads = f"a load of {self.imbalance:g} times the mean: the fullest of the ranks that share the experts"
        return [
            f"assumed: {loads} (ep {ep}) receives {self.imbalance / ep:.1%} of their tokens' rows; how many it "
            f"receives in a run depends on the data (--imbalance)"
        ]

    @property
    def fullest(self) -> Role:
        """The role with the largest peak memory."""
        return max(self.roles.values(), key=lambda role: role.peak.peak_bytes)

    @property
    def places_by_role(self) -> list[list[int]]:
        """The pp ranks that share a role, one list per role, ordered by the first pp rank in each list."""
        places: dict[int, list[int]] = defaultdict(list)
        for place, role in self.roles.items():
            places[id(role)].append(place)
        return list(places.values())


def plan_job(
    cfg: config.Config,
    sizes: Mapping[str, int],
    device: torch.device,
    on_role: Callable[[int, int], object] = lambda done, all_roles: None,
    run_role: RunRole | None = None,
    imbalance: float = 1.0,
) -> Plan:
    """Plan all roles of a job.

    Args:
        cfg: configuration of the job, complete and checked for this layout (`checks.check`).
        sizes: resolved size of each mesh axis.
        device: fake device of every rank.
        on_role: function that is called before each role is planned, with the number of roles planned so far and the
            number of all roles.
        run_role: function that runs `plan_role`; None for `in_own_process`.
        imbalance: load of each planned rank's experts, as a multiple of the mean load in the rank's ep group.
    """
    run_role = run_role or in_own_process
    sizes = dict(sizes)
    data_size = sizes["dp_replicate"] * sizes["dp_shard"]
    n = cfg.batch.global_batch_size // (data_size * cfg.batch.micro_batch_size)
    pieces = families.pieces(cfg.model)
    stages = [[piece.name for piece in pieces]]
    table = None
    runs = enough_microbatches(cfg.pipeline, sizes["pp"], n, device)
    kinds: list[object] = [0]
    held = [0.0]
    if sizes["pp"] > 1:
        cut = plan_stages(cfg, pieces, sizes["pp"])
        stages = cut.pieces
        table = make_table(cfg.pipeline, sizes["pp"], n)
        kinds = [_kind(numbers, stages, pieces) for numbers in cut.ranks]
        held = in_flight(table, HELD_BETWEEN_PARTS)
        if sent_after(cfg.pipeline, sizes["pp"], n):
            kinds = list(range(sizes["pp"]))  # pp ranks with equal pieces order the two actions of a cell differently
    ranks_per_place = math.prod(sizes.values()) // sizes["pp"]
    planned: dict[object, Role] = {}
    for kind in dict.fromkeys(kinds):
        on_role(len(planned), len(set(kinds)))
        alike = [place for place, other in enumerate(kinds) if other == kind]
        fullest = max(alike, key=held.__getitem__)
        numbers = sorted({runs.shorter, runs.longer})
        role = run_role(cfg, sizes, fullest * ranks_per_place, device, numbers, imbalance)
        planned[kind] = extrapolated(role, n, runs.pairs[fullest])
    roles = {place: planned[kind] for place, kind in enumerate(kinds)}
    return Plan(cfg, sizes, device, n, table, stages, roles, runs.longer, imbalance)


def time_step(plan: Plan, fabric: Fabric) -> StepTime:
    """Predict the time of a plan's step on a fabric.

    Raises:
        ValueError: the fabric has no speed for the dtype.
    """
    works = {place: role.works for place, role in plan.roles.items()}
    later = sent_after(plan.cfg.pipeline, plan.sizes["pp"], plan.n_microbatches) if plan.table else {}
    ep = plan.cfg.mesh.ep
    return step_time(works, plan.table, fabric, plan.sizes, plan.n_microbatches, later, ep=ep)


def in_own_process(*arguments: Any) -> Role:
    """Run `plan_role` in a separate process, because DTensor's caches keep the process groups of an earlier role.

    Raises:
        ValueError: the role cannot be planned, because training would refuse the role too.
        ChildProcessError: the role's process was killed, or the planner failed in this process.
    """
    return own_process.run(plan_role, *arguments)


def _kind(numbers: Sequence[int], stages: Sequence[Sequence[str]], pieces: Sequence[Piece]) -> tuple[object, ...]:
    """A key that is equal for all pp ranks that do the same work.

    Args:
        numbers: indices of the pp rank's stages.
        stages: names of the pieces in each stage of the pipeline.
        pieces: pieces of the whole model, with their costs.
    """
    costs = {piece.name: piece._replace(name="") for piece in pieces}
    key: list[object] = []
    for number in numbers:
        stage = stages[number]
        is_first = pieces[0].name in stage
        is_last = pieces[-1].name in stage
        stays = number + 1 in numbers  # at the turn of a V, a stage passes its output to a stage on the same rank
        key.append((is_first, is_last, stays, tuple(costs[name] for name in stage)))
    return tuple(key)


class Totals(NamedTuple):
    """Totals of one rank's step, over all microbatches.

    Attributes:
        flops: operator -> number of floating-point operations.
        messages: (axis, collective, bytes of one message) -> number of messages.
    """

    flops: dict[str, int]
    messages: dict[tuple[str, str, int], int]


def totals(role: Role) -> Totals:
    """Add up the work items of a rank's step, including those of repeated microbatches."""
    flops: dict[str, float] = defaultdict(float)
    messages: dict[tuple[str, str, int], float] = defaultdict(float)
    for work, times in zip(role.works, repeats(role), strict=True):
        flops[work.operator] += work.flops * times
        if work.message is not None:
            message = work.message
            messages[message.axis, message.collective, message.n_bytes] += times
    whole_flops = {operator: round(n) for operator, n in flops.items() if n}
    whole_messages = {key: round(times) for key, times in messages.items()}
    return Totals(whole_flops, whole_messages)
