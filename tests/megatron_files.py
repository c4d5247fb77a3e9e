"""Megatron-LM's checkpoint folders, written and read once more, by what its sources say and without dtmega's code.

Weights go in and come out as those of a whole model: flat names (encoder.layers.0.mlp.dense_h_to_4h.weight), shards of
tensor parallelism joined, layers numbered over all stages, heads of a fused QKV outermost, rows of padding included.
Real torch.save and torch.load do the rest: what is written here is what a run of the original leaves on a disk.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import math
import random
import re
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
Key = tuple[int, int]  # tp rank, stage


class Layout(NamedTuple):
    """The layout of a run.

    Attributes:
        chunks: virtual stages of each stage.
        split: stage where T5's decoder begins; 0: both stacks are on one stage.
    """

    tp: int = 1
    pp: int = 1
    chunks: int = 1
    split: int = 0


ONE_RANK = Layout()


# --------------------------------------------------------------------------------------------------- what is where


COLUMN = ("query_key_value", "query", "key_value", "dense_h_to_4h")
SECTIONS = (
    *("embedding", "encoder", "decoder", "pooler", "output_layer"),
    *("word_embeddings_for_head", "lm_head", "binary_head"),
)
# Modules in the order in which they were made.
MODULES = (
    *("word_embeddings", "word_embeddings.norm", "position_embeddings", "tokentype_embeddings"),
    *("input_layernorm", "self_attention.query_key_value", "self_attention.dense", "post_attention_layernorm"),
    *("inter_attention.query", "inter_attention.key_value", "inter_attention.dense", "post_inter_attention_layernorm"),
    *("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", "final_layernorm", "", "dense", "layernorm"),
)


class Name(NamedTuple):
    """encoder.layers.3.mlp.dense_h_to_4h.bias -> encoder, 3, mlp.dense_h_to_4h, bias"""

    section: str
    layer: int  # of no layer: -1
    module: str
    end: str

    @classmethod
    def of(cls, name: str) -> Name:
        section, *inner, end = name.split(".")
        layer = int(inner[1]) if inner[:1] == ["layers"] else -1
        return cls(section, layer, ".".join(inner[2:] if layer >= 0 else inner), end)

    @property
    def place(self) -> tuple[int, ...]:
        """The place in the order of modules, and of weight and bias in each."""
        layer = math.inf if self.layer < 0 else self.layer
        return SECTIONS.index(self.section), layer, MODULES.index(self.module), self.end == "bias"  # pyright: ignore

    @property
    def cut(self) -> int | None:
        """The dim that tensor parallelism cuts."""
        last = self.module.rpartition(".")[2]
        if last == "word_embeddings" or self.section in ("word_embeddings_for_head", "output_layer"):
            return 0
        if (self.section, self.module, self.end) == ("lm_head", "", "bias"):
            return 0
        if self.layer < 0:
            return None
        if last in COLUMN:
            return 0
        return 1 if last in ("dense", "dense_4h_to_h") and self.end == "weight" else None

    @property
    def decays(self) -> bool:
        return self.end == "weight" and not self.module.endswith("norm")


def stages(weights: Weights, layout: Layout) -> dict[tuple[int, int], dict[str, str]]:
    """(stage, chunk) -> name there, with its layer's number there -> whole name; in the order of modules."""
    found: dict[tuple[int, int], dict[str, str]] = {}
    for stage in range(layout.pp):
        for chunk in range(layout.chunks):
            here = {name: _local(Name.of(name), weights, layout, stage, chunk) for name in weights}
            found[stage, chunk] = {local: name for name, local in here.items() if local}
            first, last = _ends(layout, stage, chunk)
            if last and layout.pp > 1 and not first and "output_layer.weight" not in weights:
                found[stage, chunk]["word_embeddings_for_head.weight"] = "embedding.word_embeddings.weight"
            found[stage, chunk] = dict(sorted(found[stage, chunk].items(), key=lambda item: Name.of(item[0]).place))
    return found


