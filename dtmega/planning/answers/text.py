"""Write the planner's answer as plain text: the most important lines first, the details last."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from dtmega import families
from dtmega.files.console import counted
from dtmega.pipelining.table import ACTION
from dtmega.planning.answers.answer import Answer, RoleAnswer, Traffic
from dtmega.planning.answers.comparisons import BLOCKS, Comparison
from dtmega.planning.answers.job import Job, Machine, Memory
from dtmega.planning.plan import Plan
from dtmega.training.out_of_memory import keys_to_turn

CPU_ONLY = "for the CPU path only: ranks on CPUs with gloo; a GPU holds and computes other things (--device cuda)"
SAME_MEMORY = 0.05  # devices whose memories differ by at most this share are taken for the same device
SHOWN_SHARE = 0.01  # entries with a smaller share of the peak memory are combined
ACTIONS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


def write(answer: Answer) -> str:
    """The whole answer as text."""
    lines = headline(answer.job, answer.parameters, answer.plan.n_microbatches)
    lines += [
        extrapolation(answer.plan),
        *answer.plan.assumptions,
        *skipped_checks(answer.plan),
        "",
        *fit(answer.plan, answer.job.machine.memory),
        f"  a checkpoint: {size(answer.checkpoint_bytes)}, weights and moments",
        "",
        *prediction(answer),
    ]
    for role in answer.roles:
        lines += ["", *_role(role, answer)]
    return "\n".join(lines)


def skipped_checks(plan: Plan) -> list[str]:
    """One sentence for each check that was skipped because the check needs values, which a plan does not have."""
    sentences: set[str] = set()
    for role in plan.roles.values():
        sentences.update(role.skipped)
    return sorted(sentences)


def headline(job: Job, parameters: int, n_microbatches: int) -> list[str]:
    """The first lines of the answer: device, model, layout and batch."""
    cfg = job.cfg
    trained = families.elements(cfg).notes
    axes = " x ".join(f"{axis} {size}" for axis, size in job.sizes.items() if size > 1) or "one rank"
    experts = f", ep {cfg.mesh.ep}" if cfg.mesh.ep > 1 else ""
    schedule = f", schedule {cfg.pipeline.csv or cfg.pipeline.schedule}" if job.sizes["pp"] > 1 else ""
    lines = [CPU_ONLY] if job.machine.device.type == "cpu" else []
    return [
        *lines,
        f"{cfg.model.name}: {parameters:,} parameters, {cfg.precision.params} on {job.world:,} x "
        f"{job.machine.device.type} ({axes}{experts}{schedule})",
        *trained,
        f"a step: {cfg.batch.global_batch_size:,} sequences of {cfg.data.seq_len:,} tokens = "
        f"{counted(job.data_size, 'data rank')} x {counted(n_microbatches, 'microbatch')} x "
        f"{cfg.batch.micro_batch_size}",
    ]


def extrapolation(plan: Plan) -> str:
    """A line that states how many of the step's microbatches were run."""
    if plan.run_microbatches == plan.n_microbatches:
        return "counted: the real step, all microbatches, without values"
    return (
        f"counted: the real step, without values; steady state extrapolated from {plan.run_microbatches} of "
        f"{plan.n_microbatches} microbatches"
    )


def fit(plan: Plan, memory: Memory) -> list[str]:
    """Lines that state whether the fullest rank fits, and how much memory each role holds."""
    peak = plan.fullest.peak.peak_bytes
    holds = memory.holds(peak)
    sign = "<=" if holds else ">"
    lines = [
        f"{'fits' if holds else 'DOES NOT FIT'}: peak {size(peak)} + reserve {size(memory.reserve_bytes)} {sign} "
        f"{size(memory.n_bytes)}" + ("" if holds else f"; turn first: {', '.join(keys_to_turn(plan.cfg)[:3])}"),
        f"  memory: {memory.source}",
        f"  reserve for what no tensor can use: {memory.reserve_source}",
    ]
    for places in plan.places_by_role:
        role = plan.roles[places[0]]
        lines.append(
            f"  {_where(places, plan)}: peak {size(role.peak.peak_bytes)} in {action(role.peak.action, plan)}, "
            f"{size(sum(role.held.values()))} between steps"
        )
    return lines


