"""A family from outside of dtmega (tests/outside/neox.py): its numbers are the original's, on every layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from dtmega import families
from tests import layouts, ranks
from tests.outside import neox

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = Path(neox.__file__).parent
V, S = 131, 29
NAMES = {
    "embed.": "gpt_neox.embed_in.",
    "attn_norm.": "input_layernorm.",
    "attn.qkv.": "attention.query_key_value.",
    "attn.out.": "attention.dense.",
    "mlp_norm.": "post_attention_layernorm.",
    "mlp.up.": "mlp.dense_h_to_4h.",
    "mlp.down.": "mlp.dense_4h_to_h.",
    "norm.": "gpt_neox.final_layer_norm.",
    "head.": "lm_head.",
}


def their_name(name: str) -> str:
    """The name of a parameter in GPTNeoXForCausalLM."""
    layer, _, inside = name.removeprefix("layers.").partition(".")
    if name.startswith("layers."):
        (ours,) = (start for start in NAMES if inside.startswith(start))
        return f"gpt_neox.layers.{layer}.{NAMES[ours]}{inside.removeprefix(ours)}"
    module, _, rest = name.partition(".")
    return NAMES[f"{module}."] + rest


def both() -> tuple[neox.NeoX, Any]:
    """The two models, with the same random values, in which no bias is 0 and no norm 1."""
    theirs = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=V,
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=6,
            intermediate_size=100,
            layer_norm_eps=0.1,
            max_position_embeddings=64,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        )
    ).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    sizes = {"vocab_size": V, "hidden_size": 48, "n_layers": 2, "n_heads": 6, "ffn_hidden_size": 100}
    ours = neox.NeoX(neox.NeoXKeys(**sizes, layer_norm_eps=0.1, rotary_share=0.5, rope_theta=500.0))
    values = theirs.state_dict()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(values[their_name(name)])
    ours.init_buffers(0)
    assert len(values) == len(list(ours.parameters()))
    return ours, theirs


def relative(this: Tensor, that: Tensor) -> float:
    return ((this - that).norm() / that.norm()).item()


def test_its_logits_loss_and_gradients_are_those_of_transformers():
    ours, theirs = both()
    tokens = torch.randint(V, (2, S), generator=torch.Generator().manual_seed(3))
    labels = tokens.roll(-1, dims=1)
    truth = theirs(tokens).logits
    assert relative(ours(tokens), truth) < 1e-5
    loss, their_loss = (
        ours(tokens, labels)["lm"],
        F.cross_entropy(truth.flatten(0, 1), labels.flatten(), reduction="sum"),
    )
    assert relative(loss, their_loss) < 1e-5
    loss.backward()
    their_loss.backward()
    gradients = {name: (p.grad, theirs.get_parameter(their_name(name)).grad) for name, p in ours.named_parameters()}
    assert {name: e for name, (g, truth) in gradients.items() if (e := relative(g, truth)) > 1e-5} == {}


def test_no_output_depends_on_the_bias_that_it_calls_unseen():
    ours, _ = both()
    tokens = torch.arange(S).unsqueeze(0)
    before = ours(tokens)
    masks = ours.unseen()
    assert [int(mask.sum()) for mask in masks.values()] == [6 * 4, 6 * 4]
    with torch.no_grad():
        for name, mask in masks.items():
            ours.get_parameter(name)[mask] += 1.0
    assert relative(ours(tokens), before) < 1e-5


def register() -> None:
    """What `train_neox.py` does before it trains."""
    families.register(neox.RECORD)


def train_on(n: int, folder: Path, keys: dict[str, Any]) -> layouts.Run:
    """Train the family on n processes, each of which registers it."""
    every = {**layouts.write_text(folder / "data"), "run.dir": str(folder / "run"), **keys}
    options = [word for k, v in every.items() for word in (f"--{k}", v if isinstance(v, str) else json.dumps(v))]
    argv = ["--config", str(OUTSIDE / "neox.toml"), *options]
    ranks.run(n, layouts.one_rank, argv, str(folder), register)
    return layouts.Run(folder)


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> layouts.Run:
    return train_on(1, tmp_path_factory.mktemp("truth"), {})


LAYOUTS: dict[str, dict[str, Any]] = {
    "pp 2 x tp 2": {"mesh.pp": 2, "mesh.tp": 2},
    "tp 2": {"mesh.tp": 2},
    "pp 2": {"mesh.pp": 2},
    "dp_shard 2": {"mesh.dp_shard": 2},
    "cp 2": {"mesh.cp": 2},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if "x" in name else pytest.mark.full) for name in LAYOUTS]
)
def test_a_layout_gives_the_numbers_of_one_process(truth: layouts.Run, tmp_path: Path, name: str):
    keys = LAYOUTS[name]
    run = train_on(2 ** len(keys), tmp_path, keys)
    found = layouts.deviation(run, truth)
    assert all(found[quantity] <= bound for quantity, bound in layouts.FP32.items()), found


def ended(folder: Path, *command: str, package: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program in `folder`; `package` is the folder of an installed package that registers the family."""
    paths = os.pathsep.join([str(ROOT), package]) if package else str(ROOT)
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = (sys.executable, *command)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def by_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of the script on two ranks, with a data worker each, which it then goes on with."""
    folder = tmp_path_factory.mktemp("script")
    data = layouts.write_text(folder / "data")
    options = [word for k, v in data.items() for word in (f"--{k}", v)]
    two = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    script = [str(OUTSIDE / "train_neox.py"), "--config", str(OUTSIDE / "neox.toml"), "--run.dir", "run", *options]
    first = ended(folder, *two, *script, "--mesh.tp", "2", "--data.num_workers", "1")
    assert first.returncode == 0, first.stdout + first.stderr
    second = ended(folder, *script, "--train.steps", "4")
    assert second.returncode == 0, second.stdout + second.stderr
    assert "resumed at step 3" in second.stdout
    return folder


@pytest.mark.full
def test_a_script_registers_it_for_its_ranks_and_its_data_workers(by_script: Path, truth: layouts.Run):
    lines = [json.loads(line) for line in (by_script / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[:3] == pytest.approx(truth.loss.tolist(), rel=1e-5)
    assert len(losses) == 4


GENERATE = ("-m", "dtmega", "generate", "--run", "run", "--prompt", "w1 w2", "--tokens", "2")


@pytest.mark.full
def test_its_checkpoint_opens_only_where_its_record_is_registered(by_script: Path, tmp_path: Path):
    refused = ended(by_script, *GENERATE)
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) == 1
    assert "got 'neox'; a family from elsewhere is known once families.register has its record" in refused.stderr
    described = ended(by_script, "-m", "dtmega", "inspect", "run")
    assert "neox: 68,928 parameters" in described.stdout
    metadata = tmp_path / "neox-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: neox\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[dtmega.families]\nneox = registers_neox\n")
    (tmp_path / "neox.py").write_text((OUTSIDE / "neox.py").read_text())
    (tmp_path / "registers_neox.py").write_text(
        "import neox\nfrom dtmega import families\nfamilies.register(neox.RECORD)\n"
    )
    opened = ended(by_script, *GENERATE, package=str(tmp_path))
    assert opened.returncode == 0, opened.stderr
    assert opened.stdout.startswith("w1 w2")
