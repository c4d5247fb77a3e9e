"""`dtmega convert --from megatron` as a user runs it, on folders that tests/megatron_files.py writes by their sources.

What comes out has the logits of Megatron's model on one device (tests/plain_megatron.py), or is refused and leaves
nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dtmega import config, families, job
from dtmega.__main__ import main as command
from dtmega.checkpoint.resume import open_checkpoint, state_of
from dtmega.checkpoint.weights import Weights
from tests import megatron_files as theirs
from tests.megatron_files import Layout
from tests.plain_megatron import Plain, shapes

D, H, F, V, ROWS, S, L = 8, 2, 32, 22, 24, 10, 4
ARGS = {"num_layers": L, "hidden_size": D, "num_attention_heads": H, "ffn_hidden_size": F, "padded_vocab_size": ROWS}
ARGS |= {"max_position_embeddings": S, "make_vocab_size_divisible_by": 6, "seq_length": 8, "train_iters": 20}
TWO_BY_TWO = Layout(tp=2, pp=2)
TOKENS = torch.arange(S * 2).view(2, S) % V


def drawn(kind: str, seed: int = 0) -> dict[str, Tensor]:
    """Weights of a whole model."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.3 + (1 if "norm" in name and name.endswith("weight") else 0)
        for name, shape in shapes(kind, D, F, ROWS, S, L).items()
    }


def arguments(kind: str, version: float, layout: Layout) -> dict[str, Any]:
    fused = {} if version >= 3 else {"bias_gelu_fusion": True}
    told = {"bert_binary_head": True} if kind == "bert" else {}
    return theirs.arguments(version, layout, **ARGS, **fused, **told, world_size=2 * layout.tp * layout.pp)


def written(folder: Path, kind: str = "gpt", layout: Layout = TWO_BY_TWO, version: float = 3.0, **options: Any) -> Path:
    args = arguments(kind, version, layout)
    return theirs.write(folder, drawn(kind), H, layout, args=args | options.pop("args", {}), version=version, **options)


def convert(source: Path, out: Path, *options: str, to: str = "dtmega") -> int:
    return command(["convert", "--from", "megatron", str(source), "--to", to, str(out), *options])


def read(path: Path) -> tuple[config.Model, dict[str, Tensor]]:
    """The model of a checkpoint of ours, and its weights."""
    checkpoint = open_checkpoint(str(path))
    model = config.model_section(state_of(checkpoint).config["model"], str(path))
    weights = Weights(checkpoint)
    return model, {name: weights.read(name) for name in weights.tensors}


def logits(path: Path) -> dict[str, Tensor]:
    """Of our model with the weights of a checkpoint."""
    model, weights = read(path)
    built = families.of(model).build(model).eval()
    built.init_buffers(0)
    missing, unexpected = built.load_state_dict(weights, strict=False)
    assert not unexpected
    assert {name for name in missing if name in dict(built.named_parameters())} == set()
    places = torch.arange(S).expand(2, S)
    with torch.no_grad():
        if model.name == "bert":
            found = built(TOKENS, token_types=TOKENS % 2, places=places)
        elif model.name == "t5":
            found = built(TOKENS, TOKENS.flip(1), places=places, decoder_places=places)
        else:
            found = built(TOKENS)
    return found if isinstance(found, dict) else {"lm": found}


def expected(kind: str) -> dict[str, Tensor]:
    plain = Plain(drawn(kind), H, slopes=(2**-4, 2**-8) if kind == "bloom" else ())
    if kind == "bert":
        return plain.bert(TOKENS, TOKENS % 2)
    return plain.t5(TOKENS, TOKENS.flip(1)) if kind == "t5" else plain.decoder(TOKENS)


def assert_same_logits(path: Path, kind: str) -> None:
    found, there = logits(path), expected(kind)
    for name, logit in there.items():
        ours = found[name]
        torch.testing.assert_close(ours[..., :V], logit[..., :V] if name != "order" else logit, atol=2e-5, rtol=1e-5)


CASES: dict[str, tuple[str, Layout, float, dict[str, Any]]] = {
    "GPT": ("gpt", TWO_BY_TWO, 3.0, {}),
    "GPT with virtual stages": ("gpt", Layout(2, 2, chunks=2), 3.0, {}),
    "GPT of version 0": ("gpt", Layout(2, 1), 0, {"old_names": True, "legacy": True}),
    "GPT of version 1": ("gpt", Layout(2, 1), 1.0, {"old_names": True, "legacy": True}),
    "GPT of version 2": ("gpt", Layout(2, 1), 2.0, {"old_names": True}),
    "GPT, a release": ("gpt", Layout(1, 1), 3.0, {"release": True}),
    "BERT": ("bert", TWO_BY_TWO, 3.0, {}),
    "BERT of version 0": ("bert", Layout(2, 1), 0, {"old_names": True, "legacy": True}),
    "T5, its stacks on two stages": ("t5", Layout(2, 2, split=1), 3.0, {}),
    "T5 of version 1": ("t5", Layout(2, 1), 1.0, {"old_names": True}),
}


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][0] in families.FAMILIES])
def test_what_was_converted_has_the_logits_of_megatrons_model_on_one_device(tmp_path: Path, case: str):
    kind, layout, version, options = CASES[case]
    written(tmp_path / "in", kind, layout, version, **options)
    assert convert(tmp_path / "in", tmp_path / "out", "--vocab-size", str(V)) == job.DONE
    assert_same_logits(tmp_path / "out", kind)
    assert read(tmp_path / "out")[0].vocab_size == V
