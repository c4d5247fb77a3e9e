"""The keys of the configuration that may differ when a run goes on: each is free, printed or refused.

free      no number of the run depends on it: where, how fast, how often, on which layout
printed   the recipe, which people change on purpose: the run goes on and says what it changes
refused   all others: with another model, data or seed it would be another run. A new key is
          refused until it is placed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from dtmega import optim
from dtmega.config import Config
from dtmega.declared import Section

Treatment = Literal["free", "printed", "refused"]
FREE: dict[str, tuple[str, ...]] = {
    "run": ("dir", "device", "timeout_s", "grace_s"),
    "data": ("validation", "test", "num_workers"),
    "eval": ("interval", "steps", "only", "prompt", "sample_tokens"),
    "train": ("kill_switch",),
    "log": ("interval", "tensorboard", "num_zeros", "params_norm", "trackers", "project"),
    "checkpoint": ("interval", "final", "keep", "resume", "dir", "mode", "allow_changed_data"),
    "compile": ("enable",),
    "mesh": ("pp", "dp_replicate", "dp_shard", "cp", "tp", "sequence_parallel"),
    "pipeline": ("schedule", "virtual_stages", "stages", "split", "csv", "draw"),
    "recompute": ("mode", "method", "layers"),
    "fsdp": ("reshard_after_forward", "cpu_offload"),
}
# The keys that move the learning rate or the end of the run come first, then the rest of the recipe.
COURSE: dict[str, tuple[str, ...]] = {
    "batch": ("global_batch_size", "rampup"),
    "optim": ("lr", "min_lr", "schedule", "unit", "warmup", "warmup_fraction", "decay", "wsd_decay"),
    "train": ("steps", "samples", "tokens"),
}
PRINTED: dict[str, tuple[str, ...]] = {
    "model": (
        *("hidden_dropout", "attention_dropout", "inner_dropout", "label_smoothing", "z_loss"),
        *("fp32_residual", "query_key_layer_scaling"),
    ),
    "batch": ("micro_batch_size", *COURSE["batch"]),
    "optim": (
        *COURSE["optim"],
        *("lr_factors", "beta1", "beta2", "eps", "momentum"),
        *("weight_decay", "weight_decay_schedule", "start_weight_decay", "clip_grad"),
    ),
    "train": (
        *COURSE["train"],
        *("drift_interval", "max_skipped", "skip_spikes", "skip_steps", "exit_interval", "exit_duration_min"),
    ),
    "precision": (
        *("params", "reduce"),
        *("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
    ),
}
# Refused by what is in the file, which may move: the data's identity and the digest of the model's directory tell.
BY_CONTENT: dict[str, tuple[str, ...]] = {"data": ("path", "train", "order_samples", "tokenizer"), "model": ("path",)}


class Change(NamedTuple):
    """A key whose value is another one than in the checkpoint."""

    section: str
    key: str
    was: Any
    now: Any

    @property
    def name(self) -> str:
        return f"[{self.section}] {self.key}"

    def within(self, table: Mapping[str, tuple[str, ...]]) -> bool:
        return self.key in table.get(self.section, ())


def kind_of(section: str, key: str) -> Treatment:
    if key in FREE.get(section, ()):
        return "free"
    return "printed" if key in PRINTED.get(section, ()) else "refused"


def differing(section: str, then: Mapping[str, Any], now: Section) -> Iterator[Change]:
    """Keys of one section that differ; those whose content counts are not among them.

    Args:
        then: the section as a checkpoint keeps it. A key that it lacks is newer than it, and counts as its default; one
            that it alone has is gone, and counts for nothing.
    """
    for key, field in type(now).model_fields.items():
        change = Change(section, key, then.get(key, field.default), getattr(now, key))
        if change.was != change.now and not change.within(BY_CONTENT):
            yield change


def changed(then: Mapping[str, Mapping[str, Any]], now: Config, kind: Treatment) -> list[Change]:
    """Keys of this kind, in all sections."""
    every = (differing(section, then.get(section, {}), getattr(now, section)) for section in Config.model_fields)
    return [change for found in every for change in found if kind_of(change.section, change.key) == kind]


def lines(
    then: Mapping[str, Mapping[str, Any]],
    now: Config,
    steps: int,
    samples: int,
    overflowed: tuple[int, int] = (0, 0),
) -> list[str]:
    """The lines, one for each key, that a run with a changed recipe says when it goes on after so many steps.

    The last key that moves the learning rate or the end of the run also says what they all come to.

    Args:
        overflowed: steps and samples among them that did not move the learning rate.
    """
    printed = changed(then, now, "printed")
    of_course = [change for change in printed if change.within(COURSE)]
    found = []
    for change in printed:
        line = f"changed since the checkpoint: {change.section}.{change.key} {change.was} → {change.now}"
        if change in of_course[-1:]:
            consequences = "; ".join(_consequences(printed, now, steps, samples, overflowed))
            line += f": {consequences}" if consequences else ""
        found.append(line)
    return found


def _consequences(
    printed: list[Change], now: Config, steps: int, samples: int, overflowed: tuple[int, int]
) -> list[str]:
    values: dict[str, dict[str, Any]] = now.model_dump()
    for change in printed:
        values[change.section][change.key] = change.was
    try:
        before = Config.model_validate(values)
    except ValidationError:  # that recipe is refused today
        return []
    ends = before.end(steps, samples), now.end(steps, samples)
    # Before the first step there is no rate: that of the first one.
    done = max(steps - overflowed[0], 1), samples - overflowed[1]
    rates = [optim.rate_at(cfg, *done, end) for cfg, end in zip((before, now), ends, strict=True)]
    left_before, left = (end.steps - steps for end in ends)
    texts = {
        f"{left} steps are left, not {left_before}": left != left_before,
        f"the learning rate goes from {rates[0]:.3g} to {rates[1]:.3g}": rates[0] != rates[1],
    }
    return [text for text, holds in texts.items() if holds]
