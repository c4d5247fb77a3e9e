"""Megatron-DeepSpeed's checkpoint folders of a BLOOM, written by what its sources say and without dtmega's code.

global_step7/layer_01-model_00-model_states.pt      a layer for each rank of tensor parallelism; stages do not show
global_step7/mp_rank_00_model_states.pt             what is no weight, of stage * tp + rank
global_step7/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt     a data rank's part of fp32 weights and moments
latest
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.megatron_files import ONE_RANK, Layout, Name, Weights, generators, keys, shard, their_classes


def layer_of(name: str, n_layers: int) -> tuple[int, str]:
    """The number of the file that has a tensor of a whole model, and its name there."""
    parsed = Name.of(name)
    if parsed.section == "embedding":
        return 1, name.removeprefix("embedding.")
    if parsed.layer >= 0:
        return 3 + parsed.layer, f"{parsed.module}.{parsed.end}"
    return n_layers + 4, parsed.end


def write(
    folder: Path,
    weights: Weights,
    heads: int,
    n_layers: int,
    layout: Layout = ONE_RANK,
    *,
    args: Mapping[str, Any],
    original_vocab_size: int | None = None,
    dtype: torch.dtype | None = None,
    adam: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    dp: int = 1,
    step: int = 7,
) -> Path:
    """Write a checkpoint as BLOOM's runs did, and return its folder, which holds `latest`.

    Args:
        weights: of the whole model, fp32.
        dtype: of the layers' files; None leaves each as it is.
        adam: name -> both moments, in partitions of `dp` data ranks; None: no optimizer.
    """
    inside = folder / f"global_step{step}"
    inside.mkdir(parents=True)
    for rank in range(layout.tp):
        files: dict[int, OrderedDict[str, Tensor]] = {}
        for name, tensor in weights.items():
            number, local = layer_of(name, n_layers)
            part = shard(name, tensor.to(dtype or tensor.dtype), rank, layout.tp, heads, 3.0)
            files.setdefault(number, OrderedDict())[local] = part
        for number, content in files.items():
            torch.save(content, inside / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
    for rank, stage in keys(layout):
        mp_rank = stage * layout.tp + rank
        of_stage = _of_stage([*weights], n_layers, layout, stage)
        with their_classes() as theirs:
            positions = theirs.PositionEmbeddingType.alibi
            content = {
                **{"module": None, "optimizer": None, "lr_scheduler": {"max_lr": 1e-4, "num_iters": 8 * step}},
                **{"csr_tensor_module_names": set(), "skipped_steps": 0, "global_steps": step, "global_samples": 56},
                **{"dp_world_size": dp, "mp_world_size": layout.tp, "ds_config": {"zero": {"stage": 0}}},
                **{"ds_version": "0.5.9", "iteration": step, "tokens": 56 * 16, "checkpoint_version": 3.0},
                "args": argparse.Namespace(**args, position_embedding_type=positions, embed_layernorm=True),
                "checkpoint_info": {"padded_vocab_size": args["padded_vocab_size"]},
                "param_shapes": [OrderedDict((name, weights[name].shape) for name in of_stage)],
                **generators(),
            }
            if original_vocab_size is not None:
                content["checkpoint_info"]["original_vocab_size"] = original_vocab_size
            torch.save(content, inside / f"mp_rank_{mp_rank:02d}_model_states.pt")
            for data_rank in range(dp if adam is not None else 0):
                assert adam is not None
                states = _partition(
                    *(theirs, weights, adam, of_stage, n_layers, (rank, layout.tp), heads, (data_rank, dp), step)
                )
                name = f"bf16_zero_pp_rank_{data_rank}_mp_rank_{mp_rank:02d}_optim_states.pt"
                torch.save({"optimizer_state_dict": states, "ds_config": {}, "ds_version": "0.5.9"}, inside / name)
    (folder / "latest").write_text(f"global_step{step}")
    return folder


def _of_stage(names: list[str], n_layers: int, layout: Layout, stage: int) -> list[str]:
    """The tensors of a stage in the order of modules; the tied embedding is also on the last one."""
    per_stage = n_layers // layout.pp

    def here(name: str) -> bool:
        parsed = Name.of(name)
        if parsed.section == "embedding":
            return stage in (0, layout.pp - 1)
        return (parsed.layer // per_stage if parsed.layer >= 0 else layout.pp - 1) == stage

    return sorted(filter(here, names), key=lambda name: Name.of(name).place)


def _partition(
    theirs: Any,
    weights: Weights,
    adam: Mapping[str, tuple[Tensor, Tensor]],
    names: list[str],
    n_layers: int,
    tp: tuple[int, int],
    heads: int,
    dp: tuple[int, int],
    step: int,
) -> dict[str, Any]:
    """A data rank's part of each group of parameters: one flat vector of all of them, cut into equal parts.

    Args:
        tp, dp: rank and size.
    """
    partitions = []
    state = {}
    mappings = []
    paddings = []
    for decays in (True, False):
        group = [name for name in names if Name.of(name).decays is decays]

        def flat(tensors: Mapping[str, Tensor], group: list[str] = group) -> Tensor:
            parts = [shard(name, tensors[name], tp[0], tp[1], heads, 3.0).float().flatten() for name in group]
            joined = torch.cat(parts)
            return torch.nn.functional.pad(joined, (0, -len(joined) % (2 * dp[1])))

        whole = flat(weights)
        width = len(whole) // dp[1]
        begin = dp[0] * width
        here = slice(begin, begin + width)
        addresses: OrderedDict[str, Any] = OrderedDict()
        at = 0
        for name in group:
            n = shard(name, weights[name], tp[0], tp[1], heads, 3.0).numel()
            first, last = max(at, begin), min(at + n, begin + width)
            if first < last:
                number, local = layer_of(name, n_layers)
                owner = "tied_modules.embed" if number == 1 else str(number)
                addresses[f"{owner}.{local}"] = theirs.fragment_address(numel=last - first, start=first - begin)
            at += n
        moments = [flat({name: adam[name][i] for name in group})[here].clone() for i in range(2)]
        state[len(state)] = {"step": step, "exp_avg": moments[0], "exp_avg_sq": moments[1]}
        partitions.append(whole[here].clone())
        mappings.append(addresses)
        paddings.append(max(0, begin + width - at))
    groups = [{"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "params": [i]} for i in range(2)]
    return {
        "clip_grad": 1.0,
        "base_optimizer_state": {"state": state, "param_groups": groups},
        "single_partition_of_fp32_groups": partitions,
        "group_paddings": paddings,
        "partition_count": [dp[1], dp[1]],
        "ds_version": "0.5.9",
        "param_slice_mappings": mappings,
    }
