"""One debug model per family and the layouts it is trained on: for `test_parity.py` and `benchmarks/parity.py`."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from dtmega import families, train
from dtmega.checkpoint import resume
from dtmega.checkpoint.resume import open_checkpoint
from dtmega.checkpoint.weights import Weights
from dtmega.data.indexed_files.writer import IndexedWriter
from dtmega.data.objectives import known
from dtmega.interop.megatron.launch.architecture import THEIR_T5
from dtmega.ops.shards import boxes
from dtmega.training import device_peaks, start
from tests import ranks

ROOT = Path(__file__).resolve().parent.parent
STEPS = 20
DEBUG = {
    "model.vocab_size": 128,
    "model.hidden_size": 48,
    "model.n_layers": 4,
    "model.n_heads": 12,
    "model.hidden_dropout": 0.1,
    "model.attention_dropout": 0.1,
    "data.seq_len": 24,
    "data.split": "8,1,1",
    "data.eod_mask_loss": True,
    "data.num_workers": 0,
    "batch.micro_batch_size": 1,
    "batch.global_batch_size": 8,
    "optim.lr": 1e-2,
    "optim.eps": 1e-6,  # above the rounding of gradients that are zero, see BF16_BOUND
    "optim.warmup": 5,
    "train.steps": STEPS,
    "train.drift_interval": 1,  # replicated and tied parameters are compared to the bit after each step
    "eval.interval": 10,
    "eval.steps": 1,
    "eval.sample_tokens": 2,
    "log.tensorboard": False,
    "log.num_zeros": True,
    "log.params_norm": True,
    "checkpoint.interval": 0,
    "precision.params": "float32",
    "compile.enable": False,
}

DROPOUT = ("model.hidden_dropout", "model.attention_dropout")
# Positions that start again in each document must reach every stage and rank.
RESTARTING = {"data.reset_position_ids": True, "data.reset_attention_mask": True}
# Every family that is written here -> its debug model: BLOOM's but for what is its own.
FAMILIES: dict[str, dict[str, Any]] = {
    "bloom": DEBUG,
    "gpt": DEBUG | RESTARTING | {"model.name": "gpt", "model.max_position_embeddings": 32},
    # Half as many heads of keys as the 4 ranks that it is cut over.
    "llama": {k: v for k, v in DEBUG.items() if k not in DROPOUT}
    | RESTARTING
    | {"model.name": "llama", "model.n_kv_heads": 2, "model.ffn_hidden_size": 64},
    # A dense layer, shared experts, and all that balances a router. At a rate of 1e-2 rounding grows as in BERT, and
    # near-ties of scores (docs/mixtures-of-experts.md) come sooner.
    "moe": {k: v for k, v in DEBUG.items() if k not in DROPOUT}
    | RESTARTING
    | {"model.name": "moe", "model.n_kv_heads": 4, "model.ffn_hidden_size": 64, "model.dense_layers": 1}
    | {"model.n_experts": 6, "model.expert_ffn_hidden_size": 32, "model.shared_experts": 1, "optim.lr": 3e-3}
    | {"model.router_bias": True, "model.balance_loss": 0.01, "model.router_z_loss": 0.001},
    # At a rate of 1e-2 rounding grows a hundredfold in 20 steps, on one process with other microbatches too.
    "bert": {k: v for k, v in DEBUG.items() if k != "data.eod_mask_loss"}
    | {"model.name": "bert", "model.max_position_embeddings": 32, "optim.lr": 3e-3},
    # Stacks of other depths, and more places in the decoder than it has text for.
    "t5": {k: v for k, v in DEBUG.items() if k != "data.eod_mask_loss"}
    | {"model.name": "t5", "model.n_layers": 3, "model.n_decoder_layers": 2, "model.inner_dropout": 0.1}
    | {"model.relative_buckets": 8, "model.relative_max_distance": 20, "model.kv_channels": 8, "optim.lr": 3e-3}
    | {"data.decoder_seq_len": 12, "data.mask_prob": 0.25, "data.mean_span": 2.0, "data.sentinels": 8},
}
# Another form of a family, with other data, by the objective that it is trained for: Megatron's T5.
FORMS: dict[str, dict[str, Any]] = {
    "separate-spans": {k: v for k, v in FAMILIES["t5"].items() if "relative" not in k and k != "data.mean_span"}
    | {f"model.{k}": v for k, v in THEIR_T5.items()}
    | {"model.max_position_embeddings": 24, "model.activation": "gelu_tanh", "model.inner_dropout": 0.0},
}


SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
V131 = {"model.vocab_size": 131}
BF16 = {"precision.params": "bfloat16"}
FP16 = {
    "precision.params": "float16",
    "precision.initial_loss_scale": 2.0**14,  # far from where one layout overflows
    "model.fp32_residual": True,
    "model.query_key_layer_scaling": True,
}
GATED = {"model.glu": "swiglu"}
SGD = {"optim.name": "sgd", "optim.eps": 1e-8, "optim.lr": 0.1, "optim.lr_factors": ["layers.*.mlp.*=0.5"]}
MUON = {"optim.name": "muon", "optim.adamw_lr": 3e-3, "optim.lr_factors": ["*.mlp.*=0.5"]}
PREFIX = {"data.objective": "prefix-lm", "data.reweight_positions": True, "data.reset_attention_mask": True}
# What Llama can have beside: norms of queries and keys, heads of another width, and windows in some layers.
QWEN = {"model.name": "llama", "model.qk_norm": True, "model.kv_channels": 8}
QWEN |= {"model.window": 6, "model.window_layers": [1]}
# The time of tp goes into the collectives of each microbatch: where all 8 sequences are of one rank, two of 4 each, and
# where the data is cut, of 2 each.
PAIRS, FOURS = {"batch.micro_batch_size": 2}, {"batch.micro_batch_size": 4}
TP2 = {"mesh.tp": 2} | FOURS
# One layout of each axis runs with what a run of a user has beside the numbers; one of them all is enough for workers,
# each of which imports torch.
TENSORBOARD = {"log.tensorboard": True}
AS_USED = TENSORBOARD | {"data.num_workers": 1}

# Name -> processes, keys. A layout is compared with one process that has the same of its keys that are here.
TRUTH_KEYS = {"model.name", "model.vocab_size", "batch.global_batch_size", *FP16, *SGD, *MUON, *GATED, *PREFIX, *QWEN}
# Latent attention of a mixture, with values that are narrower than keys.
LATENT = {"model.name": "moe", "model.n_kv_heads": 0, "model.kv_latent_size": 16, "model.q_latent_size": 20}
LATENT |= {"model.kv_channels": 8, "model.rotary_channels": 4, "model.v_channels": 6}
TRUTH_KEYS |= {"data.decoder_seq_len", "model.n_experts", "model.capacity_factor", *LATENT}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp 2": (2, TP2),
    "tp 2, no sequence parallel": (2, TP2 | {"mesh.sequence_parallel": False}),
    "tp 3": (3, {"mesh.tp": 3} | FOURS | TENSORBOARD),
    "tp 4": (4, {"mesh.tp": 4} | FOURS),
    "dp_shard 2": (2, {"mesh.dp_shard": 2} | AS_USED),
    "dp_shard 4": (4, {"mesh.dp_shard": 4}),
    "dp_replicate 2": (2, {"mesh.dp_replicate": 2} | TENSORBOARD),
    "HSDP 2 x 2": (4, {"mesh.dp_replicate": 2, "mesh.dp_shard": 2}),
    "dp_shard 2 x tp 2": (4, {"mesh.dp_shard": 2, "mesh.tp": 2} | PAIRS),
    **{f"pp 2, {name}": (2, {"mesh.pp": 2, "pipeline.schedule": name}) for name in SCHEDULES},
    "pp 2, 1F1B": (2, {"mesh.pp": 2, "pipeline.schedule": "1F1B"} | TENSORBOARD),
    "pp 4": (4, {"mesh.pp": 4}),
    "pp 2 x dp_shard 2 x tp 2": (8, {"mesh.pp": 2, "mesh.dp_shard": 2, "mesh.tp": 2} | PAIRS),
    "V 131, tp 2": (2, V131 | TP2),
    "V 131, dp_shard 2 x tp 2": (4, V131 | {"mesh.dp_shard": 2, "mesh.tp": 2} | PAIRS),
    "V 131, dp_shard 4": (4, V131 | {"mesh.dp_shard": 4}),
    "V 128 padded to 144, tp 4": (4, {"model.pad_vocab_to_multiple": 48, "mesh.tp": 4} | FOURS),
    "microbatches of 2": (1, {"batch.micro_batch_size": 2}),
    "microbatches of 8": (1, {"batch.micro_batch_size": 8}),
    "recompute full": (1, {"recompute.mode": "full"}),
    "recompute full, tp 2": (2, {"recompute.mode": "full"} | TP2),
    "recompute 3 at a time, dp_shard 2": (2, {"recompute.mode": "full", "recompute.layers": 3, "mesh.dp_shard": 2}),
    "recompute selective": (1, {"recompute.mode": "selective"}),
    "compile": (1, {"compile.enable": True}),
    "compile, tp 2": (2, {"compile.enable": True} | TP2),
    "bf16, tp 2": (2, BF16 | TP2),
    "bf16, dp_shard 2": (2, BF16 | {"mesh.dp_shard": 2}),
    "prefix, tp 2": (2, PREFIX | TP2),
    "prefix, pp 2": (2, PREFIX | {"mesh.pp": 2}),
    "prefix, dp_shard 2": (2, PREFIX | {"mesh.dp_shard": 2}),
    "fp16, tp 2": (2, FP16 | TP2),
    "fp16, pp 2": (2, FP16 | {"mesh.pp": 2}),
    "fp16, dp_shard 2": (2, FP16 | {"mesh.dp_shard": 2}),
    "sgd, gated, dp_shard 2 x tp 2": (4, SGD | GATED | {"mesh.dp_shard": 2, "mesh.tp": 2} | PAIRS),
}
# All of these are BLOOM's; of each, another family needs what its own plan, model and pieces could get wrong.
EACH = ("tp 2", "tp 4", "dp_shard 2 x tp 2", "pp 2, 1F1B", "recompute full, tp 2")
for _family in [name for name in FAMILIES if name != "bloom"]:
    for _name in EACH:
        _n, _keys = LAYOUTS[_name]
        LAYOUTS[f"{_family}, {_name}"] = (_n, {"model.name": _family} | _keys)
# Learned positions are added to a hidden state that is cut along the sequence, or is not.
LAYOUTS["gpt, tp 2, no sequence parallel"] = (2, {"model.name": "gpt"} | LAYOUTS["tp 2, no sequence parallel"][1])
# BERT has two sums with their own divisors, of which the ranks have other parts, and heads that are not cut.
OF_BERT = (
    *("tp 2, no sequence parallel", "tp 3", "dp_shard 2", "dp_replicate 2", "HSDP 2 x 2", "pp 4"),
    *(f"pp 2, {name}" for name in SCHEDULES if name != "1F1B"),
    *("V 131, tp 2", "V 131, dp_shard 4", "V 128 padded to 144, tp 4", "microbatches of 8"),
    *("recompute full", "recompute selective", "compile", "compile, tp 2"),
    *("bf16, tp 2", "bf16, dp_shard 2", "fp16, tp 2", "fp16, pp 2"),
)
BERT = {"model.name": "bert"}
LAYOUTS |= {f"bert, {name}": (LAYOUTS[name][0], BERT | LAYOUTS[name][1]) for name in OF_BERT}
LAYOUTS["bert, dp_shard 3"] = (
    3,
    BERT | {"mesh.dp_shard": 3, "batch.global_batch_size": 9, "batch.micro_batch_size": 1},
)
LAYOUTS["bert, V 131, pp 2 x tp 2"] = (4, BERT | V131 | {"mesh.pp": 2, "mesh.tp": 2} | PAIRS)
# T5 has two stacks, of which a pipeline hands on two tensors, and what all layers of a stack share. Its two forms have
# other positions, norms and heads, and other samples: of Megatron's the encoder's have padding, too.
T5, SPLIT = {"model.name": "t5"}, {"pipeline.split": 2}
MEGATRON = T5 | {"data.objective": "separate-spans"}
# For Megatron's form, whose script has it. No T5 has an fp32 residual, and the first one's stream is larger: its tp 2
# and pp 2 were 1.0e-3 and 1.7e-3 from one process in the gradient's norm, which is the bound, or above it.
FP16_OF_T5 = {"precision.params": "float16", "precision.initial_loss_scale": 2.0**14}
OF_T5: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: LAYOUTS[name] for name in ("tp 2, no sequence parallel", "tp 3", "dp_replicate 2")},
    **{name: LAYOUTS[name] for name in ("pp 2, Interleaved1F1B", "pp 4", "V 131, dp_shard 4")},
    **{name: LAYOUTS[name] for name in ("V 128 padded to 144, tp 4", "microbatches of 8", "recompute selective")},
    **{name: LAYOUTS[name] for name in ("compile", "compile, tp 2", "bf16, tp 2", "bf16, dp_shard 2")},
    "HSDP 2 x 2": (4, LAYOUTS["HSDP 2 x 2"][1] | TENSORBOARD),
    "pp 3, split": (3, {"mesh.pp": 3} | SPLIT | PAIRS),
    "pp 4, split": (4, {"mesh.pp": 4} | SPLIT),
    "V 131, pp 2 x tp 2": (4, V131 | {"mesh.pp": 2, "mesh.tp": 2} | PAIRS | TENSORBOARD),
    "dp_shard 3": (3, {"mesh.dp_shard": 3, "batch.global_batch_size": 9, "batch.micro_batch_size": 1}),
    "recompute 2 at a time, dp_shard 2": (2, {"recompute.mode": "full", "recompute.layers": 2, "mesh.dp_shard": 2}),
}
OF_MEGATRON: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: LAYOUTS[name] for name in ("tp 2", "dp_shard 2", "pp 2, 1F1B", "compile")},
    "V 131, pp 3": (3, V131 | {"mesh.pp": 3, "pipeline.stages": [[0, 1], [2, 3], [4]]} | PAIRS),
    "V 131, tp 3": (3, V131 | LAYOUTS["tp 3"][1]),
    "fp16, tp 2": (2, FP16_OF_T5 | TP2),
    "fp16, pp 2": (2, FP16_OF_T5 | {"mesh.pp": 2}),
}
LAYOUTS |= {f"t5, {name}": (n, T5 | keys) for name, (n, keys) in OF_T5.items()}
LAYOUTS |= {f"t5 of megatron, {name}": (n, MEGATRON | keys) for name, (n, keys) in OF_MEGATRON.items()}
# Ranks that share sequences: alone, and together with each other axis, in both forms of attention. With `dp_replicate`
# parameters are cut over cp, and each shard has a copy.
WITH_CP: dict[str, tuple[int, dict[str, Any]]] = {}
for _form in ("gather", "heads"):
    _cp2 = {"mesh.cp": 2, "mesh.cp_form": _form}
    WITH_CP |= {
        f"cp 2, {_form}": (2, _cp2 | FOURS),
        f"cp 3, {_form}": (3, _cp2 | {"mesh.cp": 3} | FOURS),
        f"cp 4, {_form}": (4, _cp2 | {"mesh.cp": 4} | FOURS),
        f"cp 2 x tp 2, {_form}": (4, _cp2 | {"mesh.tp": 2} | FOURS),
        f"cp 2 x pp 2, 1F1B, {_form}": (4, _cp2 | {"mesh.pp": 2} | PAIRS),
        f"cp 2 x pp 2, ZBV, {_form}": (4, _cp2 | {"mesh.pp": 2, "pipeline.schedule": "ZBVZeroBubble"} | PAIRS),
        f"cp 2 x dp_shard 2, {_form}": (4, _cp2 | {"mesh.dp_shard": 2} | PAIRS),
        f"cp 2 x dp_replicate 2, {_form}": (4, _cp2 | {"mesh.dp_replicate": 2} | PAIRS),
    }
# At a rate of 1e-2 one process with microbatches of 1 is 4e-6 (GPT) and 2e-5 (Llama) from one with 4 in the gradient's
# norm after 20 steps, so that no layout could be closer.
SLOWER = {"optim.lr": 3e-3}
# Megatron's T5 at 3e-3: cp 2 and tp 2 alike are 3e-6 from one process in the gradient's norm of the 6th step, and 1e-15
# and 4e-15 in fp64, so it is rounding. AdamW turns gradients near eps, as of `encoder.0.attn.q.bias`, into long steps.
STEADY = {"optim.lr": 1e-3, "optim.eps": 1e-5}
OF_CP: dict[str, dict[str, Any]] = {"": {}, "bert, ": BERT}
OF_CP |= {"gpt, ": {"model.name": "gpt"} | SLOWER, "llama, ": {"model.name": "llama"} | SLOWER}
OF_CP |= {"prefix, ": PREFIX, "t5, ": T5, "t5 of megatron, ": MEGATRON | STEADY}
# Llama has 2 heads of keys, of which tp 2 leaves a rank one. Backward of a T5 does not run in two parts.
REFUSED = {f"llama, {name}, heads" for name in ("cp 3", "cp 4", "cp 2 x tp 2")}
REFUSED |= {f"{t5}, cp 2 x pp 2, ZBV, {form}" for t5 in ("t5", "t5 of megatron") for form in ("gather", "heads")}
for _prefix, _what in OF_CP.items():
    _rows = {_prefix + name: (n, _what | keys) for name, (n, keys) in WITH_CP.items()}
    LAYOUTS |= {name: row for name, row in _rows.items() if name not in REFUSED}
for _name in [name for name in LAYOUTS if name.startswith("t5") and "cp 4" in name]:
    # The decoder's other length, 12, is not 2 x 4 slices.
    LAYOUTS[_name] = (4, LAYOUTS[_name][1] | {"data.decoder_seq_len": 16})
# What users run beside the numbers, once.
LAYOUTS["cp 2, gather"] = (2, LAYOUTS["cp 2, gather"][1] | AS_USED)
LAYOUTS |= {
    "HSDP 2 x 2 x cp 2": (8, {"mesh.dp_replicate": 2, "mesh.dp_shard": 2, "mesh.cp": 2} | PAIRS),
    "cp 2 x tp 2, no sequence parallel": (4, {"mesh.cp": 2, "mesh.tp": 2, "mesh.sequence_parallel": False} | FOURS),
    "V 131, cp 2 x tp 2": (4, V131 | {"mesh.cp": 2, "mesh.tp": 2} | FOURS),
    "recompute full, cp 2": (2, {"recompute.mode": "full", "mesh.cp": 2} | FOURS),
    "recompute selective, cp 2": (2, {"recompute.mode": "selective", "mesh.cp": 2} | FOURS),
    "compile, cp 2, gather": (2, {"compile.enable": True} | WITH_CP["cp 2, gather"][1]),
    "compile, cp 2, heads": (2, {"compile.enable": True} | WITH_CP["cp 2, heads"][1]),
    "bf16, cp 2": (2, BF16 | {"mesh.cp": 2} | FOURS),
    "fp16, cp 2": (2, FP16 | {"mesh.cp": 2} | FOURS),
}
OF_QWEN = {
    **{name: LAYOUTS[name] for name in ("tp 2", "tp 2, no sequence parallel", "tp 4", "dp_shard 2", "pp 2, 1F1B")},
    **{name: LAYOUTS[name] for name in ("pp 2, ZBVZeroBubble", "recompute full, tp 2", "compile", "bf16, dp_shard 2")},
    **{name: LAYOUTS[name] for name in ("prefix, tp 2", "pp 2 x dp_shard 2 x tp 2")},
}
for _form in ("gather", "heads"):
    OF_QWEN |= {f"{name}, {_form}": WITH_CP[f"{name}, {_form}"] for name in ("cp 2", "cp 2 x pp 2, 1F1B")}
    OF_QWEN[f"prefix, cp 2, {_form}"] = LAYOUTS[f"prefix, cp 2, {_form}"]
OF_QWEN["cp 2 x tp 2, gather"] = WITH_CP["cp 2 x tp 2, gather"]
LAYOUTS |= {
    f"qwen, {name}": (n, QWEN | (SLOWER if "mesh.cp" in keys else {}) | keys) for name, (n, keys) in OF_QWEN.items()
}
# Gradients that add up in shards, with what their sums could get wrong.
SHARDED = {"fsdp.accumulate": "sharded"}
LAYOUTS |= {
    "dp_shard 2, sharded gradients": (2, SHARDED | LAYOUTS["dp_shard 2"][1]),
    "HSDP 2 x 2, sharded gradients": (4, SHARDED | LAYOUTS["HSDP 2 x 2"][1]),
    "pp 2 x dp_shard 2 x tp 2, sharded gradients": (8, SHARDED | LAYOUTS["pp 2 x dp_shard 2 x tp 2"][1]),
    "pp 2 x HSDP 2 x 2, ZBV, sharded gradients": (
        8,
        SHARDED
        | PAIRS
        | {"mesh.pp": 2, "mesh.dp_replicate": 2, "mesh.dp_shard": 2, "pipeline.schedule": "ZBVZeroBubble"}
        | {"batch.global_batch_size": 16},
    ),
    "cp 2 x pp 2, ZBV, heads, sharded gradients": (4, SHARDED | LAYOUTS["cp 2 x pp 2, ZBV, heads"][1]),
    "compile, dp_shard 2, sharded gradients": (2, SHARDED | {"compile.enable": True, "mesh.dp_shard": 2}),
    "fp16, dp_shard 2, sharded gradients": (2, SHARDED | FP16 | {"mesh.dp_shard": 2}),
    "bf16, HSDP 2 x 2, sharded gradients": (4, SHARDED | BF16 | LAYOUTS["HSDP 2 x 2"][1]),
    "bert, dp_shard 3, sharded gradients": (3, SHARDED | LAYOUTS["bert, dp_shard 3"][1]),
    "t5, HSDP 2 x 2, sharded gradients": (4, SHARDED | LAYOUTS["t5, HSDP 2 x 2"][1]),
    "t5 of megatron, pp 2 x dp_shard 2, fp16, sharded gradients": (
        4,
        SHARDED | MEGATRON | FP16_OF_T5 | {"mesh.pp": 2, "mesh.dp_shard": 2},
    ),
}
# A mixture: partial gradients of routers, losses of each stage, loads and parts of documents over cp.
MOE = {"model.name": "moe"}
_of_moe = (
    *("tp 2, no sequence parallel", "dp_shard 2", "dp_shard 4", "dp_replicate 2", "HSDP 2 x 2", "pp 4"),
    *("pp 2, ZBVZeroBubble", "pp 2 x dp_shard 2 x tp 2", "V 131, tp 2", "microbatches of 8"),
    *("recompute full", "recompute 3 at a time, dp_shard 2", "recompute selective", "compile", "compile, tp 2"),
    *("bf16, tp 2", "bf16, dp_shard 2", "HSDP 2 x 2, sharded gradients"),
    *("cp 2, gather", "cp 2, heads", "cp 3, gather", "cp 2 x tp 2, gather", "cp 2 x pp 2, ZBV, gather"),
    *("cp 2 x dp_shard 2, gather", "cp 2 x dp_replicate 2, heads", "recompute full, cp 2", "compile, cp 2, gather"),
)
LAYOUTS |= {f"moe, {name}": (LAYOUTS[name][0], MOE | LAYOUTS[name][1]) for name in _of_moe}
# Documents end at any place, so that their pairs are counted over slices of cp and over its ranks.
CAPACITY = MOE | {"model.capacity_factor": 1.0}
_of_capacity = (
    *("dp_shard 2", "dp_replicate 2", "tp 2", "pp 2, 1F1B", "pp 2, ZBVZeroBubble", "pp 2 x dp_shard 2 x tp 2"),
    *("cp 2, gather", "cp 2, heads", "cp 3, gather", "cp 2 x tp 2, gather", "cp 2 x pp 2, ZBV, gather"),
    *("microbatches of 8", "recompute full, cp 2", "recompute selective", "compile, cp 2, gather", "bf16, dp_shard 2"),
)
LAYOUTS |= {f"moe with capacity, {name}": (LAYOUTS[name][0], CAPACITY | LAYOUTS[name][1]) for name in _of_capacity}
FP16_OF_MOE = {"precision.params": "float16", "precision.initial_loss_scale": 2.0**14}
LAYOUTS |= {
    "moe, fp16, tp 2": (2, MOE | FP16_OF_MOE | TP2),
    "moe, fp16, pp 2": (2, MOE | FP16_OF_MOE | {"mesh.pp": 2}),
    "moe, fp16, dp_shard 2": (2, MOE | FP16_OF_MOE | {"mesh.dp_shard": 2}),
}
_of_latent = (
    *("tp 2, no sequence parallel", "dp_shard 2", "dp_shard 2 x tp 2", "pp 2, 1F1B", "pp 2, ZBVZeroBubble"),
    *("recompute full", "recompute selective", "compile", "compile, tp 2", "bf16, tp 2"),
    *("cp 2, gather", "cp 2, heads", "cp 2 x tp 2, gather", "cp 2 x pp 2, ZBV, gather", "compile, cp 2, gather"),
)
LAYOUTS |= {f"moe, latent, {name}": (LAYOUTS[name][0], LATENT | LAYOUTS[name][1]) for name in _of_latent}
LAYOUTS["moe, latent, ep, dp_shard 2"] = (2, LATENT | {"mesh.dp_shard": 2, "mesh.ep": 2})
# Experts divided over ranks that have different tokens.
OF_EP: dict[str, tuple[int, dict[str, Any]]] = {
    "dp_shard 2": (2, {"mesh.dp_shard": 2, "mesh.ep": 2}),
    "dp_shard 4, ep 4": (4, {"mesh.dp_shard": 4, "mesh.ep": 4, "model.n_experts": 8}),
    "dp_shard 4": (4, {"mesh.dp_shard": 4, "mesh.ep": 2}),
    "dp_shard 2 x tp 2": (4, TP2 | AS_USED | {"mesh.dp_shard": 2, "mesh.ep": 2}),
    "dp_shard 2 x pp 2": (4, {"mesh.dp_shard": 2, "mesh.ep": 2, "mesh.pp": 2}),
    "dp_shard 2 x pp 2, ZBV": (
        4,
        PAIRS | {"mesh.dp_shard": 2, "mesh.ep": 2, "mesh.pp": 2, "pipeline.schedule": "ZBVZeroBubble"},
    ),
    "HSDP 2 x 2": (4, {"mesh.dp_replicate": 2, "mesh.dp_shard": 2, "mesh.ep": 2}),
    "cp 2": (2, WITH_CP["cp 2, gather"][1] | {"mesh.ep": 2}),
    "dp_shard 2 x cp 2, ep 4": (4, WITH_CP["cp 2 x dp_shard 2, gather"][1] | {"mesh.ep": 4, "model.n_experts": 8}),
    "recompute full": (2, LAYOUTS["recompute full"][1] | {"mesh.dp_shard": 2, "mesh.ep": 2}),
    "compile": (2, {"compile.enable": True, "mesh.dp_shard": 2, "mesh.ep": 2}),
    "bf16": (2, BF16 | {"mesh.dp_shard": 2, "mesh.ep": 2}),
    "fp16": (2, FP16_OF_MOE | {"mesh.dp_shard": 2, "mesh.ep": 2}),
    "sharded gradients": (4, SHARDED | {"mesh.dp_shard": 4, "mesh.ep": 2}),
}
LAYOUTS |= {f"moe, ep, {name}": (n, MOE | keys) for name, (n, keys) in OF_EP.items()}
LAYOUTS |= {
    f"moe with capacity, ep, {name}": (OF_EP[name][0], CAPACITY | OF_EP[name][1]) for name in ("dp_shard 2", "cp 2")
}
# Matrices that an owner orthogonalises, gathered over each axis: with copies of whole matrices and of shards, shards of
# uneven sizes (48 rows over 9 ranks), cuts of both dims, and stages with matrices of their own.
UNEVEN = {"batch.global_batch_size": 9, "batch.micro_batch_size": 1}
OF_MUON: dict[str, tuple[int, dict[str, Any]]] = {
    **{
        name: LAYOUTS[name]
        for name in ("tp 2", "dp_shard 2", "dp_replicate 2", "HSDP 2 x 2", "pp 2, 1F1B", "cp 2, gather")
    },
    **{name: LAYOUTS[name] for name in ("pp 2 x dp_shard 2 x tp 2", "bf16, dp_shard 2", "fp16, pp 2", "bert, tp 3")},
    **{
        name: LAYOUTS[name] for name in ("llama, tp 4", "llama, dp_shard 2 x tp 2", "gpt, pp 2, 1F1B", "t5, HSDP 2 x 2")
    },
    "dp_shard 9": (9, UNEVEN | {"mesh.dp_shard": 9}),
    "gated, dp_shard 2 x tp 2": (4, GATED | LAYOUTS["dp_shard 2 x tp 2"][1]),
    "pp 2 x dp_replicate 2, ZBV": (
        4,
        PAIRS | {"mesh.pp": 2, "mesh.dp_replicate": 2, "pipeline.schedule": "ZBVZeroBubble"},
    ),
}
LAYOUTS |= {f"muon, {name}": (n, keys | MUON) for name, (n, keys) in OF_MUON.items()}
# Relative to one process, the largest over 20 steps: loss and gradient norm; at the end: each parameter, all of them.
FP32 = {"loss": 1e-5, "grad_norm": 1e-4, "parameter": 1e-4, "model": 1e-4}
# Ranks of cp compute what one process does, but for the order of a few sums.
FP32_WITH_CP = FP32 | {"loss": 1e-6, "grad_norm": 1e-6}
# bf16 rounds each product to 2^-9 = 2e-3. No bound on single parameters: the gradient of the keys' biases is zero but
# for rounding (softmax does not see them), and AdamW makes steps of full length of it.
BF16_BOUND = {"loss": 2e-3, "grad_norm": 1e-2, "model": 2e-2}
FP16_BOUND = {"loss": 2e-4, "grad_norm": 1e-3, "model": 2e-3}  # it rounds to 2^-12: a tenth
BOUNDS = {"float32": FP32, "bfloat16": BF16_BOUND, "float16": FP16_BOUND}


def family(keys: Mapping[str, Any]) -> str:
    """The one that `keys` are about, or the form of one."""
    objective = keys.get("data.objective")
    return objective if objective in FORMS else keys.get("model.name", "bloom")


def debug_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """All keys of the debug model that `keys` are about."""
    return {**(FAMILIES | FORMS)[family(keys)], **keys}


def truth_keys(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys that one process is given to be the truth for a layout with these keys."""
    return {k: v for k, v in keys.items() if k in TRUTH_KEYS}


