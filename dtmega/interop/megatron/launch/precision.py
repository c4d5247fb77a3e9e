"""Set dtypes, float16's loss scale and gradient clipping from a command's flags and from DeepSpeed's JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dtmega.interop.megatron.launch.draft import Draft

# Key in the "fp16" section of DeepSpeed's JSON -> key of [precision] and DeepSpeed's default. Source: DeepSpeed's
# `runtime/config.py` and `runtime/fp16/loss_scaler.py`.
OF_JSON = {
    "loss_scale_window": ("precision.loss_scale_window", 1000),
    "min_loss_scale": ("precision.min_loss_scale", 1),
    "hysteresis": ("precision.hysteresis", 2),
}
INITIAL_SCALE_POWER = 16
# JSON keys that do not change what a run computes, that Megatron's flags repeat, or that this module translates. Any
# other key is left to the user, unless the key's value is empty or a disabled section.
REPEATED = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("fp16", "bf16", "bfloat16", "zero_optimization", "zero_allow_untested_optimizer", "prescale_gradients"),
    *("steps_per_print", "wall_clock_breakdown", "dump_state", "tensorboard", "csv_monitor", "wandb", "comms_logger"),
    *("flops_profiler", "activation_checkpointing", "aio", "checkpoint", "memory_breakdown", "communication_data_type"),
    *("data_types", "gradient_predivide_factor", "timers", "amp"),
)
SCALE_FLAGS = ("--initial-loss-scale", "--min-loss-scale", "--loss-scale-window", "--hysteresis", "--loss-scale")


def set_precision(draft: Draft) -> None:
    """Set the dtypes and the loss scale."""
    for flag, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if draft.has(flag):
            draft.keys["precision.params"] = dtype
    if draft.has("grad-reduce-in-bf16"):
        draft.keys["precision.reduce"] = "bfloat16"
    if not draft.has("fp16"):
        for key in ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"):
            draft.keys.pop(f"precision.{key}", None)
        for flag in SCALE_FLAGS:
            if flag in draft.command.values:
                draft.open.pop(flag, None)
                draft.notes[flag] = "read with --fp16 only"
    elif draft.has("loss-scale") and not draft.has("deepspeed") and draft.number("loss-scale") != 0:
        draft.refuse("--loss-scale", "the scale is always dynamic")
    if draft.has("deepspeed"):
        _set_from_json(draft)


def _set_from_json(draft: Draft) -> None:
    """Set the loss scale and the gradient limit, which DeepSpeed takes from its JSON and not from Megatron's flags."""
    flag = "--deepspeed_config"
    if flag not in draft.command.values:
        return
    path = (draft.value("deepspeed_config") or "").strip()
    text = draft.command.files.get(path)
    try:
        settings = None if text is None else json.loads(text)
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        draft.refuse(
            flag,
            "the script does not contain this file as valid JSON, so its loss scale and gradient_clipping are not "
            "known: set [precision] and [optim] clip_grad yourself",
        )
        return
    others = [key for key, value in settings.items() if key not in REPEATED and _is_on(value)]
    if others:
        draft.refuse(flag, f"its {', '.join(others):.200} is not carried over")
    else:
        draft.notes[flag] = "its loss scale and its limit of gradients are carried over"
    for scale_flag in SCALE_FLAGS:
        if scale_flag in draft.command.values and scale_flag not in draft.notes:
            draft.open.pop(scale_flag, None)
            draft.notes[scale_flag] = f"DeepSpeed reads {flag} in its place"
    _set_clipping(draft, settings)
    if draft.has("fp16"):
        fp16 = settings.get("fp16")
        _set_scale(draft, fp16 if isinstance(fp16, dict) else {})


def _is_on(value: Any) -> bool:
    """True if a setting in DeepSpeed's JSON is neither empty nor a disabled section."""
    if isinstance(value, dict):
        return value.get("enabled", True) is not False
    return value not in (None, False, "", 0)


def _set_clipping(draft: Draft, settings: Mapping[str, Any]) -> None:
    """Set the limit for the gradient norm. DeepSpeed's default, 0, means no limit."""
    limit = settings.get("gradient_clipping", 0.0)
    if type(limit) not in (int, float):
        draft.refuse("--deepspeed_config", f"gradient_clipping={limit!r:.40} is no number")
        return
    if limit != draft.number("clip-grad"):
        draft.notes["--clip-grad"] = f"DeepSpeed reads gradient_clipping = {limit} of its JSON in its place"
    draft.keys["optim.clip_grad"] = float(limit)


def _set_scale(draft: Draft, fp16: Mapping[str, Any]) -> None:
    """Set the loss scale from the "fp16" section of DeepSpeed's JSON."""
    fixed = fp16.get("loss_scale", 0)
    if fixed != 0:
        draft.refuse("--deepspeed_config", f"its loss_scale is {fixed!r:.40}, and the scale is always dynamic here")
        return
    power = fp16.get("initial_scale_power", INITIAL_SCALE_POWER)
    values = {key: fp16.get(name, default) for name, (key, default) in OF_JSON.items()}
    if type(power) is not int or not 0 <= power < 128 or not all(type(v) in (int, float) for v in values.values()):
        draft.refuse("--deepspeed_config", 'its "fp16" has values that are no numbers')
        return
    draft.keys["precision.initial_loss_scale"] = 2.0**power
    draft.keys["precision.min_loss_scale"] = float(values["precision.min_loss_scale"])
    for name in ("loss_scale_window", "hysteresis"):
        draft.keys[f"precision.{name}"] = int(values[f"precision.{name}"])
