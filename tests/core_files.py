"""megatron-core's distributed checkpoints, written and read by torch.distributed.checkpoint and without dtmega's code.

Weights are those of transformers' models under megatron-core's names, layers stacked: what its sources say of each
tensor (megatron-core 0.16.1).
"""

from __future__ import annotations

import argparse
import json
import signal
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader

FOLDER = "iter_0000007"


class Planner(DefaultSavePlanner):
    """megatron-core's, which adds to the metadata what it knows of flattened tensors, and the plans of the ranks."""

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        metadata.mcore_data = {name: {"nd_reformulated_orig_global_shape": (2, 3)} for name in ("a", "b")}  # pyright: ignore
        metadata.all_local_plans = all_plans  # pyright: ignore[reportAttributeAccessIssue]
        return plans, metadata


def write(
    folder: Path,
    tensors: Mapping[str, Any],
    args: Mapping[str, Any],
    *,
    backend: str = "torch_dist",
    optimizer: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint of iteration 7, and return the folder, which holds the tracker's file."""
    inside = folder / FOLDER
    inside.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        state_dict_saver.save(dict(tensors), checkpoint_id=str(inside), planner=Planner(), no_dist=True)
    (inside / "metadata.json").write_text(json.dumps({"sharded_backend": backend, "sharded_backend_version": 1}))
    common: dict[str, Any] = {"args": argparse.Namespace(**args, exit_signal=signal.SIGTERM), "checkpoint_version": 3.0}
    if optimizer is not None:
        common["optimizer"] = optimizer
    torch.save(common | {"iteration": 7, "opt_param_scheduler": {"num_steps": 56}}, inside / "common.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


def read(folder: Path) -> tuple[dict[str, Tensor], list[str], dict[str, Any]]:
    """The tensors of a checkpoint's own folder, the names of its byte entries, and its common.pt."""
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    others = [name for name, entry in metadata.items() if not hasattr(entry, "size")]
    tensors: dict[str, Any] = {
        name: torch.full(tuple(entry.size), torch.nan, dtype=entry.properties.dtype)  # pyright: ignore
        for name, entry in metadata.items()
        if name not in others
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_loader.load(tensors, checkpoint_id=str(folder), no_dist=True)
    # As their loader opens it: a pickle of plain values and of arguments.
    with torch.serialization.safe_globals([argparse.Namespace]):
        common = torch.load(folder / "common.pt", weights_only=True)
    return tensors, others, common


# ------------------------------------------------------------------------------------------------- of transformers


def of_llama(state: Mapping[str, Tensor], heads: int, groups: int, tied: bool) -> dict[str, Tensor]:
    """The weights of transformers' LlamaForCausalLM or Qwen3ForCausalLM.

    Args:
        heads: heads of queries.
        groups: heads of keys and values.
    """
    layers = [_llama_layer(state, f"model.layers.{i}.", heads, groups) for i in range(_depth(state, "model.layers."))]
    found = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": state["model.norm.weight"],
        **_stacked(layers),
    }
    return found if tied else found | {"output_layer.weight": state["lm_head.weight"]}


def _llama_layer(state: Mapping[str, Tensor], at: str, heads: int, groups: int) -> dict[str, Tensor]:
    q, k, v = (state[f"{at}self_attn.{name}_proj.weight"] for name in "qkv")
    width = len(q) // heads
    rows: list[Tensor] = []
    for group in range(groups):
        share = heads // groups
        rows += [q[head * width : (head + 1) * width] for head in range(group * share, (group + 1) * share)]
        rows += [tensor[group * width : (group + 1) * width] for tensor in (k, v)]
    norms = {}
    for name in "qk":
        if f"{at}self_attn.{name}_norm.weight" in state:
            norms[f"self_attention.{name}_layernorm.weight"] = state[f"{at}self_attn.{name}_norm.weight"]
    return norms | {
        "self_attention.linear_qkv.layer_norm_weight": state[f"{at}input_layernorm.weight"],
        "self_attention.linear_qkv.weight": torch.cat(rows),
        "self_attention.linear_proj.weight": state[f"{at}self_attn.o_proj.weight"],
        "mlp.linear_fc1.layer_norm_weight": state[f"{at}post_attention_layernorm.weight"],
        "mlp.linear_fc1.weight": torch.cat([state[f"{at}mlp.gate_proj.weight"], state[f"{at}mlp.up_proj.weight"]]),
        "mlp.linear_fc2.weight": state[f"{at}mlp.down_proj.weight"],
    }


def of_gpt2(state: Mapping[str, Tensor], heads: int) -> dict[str, Tensor]:
    """The weights of transformers' GPT2LMHeadModel, whose linear layers are [in, out]."""
    layers = [_gpt2_layer(state, f"transformer.h.{i}.", heads) for i in range(_depth(state, "transformer.h."))]
    return {
        "embedding.word_embeddings.weight": state["transformer.wte.weight"],
        "embedding.position_embeddings.weight": state["transformer.wpe.weight"],
        "decoder.final_layernorm.weight": state["transformer.ln_f.weight"],
        "decoder.final_layernorm.bias": state["transformer.ln_f.bias"],
        **_stacked(layers),
    }


def _gpt2_layer(state: Mapping[str, Tensor], at: str, heads: int) -> dict[str, Tensor]:
    qkv_weight, qkv_bias = state[f"{at}attn.c_attn.weight"].t(), state[f"{at}attn.c_attn.bias"]
    found = {}
    for end, tensor in (("weight", qkv_weight), ("bias", qkv_bias)):
        q, k, v = (part.chunk(heads) for part in tensor.chunk(3))
        found[f"self_attention.linear_qkv.{end}"] = torch.cat(
            [rows for head in zip(q, k, v, strict=True) for rows in head]
        )
        found[f"self_attention.linear_qkv.layer_norm_{end}"] = state[f"{at}ln_1.{end}"]
        found[f"mlp.linear_fc1.layer_norm_{end}"] = state[f"{at}ln_2.{end}"]
    linears = {
        "self_attention.linear_proj": "attn.c_proj",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
    }
    for theirs, name in linears.items():
        found[f"{theirs}.weight"] = state[f"{at}{name}.weight"].t()
        found[f"{theirs}.bias"] = state[f"{at}{name}.bias"]
    return found


def _depth(state: Mapping[str, Tensor], prefix: str) -> int:
    return 1 + max(int(name.removeprefix(prefix).partition(".")[0]) for name in state if name.startswith(prefix))


def _stacked(layers: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {f"decoder.layers.{name}": torch.stack([layer[name] for layer in layers]) for name in layers[0]}