def bound_of(keys: dict[str, Any]) -> dict[str, float]:
    dtype = keys.get("precision.params", "float32")
    return FP32_WITH_CP if dtype == "float32" and "mesh.cp" in keys else BOUNDS[dtype]


class Run:
    """The files that a run left behind."""

    def __init__(self, folder: Path) -> None:
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if "loss" in line]
        self.loss = np.array([line["loss"] for line in steps])
        self.grad_norm = np.array([line["grad_norm"] for line in steps])
        self.params_norm = np.array([line["params_norm"] for line in steps])
        self.val_loss = np.array([line["val_loss"] for line in lines if "val_loss" in line])
        self.dropped = [line[name] for line in lines for name in ("dropped", "val_dropped") if name in line]
        self.initial = joined(folder / "initial")
        self._folder = folder

    @functools.cached_property
    def final(self) -> dict[str, torch.Tensor]:
        """The weights at the end, if this run came there."""
        return tensors(self._folder / "run" / "checkpoints", len(self.loss))


def tensors(root: Path, step: int) -> dict[str, torch.Tensor]:
    weights = Weights(open_checkpoint(str(root / resume.name(step))))
    return {name: weights.read(name) for name in weights.tensors}


def one_rank(argv: list[str], folder: str, plant: Callable[[], None] | None = None) -> None:
    """train.py on this rank of a group that exists already; also saves what the model was before the first step."""
    if plant is not None:
        plant()
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    device_peaks.matmul_flops = lambda device, dtype: 1e12  # MFU is not looked at
    with keeping_initial(folder):
        assert train.main(argv) == 0