def _ends(layout: Layout, stage: int, chunk: int) -> tuple[bool, bool]:
    """Tell whether a stage has embeddings, and whether it has the head."""
    first = (stage, chunk) == (0, 0) or (layout.split > 0 and stage == layout.split)
    return first, (stage, chunk) == (layout.pp - 1, layout.chunks - 1)


def _local(name: Name, weights: Weights, layout: Layout, stage: int, chunk: int) -> str | None:
    """The name of a tensor on a stage; None: it is not there."""
    first, last = _ends(layout, stage, chunk)
    end = f"{name.module}.{name.end}" if name.module else name.end
    if name.section == "embedding":
        return f"embedding.{end}" if first else None
    if name.section not in ("encoder", "decoder"):
        return f"{name.section}.{end}" if last else None
    if layout.split:
        stacks = {"encoder": (0, layout.split), "decoder": (layout.split, layout.pp)}
        begin, stop = stacks[name.section]
    else:
        begin, stop = 0, layout.pp
    if not begin <= stage < stop:
        return None
    if name.layer < 0:
        return f"{name.section}.{end}" if (stage, chunk) == (stop - 1, layout.chunks - 1) else None
    n_layers = 1 + max(Name.of(other).layer for other in weights if other.startswith(f"{name.section}."))
    per_chunk = n_layers // (stop - begin) // layout.chunks
    start = chunk * (n_layers // layout.chunks) + (stage - begin) * per_chunk
    return f"{name.section}.layers.{name.layer - start}.{end}" if start <= name.layer < start + per_chunk else None


def shard(name: str, tensor: Tensor, rank: int, tp: int, heads: int, version: float) -> Tensor:
    """A rank's part of a whole tensor, rows of QKV in the order of that version."""
    parsed = Name.of(name)
    part = tensor if parsed.cut is None else tensor.chunk(tp, parsed.cut)[rank]
    n = 3 if ".query_key_value." in name else 2 if ".key_value." in name else 1
    if n > 1 and version < 2:
        by_head = part.unflatten(0, (heads // tp, n, -1))  # [np, n, hn, ...]
        orders = {0: by_head.transpose(0, 1), 1: by_head.transpose(1, 2)}
        part = orders[int(version)].flatten(0, 2)
    return part.contiguous().clone()


def whole(name: str, parts: list[Tensor], heads: int, version: float) -> Tensor:
    """The inverse of `shard`, of all ranks' parts. Copies have to be equal."""
    n = 3 if ".query_key_value." in name else 2 if ".key_value." in name else 1
    if n > 1 and version < 2:
        np_ = heads // len(parts)
        sizes = {0: (n, np_, -1), 1: (np_, -1, n)}[int(version)]
        dims = {0: (0, 1), 1: (1, 2)}[int(version)]
        parts = [part.unflatten(0, sizes).transpose(*dims).flatten(0, 2) for part in parts]
    cut = Name.of(name).cut
    if cut is None:
        assert all(torch.equal(part, parts[0]) for part in parts), name
        return parts[0]
    return torch.cat(parts, cut)


def path_in_file(local: str, old: bool) -> tuple[str, ...]:
    """The keys that lead to a tensor. Up to tag v2.0 some of them had other names."""
    name = Name.of(local)
    _, _, inner = local.partition(".")
    if old:
        inner = inner.replace(".self_attention.", ".attention.")
    section = "transformer" if old and name.section == "encoder" else name.section
    if name.section == "embedding":
        table, _, rest = inner.partition(".")
        return "language_model", section, table, rest
    if name.section in ("encoder", "decoder", "pooler", "output_layer"):
        return "language_model", section, inner
    return section, inner


def nested(tensors: Mapping[tuple[str, ...], Tensor]) -> dict[str, Any]:
    """Dicts in dicts; the innermost are what a module's state_dict gives, with a state of their own."""
    tree: dict[str, Any] = {}
    for path, tensor in tensors.items():
        inner = tree
        for key in path[:-2]:
            inner = inner.setdefault(key, {})
        table = inner.setdefault(path[-2], OrderedDict())
        table[path[-1]] = tensor
        table._metadata = OrderedDict({"": {"version": 1}})
    return tree


def models(weights: Weights, key: Key, layout: Layout, heads: int, version: float, old: bool) -> dict[str, Any]:
    """{"model": ...} of one rank, with virtual stages {"model0": ..., "model1": ...}"""
    rank, stage = key
    found = {}
    for (at, chunk), names in stages(weights, layout).items():
        if at != stage:
            continue
        tensors = {
            path_in_file(local, old): shard(name, weights[name], rank, layout.tp, heads, version)
            for local, name in names.items()
        }
        found[f"model{chunk}" if layout.chunks > 1 else "model"] = nested(tensors)
    return found


# ------------------------------------------------------------------------------------------------------- optimizer


def optimizer(
    key: Key,
    layout: Layout,
    heads: int,
    version: float,
    weights: Weights,
    adam: Mapping[str, tuple[Tensor, Tensor]],
    step: int,
    masters: bool,
    fused_adam: bool,
) -> dict[str, Any]:
    """The optimizer's dict of one rank.

    Args:
        weights: fp32.
        masters: of a run in float16, with fp32 copies of its parameters and a loss scale.
        fused_adam: apex's, which keeps the step in its groups.
    """
    rank, stage = key
    names = [name for (at, _), here in stages(weights, layout).items() if at == stage for name in here.items()]
    groups = [[pair for pair in names if Name.of(pair[0]).decays is decays] for decays in (True, False)]

    def cut(name: str, tensor: Tensor) -> Tensor:
        return shard(name, tensor, rank, layout.tp, heads, version)

    state = {}
    for _, name in (pair for group in groups for pair in group):
        moments = [cut(name, moment) for moment in adam[name]]
        steps = {} if fused_adam else {"step": torch.tensor(float(step))}
        state[len(state)] = {**steps, "exp_avg": moments[0], "exp_avg_sq": moments[1]}
    param_groups = []
    for group, decay in zip(groups, (0.01, 0.0), strict=True):
        begin = sum(len(before["params"]) for before in param_groups)
        told = {"step": step} if fused_adam else {}
        settings = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": decay, **told}
        param_groups.append({**settings, "params": [*range(begin, begin + len(group))]})
    adam_dict = {"state": state, "param_groups": param_groups}
    if not masters:
        return adam_dict
    copies = [[_master(name, cut(name, weights[name])) for _, name in group] for group in groups]
    scaler = {"scale": torch.tensor([65536.0]), "growth_tracker": 3, "hysteresis_tracker": 2}
    return {"optimizer": adam_dict, "grad_scaler": scaler, "fp32_from_fp16_params": copies}


def _master(name: str, tensor: Tensor) -> Tensor:
    """A tensor with attributes, which torch saves in another way than one without."""
    cut = Name.of(name).cut
    tensor.tensor_model_parallel = cut is not None  # pyright: ignore[reportAttributeAccessIssue]
    tensor.partition_dim = -1 if cut is None else cut  # pyright: ignore[reportAttributeAccessIssue]
    tensor.partition_stride = 1  # pyright: ignore[reportAttributeAccessIssue]
    return tensor


# ------------------------------------------------------------------------------------------------ classes of theirs


@contextlib.contextmanager
def their_classes() -> Iterator[types.SimpleNamespace]:
    """The classes of the originals that a pickle names, importable for as long as this lasts."""
    members = {
        ("megatron.model.enums", "ModelType"): {"encoder_or_decoder": 1, "encoder_and_decoder": 2},
        ("megatron.enums", "PositionEmbeddingType"): {"rotary": 1, "absolute": 2, "alibi": 3},
    }
    made: dict[str, Any] = {}
    modules: dict[str, types.ModuleType] = {}
    for (module, name), values in members.items():
        made[name] = enum.Enum(name, values, module=module, qualname=name)
    # DeepSpeed's, where a piece of a parameter is in the flat partition of a rank.
    fields = [("numel", int), ("start", int)]
    made["fragment_address"] = dataclasses.make_dataclass("fragment_address", fields)
    made["fragment_address"].__module__ = "deepspeed.utils.tensor_fragment"
    for module, name in [*members, ("deepspeed.utils.tensor_fragment", "fragment_address")]:
        parts = module.split(".")
        for n in range(1, len(parts) + 1):
            dotted = ".".join(parts[:n])
            modules.setdefault(dotted, types.ModuleType(dotted))
        setattr(modules[module], name, made[name])
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield types.SimpleNamespace(**made)
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def arguments(version: float, layout: Layout, **given: Any) -> dict[str, Any]:
    """args of a run, by the version of its checkpoints, with the defaults of then.

    Args:
        given: num_layers, hidden_size, num_attention_heads, padded_vocab_size, max_position_embeddings, ffn_hidden_size
            (of version 3) and whatever is not the default.
    """
    found = {
        **{"hidden_dropout": 0.1, "attention_dropout": 0.1, "init_method_std": 0.02, "layernorm_epsilon": 1e-5},
        **{"openai_gelu": False, "onnx_safe": None, "apply_query_key_layer_scaling": True, "fp16": False},
        **{"apply_residual_connection_post_layernorm": False, "make_vocab_size_divisible_by": 128},
        **{"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "/no/such/vocab.json", "seed": 1234, "lr": 1e-4},
        **{"fp32_residual_connection": False, "params_dtype": torch.float32},
    }
    if version < 3:
        found |= {"model_parallel_size": layout.tp, "batch_size": 4}
        given = {name: value for name, value in given.items() if name != "ffn_hidden_size"}
    else:
        found |= {"tensor_model_parallel_size": layout.tp, "pipeline_model_parallel_size": layout.pp}
        found |= {"micro_batch_size": 4, "global_batch_size": 8, "bias_gelu_fusion": True}
        found |= {"consumed_train_samples": 56, "consumed_valid_samples": 0}
        found["kv_channels"] = given["hidden_size"] // given["num_attention_heads"]
        if layout.chunks > 1:
            found["virtual_pipeline_model_parallel_size"] = layout.chunks
        if layout.split:
            found["pipeline_model_parallel_split_rank"] = layout.split
    return found | given


def generators() -> dict[str, Any]:
    """States of the generators of random numbers."""
    state = torch.get_rng_state()
    return {
        "random_rng_state": random.Random(0).getstate(),
        "np_rng_state": np.random.RandomState(0).get_state(),
        "torch_rng_state": state,
        "cuda_rng_state": state[:16].clone(),
        "rng_tracker_states": {"model-parallel-rng": state[:16].clone()},
    }


# --------------------------------------------------------------------------------------------------------- folders


def rank_folder(layout: Layout, key: Key) -> str:
    rank, stage = key
    return f"mp_rank_{rank:02d}" if layout.pp == 1 else f"mp_rank_{rank:02d}_{stage:03d}"


def keys(layout: Layout) -> list[Key]:
    return [(rank, stage) for stage in range(layout.pp) for rank in range(layout.tp)]


def write(
    folder: Path,
    weights: Weights,
    heads: int,
    layout: Layout = ONE_RANK,
    *,
    args: Mapping[str, Any] | None = None,
    version: float = 3.0,
    old_names: bool = False,
    legacy: bool = False,
    dtype: torch.dtype | None = None,
    adam: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    step: int = 7,
    fused_adam: bool = False,
    masters: bool = False,
    listed_rng: bool = True,
    release: bool = False,
) -> Path:
    """Write a checkpoint as a run of Megatron-LM does, and return its folder, which holds the tracker's file.

    Args:
        weights: of the whole model.
        args: of the run; None: none, as in files of 2019.
        version: 0 has no entry for it.
        old_names: of before v2.1.
        legacy: in the format of torch before 1.6, no zip.
        dtype: of the model's weights; None leaves each as it is.
        adam: name -> both moments; None: no optimizer.
        masters, fused_adam: see `optimizer`.
        listed_rng: since 2022.
    """
    name = "release" if release else f"iter_{step:07d}"
    for key in keys(layout):
        lowered = {name: tensor.to(dtype or tensor.dtype) for name, tensor in weights.items()}
        content: dict[str, Any] = {"iteration": 0 if release else step}
        with their_classes() as theirs:
            if args is not None:
                content["args"] = argparse.Namespace(**args, rank=key[0])
                if version >= 3:
                    content["args"].model_type = theirs.ModelType.encoder_or_decoder
            if version:
                content["checkpoint_version"] = version
            content |= models(lowered, key, layout, heads, version, old_names)
            if adam is not None:
                content["optimizer"] = optimizer(
                    *(key, layout, heads, version, weights, adam, step, masters, fused_adam)
                )
                content["lr_scheduler"] = {"max_lr": 1e-4, "num_steps": 8 * step, "decay_style": "linear"}
            if not release:
                content |= {"rng_state": [generators()]} if listed_rng else generators()
            file = folder / name / rank_folder(layout, key) / "model_optim_rng.pt"
            file.parent.mkdir(parents=True)
            torch.save(content, file, _use_new_zipfile_serialization=not legacy)
    (folder / "latest_checkpointed_iteration.txt").write_text("release" if release else str(step))
    return folder


def read(folder: Path, layout: Layout, heads: int) -> tuple[dict[str, Tensor], argparse.Namespace]:
    """The whole model's weights, and the arguments, of a folder whose files are laid out so.

    Every name of every file has its place, and all copies are equal.
    """
    tracked = (folder / "latest_checkpointed_iteration.txt").read_text().strip()
    name = "release" if tracked == "release" else f"iter_{int(tracked):07d}"
    with their_classes():
        files = {
            key: torch.load(folder / name / rank_folder(layout, key) / "model_optim_rng.pt", weights_only=False)
            for key in keys(layout)
        }
    version = files[0, 0].get("checkpoint_version", 0)
    flats = {}
    for key, content in files.items():
        for chunk in range(layout.chunks):
            tree = content[f"model{chunk}" if layout.chunks > 1 else "model"]
            flats[(*key, chunk)] = {".".join(path): tensor for path, tensor in leaves(tree)}
    found: dict[str, Tensor] = {}
    for stage in range(layout.pp):
        for chunk in range(layout.chunks):
            of_ranks = [flats[rank, stage, chunk] for rank in range(layout.tp)]
            assert all(each.keys() == of_ranks[0].keys() for each in of_ranks)
            for path in of_ranks[0]:
                name = _whole_name(path, layout, stage, chunk, flats)
                tensor = whole(name, [each[path] for each in of_ranks], heads, version)
                assert name not in found or torch.equal(found[name], tensor), name
                found[name] = tensor
    copy = found.pop("word_embeddings_for_head.weight", None)
    assert copy is None or torch.equal(copy, found["embedding.word_embeddings.weight"])
    return found, files[0, 0].get("args")


def _whole_name(path: str, layout: Layout, stage: int, chunk: int, flats: Mapping[Any, Mapping[str, Tensor]]) -> str:
    name = path.removeprefix("language_model.").replace("transformer.", "encoder.", 1)
    name = name.replace(".attention.", ".self_attention.")
    if ".layers." not in name:
        return name
    section = "decoder" if name.startswith("decoder.") else "(encoder|transformer)"
    own = re.compile(rf"^language_model\.{section}\.layers\.(?P<number>\d+)\.")

    def n_here(at: int, of: int) -> int:
        return len({match["number"] for key in flats[0, at, of] if (match := own.match(key))})

    # Layers go through all stages chunk by chunk.
    before = [(at, of) for of in range(layout.chunks) for at in range(layout.pp)]
    start = sum(n_here(*place) for place in before[: before.index((stage, chunk))])
    return re.sub(r"\.layers\.(\d+)\.", lambda match: f".layers.{int(match[1]) + start}.", name)


def leaves(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Every tensor in dicts of dicts, with the keys that lead to it."""
    for key, value in tree.items():
        if isinstance(value, Tensor):
            yield (*path, key), value
        else:
            yield from leaves(value, (*path, key))