def prediction(answer: Answer) -> list[str]:
    """Lines with the step time and the cost of the run, marked as predictions."""
    step, spent, machine = answer.step, answer.budget, answer.job.machine
    gpu = machine.fabric.gpu
    error = gpu.held_out_error
    how_far = f"mean error of its fit on held-out figures {error:.1%}" if error else "its error is not known"
    compute = step.compute_s / step.seconds
    exposed = step.exposed_communication_s / step.seconds
    kinds = []
    for kind, seconds in _largest(step.compute_by_action):
        kinds.append(f"{ACTIONS.get(kind, kind)} {seconds / step.seconds:.1%}")
    lines = [
        f"predicted, not measured (fabric {machine.fabric_name}: {gpu.name}; {how_far}):",
        *priced_as(machine),
        f"  step {duration(step.seconds)}: computing {compute:.1%}, uncovered communication {exposed:.1%}, "
        f"waiting in the pipeline {step.bubble_fraction:.1%}",
        f"  computing: {', '.join(kinds)}",
        f"  {spent.tokens_per_s:,.0f} tokens/s, {spent.tokens_per_s_per_gpu:,.0f} for each rank; MFU {spent.mfu:.1%}",
        f"  {answer.tokens:.4g} tokens: {', '.join(_cost(answer))}, without restarts and evaluations",
    ]
    if answer.bubble is not None:
        lines.append(f"  {_compared(answer.bubble)}")
    return lines


def priced_as(machine: Machine) -> list[str]:
    """A line that names the device of the prediction, if --memory says that the ranks have another; otherwise []."""
    gpu, memory = machine.fabric.gpu, machine.memory
    if not memory.is_given or abs(memory.n_bytes - gpu.memory_bytes) <= SAME_MEMORY * gpu.memory_bytes:
        return []
    return [
        f"  times and costs are those of {gpu.name}, which has {size(gpu.memory_bytes)}, not those of a device with "
        f"{size(memory.n_bytes)} (--memory): --fabric FILE describes another device"
    ]


def _cost(answer: Answer) -> list[str]:
    """The time, energy and money that the whole run takes. Energy and money need the fabric's power and price."""
    spent, gpu = answer.budget, answer.job.machine.fabric.gpu
    parts = [f"{spent.days:,.3g} days", f"{_many(spent.gpu_hours)} hours of one device"]
    if gpu.power_w:
        parts.append(f"{_many(spent.energy_kwh)} kWh")
    if gpu.price_per_hour:
        parts.append(f"{_many(spent.cost)} {spent.currency}")
    return parts


def _many(value: float) -> str:
    """Format a number with at least three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _role(role: RoleAnswer, answer: Answer) -> list[str]:
    """Lines with the details of one role."""
    plan = role.plan
    n = sum(last - first + 1 for first, last in role.ranks)
    lines = [f"{_where(role.places, answer.plan)} ({counted(n, 'rank')}, counted on rank {plan.rank})"]
    lines.append(f"  memory at the peak, in {action(plan.peak.action, answer.plan)}:")
    lines += _owners(plan.peak.at_peak)
    lines.append("  held between steps:")
    lines += _owners(plan.held)
    if role.traffic:
        lines.append("  messages of a step:")
        lines += [f"    {line}" for line in _messages(role.traffic)]
    total = sum(role.flops.values())
    lines.append(f"  {total:.4g} FLOPs a step:")
    for operator, flops in _largest(role.flops):
        lines.append(f"    {operator:<42} {flops:>10.3g} {flops / total:>7.1%}")
    lines.append("  beside formulas:")
    lines += [f"    {_compared(one)}" for one in role.comparisons]
    return lines


def _where(places: Sequence[int], plan: Plan) -> str:
    """Describe in words which pp ranks (pipeline ranks) have a role."""
    if plan.table is None:
        return "every rank"
    runs: list[list[int]] = []
    for place in places:
        if runs and place == runs[-1][-1] + 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"pipeline rank{'s' if len(places) > 1 else ''} {', '.join(parts)} of {len(plan.roles)}"


def grouped(owners: Mapping[str, int]) -> dict[str, int]:
    """Shorten a table of bytes by owner: combine all blocks' activations, and all small entries. Sort by size."""
    blocks = [name for name in owners if name.startswith(BLOCKS)]
    result: dict[str, int] = defaultdict(int)
    for owner, n_bytes in owners.items():
        name = f"activations of {counted(len(blocks), 'block')}" if owner in blocks else owner
        result[name] += n_bytes
    total = sum(result.values())
    small = {name: n_bytes for name, n_bytes in result.items() if n_bytes < SHOWN_SHARE * total}
    if len(small) > 1:
        for name in small:
            del result[name]
    ordered = dict(sorted(result.items(), key=lambda one: -one[1]))
    if len(small) > 1:
        ordered[f"{len(small)} smaller ones"] = sum(small.values())
    return ordered


