"""Claims about [lora] on models of transformers: every layout trains what a plain loop in one process does."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests import hf_train, lora_train
from tests.hf_models import Case
from tests.hf_train import Job
from tests.lora_train import Asked

LOSS, STEPPED = 1e-5, 1e-4
LLAMA = Asked(Case("llama", tied=False), "linears", tuple("qkvo"))
GEMMA = Asked(Case("gemma3_text"), ("q_proj", "v_proj", "down_proj"), ("q_proj", "v_proj", "down_proj"))
MIXTRAL = Asked(Case("mixtral", tied=False), "linears", ("q_proj", "k_proj", "v_proj", "o_proj"))
_OF_LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LLAMA = LLAMA._replace(ends=_OF_LLAMA)
GPT2 = Asked(Case("gpt2"), "linears", ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"))
EVERYWHERE = {"tp 2": [LLAMA, GEMMA, MIXTRAL, GPT2], "pp 2": [LLAMA, GEMMA], "dp 2": [LLAMA, MIXTRAL]}
ROUNDED = ("1", "tp 2", "dp 2")


@functools.cache
def measured() -> dict[str, list[dict[Asked, Any]]]:
    every = list(dict.fromkeys(asked for cases in EVERYWHERE.values() for asked in cases))
    directories, path = lora_train.truths(every)
    jobs = {
        layout: Job(layout, lora_train.numbers, ({asked: directories[asked] for asked in cases}, path))
        for layout, cases in EVERYWHERE.items()
    }
    for layout in ROUNDED:
        jobs[f"{layout}, bf16"] = Job(layout, lora_train.rounded, (directories[GEMMA], GEMMA))
    return hf_train.run_all(jobs)


@pytest.mark.parametrize("layout", EVERYWHERE)
def test_ten_steps_with_adapters_are_those_of_a_plain_loop(layout: str):
    for found in measured()[layout]:
        for asked, numbers in found.items():
            assert numbers["losses"] <= LOSS, asked
            worst = max(numbers["adapters"].items(), key=lambda item: item[1], default=("", 0.0))
            assert worst[1] <= STEPPED, (asked, worst)


@pytest.mark.parametrize("layout", ROUNDED)
def test_a_base_in_bfloat16_gives_the_losses_of_fp32_masters_to_the_bit_in_half_the_bytes(layout: str):
    for found in measured()[f"{layout}, bf16"]:
        masters, halves = found["float32"], found["bfloat16"]
        assert masters["losses"] == halves["losses"]
        assert masters["bytes"] == 2 * halves["bytes"]
