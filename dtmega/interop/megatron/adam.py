"""Read Adam's state (moments, step, fp32 masters) from one rank's Megatron-LM file, and match it with weight names.

    fp32        optimizer = {state: {0: {exp_avg, exp_avg_sq, step}, ...}, param_groups: [{params: [0, ...]}, ...]}
    16 bits     optimizer = {optimizer: {state, param_groups}, fp32_from_fp16_params: [[...], [...]], grad_scaler: ...}

The state refers to parameters by number, not by name. Parameters are numbered in two groups. The first group, with
weight decay, has all weights except LayerNorm weights. The second group, without weight decay, has the LayerNorms and
all biases. Within a group, parameters follow the order of the modules. The masters prove that names and numbers were
matched correctly: each master, rounded to 16 bits, must equal its weight. apex's FusedAdam keeps `step` in
param_groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dtmega.checkpoint.state import ScaleState
from dtmega.interop.megatron.parts import Part, Shard
from dtmega.interop.megatron.ranks import Rank
from dtmega.interop.megatron.saved import SavedFile, Stored, check_apart, entries
from dtmega.interop.torch_files.inert import PickledObject, of_type

# A model's modules, in order. The head's copy of the embedding comes before the `lm_head` of BERT and T5.
SECTIONS = ("embedding.", "encoder.", "decoder.", "pooler.", "word_embeddings_for_head.", "lm_head.", "binary_head.")
OPTIMIZER = ("optimizer", "optimizer_state_dict")  # today's name, and the name in 2019
MASTERS = ("fp32_from_fp16_params", "fp32_from_fp16")
MOMENTS = ("exp_avg", "exp_avg_sq")

TensorPlace = tuple[int, str]  # chunk (virtual stage), name within the chunk


class Adam(NamedTuple):
    """The optimizer's state in one rank's file.

    Attributes:
        masters: fp32 copies of all weights; empty if the file has no masters.
        moments: exp_avg and exp_avg_sq of all weights; empty if the moments are incomplete.
        step: number of updates that the optimizer has made.
        scale: state of float16's loss scale; None if the file has no loss scale.
        why: reason why the moments are incomplete; '' if they are complete.
    """

    masters: dict[TensorPlace, Part]
    moments: dict[str, dict[TensorPlace, Part]]
    step: int
    scale: ScaleState | None
    why: str = ""


class IncompleteMoments(Exception):
    """Raised if the moments are unusable; the weights remain usable. The message gives the reason."""


def read_adam(rank: Rank) -> Adam:
    """Decode the optimizer's state in a rank's file, without reading the tensors yet.

    Raises:
        ValueError: the file is damaged, or has contents that Megatron does not write.
    """
    if rank.content.get("optimizer") is None:
        return Adam({}, {}, 0, None, "the files have no optimizer's state")
    outer = entries(rank.content["optimizer"], "the optimizer")
    inner = next((outer[key] for key in OPTIMIZER if key in outer), None)
    adam = outer if inner is None else entries(inner, "the optimizer")
    groups = []
    for decayed in (True, False):
        if group := _parameters(rank, decayed):
            groups.append(group)
    masters = _masters(rank.file, groups, next((outer[key] for key in MASTERS if key in outer), []))
    moments: dict[str, dict[TensorPlace, Stored]] = {}
    step = 0
    why = ""
    try:
        moments, step = _moments(rank, groups, adam)
    except IncompleteMoments as reason:
        why = str(reason)
    # Check all tensors in the file together, including weights, because no two tensors may share bytes.
    tensors = [*masters.values()]
    for tensors_of_kind in moments.values():
        tensors += tensors_of_kind.values()
    for chunk in rank.chunks:
        tensors += chunk.values()
    check_apart(rank.file.path, tensors)
    parts = {kind: _parts(rank.file, tensors_of_kind) for kind, tensors_of_kind in moments.items()}
    return Adam(_parts(rank.file, masters), parts, step, scale_of(rank.file, outer.get("grad_scaler")), why)


def _parts(file: SavedFile, tensors: Mapping[TensorPlace, Stored]) -> dict[TensorPlace, Part]:
    return {place: Shard(file, stored) for place, stored in tensors.items()}


def _parameters(rank: Rank, decayed: bool) -> list[TensorPlace]:
    """The parameters with weight decay (`decayed` is True) or without it, in the order of the modules."""
    places: list[TensorPlace] = []
    for v, chunk in enumerate(rank.chunks):
        for section in SECTIONS:
            places += [(v, name) for name in chunk if name.startswith(section) and is_decayed(name) == decayed]
    return places


def is_decayed(name: str) -> bool:
    """True if Megatron applies weight decay to a parameter."""
    return not (name.endswith(".bias") or "layernorm." in name or ".norm." in name)


def _masters(file: SavedFile, groups: Sequence[Sequence[TensorPlace]], lists: Any) -> dict[TensorPlace, Stored]:
    """The fp32 masters, matched with the parameters by position.

    Args:
        lists: the file's lists of masters, one list for each group; empty if the weights are fp32 themselves.
    """
    counts = [len(of_type(group, list, "a group of masters")) for group in of_type(lists, list, "the masters")]
    if counts and counts != [*map(len, groups)]:
        raise ValueError(
            f"{file.path}: there are {' + '.join(map(str, counts))} fp32 masters for "
            f"{' + '.join(str(len(group)) for group in groups)} weights"
        )
    masters: dict[TensorPlace, Stored] = {}
    for group, pickled_tensors in zip(groups, lists, strict=False):  # `lists` is empty or complete
        for place, pickled in zip(group, pickled_tensors, strict=True):
            masters[place] = file.tensor(pickled)
    return masters


def _moments(
    rank: Rank, groups: Sequence[Sequence[TensorPlace]], adam: Mapping[Any, Any]
) -> tuple[dict[str, dict[TensorPlace, Stored]], int]:
    """The moments (kind -> parameter -> moment), and the number of updates.

    Args:
        groups: the rank's parameters, in the order in which the optimizer numbers them.
        adam: the optimizer's state_dict.

    Raises:
        IncompleteMoments: a parameter has no moments, or the number of updates is unknown.
        ValueError: a moment and its parameter have different shapes.
    """
    if not {"state", "param_groups"} <= adam.keys():
        raise IncompleteMoments("the optimizer's state is not Adam's")
    param_groups = [entries(group, "a group of parameters") for group in of_type(adam["param_groups"], list, "groups")]
    numbers = [of_type(group.get("params"), list, "the parameters of a group") for group in param_groups]
    if [*map(len, numbers)] != [*map(len, groups)]:
        raise IncompleteMoments("the optimizer's state is of another number of parameters than the model has")
    state = entries(adam["state"], "the state of the optimizer")
    moments: dict[str, dict[TensorPlace, Stored]] = {kind: {} for kind in MOMENTS}
    steps = {step_of(rank.file, group["step"]) for group in param_groups if "step" in group}
    for group, numbers_of_group in zip(groups, numbers, strict=True):
        for (v, name), number in zip(group, numbers_of_group, strict=True):
            pickled = state.get(number) if type(number) is int else None
            if pickled is None or not {*MOMENTS} <= entries(pickled, "the state of a parameter").keys():
                raise IncompleteMoments(f"the optimizer's state has no moments of '{name}'")
            parameter_state = entries(pickled, "the state of a parameter")
            for kind in MOMENTS:
                stored = rank.file.tensor(parameter_state[kind])
                if stored.shape != rank.chunks[v][name].shape:
                    raise ValueError(
                        f"{rank.file.path}: the moment with the number of '{name}' is {list(stored.shape)}, expected "
                        f"{list(rank.chunks[v][name].shape)}"
                    )
                moments[kind][v, name] = stored
            if "step" in parameter_state:
                steps.add(step_of(rank.file, parameter_state["step"]))
    if len(steps) != 1:
        raise IncompleteMoments(f"the optimizer has {len(steps)} different numbers of updates, expected one")
    return moments, steps.pop()


def step_of(file: SavedFile, value: Any) -> int:
    """Convert a number of updates, stored as an int, a float or a tensor with one element, to an int."""
    if type(value) is PickledObject:
        value = _number(file, value)
    if type(value) not in (int, float) or not 0 <= value < 1 << 60 or value != int(value):
        raise ValueError(f"{file.path}: expected a number of updates")
    return int(value)


def _number(file: SavedFile, pickled: PickledObject) -> float:
    """The value of a tensor with one element."""
    stored = file.tensor(pickled)
    if stored.shape not in ((), (1,)):
        raise ValueError(f"{file.path}: expected a number, got a tensor {list(stored.shape)}")
    return file.read(stored).to(torch.float64).item()


def scale_of(file: SavedFile, pickled: Any) -> ScaleState | None:
    """The state of Megatron's DynamicGradScaler; None if the file lacks the state or has unusable values."""
    if pickled is None:
        return None
    scaler = entries(pickled, "the state of the loss scale")
    scale = scaler.get("scale")
    if type(scale) is PickledObject:
        scale = _number(file, scale)
    growth = scaler.get("growth_tracker")
    hysteresis = scaler.get("hysteresis_tracker")
    if not isinstance(scale, int | float) or not scale > 0 or type(growth) is not int or type(hysteresis) is not int:
        return None
    return ScaleState(float(scale), max(0, growth), max(0, hysteresis))
