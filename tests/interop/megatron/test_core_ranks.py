"""Checkpoints of megatron-core, against megatron-core itself (`make test-extras` installs it)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from dtmega.__main__ import main as command
from dtmega.checkpoint.resume import open_checkpoint, state_of
from dtmega.distributed import exit_codes
from tests import core_ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed (make test-extras)")
V, HEADS, GROUPS, D, L = 130, 8, 4, 64, 4
SIZES: dict[str, Any] = {"hidden_size": D, "intermediate_size": 96, "num_hidden_layers": L, "vocab_size": V}
SIZES |= {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "initializer_range": 0.1}
SIZES |= {"max_position_embeddings": 16_384}
SCALED = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0}
SCALED |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMAS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "scaled": {"rope_parameters": SCALED},
}


def theirs(kind: str) -> Any:
    """A model of transformers, all of whose tensors differ from those that it is made with."""
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"n_embd": D, "n_layer": L, "n_head": HEADS, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
        model: Any = GPT2LMHeadModel(GPT2Config(**sizes, vocab_size=V, initializer_range=0.1))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES, **LLAMAS[kind]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def converted(folder: Path, model: Any) -> Path:
    """The `release` folder of a model of transformers."""
    model.save_pretrained(folder / "hf")
    arguments = ["--from", "hf", str(folder / "hf"), "--to", "megatron", str(folder / "core")]
    assert command(["convert", *arguments]) == exit_codes.DONE
    return folder / "core" / "release"


def run(what: str, folder: Path, tp: int, pp: int, out: Path) -> None:
    """Run megatron-core on tp times pp ranks."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={tp * pp}"]
    words = [*launch, "-m", "tests.core_ranks", what, folder, tp, pp, out]
    log = out.with_suffix(".log")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    # To a file: what megatron-core starts while it saves would keep a pipe open.
    with log.open("w") as written:
        process = subprocess.Popen(
            [str(word) for word in words], env=environment, stdout=written, stderr=written, start_new_session=True
        )
        try:
            code = process.wait(timeout=180)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert code == 0, log.read_text()[-4000:]


@pytest.mark.parametrize("kind", ["gpt2", *LLAMAS])
def test_megatron_core_loads_it_strictly_and_computes_what_transformers_does(tmp_path: Path, kind: str):
    model = theirs(kind)
    run("load", converted(tmp_path, model), 1, 1, tmp_path / "out")
    found = torch.load(tmp_path / "out")
    assert (found["missing"], found["unexpected"]) == ([], [])
    with torch.no_grad():
        expected = model(core_ranks.tokens(V)).logits
    print("largest difference", (found["logits"][..., :V] - expected).abs().max().item())
    torch.testing.assert_close(found["logits"][..., :V], expected, rtol=0, atol=1e-5)
    assert not found["logits"][..., V:].any()


@pytest.mark.parametrize(("tp", "pp"), [(4, 1), (2, 2)])
def test_megatron_core_loads_it_on_any_layout_whatever_padding_its_vocabulary_has_there(
    tmp_path: Path, tp: int, pp: int
):
    model = theirs("untied")
    run("load", converted(tmp_path, model), tp, pp, tmp_path / "out")
    found = torch.load(tmp_path / "out")
    assert (found["missing"], found["unexpected"]) == ([], [])
    if pp == 1:
        with torch.no_grad():
            expected = model(core_ranks.tokens(V)).logits
        assert found["logits"].shape[-1] == 512  # the next multiple of 128 x 4; the file has 256 rows
        torch.testing.assert_close(found["logits"][..., :V], expected, rtol=0, atol=1e-5)
        assert not found["logits"][..., V:].any()


@pytest.mark.parametrize("kind", ["untied", "tied", "gpt2"])
def test_what_it_saved_on_tp_2_by_pp_2_is_read_with_its_moments(tmp_path: Path, kind: str):
    model = theirs(kind)
    run("save", converted(tmp_path, model), 2, 2, tmp_path / "saved")
    arguments = ["--from", "megatron", str(tmp_path / "saved"), "--to", "dtmega", str(tmp_path / "out")]
    assert command(["convert", *arguments, "--vocab-size", str(V)]) == exit_codes.DONE
    checkpoint = open_checkpoint(str(tmp_path / "out"))
    state = state_of(checkpoint)
    assert (state.progress.step, state.progress.samples, state.updates) == (core_ranks.STEPS, core_ranks.SAMPLES, 3)
    # The weights before the updates, as our names: each gradient was half of its weight.
    back = ["--from", "hf", str(tmp_path / "hf"), "--to", "dtmega", str(tmp_path / "first")]
    assert command(["convert", *back]) == exit_codes.DONE
    first = open_checkpoint(str(tmp_path / "first"))
    names = [name.removeprefix("model/") for name in first.tensors if name.startswith("model/")]
    assert {f"optimizer/{kind}/{name}" for kind in ("exp_avg", "exp_avg_sq") for name in names} <= {*checkpoint.tensors}
    for name in names:
        gradient = first.read(f"model/{name}") * 0.5
        expected = {"exp_avg": gradient * (1 - 0.9**3), "exp_avg_sq": gradient.square() * (1 - 0.999**3)}
        for moment, values in expected.items():
            found = checkpoint.read(f"optimizer/{moment}/{name}")[: len(values)]
            torch.testing.assert_close(found, values, rtol=1e-5, atol=1e-8, msg=f"{moment} of {name}")
