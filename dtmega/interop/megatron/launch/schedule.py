"""Set a run's length, batches, learning-rate schedule and optimizer from a command's flags."""

from __future__ import annotations

from dtmega import config
from dtmega.interop.megatron.launch.draft import Draft, as_number

UNITS = ("iters", "samples", "tokens")  # units in Megatron's flags; [optim] unit uses "steps" instead of "iters"
SCHEDULES = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse-square-root": "inverse-sqrt",
    "wsd": "wsd",
}
LENGTH = {"iters": "train.steps", "samples": "train.samples", "tokens": "train.tokens"}


def set_batch(draft: Draft) -> None:
    """Set the batch-size ramp-up and the skipped steps."""
    ramp = draft.command.values.get("--rampup-batch-size")
    if ramp:
        draft.set_numbers("batch.rampup", ramp, "--rampup-batch-size")
    for flag in ("--skip-train-iteration-range", "--iterations-to-skip"):
        ranges = draft.command.values.get(flag, [])
        if not ranges:
            continue
        skipped = [[as_number(end) for end in step_range.split("-")] for step_range in ranges]
        if flag == "--iterations-to-skip":
            skipped = [[*step, *step] for step in skipped]
        if any(None in ends for ends in skipped):
            draft.lack("train.skip_steps", draft.unknown(flag) or "expected ranges of numbers", flag)
        else:
            draft.keys["train.skip_steps"] = skipped


def set_length(draft: Draft) -> None:
    """Set the run's length. If several lengths are given, Megatron stops at the length that is reached first."""
    given = [unit for unit in UNITS if draft.has(f"train-{unit}")]
    if not given:
        draft.lack("train.steps", "--train-iters, --train-samples or --train-tokens")
    if len(given) < 2:
        return
    unknown = [unit for unit in given if draft.number(f"train-{unit}") is None]
    if unknown:
        return  # `copy_values` has already left the run's length to the user
    in_tokens = {unit: converted(draft, draft.number(f"train-{unit}"), unit, "tokens") for unit in given}
    lengths = {unit: length for unit, length in in_tokens.items() if length is not None}
    if len(lengths) < len(given):
        for unit in given[:-1]:
            draft.refuse(f"--train-{unit}", f"it cannot be compared with --train-{given[-1]}")
            draft.keys.pop(LENGTH[unit], None)
        return
    first = min(lengths, key=lambda unit: lengths[unit])
    for unit in given:
        if unit != first:
            draft.keys.pop(LENGTH[unit], None)
            draft.notes[f"--train-{unit}"] = f"--train-{first} ends the run before"


def converted(draft: Draft, amount: int | float | None, unit: str, wanted: str) -> int | float | None:
    """Convert a number of steps, samples or tokens to another unit; None if the flags do not determine the result."""
    if amount is None or unit == wanted:
        return amount
    per_step = None if draft.has("rampup-batch-size") else draft.number("global-batch-size")
    per_sample = draft.keys.get("data.seq_len")
    sizes = {"iters": per_step, "samples": 1, "tokens": None if not per_sample else 1 / per_sample}
    sizes_are_known = sizes[unit] and sizes[wanted]
    if not sizes_are_known:
        return None
    result = amount * (sizes[unit] or 0) / (sizes[wanted] or 1)
    return round(result) if abs(result - round(result)) < 1e-6 * max(1, result) else None


def set_schedule(draft: Draft) -> None:
    """Set the learning-rate schedule: unit, decay, warm-up and curve."""
    decays = [unit for unit in UNITS if draft.has(f"lr-decay-{unit}")]
    lengths = [unit for unit in UNITS if draft.has(f"train-{unit}")]
    # For the decay and for the run's length, tokens take precedence over samples, and samples over steps.
    unit = next(reversed(decays), "") or next(reversed(_kept(draft, lengths)), "") or UNITS[0]
    if unit != UNITS[0]:
        draft.keys["optim.unit"] = unit
    for other in decays[:-1]:
        draft.refuse(f"--lr-decay-{other}", f"--lr-decay-{unit} is read in its place")
    if decays:
        _set_amount(draft, f"lr-decay-{unit}", "optim.decay", unit, unit)
    elif len(lengths) > 1:
        # Without a decay flag, the decay lasts as long as the run. Use the run's length in steps if the command gives
        # it, otherwise the length in samples.
        longest = next((length for length in lengths if length != "tokens"), lengths[0])
        amount = converted(draft, draft.number(f"train-{longest}"), longest, unit)
        draft.keys["optim.decay"] = amount if amount is not None else 0
    _set_warmup(draft, unit)
    _set_curve(draft, unit)


