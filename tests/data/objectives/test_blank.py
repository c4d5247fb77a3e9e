"""Rows without text, which a plan trains on, against rows of text."""

from __future__ import annotations

import functools

import pytest

from dtmega import config, families
from dtmega.data.objectives.rows import IGNORED
from dtmega.data.text import open_text

N_ROWS = 8
RESETS = ("--data.reset_position_ids true", "--data.reset_attention_mask true")
CASES = [
    "--config bloom.toml",
    f"--config bloom.toml {RESETS[0]}",
    f"--config bloom.toml {RESETS[1]} --data.eod_mask_loss true",
    "--config gpt.toml",
    "--config llama.toml",
    "--config prefix-lm.toml",
    f"--config prefix-lm.toml --data.reweight_positions true {' '.join(RESETS)}",
    "--config bert.toml",
    "--config t5.toml",
    "--config t5.toml --data.decoder_seq_len 100",
    "--config t5-megatron.toml --data.path stdlib --data.tokenizer stdlib-wordpiece",
]


@functools.cache
def opened(flags: str) -> tuple[dict, dict]:
    cfg = families.resolve(config.load(flags.split()))
    objective = families.objective(cfg)
    real = open_text(cfg, objective).rows("train")[range(N_ROWS)]
    return objective.blank(cfg.data, N_ROWS), real


@pytest.mark.parametrize("flags", CASES)
def test_rows_without_text_have_the_names_shapes_and_dtypes_of_real_rows(flags: str):
    blank, real = opened(flags)
    assert {name: (t.shape, t.dtype) for name, t in blank.items()} == {
        name: (t.shape, t.dtype) for name, t in real.items()
    }
    assert [t.is_contiguous() for t in blank.values()] == [real[name].is_contiguous() for name in blank]


def test_rows_without_text_have_somewhat_more_labels_than_berts_which_take_memory():
    blank, real = opened("--config bert.toml")
    n_blank, n_real = (int((rows["labels"] != IGNORED).sum()) for rows in (blank, real))
    assert n_real <= n_blank <= 1.25 * n_real
