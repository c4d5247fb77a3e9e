"""The planner's answer as data: whether the job fits, what each rank holds and sends, and how long a step takes.

    answer = answer_job(lay_out(config.load(argv), 384, machine_of("cuda", "a100-ib")))
    answer.fits, answer.step.seconds

`text.py` writes the answer for people; `as_dict` converts the answer for programs. The counts come from `plan_job`.
All times in seconds are predictions for the fabric.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dtmega import families
from dtmega.models.trainable import Elements
from dtmega.ops import cost
from dtmega.planning.answers.comparisons import Comparison, compare_bubble, compare_role
from dtmega.planning.answers.job import Job
from dtmega.planning.counting.role import MOMENTS, PARAMETERS, Role
from dtmega.planning.extrapolation import repeats
from dtmega.planning.plan import Plan, plan_job, time_step, totals
from dtmega.planning.prices.budget import Budget, budget
from dtmega.planning.prices.fabric import Fabric
from dtmega.planning.prices.rank_time import POINT_TO_POINT, groups_of, time_rank
from dtmega.planning.prices.step_time import StepTime

Report = Callable[[int, int], object]  # called before each role: (number of planned roles, number of all roles)


class Traffic(NamedTuple):
    """All messages of one kind that one rank exchanges on one axis in one step.

    Attributes:
        axis: name of the process group.
        collective: kind of message, as in `Message.collective`.
        n_ranks: number of ranks in the group; 2 for messages between two ranks.
        n_messages: number of messages.
        n_bytes: sum of the messages' sizes. A message's size is the size of its largest buffer on the rank.
        seconds: predicted duration of the messages; None for messages between pipeline stages, which are part of the
            schedule's time.
        exposed_s: predicted time during which computation waits for the messages; None for messages between stages.
    """

    axis: str
    collective: str
    n_ranks: int
    n_messages: int
    n_bytes: int
    seconds: float | None
    exposed_s: float | None


class RoleAnswer(NamedTuple):
    """The answer for all ranks that do the same work.

    Attributes:
        plan: memory and work of one of the ranks.
        places: coordinates of the ranks on the pp axis (pipeline ranks).
        ranks: numbers of the first and the last rank at each pipeline rank.
        traffic: messages of one rank.
        flops: operator -> number of floating-point operations on one rank.
        comparisons: comparisons of the counts with formulas from the literature.
    """

    plan: Role
    places: list[int]
    ranks: list[tuple[int, int]]
    traffic: list[Traffic]
    flops: dict[str, int]
    comparisons: list[Comparison]


class Answer(NamedTuple):
    """The planner's whole answer for a job.

    Attributes:
        job: configuration, layout and hardware.
        plan: counts for every role.
        roles: one answer per role, in the order of the pipeline.
        parameters: total number of weights in the model.
        elements: numbers of trained and of frozen weights, including adapters.
        step: predicted time of a step.
        bubble: comparison of the schedule's bubble with a formula; None without a pipeline or a formula.
        tokens: number of tokens in the whole run.
        budget: predicted cost of training on `tokens` tokens.
    """

    job: Job
    plan: Plan
    roles: list[RoleAnswer]
    parameters: int
    elements: Elements
    step: StepTime
    bubble: Comparison | None
    tokens: float
    budget: Budget

    @property
    def fits(self) -> bool:
        """True if the fullest rank's peak and the reserve together fit into the device's memory."""
        return self.job.machine.memory.holds(self.plan.fullest.peak.peak_bytes)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the tensors in one checkpoint: the trained weights and the optimizer's moments, both in float32."""
        trained = self.elements.trained
        if self.job.cfg.optim.name == "muon":
            # Muon keeps one moment for each matrix, and two moments for each of the remaining parameters.
            with torch.device("meta"):
                whole = families.build(self.job.cfg)
            shapes = {whole.full_name(name): parameter.shape for name, parameter in whole.named_parameters()}
            of_matrices = sum(shapes[name].numel() for name in whole.matrices())
            return torch.float32.itemsize * (3 * trained - of_matrices)
        # Rounding drops the step counts, which the optimizer keeps per tensor. A pp rank may hold only frozen weights,
        # so use the role that holds the most trained weights.
        held = max((role.plan.held for role in self.roles), key=lambda held: held.get(PARAMETERS, 0))
        moments_per_weight = round(held.get(MOMENTS, 0) / held[PARAMETERS])
        return trained * torch.float32.itemsize * (1 + moments_per_weight)


def answer_job(job: Job, tokens: float | None = None, on_role: Report = lambda done, all_roles: None) -> Answer:
    """Plan a job and price it.

    Args:
        job: configuration, layout and hardware.
        tokens: number of tokens to price; None for the number in the configuration's [train] section.
        on_role: function that is called before each role.
    """
    plan = plan_job(job.cfg, job.sizes, job.machine.device, on_role, imbalance=job.imbalance)
    return price(plan, job, tokens)


