"""Compare the configuration of a resumed run with the saved one: accept, print or refuse each changed key.

free      accepted silently: paths, intervals, speed and layout, which do not change the run's numbers
printed   the recipe, which people change on purpose: the run resumes and prints each change
refused   every other key, such as the model, the data or the seed: a change would turn the run into a different run.
          A key that is new in dtmega is refused unless one of the tables below lists the key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from dtmega.config import Config
from dtmega.config.schema import Section
from dtmega.ops import optim

Treatment = Literal["free", "printed", "refused"]
FREE: dict[str, tuple[str, ...]] = {
    "run": ("dir", "device", "timeout_s", "grace_s", "untranslated"),
    "data": ("validation", "test", "num_workers"),
    "eval": ("interval", "steps", "only", "prompt", "sample_tokens"),
    "train": ("kill_switch", "stop_loss_above", "stop_validation_rises", "past_stop"),
    "log": ("interval", "ranks", "slow_steps", "tensorboard", "num_zeros", "params_norm", "trackers", "project"),
    "profile": ("steps", "ranks", "with_stack", "with_memory", "memory_history"),
    "checkpoint": ("interval", "final", "keep", "resume", "dir", "mode", "allow_changed_data"),
    "compile": ("enable",),
    "mesh": ("pp", "dp_replicate", "dp_shard", "cp", "cp_form", "ep", "tp", "sequence_parallel"),
    "pipeline": ("schedule", "virtual_stages", "stages", "split", "csv", "draw"),
    "recompute": ("mode", "method", "layers"),
    "lora": ("base", "base_path"),
    "fsdp": ("reshard_after_forward", "cpu_offload", "accumulate"),
}
# Keys that affect the learning rate or the end of the run. If some of these keys have changed, the line about the last
# changed key also states the combined effect of all changes.
COURSE: dict[str, tuple[str, ...]] = {
    "batch": ("global_batch_size", "rampup"),
    "optim": ("lr", "min_lr", "schedule", "unit", "warmup", "warmup_fraction", "decay", "wsd_decay"),
    "train": ("steps", "samples", "tokens", "epochs"),
}
PRINTED: dict[str, tuple[str, ...]] = {
    "model": (
        *("hidden_dropout", "attention_dropout", "inner_dropout", "label_smoothing", "z_loss"),
        *("fp32_residual", "query_key_layer_scaling"),
        *("router_bias_rate", "balance_loss", "router_z_loss", "capacity_factor"),
    ),
    "batch": ("micro_batch_size", *COURSE["batch"]),
    "optim": (
        *COURSE["optim"],
        *("lr_factors", "beta1", "beta2", "eps", "momentum", "muon_momentum", "adjust_lr_fn", "adamw_lr"),
        *("weight_decay", "weight_decay_schedule", "start_weight_decay", "clip_grad"),
    ),
    "train": (
        *COURSE["train"],
        *("drift_interval", "max_skipped", "skip_spikes", "skip_steps", "exit_interval", "exit_duration_min"),
        "freeze",
    ),
    "precision": (
        *("params", "reduce"),
        *("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
    ),
}
# Keys whose values are not compared: files may move, and `order_samples = 0` means a number derived from other keys.
# `resume.check_same` compares the identity of the data and the digest of the model directory instead.
BY_CONTENT: dict[str, tuple[str, ...]] = {"data": ("path", "train", "order_samples", "tokenizer"), "model": ("path",)}


class Change(NamedTuple):
    """A key whose current value differs from the value in the checkpoint.

    Attributes:
        was: value in the checkpoint.
        now: value in the current configuration.
    """

    section: str
    key: str
    was: Any
    now: Any

    @property
    def name(self) -> str:
        return f"[{self.section}] {self.key}"

    def within(self, table: Mapping[str, tuple[str, ...]]) -> bool:
        """Return True if the table (section -> keys) lists this key."""
        return self.key in table.get(self.section, ())


def kind_of(section: str, key: str) -> Treatment:
    if key in FREE.get(section, ()):
        return "free"
    return "printed" if key in PRINTED.get(section, ()) else "refused"


def differing(section: str, then: Mapping[str, Any], now: Section) -> Iterator[Change]:
    """The changes within one section, except changes to the keys in BY_CONTENT.

    Args:
        section: name of the section.
        then: section as recorded in the checkpoint. A key that the checkpoint lacks was added to dtmega later, so
            the key's default value is used. A key found only in the checkpoint was removed from dtmega later, so it
            is ignored.
        now: section in the current configuration.
    """
    for key, field in type(now).model_fields.items():
        change = Change(section, key, then.get(key, field.default), getattr(now, key))
        if change.was != change.now and not change.within(BY_CONTENT):
            yield change


def changed(then: Mapping[str, Mapping[str, Any]], now: Config, kind: Treatment) -> list[Change]:
    """List the changed keys whose treatment is `kind`, across all sections.

    Args:
        then: configuration recorded in the checkpoint, keyed by section.
        now: current configuration.
        kind: treatment that selects the keys to return.
    """
    changes: list[Change] = []
    for section in Config.model_fields:
        for change in differing(section, then.get(section, {}), getattr(now, section)):
            if kind_of(change.section, change.key) == kind:
                changes.append(change)
    return changes


def lines(
    then: Mapping[str, Mapping[str, Any]],
    now: Config,
    steps: int,
    samples: int,
    samples_in: Callable[[int], int],
    overflowed: tuple[int, int] = (0, 0),
) -> list[str]:
    """Lines that a resumed run prints about its changed recipe, one per changed key.

    The line about the last changed key in COURSE ends with the combined effect of all changes on the remaining steps
    and on the learning rate.

    Args:
        then: configuration recorded in the checkpoint, keyed by section.
        now: current configuration.
        steps: number of steps that the run has done.
        samples: number of samples that the run has read.
        samples_in: function that converts a number of epochs to a number of samples.
        overflowed: numbers of steps and of samples that were skipped because a gradient overflowed in float16. These
            steps do not advance the learning rate, but are included in `steps` and `samples`.
    """
    printed = changed(then, now, "printed")
    course_changes = [change for change in printed if change.within(COURSE)]
    change_lines = []
    for change in printed:
        line = f"changed since the checkpoint: {change.section}.{change.key} {change.was} → {change.now}"
        if change in course_changes[-1:]:
            consequences = "; ".join(_consequences(printed, now, steps, samples, samples_in, overflowed))
            line += f": {consequences}" if consequences else ""
        change_lines.append(line)
    return change_lines


def _consequences(
    printed: list[Change],
    now: Config,
    steps: int,
    samples: int,
    samples_in: Callable[[int], int],
    overflowed: tuple[int, int],
) -> list[str]:
    """Phrases that describe how the printed changes affect the number of remaining steps and the learning rate."""
    # Restore the old values of the changed keys, to compute when the run would have ended and its old learning rate.
    values: dict[str, dict[str, Any]] = now.model_dump()
    for change in printed:
        values[change.section][change.key] = change.was
    try:
        before = Config.model_validate(values).completed(samples_in)
    except ValueError:  # this version of dtmega refuses the combination of old and new keys
        return []
    now = now.completed(samples_in)
    end_before, end_now = before.end(steps, samples), now.end(steps, samples)
    # The learning rate is defined from step 1 on, so a run that has done no step shows the rate of its first step.
    done = max(steps - overflowed[0], 1), samples - overflowed[1]
    rate_before = optim.rate_at(before, *done, end_before)
    rate_now = optim.rate_at(now, *done, end_now)
    remaining_before = end_before.steps - steps
    remaining = end_now.steps - steps
    consequences = []
    if remaining != remaining_before:
        consequences.append(f"{remaining} steps are left, not {remaining_before}")
    if rate_now != rate_before:
        consequences.append(f"the learning rate goes from {rate_before:.3g} to {rate_now:.3g}")
    return consequences
