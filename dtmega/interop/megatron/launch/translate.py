"""Translate the flags of a Megatron command into a TOML configuration.

translation = translate("pretrain_bert.py --num-layers 24 ...")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dtmega.interop.megatron.launch import architecture, command, corpora, experts, layout, precision, schedule
from dtmega.interop.megatron.launch.command import Command
from dtmega.interop.megatron.launch.draft import Draft, by_section

LAYOUT = ("mesh", "pipeline", "recompute", "fsdp")  # sections that do not change what a run computes


class Translation(NamedTuple):
    """The result of translating a command's flags.

    Attributes:
        toml: text of the configuration, with comments in place of the keys that the flags do not give.
        left_out: lines for the user, one for each flag that was not carried over.
        notes: further remarks for the user, about files that were not read.
        missing: lines for the user, one for each key whose value the flags do not give.
        open: lines about everything that the user has to decide before a run accepts the configuration, i.e. each key
            in `missing` and each flag in `left_out` that changes what a run computes. The configuration has the same
            lines in `[run] untranslated`.
    """

    toml: str
    left_out: list[str]
    notes: list[str]
    missing: list[str]
    open: list[str]


def translate(
    source: str,
    given: Mapping[str, str] | None = None,
    allowed: Sequence[str] = (),
    original: str = "",
    number: int = 0,
) -> Translation:
    """Translate a command line, or the command in a launch script.

    Args:
        source: text of a command that contains `pretrain_….py`, or path of a launch script.
        given: values of the script's environment variables, keyed by name.
        allowed: flags and keys that may be missing from the configuration.
        original: fork and version that the command is for: megatron-lm (until November 2023), megatron-deepspeed or
            megatron-core; '' to infer fork and version from the flags.
        number: 1-based index of the command if the script has several commands; 0 if the script must have only one.

    Raises:
        ValueError: `source` has no Megatron command or does not determine which command runs, or the command trains a
            model that dtmega does not support.
        OSError: the launch script cannot be read.
    """
    found, notes = command.read(source, given or {}, number)
    draft = _filled_draft(found, original)
    draft.close(allowed)
    title = f"From {found.script}.py's flags by dtmega from-megatron."
    return Translation(
        draft.text(title), draft.left_out(), notes, draft.missing(), [str(each) for each in draft.open.values()]
    )


def translate_known_model(
    found: Command, known: Mapping[str, Any], title: str
) -> tuple[str, dict[str, dict[str, Any]]]:
    """Translate a command, without the layout, for a model that is already known.

    Args:
        found: command to translate.
        known: values keyed by "section.key". [model] gets only these values; in other sections, these values replace
            the values from the flags.
        title: first line of the text, a comment.

    Returns:
        The text of the configuration, and its values as section -> key -> value.
    """
    draft = _filled_draft(found, "")
    for keys in (draft.keys, draft.lacking):
        for key in [key for key in keys if key.partition(".")[0] in ("model", *LAYOUT)]:
            del keys[key]
    draft.keys |= known
    # The checkpoint determines the model, so nothing is left for the user to decide.
    draft.open.clear()
    return draft.text(title), by_section(draft.keys)


def _filled_draft(found: Command, original: str) -> Draft:
    """Create a draft and translate all flags of the command."""
    draft = Draft(found, architecture.family_of(found), original)
    # The order matters: each step reads keys that earlier steps copied or set, and replaces some of these keys.
    draft.copy_values()
    for step in (
        architecture.set_model,
        experts.set_experts,
        corpora.set_vocabulary,
        schedule.set_batch,
        schedule.set_length,
        schedule.set_schedule,
        schedule.set_optimizer,
        precision.set_precision,
        layout.set_layout,
        corpora.set_data,
        corpora.set_evaluation,
    ):
        step(draft)
    return draft
