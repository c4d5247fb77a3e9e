"""`convert --from megatron` of megatron-core's distributed checkpoints, written by torch.distributed.checkpoint."""

from __future__ import annotations

import argparse
import io
import json
import signal
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from dtmega import job
from tests.megatron_files import Layout
from tests.test_megatron_checkpoints import L, arguments, assert_same_logits, convert, drawn, read

# By Megatron-LM's names of a layer: where a GPT of megatron-core has the same.
LAYER = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "self_attention.query_key_value.": "self_attention.linear_qkv.",
    "self_attention.dense.": "self_attention.linear_proj.",
    "post_attention_layernorm.": "mlp.linear_fc1.layer_norm_",
    "mlp.dense_h_to_4h.": "mlp.linear_fc1.",
    "mlp.dense_4h_to_h.": "mlp.linear_fc2.",
}


class Planner(DefaultSavePlanner):
    """megatron-core's, which adds to the metadata what it knows of flattened tensors."""

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        metadata.mcore_data = {name: {"nd_reformulated_orig_global_shape": (2, 3)} for name in ("a", "b")}  # pyright: ignore
        return plans, metadata


def by_their_names(weights: Mapping[str, Tensor], stacked: bool) -> dict[str, Tensor]:
    found = {}
    for name, tensor in weights.items():
        if ".layers." not in name:
            found[name.replace("encoder.final", "decoder.final")] = tensor
            continue
        _, _, number, inner = name.split(".", 3)
        module, end = next((module, inner.removeprefix(module)) for module in LAYER if inner.startswith(module))
        if not stacked:
            found[f"decoder.layers.{number}.{LAYER[module]}{end}"] = tensor
        elif number == "0":
            every = [weights[f"encoder.layers.{i}.{inner}"] for i in range(L)]
            found[f"decoder.layers.{LAYER[module]}{end}"] = torch.stack(every)
    return found


def written(
    folder: Path, stacked: bool = True, more: Mapping[str, Any] | None = None, backend: str = "torch_dist"
) -> Path:
    inside = folder / "iter_0000007"
    inside.mkdir(parents=True)
    tensors: dict[str, Any] = by_their_names(drawn("gpt"), stacked)
    tensors |= {f"decoder.layers.mlp.linear_fc1._extra_state/shard_{i}_{L}": io.BytesIO(b"fp8") for i in range(L)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        state_dict_saver.save({**tensors, **(more or {})}, checkpoint_id=str(inside), planner=Planner(), no_dist=True)
    (inside / "metadata.json").write_text(json.dumps({"sharded_backend": backend, "sharded_backend_version": 1}))
    args = arguments("gpt", 3.0, Layout()) | {"position_embedding_type": "learned_absolute", "swiglu": False}
    common = {"args": argparse.Namespace(**args, exit_signal=signal.SIGTERM), "checkpoint_version": 3.0}
    torch.save(common | {"iteration": 7, "opt_param_scheduler": {"num_steps": 56}}, inside / "common.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "one by one"])
def test_layers_stacked_or_one_by_one_are_megatrons_model(
    tmp_path: Path, stacked: bool, capsys: pytest.CaptureFixture[str]
):
    assert convert(written(tmp_path / "in", stacked), tmp_path / "out", "--vocab-size", "22") == job.DONE
    assert "weights alone: of megatron-core no moments are read" in capsys.readouterr().out
    assert_same_logits(tmp_path / "out", "gpt")


def test_weights_are_the_fp32_masters_where_these_are(tmp_path: Path):
    name = "decoder.final_layernorm.weight"
    master = drawn("gpt")["encoder.final_layernorm.weight"] + 1
    moments = {f"optimizer.state.exp_avg.{name}": master + 1}
    written(tmp_path / "in", more={f"optimizer.state.fp32_param.{name}": master, **moments})
    assert convert(tmp_path / "in", tmp_path / "out") == job.DONE
    assert torch.equal(read(tmp_path / "out")[1]["norm.weight"], master)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "zarr"}, "metadata.json has sharded_backend='zarr', expected 'torch_dist'"),
        (
            {"more": {"decoder.layers.mlp.router.weight": torch.ones(L, 2)}},
            "has no place for decoder.layers.mlp.router",
        ),
        (
            {"more": {"decoder.layers.1.mlp.linear_fc2.bias": torch.ones(8)}},
            "'encoder.layers.1.mlp.dense_4h_to_h.bias' is",
        ),
        ({"more": {"output_layer.bias": torch.ones(2, 0)}}, "'output_layer.bias' is [2, 0], expected a tensor with"),
    ],
)
def test_what_is_no_such_checkpoint_of_a_gpt_is_refused_and_nothing_is_written(
    tmp_path: Path, options: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
):
    assert convert(written(tmp_path / "in", **options), tmp_path / "out") == job.REFUSED
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
