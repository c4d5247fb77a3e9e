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

from dtmega import config
from dtmega.distributed import exit_codes
from tests.interop.megatron.test_folder import (
    L,
    V,
    arguments,
    assert_same_logits,
    checkpoint,
    convert,
    drawn,
    of_kind,
    read,
)
from tests.megatron_files import Layout

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
    """megatron-core's, which adds to the metadata what it knows of flattened tensors, and the plans of the ranks."""

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        metadata.mcore_data = {name: {"nd_reformulated_orig_global_shape": (2, 3)} for name in ("a", "b")}  # pyright: ignore
        metadata.all_local_plans = all_plans  # pyright: ignore[reportAttributeAccessIssue]
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
    folder: Path,
    stacked: bool = True,
    more: Mapping[str, Any] | None = None,
    backend: str = "torch_dist",
    optimizer: Mapping[str, Any] | None = None,
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
    if optimizer is not None:
        common["optimizer"] = optimizer
    torch.save(common | {"iteration": 7, "opt_param_scheduler": {"num_steps": 56}}, inside / "common.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "one by one"])
def test_layers_stacked_or_one_by_one_are_megatrons_model(
    tmp_path: Path, stacked: bool, capsys: pytest.CaptureFixture[str]
):
    assert convert(written(tmp_path / "in", stacked), tmp_path / "out", "--vocab-size", "22") == exit_codes.DONE
    assert "weights only: the files have no optimizer's state" in capsys.readouterr().out
    assert_same_logits(tmp_path / "out", "gpt")


def test_weights_are_the_fp32_masters_where_these_are(tmp_path: Path):
    name = "decoder.final_layernorm.weight"
    master = drawn("gpt")["encoder.final_layernorm.weight"] + 1
    moments = {f"optimizer.state.exp_avg.{name}": master + 1}
    written(tmp_path / "in", more={f"optimizer.state.fp32_param.{name}": master, **moments})
    assert convert(tmp_path / "in", tmp_path / "out") == exit_codes.DONE
    assert torch.equal(read(tmp_path / "out")[1]["norm.weight"], master)


GROUPS = [{"wd_mult": 1.0, "lr": 1e-4}, {"wd_mult": 0.0, "lr": 1e-4}]
# What stands in common.pt of an optimizer in fp32, of one of 16 bits, and of the distributed one.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "fp32": {"state": {"common_step": torch.tensor(6.0)}, "param_groups": GROUPS},
    "16 bits": {"optimizer": {"state": {"common_step": 6}, "param_groups": GROUPS}},
    "distributed": {"optimizer": {"param_groups": [{**group, "step": 6} for group in GROUPS]}},
}


def adams(stacked: bool) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """Moments by kind and Megatron-LM's names, and the same under those in a checkpoint."""
    moments = {kind: drawn("gpt", seed) for seed, kind in enumerate(("exp_avg", "exp_avg_sq"), start=1)}
    stored = {}
    for kind, tensors in moments.items():
        stored |= {f"optimizer.state.{kind}.{name}": t for name, t in by_their_names(tensors, stacked).items()}
    return moments, stored


@pytest.mark.parametrize(("optimizer", "stacked"), [("fp32", True), ("16 bits", False), ("distributed", True)])
def test_adams_moments_are_those_of_their_weights(tmp_path: Path, optimizer: str, stacked: bool):
    moments, stored = adams(stacked)
    written(tmp_path / "in", stacked, more=stored, optimizer=OPTIMIZERS[optimizer])
    assert convert(tmp_path / "in", tmp_path / "out", "--vocab-size", str(V)) == exit_codes.DONE
    state, tensors = checkpoint(tmp_path / "out")
    assert (state.progress.step, state.progress.samples, state.updates, state.progress.skipped) == (7, 56, 6, 1)
    assert config.load(["--config", str(tmp_path / "out" / "config.toml")]).data.order == "megatron-core"
    model = config.model_section(state.config["model"], "out")
    for kind, there in moments.items():
        for name, tensor in of_kind("gpt", there, model).items():
            assert torch.equal(tensors[f"optimizer/{kind}/{name}"], tensor), (kind, name)


@pytest.mark.parametrize(
    ("lost", "why"),
    [
        (
            "exp_avg_sq.decoder.layers.mlp.linear_fc2.bias",
            "there is no exp_avg_sq of 'decoder.layers.mlp.linear_fc2.bias'",
        ),
        ("common_step", "the files do not say how many updates Adam has made"),
    ],
)
def test_moments_that_are_not_whole_are_left_out_with_the_reason(
    tmp_path: Path, lost: str, why: str, capsys: pytest.CaptureFixture[str]
):
    _, stored = adams(stacked=True)
    optimizer = {"state": {} if lost == "common_step" else {"common_step": 6}, "param_groups": GROUPS}
    more = {name: tensor for name, tensor in stored.items() if not name.endswith(lost)}
    written(tmp_path / "in", more=more, optimizer=optimizer)
    assert convert(tmp_path / "in", tmp_path / "out") == exit_codes.DONE
    assert f"weights only: {why}" in capsys.readouterr().out
    assert [name for name in checkpoint(tmp_path / "out")[1] if not name.startswith("model/")] == []


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
    assert convert(written(tmp_path / "in", **options), tmp_path / "out") == exit_codes.REFUSED
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