@contextlib.contextmanager
def keeping_initial(folder: str) -> Iterator[None]:
    """Each rank leaves what it holds of a model before the first step in folder/initial."""
    honest = start.parallelize

    def parallelize(cfg, world):
        model = honest(cfg, world)
        draw = model.draw

        def drawing(seed):
            draw(seed)
            held = {name: (p.shape, [tuple(box) for box in boxes(p.detach())]) for name, p in model.owned().items()}
            Path(folder, "initial").mkdir(parents=True, exist_ok=True)
            torch.save(held, Path(folder, "initial", str(world.rank)))

        model.draw = drawing
        return model

    with patch.object(start, "parallelize", parallelize):
        yield


def joined(folder: Path) -> dict[str, torch.Tensor]:
    """Whole tensors of what the ranks have left there; copies are equal to the bit."""
    found: dict[str, torch.Tensor] = {}
    for path in folder.iterdir():
        for name, (shape, held) in torch.load(path, weights_only=False).items():
            whole = found.setdefault(name, torch.full(shape, math.nan))
            for offsets, part in held:
                where = tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))
                there = whole[where]
                assert there.isnan().all() or torch.equal(there, part), f"copies of {name} start with other bits"
                whole[where] = part
    assert [name for name, whole in found.items() if whole.isnan().any()] == []
    return found