def _owners(owners: Mapping[str, int]) -> list[str]:
    total = max(1, sum(owners.values()))
    lines = []
    for owner, n_bytes in grouped(owners).items():
        lines.append(f"    {owner:<42} {size(n_bytes):>10} {n_bytes / total:>7.1%}")
    return lines


def _messages(rows: Sequence[Traffic]) -> list[str]:
    lines = []
    for row in rows:
        covered = "in the schedule"
        if row.seconds is not None and row.exposed_s is not None:
            share = 1 - row.exposed_s / row.seconds if row.seconds else 1.0
            covered = f"{duration(row.seconds)}, {max(share, 0):.0%} covered by computing"
        what = f"{row.axis} ({row.n_ranks}) {row.collective}"
        lines.append(f"{what:<34} {row.n_messages:>7,} x, {size(row.n_bytes):>10}, {covered}")
    return lines


def _compared(one: Comparison) -> str:
    if one.unit == "bytes":
        values = f"counted {size(one.counted)}, formula {size(one.formula)}"
    else:
        values = f"counted {one.counted:.2%}, formula {one.formula:.2%}"
    difference = f"{one.difference:+.1%}" if abs(one.difference) >= 5e-4 else "equal"
    return f"{one.what}: {values} ({difference}); {one.source}"


def _largest(values: Mapping[str, float], n: int = 6) -> list[tuple[str, float]]:
    """The n largest entries, and the sum of the remaining entries."""
    ordered = sorted(values.items(), key=lambda one: -one[1])
    rest = ordered[n:]
    if len(rest) > 1:
        return [*ordered[:n], (f"{len(rest)} others", sum(value for _, value in rest))]
    return ordered


def action(name: str, plan: Plan) -> str:
    """An action in words: "3F7" becomes "forward of microbatch 7 on stage 3". Phase names are returned unchanged."""
    matched = ACTION.fullmatch(name)
    if matched is None:
        return name
    stage, letter, microbatch = matched.groups()
    of_stage = f" on stage {stage}" if plan.table is not None else ""
    return f"{ACTIONS[letter]} of microbatch {microbatch}{of_stage}"


def dry_run(job: Job, plan: Plan, parameters: int, first_lines: Sequence[str]) -> str:
    """The answer of `train --dry-run`, which contains no predicted times or costs."""
    lines = [*first_lines, *headline(job, parameters, plan.n_microbatches), extrapolation(plan), *plan.assumptions]
    return "\n".join([*lines, *fit(plan, job.machine.memory)])


def size(n_bytes: float) -> str:
    """Format a number of bytes with three digits: 68 GiB, 1.25 MiB, 640 B."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.3g} {unit}" if n_bytes < 1000 * factor else f"{n_bytes / factor:.0f} {unit}"
    return f"{n_bytes:.0f} B"


def duration(seconds: float) -> str:
    """Format a time in seconds with three digits: 1.25 s, 340 ms, 12 us."""
    unit, factor = "us", 1e-6
    if seconds >= 1e-3:
        unit, factor = "ms", 1e-3
    if seconds >= 1:
        unit, factor = "s", 1.0
    value = seconds / factor
    return f"{value:,.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"