def price(plan: Plan, job: Job, tokens: float | None = None) -> Answer:
    """Turn the counts of a plan into an answer. `job` and `tokens` are the same as in `answer_job`."""
    fabric = job.machine.fabric
    cfg = job.cfg
    pieces = families.pieces(cfg.model)
    elements = families.elements(cfg)
    step = time_step(plan, fabric)
    data = cfg.data
    of_run = families.pieces_of_run(cfg)
    per_token = cost.flops_per_token(of_run, data.seq_len, data.mask_prob, data.decoder_length)
    if tokens is None:
        tokens = float(cfg.end(0, 0).samples * cfg.data.seq_len)
    tokens_per_step = cfg.batch.global_batch_size * cfg.data.seq_len
    spent = budget(step.seconds, tokens_per_step, per_token, job.world, fabric, cfg.precision.params, tokens)
    roles = []
    for numbers in plan.places_by_role:
        role = plan.roles[numbers[0]]
        per_place = job.world // job.sizes["pp"]
        ranks = [(place * per_place, (place + 1) * per_place - 1) for place in numbers]
        comparisons = compare_role(job, plan, numbers[0], pieces, elements)
        messages = traffic(role, fabric, job.sizes, cfg.mesh.ep)
        roles.append(RoleAnswer(role, numbers, ranks, messages, totals(role).flops, comparisons))
    return Answer(
        job=job,
        plan=plan,
        roles=roles,
        parameters=cost.n_parameters(pieces),
        elements=elements,
        step=step,
        bubble=compare_bubble(job, plan),
        tokens=tokens,
        budget=spent,
    )


def traffic(role: Role, fabric: Fabric, sizes: dict[str, int], ep: int) -> list[Traffic]:
    """Add up the messages of one rank's step by axis and kind, including the messages of repeated microbatches."""
    times = time_rank(role.works, fabric, role.rank, groups_of(sizes, role.rank, ep))
    n_times = repeats(role)
    rows: dict[tuple[str, str, int], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    for timed in times.streams.messages:
        work = role.works[timed.number]
        message = work.message
        assert message is not None
        row = rows[message.axis, message.collective, message.n_ranks]
        for i, value in enumerate((1, message.n_bytes, timed.seconds, timed.exposed_s)):
            row[i] += n_times[timed.number] * value
    found = []
    for (axis, collective, n_ranks), (count, n_bytes, seconds, exposed_s) in rows.items():
        timed = (None, None) if collective in POINT_TO_POINT else (seconds, exposed_s)
        found.append(Traffic(axis, collective, n_ranks, round(count), round(n_bytes), *timed))
    return sorted(found, key=lambda one: -one.n_bytes)


def as_dict(answer: Answer) -> dict[str, Any]:
    """Convert an answer to types that JSON can express."""
    job, plan, step = answer.job, answer.plan, answer.step
    machine = job.machine
    return {
        "config": job.cfg.model_dump(),
        "world": job.world,
        "mesh": job.sizes,
        "device": machine.device.type,
        "parameters": answer.parameters,
        "microbatches": plan.n_microbatches,
        "run_microbatches": plan.run_microbatches,
        "extrapolated": plan.run_microbatches < plan.n_microbatches,
        "imbalance": plan.imbalance,
        "assumptions": plan.assumptions,
        "fits": answer.fits,
        "frozen_parameters": answer.elements.frozen,
        "checkpoint_bytes": answer.checkpoint_bytes,
        "memory": machine.memory._asdict(),
        "stages": plan.stages,
        "roles": [_role_as_dict(role) for role in answer.roles],
        "prediction": {
            "fabric": {"name": machine.fabric_name, **machine.fabric.model_dump()},
            "held_out_error": machine.fabric.gpu.held_out_error,
            "step": step._replace(timeline=None)._asdict() | {"timeline": _timeline(step)},
            "bubble": answer.bubble and _comparison_as_dict(answer.bubble),
            "tokens": answer.tokens,
            "budget": answer.budget._asdict(),
        },
    }


def _role_as_dict(role: RoleAnswer) -> dict[str, Any]:
    plan = role.plan
    return {
        "rank": plan.rank,
        "places": role.places,
        "ranks": role.ranks,
        "peak_bytes": plan.peak.peak_bytes,
        "peak_action": plan.peak.action,
        "at_peak": plan.peak.at_peak,
        "held": plan.held,
        "spans": [span._asdict() for span in plan.spans],
        "messages": [row._asdict() for row in role.traffic],
        "flops": role.flops,
        "formulas": [_comparison_as_dict(one) for one in role.comparisons],
    }


def _comparison_as_dict(comparison: Comparison) -> dict[str, Any]:
    return comparison._asdict() | {"difference": comparison.difference}


def _timeline(step: StepTime) -> list[list[dict[str, Any]]] | None:
    """The simulated schedule: one list of timed actions per pp rank; None without a pipeline."""
    if step.timeline is None:
        return None
    rows = []
    for row in step.timeline.rows:
        rows.append([{"action": str(one.action), "start_s": one.start, "end_s": one.end} for one in row])
    return rows
