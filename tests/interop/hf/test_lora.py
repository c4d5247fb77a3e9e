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
TEN = 10  # steps in full runs
_OF_LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_SOME = ("q_proj", "v_proj", "down_proj")
LLAMA = Asked(Case("llama", tied=False), "linears", _OF_LLAMA)
GEMMA = Asked(Case("gemma3_text"), _SOME, _SOME)
MIXTRAL = Asked(Case("mixtral", tied=False), "linears", _OF_LLAMA[:4])
# Layers whose weights are stored as [in, out], one of them three matrices in one.
GPT2 = Asked(Case("gpt2"), "linears", ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"))
# A projection in two parts whose heads share keys, and a fused one.
PACKED = Asked(Case("phi3", tied=False), "linears", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"))
BIGCODE = Asked(Case("gpt_bigcode"), "linears", ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"))
EVERYWHERE = {"tp 2": [LLAMA, GPT2], "pp 2": [GEMMA], "dp 2, ep 2": [MIXTRAL]}
EVERY = [LLAMA, GEMMA, MIXTRAL, GPT2, PACKED, BIGCODE]
REPEATING = {
    "tp 2": [GEMMA, MIXTRAL, PACKED, BIGCODE],
    "pp 2": [LLAMA],
    "dp 2": [LLAMA, GEMMA, MIXTRAL],
    "dp 4, ep 2": [MIXTRAL],
    "HSDP 2 x 2": [LLAMA, GEMMA, MIXTRAL],
    "tp 2 x dp 2": EVERY,
    "tp 2 x dp 2, recompute": [LLAMA, MIXTRAL],
}
ROUNDED = ("dp 2", "1", "tp 2")


@functools.cache
def measured(repeating: bool = False) -> dict[str, list[dict[Asked, Any]]]:
    """What `make test` measures, or what only `make test-full` does, so that the processes start once for each."""
    trained = REPEATING if repeating else EVERYWHERE
    gemma = GEMMA
    if repeating:
        trained = {layout: [asked._replace(steps=TEN) for asked in cases] for layout, cases in trained.items()}
        gemma = GEMMA._replace(steps=TEN)
    directories, path = lora_train.truths(list(dict.fromkeys(asked for cases in trained.values() for asked in cases)))
    jobs = {}
    for layout, cases in trained.items():
        jobs[layout] = Job(layout, lora_train.numbers, ({asked: directories[asked] for asked in cases}, path))
    for layout in ROUNDED[1:] if repeating else ROUNDED[:1]:
        jobs[f"{layout}, bf16"] = Job(layout, lora_train.rounded, (directories[gemma], gemma))
    return hf_train.run_all(jobs)


def check_steps(layout: str, repeating: bool) -> None:
    for found in measured(repeating)[layout]:
        for asked, numbers in found.items():
            assert numbers["drawn"], asked
            assert numbers["losses"] <= LOSS, asked
            worst = max(numbers["adapters"].items(), key=lambda item: item[1], default=("", 0.0))
            assert worst[1] <= STEPPED, (asked, worst)


@pytest.mark.parametrize("layout", EVERYWHERE)
def test_four_steps_with_adapters_are_those_of_a_plain_loop(layout: str):
    check_steps(layout, repeating=False)


# peft asks transformers 5 for what is called otherwise there.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_four_steps_and_the_bytes_of_moments_are_those_of_a_loop_with_peft():
    directories, _ = lora_train.truths([LLAMA])
    plain = lora_train.truth(directories[LLAMA], LLAMA)
    theirs = lora_train.plain_steps(*lora_train.with_peft(directories[LLAMA], LLAMA.ends), LLAMA.steps)
    assert max(abs(a / b - 1) for a, b in zip(theirs["losses"], plain["losses"], strict=True)) <= 1e-6
    assert max(hf_train.errors(theirs["adapters"], plain["adapters"]).values()) <= STEPPED
    for layout in ("tp 2",):
        ours = measured()[layout]
        assert sum(found[LLAMA]["bytes"] for found in ours) == theirs["bytes"]


@pytest.mark.full
@pytest.mark.parametrize("layout", REPEATING)
def test_ten_steps_with_adapters_are_those_of_a_plain_loop_for_every_form_of_a_layer(layout: str):
    check_steps(layout, repeating=True)


def check_rounded(layout: str, repeating: bool) -> None:
    for found in measured(repeating)[f"{layout}, bf16"]:
        masters, halves = found["float32"], found["bfloat16"]
        assert masters["losses"] == halves["losses"]
        assert masters["bytes"] == 2 * halves["bytes"]


def test_a_base_in_bfloat16_gives_the_losses_of_fp32_masters_to_the_bit_in_half_the_bytes():
    check_rounded("dp 2", repeating=False)


@pytest.mark.full
@pytest.mark.parametrize("layout", ROUNDED[1:])
def test_a_base_in_bfloat16_gives_the_losses_of_fp32_masters_on_every_kind_of_rank(layout: str):
    check_rounded(layout, repeating=True)
