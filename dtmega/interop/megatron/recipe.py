"""The configuration of the run that wrote a checkpoint, derived from the arguments in the checkpoint's files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtmega import config
from dtmega.checkpoint.state import Progress
from dtmega.interop.megatron.launch.architecture import FAMILY_OF_SCRIPT
from dtmega.interop.megatron.launch.command import Command
from dtmega.interop.megatron.launch.flags import FLAGS, by_name
from dtmega.interop.megatron.launch.translate import translate_known_model

SIZES = ("name", "vocab_size", "hidden_size", "n_layers", "n_heads")  # written even if they equal the defaults
NEXT_TOKEN_SCRIPT = "pretrain_gpt"  # the only script whose sample order dtmega reproduces
# Sections that the converted checkpoint records, so that a resumed run can report changed settings.
RECORDED = ("batch", "optim", "train", "precision")
# Flags that a resumed run does not need: paths on the old machine, how the run starts, and the layout.
LEFT_OUT = {
    *("--save", "--load", "--tensorboard-dir", "--kill-switch-path", "--finetune", "--no-load-optim"),
    *(name for flag in FLAGS["Layout"] for name in flag.names),
}


def config_of_args(
    args: Mapping[str, Any], model: config.Model, order: str = ""
) -> tuple[str, dict[str, dict[str, Any]]]:
    """The configuration that continues a checkpoint's run, without the layout.

    Args:
        args: the run's arguments as plain values; empty if only the model is known.
        order: value of [data] order if a run can resume from the checkpoint; '' if the checkpoint has only weights.

    Returns:
        The text of a TOML file, in which a comment replaces each unknown key; and the sections that the checkpoint
        should record (empty if the configuration is invalid).
    """
    section = {key: value for key, value in model.model_dump().items() if key in (*SIZES, *_set_keys(model))}
    keys = {f"model.{key}": value for key, value in section.items()}
    keys["run.dir"] = f"runs/{model.name}"
    # pretrain_gpt also trains BLOOM and Llama, which have no script of their own.
    script = next((script for script, family in FAMILY_OF_SCRIPT.items() if family == model.name), "pretrain_gpt")
    if order and script == NEXT_TOKEN_SCRIPT:
        keys["data.order"] = order
        keys["data.order_samples"] = _samples(args)
    title = "From the arguments in a Megatron checkpoint, by dtmega convert."
    text, values = translate_known_model(Command(script, _flags(args), []), keys, title)
    try:
        valid = config.validate(values, "the arguments in the files").model_dump()
    except config.ConfigError:
        return text, {}
    return text, {section: valid[section] for section in RECORDED}


def _set_keys(model: config.Model) -> list[str]:
    """The [model] keys whose values differ from the defaults."""
    return [key for key, field in type(model).model_fields.items() if getattr(model, key) != field.default]


def _flags(args: Mapping[str, Any]) -> dict[str, list[str]]:
    """Convert a run's arguments to command-line flags: flag -> list of values."""
    flags: dict[str, list[str]] = {}
    for name, flag in by_name().items():
        value = args.get(name.removeprefix("--").replace("-", "_"))
        if name in LEFT_OUT or not flag.keys or value is None or value is False or value == []:
            continue
        if flag.n_values == 0:
            flags[name] = []
        elif name.endswith("-weighted-split-paths"):
            flags[name] = _groups(args, name)
        else:
            items = value if isinstance(value, list) else [value]
            flags[name] = [str(item) for item in items]
    # If the run's length is given in samples, Megatron computes `train_iters` from the samples, so omit --train-iters.
    if "--train-samples" in flags:
        flags.pop("--train-iters", None)
    return flags


def _groups(args: Mapping[str, Any], flag: str) -> list[str]:
    """The mixtures of corpora in the form in which the user wrote them: "NAME: WEIGHT START:END PREFIX, ...".

    Megatron's arguments store the mixtures as separate lists of names, weights, ranges and paths.
    """
    key = flag.removeprefix("--").replace("-", "_")
    lists = [args.get(key.replace("paths", part)) for part in ("names", "weights", "splits", "paths")]
    if not all(isinstance(part, list) for part in lists):
        return []
    groups = []
    for name, *shares in zip(*lists, strict=False):
        corpora = [" ".join(map(str, share)) for share in zip(*shares, strict=False)]
        groups.append(f"{name}: {', '.join(corpora)}")
    return groups


def _samples(args: Mapping[str, Any]) -> int:
    """The planned number of training samples; 0 if the arguments do not give the number."""
    samples = args.get("train_samples")
    if samples is None:
        steps, per_step = args.get("train_iters"), args.get("global_batch_size")
        samples = steps * per_step if type(steps) is int and type(per_step) is int else 0
    return samples if type(samples) is int and samples > 0 else 0


def resume_note(progress: Progress, out: str) -> str:
    """A message that tells the user how to continue the run from the converted checkpoint.

    Args:
        progress: counts of the run's steps and samples at the checkpoint.
        out: path of the converted checkpoint.
    """
    return (
        f"with Adam's moments, after {progress.step} steps and {progress.samples} samples: --checkpoint.resume {out} "
        f"--checkpoint.allow_changed_data true continues the run (with [data] order, on the samples that would have "
        f"come next); [model] init_from starts a new run with these weights"
    )