def write_text(folder: Path, n_sentinels: int = 0) -> dict[str, str]:
    """Documents that count in 127 words, and the tokenizer they were written with; 0 ends a document.

    Args:
        n_sentinels: so many words less are those that stand for hidden spans.
    """
    n_words = 127 - n_sentinels
    special = {"<|endoftext|>": 0} | {f"<extra_id_{i}>": 1 + n_words + i for i in range(n_sentinels)}
    tokenizer = Tokenizer(WordLevel(special | {f"w{i}": i for i in range(1, 1 + n_words)}, unk_token="w1"))
    tokenizer.add_special_tokens([*special])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    rng = np.random.default_rng(0)
    with IndexedWriter(folder / "text", np.dtype(np.uint16)) as writer:
        for _ in range(300):
            start, length = rng.integers(0, 127), rng.integers(5, 60)
            writer.add([*(1 + (start + np.arange(length)) % n_words).tolist(), 0])
    return {"data.path": str(folder / "text"), "data.tokenizer": str(folder / "tokenizer.json")}


def write_sentences(folder: Path, n_words: int = 123) -> dict[str, str]:
    """The same for models that read sentences: documents of 1 to 12 that count on, and their vocabulary.

    Every third word goes on the word before.
    """
    words = [f"##w{i}" if i % 3 == 0 else f"w{i}" for i in range(n_words)]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(special + words) + "\n")
    rng = np.random.default_rng(0)
    with IndexedWriter(folder / "sentences", np.dtype(np.uint16)) as writer:
        for _ in range(300):
            sizes = rng.integers(2, 10, rng.integers(1, 13))
            counting = rng.integers(0, len(words)) + np.arange(sizes.sum())
            writer.add(len(special) + counting % len(words), sizes.tolist())
    return {"data.path": str(folder / "sentences"), "data.tokenizer": f"bert:{folder / 'vocab.txt'}"}


