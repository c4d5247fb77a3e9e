"""A distributed checkpoint of megatron-core's GPT: whole tensors by the names of names.py, read as data like any other.

    iter_0001000/metadata.json      which program wrote the tensors; torch_dist is torch.distributed.checkpoint
    iter_0001000/common.pt          arguments, and what all ranks have alike: a pickle
    iter_0001000/.metadata, __*.distcp

Tensors of all layers are stacked under one name, [L, ...], or stand one by one. A LayerNorm has the name of the linear
that it is fused with, whether it is or not. `*_extra_state*` are byte entries, which are not opened.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dtmega.foreign.dcp import DCPFolder
from dtmega.formats.rules import Made, Run
from dtmega.formats.sources import Source, Translated
from dtmega.megatron.ranks import arguments
from dtmega.megatron.saved import SavedFile, entries
from dtmega.strangers import read_object

METADATA = "metadata.json"
COMMON = "common.pt"
BACKEND = "torch_dist"
# In arguments and in what they stand beside.
NAMES = {
    "signal Signals",
    *(f"megatron.core.rerun_state_machine {name}" for name in ("RerunMode", "RerunState", "RerunDiagnostic")),
}
# Modules of a layer -> those of Megatron-LM.
LINEARS = {
    "self_attention.linear_qkv": "self_attention.query_key_value",
    "self_attention.linear_proj": "self_attention.dense",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}
FUSED_NORMS = {"self_attention.linear_qkv": "input_layernorm", "mlp.linear_fc1": "post_attention_layernorm"}
LAYER = re.compile(
    r"decoder\.layers\.((?P<layer>\d{1,6})\.)?(?P<module>[a-z_]+\.[a-z0-9_]+)\.(?P<norm>layer_norm_)?(?P<end>weight|bias)"
)
MOST_LAYERS = 100_000
MASTER = "optimizer.state.fp32_param."  # before the name of a model's tensor
# What stands beside a model's tensors: the optimizer, the generators, the state of a rerun.
BESIDE = re.compile(r"(chained_\d+\.)?optimizer\.|rng_state|rerun_state_machine|opt_param_scheduler")


def holds(folder: Path) -> bool:
    return (folder / METADATA).is_file() or (folder / COMMON).is_file()


def opened(folder: Path) -> tuple[dict[str, Any], Source]:
    """The arguments of a run, and its weights: fp32 masters where they are there under the names of the weights.

    Raises:
        ValueError: another backend than torch_dist; a damaged or a crafted file; layers that are there twice.
    """
    backend = read_object(folder / METADATA).get("sharded_backend")
    if backend != BACKEND:
        raise ValueError(
            f"{folder / METADATA} has sharded_backend={backend!a:.80}, expected '{BACKEND}': megatron-core can load it "
            f"and save it again so"
        )
    common = SavedFile(folder / COMMON, NAMES)
    args = arguments(entries(common.value, "what was saved"))
    stored = DCPFolder(folder)
    made: dict[str, Made] = {}
    for name, (_, shape) in stored.tensors.items():
        if BESIDE.match(name):
            continue
        if not shape or 0 in shape:
            raise ValueError(f"{folder}: '{name}' is {list(shape)}, expected a tensor with elements and dims")
        master = MASTER + name
        has_master = master in stored.tensors and stored.tensors[master][1] == shape
        for whole, its in _made(name, master if has_master else name, shape).items():
            if whole in made:
                raise ValueError(f"{folder}: '{whole}' is there twice, once as '{name}'")
            made[whole] = its
    return args, Translated(stored, made)


def _made(name: str, stored: str, shape: tuple[int, ...]) -> dict[str, Made]:
    """Whole names of what a tensor has, and how they are made of it.

    Args:
        stored: the name under which its values are.
    """
    match = LAYER.fullmatch(name)
    modules = {} if match is None else FUSED_NORMS if match["norm"] else LINEARS
    if match is None or match["module"] not in modules:
        # Another one keeps its name, for which no model of Megatron's has a place.
        today = re.sub(r"^decoder\.final_layernorm\.", "encoder.final_layernorm.", name)
        return {today: Made(shape, (Run(0, stored, 0, shape[0]),))}
    inner = f"{modules[match['module']]}.{match['end']}"
    if match["layer"]:
        return {f"encoder.layers.{match['layer']}.{inner}": Made(shape, (Run(0, stored, 0, shape[0]),))}
    n_layers, *each = shape
    if n_layers > MOST_LAYERS or not each:
        raise ValueError(f"'{name}' is {list(shape)}, expected [layers, ...] of at most {MOST_LAYERS} layers")
    rows = each[0]
    return {
        f"encoder.layers.{i}.{inner}": Made(tuple(each), (Run(0, stored, i * rows, rows),), there="stack")
        for i in range(n_layers)
    }
