"""Adam's moments, its step and the fp32 masters in one rank's file of Megatron-LM, by the names of the weights.

    fp32        optimizer = {state: {0: {exp_avg, exp_avg_sq, step}, ...}, param_groups: [{params: [0, ...]}, ...]}
    16 bits     optimizer = {optimizer: the same, fp32_from_fp16_params: [[...], [...]], grad_scaler: {...}}

They stand there by number alone: first those that are decayed, weights outside of LayerNorms; then LayerNorms and
biases; each in the order of the modules. That the numbers are the right ones is proven by the masters, which have to
round to the weights. apex's FusedAdam has `step` in param_groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dtmega.foreign.inert import PickledObject, of_type
from dtmega.loss_scale import ScaleState
from dtmega.megatron.parts import Part, Shard
from dtmega.megatron.ranks import Rank
from dtmega.megatron.saved import SavedFile, Stored, check_apart, entries

# A model's modules in order; the head's copy of the embedding comes before what BERT and T5 have for words.
SECTIONS = ("embedding.", "encoder.", "decoder.", "pooler.", "word_embeddings_for_head.", "lm_head.", "binary_head.")
OPTIMIZER = ("optimizer", "optimizer_state_dict")  # today's name, and that of 2019
MASTERS = ("fp32_from_fp16_params", "fp32_from_fp16")
MOMENTS = ("exp_avg", "exp_avg_sq")

TensorPlace = tuple[int, str]  # chunk, name within it


class Adam(NamedTuple):
    """The optimizer of one rank.

    Attributes:
        masters: fp32, of all weights or of none.
        moments: exp_avg and exp_avg_sq; empty where they are not whole.
        step: updates that were made.
        scale: float16's; None where there is none.
        why: the reason why moments are not whole.
    """

    masters: dict[TensorPlace, Part]
    moments: dict[str, dict[TensorPlace, Part]]
    step: int
    scale: ScaleState | None
    why: str = ""


class NotWhole(Exception):
    """The reason why moments are not read."""


def read_adam(rank: Rank) -> Adam:
    """The optimizer in a file.

    Raises:
        ValueError: damaged, or not what Megatron writes.
    """
    if rank.content.get("optimizer") is None:
        return Adam({}, {}, 0, None, "the files have no optimizer's state")
    outer = entries(rank.content["optimizer"], "the optimizer")
    inner = next((outer[key] for key in OPTIMIZER if key in outer), None)
    adam = outer if inner is None else entries(inner, "the optimizer")
    groups = [group for decayed in (True, False) if (group := _names(rank, decayed))]
    masters = _masters(rank.file, groups, next((outer[key] for key in MASTERS if key in outer), []))
    moments: dict[str, dict[TensorPlace, Stored]] = {}
    step = 0
    why = ""
    try:
        moments, step = _moments(rank, groups, adam)
    except NotWhole as reason:
        why = str(reason)
    everything = [masters, *moments.values(), *(dict(enumerate(chunk.values())) for chunk in rank.chunks)]
    check_apart(rank.file.path, (stored for those in everything for stored in those.values()))
    parts = {kind: _parts(rank.file, those) for kind, those in moments.items()}
    return Adam(_parts(rank.file, masters), parts, step, scale_of(rank.file, outer.get("grad_scaler")), why)


def _parts(file: SavedFile, tensors: Mapping[TensorPlace, Stored]) -> dict[TensorPlace, Part]:
    return {place: Shard(file, stored) for place, stored in tensors.items()}


def _names(rank: Rank, decayed: bool) -> list[TensorPlace]:
    """The weights of one group in the order of the modules."""
    found: list[TensorPlace] = []
    for v, chunk in enumerate(rank.chunks):
        for section in SECTIONS:
            found += [(v, name) for name in chunk if name.startswith(section) and is_decayed(name) == decayed]
    return found


def is_decayed(name: str) -> bool:
    return not (name.endswith(".bias") or "layernorm." in name or ".norm." in name)


def _masters(file: SavedFile, groups: Sequence[Sequence[TensorPlace]], lists: Any) -> dict[TensorPlace, Stored]:
    counts = [len(of_type(those, list, "a group of masters")) for those in of_type(lists, list, "the masters")]
    if counts and counts != [*map(len, groups)]:
        raise ValueError(
            f"{file.path}: the fp32 masters are {' + '.join(map(str, counts))}, but the weights "
            f"{' + '.join(str(len(group)) for group in groups)}"
        )
    found: dict[TensorPlace, Stored] = {}
    for group, those in zip(groups, lists, strict=False):  # no masters, or as many
        found |= {place: file.tensor(made) for place, made in zip(group, those, strict=True)}
    return found


def _moments(
    rank: Rank, groups: Sequence[Sequence[TensorPlace]], adam: Mapping[Any, Any]
) -> tuple[dict[str, dict[TensorPlace, Stored]], int]:
    if not {"state", "param_groups"} <= adam.keys():
        raise NotWhole("the optimizer's state is not Adam's")
    param_groups = [entries(group, "a group of parameters") for group in of_type(adam["param_groups"], list, "groups")]
    numbers = [of_type(group.get("params"), list, "the parameters of a group") for group in param_groups]
    if [*map(len, numbers)] != [*map(len, groups)]:
        raise NotWhole("the optimizer's state is not of as many parameters as the model has")
    state = entries(adam["state"], "the state of the optimizer")
    moments: dict[str, dict[TensorPlace, Stored]] = {kind: {} for kind in MOMENTS}
    steps = {step_of(rank.file, group["step"]) for group in param_groups if "step" in group}
    for group, those in zip(groups, numbers, strict=True):
        for (v, name), number in zip(group, those, strict=True):
            its = state.get(number) if type(number) is int else None
            if its is None or not {*MOMENTS} <= entries(its, "the state of a parameter").keys():
                raise NotWhole(f"the optimizer's state has no moments of '{name}'")
            its = entries(its, "the state of a parameter")
            for kind in MOMENTS:
                stored = rank.file.tensor(its[kind])
                if stored.shape != rank.chunks[v][name].shape:
                    raise ValueError(
                        f"{rank.file.path}: the moment with the number of '{name}' is {list(stored.shape)}, expected "
                        f"{list(rank.chunks[v][name].shape)}"
                    )
                moments[kind][v, name] = stored
            if "step" in its:
                steps.add(step_of(rank.file, its["step"]))
    if len(steps) != 1:
        raise NotWhole(f"the optimizer says {len(steps)} numbers of updates, expected one")
    return moments, steps.pop()


def step_of(file: SavedFile, said: Any) -> int:
    """The number of updates, from an int or a tensor of one."""
    if type(said) is PickledObject:
        said = _number(file, said)
    if type(said) not in (int, float) or not 0 <= said < 1 << 60 or said != int(said):
        raise ValueError(f"{file.path}: expected a number of updates")
    return int(said)


def _number(file: SavedFile, made: PickledObject) -> float:
    stored = file.tensor(made)
    if stored.shape not in ((), (1,)):
        raise ValueError(f"{file.path}: expected a number, got a tensor {list(stored.shape)}")
    return file.read(stored).to(torch.float64).item()


def scale_of(file: SavedFile, said: Any) -> ScaleState | None:
    """The state of a DynamicGradScaler; None where there is none."""
    if said is None:
        return None
    scaler = entries(said, "the state of the loss scale")
    said = scaler.get("scale")
    scale = _number(file, said) if type(said) is PickledObject else said
    growth = scaler.get("growth_tracker")
    hysteresis = scaler.get("hysteresis_tracker")
    if not isinstance(scale, int | float) or not scale > 0 or type(growth) is not int or type(hysteresis) is not int:
        return None
    return ScaleState(float(scale), max(0, growth), max(0, hysteresis))