def write_data(folder: Path) -> dict[str, dict[str, str]]:
    """Write the data of each family, and of each form of one; returns the keys that name them."""
    text, sentences = write_text(folder), write_sentences(folder)
    objectives = {name: known.objective(families.named(name).objectives["auto"]) for name in FAMILIES}
    found = {name: sentences if objectives[name].sentences else text for name in FAMILIES}
    n_sentinels = FAMILIES["t5"]["data.sentinels"]
    found["t5"] = write_text(folder / "t5", n_sentinels)
    found["separate-spans"] = write_sentences(folder / "separate-spans", 123 - len(["[BOS]", "[EOS]"]) - n_sentinels)
    return found


def train_debug_model(n: int, keys: dict[str, Any], folder: Path, plant: Callable[[], None] | None = None) -> Run:
    """The debug model with these keys on n processes, in `folder`."""
    every = debug_keys(keys) | {"run.dir": str(folder / "run")}
    flags = [word for k, v in every.items() for word in (f"--{k}", v if isinstance(v, str) else json.dumps(v))]
    ranks.run(n, one_rank, ["--config", str(ROOT / "tests" / "small.toml"), *flags], str(folder), plant)
    return Run(folder)


def deviation(run: Run, truth: Run) -> dict[str, float]:
    """The largest relative difference in each quantity."""

    def largest(name: str) -> float:
        ours, theirs = getattr(run, name), getattr(truth, name)
        assert ours.shape == theirs.shape
        return float(np.max(np.abs(ours / theirs - 1)))

    assert run.final.keys() == truth.final.keys()
    ours, theirs = ({k: v[: len(truth.final[k])].double() for k, v in r.final.items()} for r in (run, truth))
    model = math.sqrt(sum(float((ours[k] - theirs[k]).square().sum()) for k in theirs))
    seen = [k for k in theirs if not k.endswith(".k.bias")]  # the bias of all keys, which stays 0
    return {
        "loss": max(largest("loss"), largest("val_loss")),
        "grad_norm": largest("grad_norm"),
        "parameter": max(float((ours[k] - theirs[k]).norm() / theirs[k].norm()) for k in seen),
        "model": model / math.sqrt(sum(float(t.square().sum()) for t in theirs.values())),
    }
