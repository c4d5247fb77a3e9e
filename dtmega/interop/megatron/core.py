"""Read a distributed megatron-core checkpoint as unsharded tensors, named as in core_forms.py.

    iter_0001000/metadata.json      the backend's name; torch_dist stands for torch.distributed.checkpoint
    iter_0001000/common.pt          a pickle of the arguments and everything else that all ranks share, decoded as data
    iter_0001000/.metadata, __*.distcp      the tensors

A tensor that exists in every layer is either stacked under one name, [L, ...], or stored once per layer.
Entries named `*_extra_state*` hold bytes and are not opened. The name of an Adam moment or an fp32 master is the
weight's name after a prefix such as `optimizer.state.exp_avg.`; the step is in common.pt.

Source: `dist_checkpointing/optimizer.py` and `optimizer/optimizer.py` of megatron-core 0.16.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dtmega.checkpoint.sources import Source
from dtmega.checkpoint.state import ScaleState
from dtmega.files.untrusted_json import read_object
from dtmega.interop.formats.rules import Assembly, RowRun
from dtmega.interop.formats.sources import Translated
from dtmega.interop.megatron.adam import MOMENTS, IncompleteMoments, scale_of, step_of
from dtmega.interop.megatron.core_forms import LAYERS, TENSORS_IN_LAYER
from dtmega.interop.megatron.ranks import arguments, iteration_of
from dtmega.interop.megatron.saved import SavedFile, entries
from dtmega.interop.torch_files.dcp import DCPFolder
from dtmega.interop.torch_files.inert import of_type

METADATA = "metadata.json"
COMMON = "common.pt"
BACKEND = "torch_dist"
# Classes that common.pt contains in addition to the classes in saved.py.
NAMES = {
    "signal Signals",
    *(f"megatron.core.rerun_state_machine {name}" for name in ("RerunMode", "RerunState", "RerunDiagnostic")),
}
LAYER = re.compile(rf"{re.escape(LAYERS)}(?P<number>\d{{1,6}}\.)?(?P<inner>.+)")
MAX_LAYERS = 100_000
STATE = "optimizer.state."  # followed by the kind of state and the name of a model tensor
# Prefixes of the fp32 masters: a 16-bit optimizer uses the first prefix, a distributed optimizer the second.
MASTERS = (f"{STATE}fp32_param.", f"{STATE}param.")
BUCKETS = "optimizer.distributed."  # prefix that a distributed optimizer uses if its moments have no names
# Names of entries outside the model: the optimizer, the random generators, the rerun state, the scheduler.
NOT_WEIGHTS = re.compile(r"(chained_\d+\.)?optimizer\.|rng_state|rerun_state_machine|opt_param_scheduler")


def is_checkpoint(folder: Path) -> bool:
    """True if megatron-core wrote the folder."""
    return (folder / METADATA).is_file() or (folder / COMMON).is_file()


class RunState(NamedTuple):
    """State of the run that wrote a checkpoint, apart from the weights.

    Attributes:
        moments: sources of exp_avg and exp_avg_sq, under the weights' names; empty if the moments are incomplete.
        iteration: number of iterations done.
        steps: update counts in the optimizer, without duplicates; more than one if the parameter groups disagree.
        scheduler: state of the learning-rate scheduler, as stored in the file; None if the file has no scheduler.
        scale: state of float16's loss scale; None if the file has no loss scale.
        why: reason why the moments are incomplete; '' if they are complete.
    """

    moments: dict[str, Source]
    iteration: int
    steps: frozenset[int]
    scheduler: Any
    scale: ScaleState | None
    why: str


def open_folder(folder: Path) -> tuple[dict[str, Any], Source, RunState]:
    """Open a megatron-core checkpoint.

    Returns:
        The run's arguments, weights and other state. A weight is read from its fp32 master if the checkpoint has a
        master with the weight's name and shape.

    Raises:
        ValueError: the backend is not torch_dist, a file is damaged or crafted, or a layer's tensor is stored twice.
    """
    backend = read_object(folder / METADATA).get("sharded_backend")
    if backend != BACKEND:
        raise ValueError(
            f"{folder / METADATA} has sharded_backend={backend!a:.80}, expected '{BACKEND}': megatron-core can load "
            f"the checkpoint and save it with that backend"
        )
    common = SavedFile(folder / COMMON, NAMES)
    content = entries(common.value, "the contents")
    stored = DCPFolder(folder)
    shapes = {name: shape for name, (_, shape) in stored.tensors.items() if not NOT_WEIGHTS.match(name)}
    for name, shape in shapes.items():
        if not shape or 0 in shape:
            raise ValueError(f"{folder}: '{name}' is {list(shape)}, expected a tensor with elements and dims")
    keys = {}
    for name, shape in shapes.items():
        masters = [prefix + name for prefix in MASTERS]
        same_shape = (key for key in masters if key in stored.tensors and stored.tensors[key][1] == shape)
        keys[name] = next(same_shape, name)
    weights = _translated(stored, shapes, keys)
    return arguments(content), weights, _run_state(common, content, stored, shapes)


def _run_state(
    common: SavedFile, content: Mapping[Any, Any], stored: DCPFolder, shapes: Mapping[str, tuple[int, ...]]
) -> RunState:
    """The run's state apart from its weights.

    Args:
        content: decoded contents of common.pt.
        shapes: shape of each weight, keyed by the weight's name in the checkpoint.
    """
    moments: dict[str, Source] = {}
    steps: frozenset[int] = frozenset()
    scale = None
    why = ""
    try:
        if content.get("optimizer") is None:
            raise IncompleteMoments("the files have no optimizer's state")
        if any(name.startswith(BUCKETS) for name in stored.tensors):
            raise IncompleteMoments(
                "the moments are cut into buckets of that run's layout; megatron-core can load the checkpoint and save "
                "it with --dist-ckpt-optim-fully-reshardable"
            )
        optimizer = entries(content["optimizer"], "the optimizer")
        inner = entries(optimizer.get("optimizer", optimizer), "the optimizer")
        steps = _steps(common, inner)
        scale = scale_of(common, optimizer.get("grad_scaler"))
        for kind in MOMENTS:
            keys = {name: f"{STATE}{kind}.{name}" for name in shapes}
            for name, key in keys.items():
                if key not in stored.tensors or stored.tensors[key][1] != shapes[name]:
                    raise IncompleteMoments(f"there is no {kind} of '{name}', or one of another shape")
            moments[kind] = _translated(stored, shapes, keys)
    except IncompleteMoments as reason:
        moments = {}
        why = str(reason)
    return RunState(moments, iteration_of(content), steps, content.get("opt_param_scheduler"), scale, why)


def _steps(common: SavedFile, optimizer: Mapping[Any, Any]) -> frozenset[int]:
    """The update counts in the optimizer, without duplicates.

    The optimizer stores one count for all parameters, or one count per parameter group. Groups may disagree.
    """
    state = entries(optimizer.get("state", {}), "the state of the optimizer")
    steps = [state["common_step"]] if "common_step" in state else []
    for pickled in of_type(optimizer.get("param_groups", []), list, "groups"):
        group = entries(pickled, "a group of parameters")
        if group.get("step") is not None:
            steps.append(group["step"])
    if not steps:
        raise IncompleteMoments("the files do not say how many updates Adam has made")
    return frozenset(step_of(common, step) for step in steps)


def _translated(stored: DCPFolder, shapes: Mapping[str, tuple[int, ...]], keys: Mapping[str, str]) -> Source:
    """The checkpoint's tensors. A tensor that is stacked over the layers, [L, ...], is split into one tensor per layer.

    Args:
        shapes: shape of each weight, keyed by the weight's name in the checkpoint.
        keys: name of the stored tensor that holds each weight's values, keyed by the weight's name.
    """
    assemblies: dict[str, Assembly] = {}
    for name, shape in shapes.items():
        for layer_name, assembly in _assemblies(name, keys[name], shape).items():
            if layer_name in assemblies:
                raise ValueError(f"{stored.path}: '{layer_name}' is there twice, by itself and in a stack")
            assemblies[layer_name] = assembly
    return Translated(stored, assemblies)


def _assemblies(name: str, key: str, shape: tuple[int, ...]) -> dict[str, Assembly]:
    """The assembly of each of our tensors from a stored weight, keyed by name: one per layer if the weight is [L, ...].

    Args:
        name: name of the weight, which shows whether the weight is stacked over the layers.
        key: name of the stored tensor that holds the values (the weight itself, its fp32 master or a moment).
        shape: shape of the weight.
    """
    match = LAYER.fullmatch(name)
    # Keep an unknown name unchanged here. No model has a tensor with such a name, so a later check refuses the name.
    if match is None or match["number"] or match["inner"] not in TENSORS_IN_LAYER:
        return {name: Assembly(shape, (RowRun(0, key, 0, shape[0]),))}
    n_layers, *layer_shape = shape
    if n_layers > MAX_LAYERS or not layer_shape:
        raise ValueError(f"'{name}' is {list(shape)}, expected [layers, ...] of at most {MAX_LAYERS} layers")
    rows = layer_shape[0]
    assemblies = {}
    for i in range(n_layers):
        run = RowRun(0, key, i * rows, rows)
        assemblies[f"{LAYERS}{i}.{match['inner']}"] = Assembly(tuple(layer_shape), (run,), source_view="stack")
    return assemblies
