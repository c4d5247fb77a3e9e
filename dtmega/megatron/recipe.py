"""The configuration of the run that wrote a checkpoint, of the arguments that are in its files."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from dtmega import config
from dtmega.checkpoint.resume import Progress
from dtmega.megatron.flags import FLAGS, by_name
from dtmega.megatron.translate import PRE_TRAINED, Given, recipe

SIZES = ("name", "vocab_size", "hidden_size", "n_layers", "n_heads")  # are written whatever the defaults
NEXT_TOKEN_SCRIPT = "pretrain_gpt"  # the program whose order of samples is known here
# Sections that a run goes on with, or says what it changes of them.
RECORDED = ("batch", "optim", "train", "precision")
# Places on the machine of then, and what says how that run began.
OF_THE_MACHINE = {
    *("--save", "--load", "--tensorboard-dir", "--kill-switch-path", "--finetune", "--no-load-optim"),
    *(name for flag in FLAGS["Layout"] for name in flag.names),
}


def written(args: Mapping[str, Any], model: config.Model, order: str = "") -> tuple[str, dict[str, dict[str, Any]]]:
    """A TOML for a run that goes on, and the sections that the checkpoint should record, as far as they are known.

    What stands in the TOML as a comment is not known; a layout is not in it.

    Args:
        args: as plain values; none: the model is all that is known.
        order: of samples, of a run that goes on; '' of one that does not.
    """
    section = {key: value for key, value in model.model_dump().items() if key in (*SIZES, *_set_keys(model))}
    keys = {f"model.{key}": value for key, value in section.items()}
    script = next((script for script, family in PRE_TRAINED.items() if family == model.name), "pretrain_gpt")
    if order and script == NEXT_TOKEN_SCRIPT:
        keys["data.order"] = order
        keys["data.order_samples"] = _samples(args)
    given = Given(script, _flags(args), [])
    text, values = recipe(given, keys, "Of the arguments in a checkpoint of Megatron's, by dtmega convert.")
    with contextlib.suppress(config.ConfigError):
        known = config.validate(values, "the arguments in the files").model_dump()
        return text, {section: known[section] for section in RECORDED}
    return text, {}


def _set_keys(model: config.Model) -> list[str]:
    """Keys that have another value than the default."""
    return [key for key, field in type(model).model_fields.items() if getattr(model, key) != field.default]


def _flags(args: Mapping[str, Any]) -> dict[str, list[str]]:
    """The arguments as they would stand on a command line."""
    found: dict[str, list[str]] = {}
    for name, flag in by_name().items():
        value = args.get(name.removeprefix("--").replace("-", "_"))
        if name in OF_THE_MACHINE or not flag.keys or value is None or value is False or value == []:
            continue
        if flag.n_values == 0:
            found[name] = []
        elif name.endswith("-weighted-split-paths"):
            found[name] = _groups(args, name)
        else:
            found[name] = [str(item) for item in (value if isinstance(value, list) else [value])]
    # A run that is counted in samples has its steps worked out, and kept beside them.
    if "--train-samples" in found:
        found.pop("--train-iters", None)
    return found


def _groups(args: Mapping[str, Any], flag: str) -> list[str]:
    """The groups of corpora as they were written: their reader keeps names, weights, ranges and paths apart."""
    key = flag.removeprefix("--").replace("-", "_")
    kept = [args.get(key.replace("paths", part)) for part in ("names", "weights", "splits", "paths")]
    if not all(isinstance(part, list) for part in kept):
        return []
    return [
        f"{name}: {', '.join(' '.join(map(str, share)) for share in zip(*shares, strict=False))}"
        for name, *shares in zip(*kept, strict=False)
    ]


def _samples(args: Mapping[str, Any]) -> int:
    """The training samples that the run was started for; 0 where the arguments do not say."""
    samples = args.get("train_samples")
    if samples is None:
        steps, per_step = args.get("train_iters"), args.get("global_batch_size")
        samples = steps * per_step if type(steps) is int and type(per_step) is int else 0
    return samples if type(samples) is int and samples > 0 else 0


def goes_on(progress: Progress, out: str) -> str:
    """The line that says how a run goes on from there."""
    return (
        f"with Adam's moments, after {progress.step} steps and {progress.samples} samples: --checkpoint.resume {out} "
        f"--checkpoint.allow_changed_data true goes on from there ([data] order: on its own samples), "
        f"[model] init_from starts anew"
    )
