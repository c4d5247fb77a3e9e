"""A distributed checkpoint of megatron-core's GPT: whole tensors by the names of names.py, read as data like any other.

    iter_0001000/metadata.json      which program wrote the tensors; torch_dist is torch.distributed.checkpoint
    iter_0001000/common.pt          arguments, and what all ranks have alike: a pickle
    iter_0001000/.metadata, __*.distcp

Tensors of all layers are stacked under one name, [L, ...], or stand one by one. A LayerNorm has the name of the linear
that it is fused with, whether it is or not. `*_extra_state*` are byte entries, which are not opened. Adam's moments and
the fp32 masters have the names of the weights behind `optimizer.state.exp_avg.` and so on; the step is in common.pt.

Source: `dist_checkpointing/optimizer.py` and `optimizer/optimizer.py` of megatron-core 0.16.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dtmega.foreign.dcp import DCPFolder
from dtmega.foreign.inert import of_type
from dtmega.formats.rules import Assembly, RowRun
from dtmega.formats.sources import Source, Translated
from dtmega.loss_scale import ScaleState
from dtmega.megatron.adam import MOMENTS, NotWhole, scale_of, step_of
from dtmega.megatron.ranks import arguments, iteration_of
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
STATE = "optimizer.state."  # before the key of a state and the name of a model's tensor
MASTER = f"{STATE}fp32_param."
# What stands beside a model's tensors: the optimizer, the generators, the state of a rerun.
BESIDE = re.compile(r"(chained_\d+\.)?optimizer\.|rng_state|rerun_state_machine|opt_param_scheduler")


def holds(folder: Path) -> bool:
    return (folder / METADATA).is_file() or (folder / COMMON).is_file()


class RunState(NamedTuple):
    """The run as the files tell of it, beside its weights.

    Attributes:
        moments: exp_avg and exp_avg_sq by the names of the weights; empty where they are not whole.
        steps: the numbers of updates that the optimizer says.
        scheduler: of the learning rate, as the file has it; None: there is none.
        scale: float16's; None where there is none.
        why: the reason why moments are not whole.
    """

    moments: dict[str, Source]
    iteration: int
    steps: frozenset[int]
    scheduler: Any
    scale: ScaleState | None
    why: str


def opened(folder: Path) -> tuple[dict[str, Any], Source, RunState]:
    """The arguments of a run, its weights (fp32 masters where they are there under the names of the weights), and more.

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
    content = entries(common.value, "what was saved")
    stored = DCPFolder(folder)
    shapes = {name: shape for name, (_, shape) in stored.tensors.items() if not BESIDE.match(name)}
    for name, shape in shapes.items():
        if not shape or 0 in shape:
            raise ValueError(f"{folder}: '{name}' is {list(shape)}, expected a tensor with elements and dims")
    values = {}
    for name, shape in shapes.items():
        master = MASTER + name
        has_master = master in stored.tensors and stored.tensors[master][1] == shape
        values[name] = master if has_master else name
    weights = _translated(stored, shapes, values)
    return arguments(content), weights, _training(common, content, stored, shapes)


def _training(
    common: SavedFile, content: Mapping[Any, Any], stored: DCPFolder, shapes: Mapping[str, tuple[int, ...]]
) -> RunState:
    moments: dict[str, Source] = {}
    steps: frozenset[int] = frozenset()
    scale = None
    why = ""
    try:
        if content.get("optimizer") is None:
            raise NotWhole("the files have no optimizer's state")
        optimizer = entries(content["optimizer"], "the optimizer")
        inner = entries(optimizer.get("optimizer", optimizer), "the optimizer")
        steps = _steps(common, inner)
        scale = scale_of(common, optimizer.get("grad_scaler"))
        for kind in MOMENTS:
            values = {name: f"{STATE}{kind}.{name}" for name in shapes}
            for name, value in values.items():
                if value not in stored.tensors or stored.tensors[value][1] != shapes[name]:
                    raise NotWhole(f"there is no {kind} of '{name}', or one of another shape")
            moments[kind] = _translated(stored, shapes, values)
    except NotWhole as reason:
        moments = {}
        why = str(reason)
    return RunState(moments, iteration_of(content), steps, content.get("opt_param_scheduler"), scale, why)


def _steps(common: SavedFile, optimizer: Mapping[Any, Any]) -> frozenset[int]:
    """The numbers of updates: one that all parameters share, or those of the groups of parameters."""
    state = entries(optimizer.get("state", {}), "the state of the optimizer")
    found = [state["common_step"]] if "common_step" in state else []
    for group in of_type(optimizer.get("param_groups", []), list, "groups"):
        its = entries(group, "a group of parameters")
        if its.get("step") is not None:
            found.append(its["step"])
    if not found:
        raise NotWhole("the files do not say how many updates Adam has made")
    return frozenset(step_of(common, said) for said in found)


def _translated(stored: DCPFolder, shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, str]) -> Source:
    """Tensors by whole names.

    Args:
        values: name of a model's tensor -> that under which its values are.
    """
    made: dict[str, Assembly] = {}
    for name, shape in shapes.items():
        for whole, its in _made(name, values[name], shape).items():
            if whole in made:
                raise ValueError(f"{stored.path}: '{whole}' is there twice, once as '{name}'")
            made[whole] = its
    return Translated(stored, made)


def _made(name: str, stored: str, shape: tuple[int, ...]) -> dict[str, Assembly]:
    """Whole names of what a tensor has, and how they are made of it.

    Args:
        stored: the name under which its values are.
    """
    match = LAYER.fullmatch(name)
    modules = {} if match is None else FUSED_NORMS if match["norm"] else LINEARS
    if match is None or match["module"] not in modules:
        # Another one keeps its name, for which no model of Megatron's has a place.
        today = re.sub(r"^decoder\.final_layernorm\.", "encoder.final_layernorm.", name)
        return {today: Assembly(shape, (RowRun(0, stored, 0, shape[0]),))}
    inner = f"{modules[match['module']]}.{match['end']}"
    if match["layer"]:
        return {f"encoder.layers.{match['layer']}.{inner}": Assembly(shape, (RowRun(0, stored, 0, shape[0]),))}
    n_layers, *each = shape
    if n_layers > MOST_LAYERS or not each:
        raise ValueError(f"'{name}' is {list(shape)}, expected [layers, ...] of at most {MOST_LAYERS} layers")
    rows = each[0]
    return {
        f"encoder.layers.{i}.{inner}": Assembly(tuple(each), (RowRun(0, stored, i * rows, rows),), source_view="stack")
        for i in range(n_layers)
    }
