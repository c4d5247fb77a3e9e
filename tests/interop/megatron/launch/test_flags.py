"""The table of flags beside those that the originals' own parsers define (`flags.tsv`)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from dtmega import config
from dtmega.interop.megatron.launch.flags import by_name, row_of
from dtmega.interop.megatron.launch.row import MANY, Flag
from dtmega.interop.megatron.launch.translate import translate


class Theirs(NamedTuple):
    """A flag of the originals: its name, its numbers of values ('*': any), and its defaults."""

    name: str
    n_values: list[str]
    defaults: list[str]


def read() -> list[Theirs]:
    lines = Path(__file__).with_name("flags.tsv").read_text(encoding="utf-8").splitlines()
    columns = [line.split("\t") for line in lines if not line.startswith("#")][1:]
    return [
        Theirs(name, n.split(), [text for text in defaults if text not in ("", "-")]) for name, n, *defaults in columns
    ]


FLAGS = read()
# Flags whose default is another word for what the row says, and why it comes to the same.
OTHER_WORDS = {
    "--num-experts": "[1] is a model without experts",
    "--position-embedding-type": "learned_absolute is the later name of absolute",
    "--normalization": "layernorm is LayerNorm in the fork",
    "--vocab-extra-ids": "Megatron refuses a T5 without sentinels",
}


def row(theirs: Theirs) -> Flag:
    found = row_of(theirs.name)
    assert found is not None
    return found


def test_every_flag_of_the_originals_has_a_row():
    assert [theirs.name for theirs in FLAGS if row_of(theirs.name) is None] == []
    # Flags of their other programs, which start no training.
    other_programs = "input json-keys output-prefix workers append-eod split-sentences dataset-impl task"
    assert {f"--{name}" for name in other_programs.split()} <= by_name().keys()


def test_every_flag_takes_as_many_values_as_in_the_originals():
    numbers = {theirs.name: row(theirs).n_values for theirs in FLAGS if row(theirs).n_values != MANY}
    assert [f.name for f in FLAGS if f.name in numbers and str(numbers[f.name]) not in f.n_values] == []


def test_a_default_of_the_originals_is_the_tables_or_changes_nothing():
    fields = config.Config.model_fields
    unlike = []
    for theirs in FLAGS:
        mine = row(theirs)
        if theirs.name in OTHER_WORDS or not (mine.keys or mine.changes):
            continue
        harmless = [text for text in (mine.default, *mine.neutral) if text is not None]
        section, _, key = (mine.keys or (".",))[0].partition(".")
        declared = getattr(fields[section].annotation, "model_fields", {}).get(key) if section else None
        if declared is not None:
            harmless.append(str(declared.default))
        unlike += [theirs.name for text in theirs.defaults if not any(equal(text, other) for other in harmless)]
    assert unlike == []


def equal(text: str, other: str) -> bool:
    try:
        return float(text) == float(other)
    except ValueError:
        return text.replace(" ", "") == other.replace(" ", "")


@pytest.mark.parametrize("flag", ["--seed", "--clip-grad", "--rampup-batch-size 2 4", "--fp8-format", "--eval-only"])
def test_a_flag_without_its_value_is_refused(flag: str):
    lines = translate(f"pretrain_gpt.py {flag} --num-layers 2").open
    assert any(line.startswith(f"{flag} (line 1): without its value") for line in lines)


def test_a_flag_whose_values_are_in_a_variable_is_not_called_one_without_values():
    lines = translate("pretrain_gpt.py --rampup-batch-size $RAMP").open
    assert not any("without its value" in line for line in lines)


def test_a_name_with_an_asterisk_stands_for_flags_without_a_row_of_their_own():
    assert row_of("--rl-something-of-next-year") is row_of("--rl-default-top-k")
    assert row_of("--fp8-format") is not row_of("--fp8-margin")
    assert row_of("--nonsense") is None