def _kept(draft: Draft, lengths: list[str]) -> list[str]:
    """The units of the given run lengths, without those of lengths that the run never reaches (`set_length`)."""
    return [unit for unit in lengths if f"--train-{unit}" not in draft.notes]


def _set_amount(draft: Draft, flag: str, key: str, unit: str, wanted: str) -> None:
    """Convert the value of a flag to the unit `wanted`, and set a key of [optim] to the result."""
    amount = draft.number(flag)
    value = converted(draft, amount, unit, wanted)
    if draft.unknown(f"--{flag}") or amount is None:
        draft.lack(key, draft.unknown(f"--{flag}") or "expected a number", f"--{flag}")
    elif value is None:
        draft.lack(key, f"{amount:g} {unit} in {wanted}, which the other flags do not determine", f"--{flag}")
    elif value:
        draft.keys[key] = value


def _set_warmup(draft: Draft, unit: str) -> None:
    """Set the warm-up. Tokens take precedence over samples, and samples over steps."""
    warmups = [each for each in UNITS if draft.has(f"lr-warmup-{each}")]
    for other in warmups[:-1]:
        draft.refuse(f"--lr-warmup-{other}", f"--lr-warmup-{warmups[-1]} is read in its place")
    if draft.has("warmup"):
        _set_amount(draft, "warmup", "optim.warmup_fraction", unit, unit)
    if warmups:
        _set_amount(draft, f"lr-warmup-{warmups[-1]}", "optim.warmup", warmups[-1], unit)
        if draft.has("lr-warmup-fraction"):
            # The warm-up fraction takes precedence: Megatron's optimizer_param_scheduler checks this fraction first.
            draft.keys.pop("optim.warmup", None)
            draft.refuse(f"--lr-warmup-{warmups[-1]}", "--lr-warmup-fraction is read in its place")


def _set_curve(draft: Draft, unit: str) -> None:
    """Set the learning-rate curve and, for WSD, the length of the final decay."""
    style = (draft.value("lr-decay-style") or "").lower()
    if style not in SCHEDULES:
        draft.lack("optim.schedule", f"one of {', '.join(SCHEDULES.values())}", "--lr-decay-style")
        return
    if draft.has("lr-decay-style") or SCHEDULES[style] != config.Optim.model_fields["schedule"].default:
        draft.keys["optim.schedule"] = SCHEDULES[style]
    if style != "wsd":
        for flag in ("--lr-wsd-decay-style", "--lr-wsd-decay-iters", "--lr-wsd-decay-samples"):
            if flag in draft.command.values:
                draft.notes[flag] = "read with --lr-decay-style WSD only"
        return
    if draft.value("lr-wsd-decay-style") != "linear":
        flag = "--lr-wsd-decay-style" if draft.has("lr-wsd-decay-style") else "--lr-decay-style"
        draft.refuse(flag, f"its last decay is {draft.value('lr-wsd-decay-style')}, and only a linear one is built")
    tails = [each for each in UNITS[:2] if draft.has(f"lr-wsd-decay-{each}")]
    if not tails:
        draft.lack("optim.wsd_decay", "--lr-wsd-decay-iters or --lr-wsd-decay-samples")
    for each in tails:
        _set_amount(draft, f"lr-wsd-decay-{each}", "optim.wsd_decay", each, unit)


def set_optimizer(draft: Draft) -> None:
    """Set the optimizer and remove the keys that the optimizer does not read."""
    name = draft.value("optimizer")
    if name == "sgd":
        draft.keys["optim.name"] = "sgd"
    elif name != "adam":
        draft.refuse("--optimizer", "only adam and sgd are translated")
    # A run refuses a configuration with a key that the optimizer does not read.
    for key in config.UNREAD_BY_OPTIMIZER[draft.keys.get("optim.name", "adamw")]:
        draft.keys.pop(f"optim.{key}", None)
