"""The folder of a Megatron-LM checkpoint: one file for each rank of tensor and pipeline parallelism.

    DIR/latest_checkpointed_iteration.txt                    a number, or "release"
    DIR/iter_0001000/mp_rank_TT/model_optim_rng.pt           without pipeline; with one mp_rank_TT_PPP

In a file `model`, or `model0`, `model1`, ... with virtual stages, nests the tensors of one stage, whose layers are
numbered from 0. Here they get their names in the whole model. Chunk v of stage p has the layers from
v * (L / VPP) + p * (L / PP / VPP) on, each stack of a T5 counted over the stages that have some of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dtmega.foreign.inert import PickledObject, items_of
from dtmega.megatron import names
from dtmega.megatron.parts import InOrder, Part
from dtmega.megatron.saved import SavedFile, Stored, check_apart, entries, plain

FILE = "model_optim_rng.pt"
FOLDER = re.compile(r"mp_rank_(\d{2,4})(?:_(\d{3,4}))?")
CHUNK_KEY = re.compile(r"model(\d*)")
LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d{1,6})\.(.+)")
VERSIONS = (0, 1, 2, 3)
DEEPEST = 8  # dicts in each other; a BERT of today has 4
# Arguments that decide which tensors there are, so that all ranks have to have the same.
AGREED = (
    *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels", "padded_vocab_size"),
    *("max_position_embeddings", "tensor_model_parallel_size", "model_parallel_size", "pipeline_model_parallel_size"),
    *("virtual_pipeline_model_parallel_size", "iteration", "consumed_train_samples"),
)
# Lists of older LossScaler objects among the optimizer's state.
SCALERS = {
    f"{module} {name}"
    for module in ("fp16.loss_scaler", "megatron.fp16.loss_scaler")
    for name in ("DynamicLossScaler", "LossScaler")
}


class Rank(NamedTuple):
    """The content of one rank's file.

    Attributes:
        args: the arguments of the run, as far as they are numbers, words or lists of them; empty in files of 2019.
        version: 0 where the file does not say.
        chunks: a dict for each virtual stage: name within the stage -> tensor, in the file's order.
        content: the whole of it.
    """

    file: SavedFile
    args: dict[str, Any]
    version: int
    chunks: list[dict[str, Stored]]
    content: dict[Any, Any]

    @property
    def iteration(self) -> int:
        return iteration_of(self.content)


Grid = dict[tuple[int, int], Rank]  # (tp, pp)


def opened(folder: Path) -> Grid:
    """Every file of `iter_.......` or `release`, its pickle read.

    Raises:
        ValueError: a file is missing, there twice, no checkpoint's, or disagrees with the others; with its name.
    """
    paths = _paths(folder)
    n_tp, n_pp = (1 + max(place[axis] for place in paths) for axis in (0, 1))
    ranks: Grid = {}
    for pp in range(n_pp):
        for tp in range(n_tp):
            if (tp, pp) not in paths:
                raise ValueError(f"{folder} has no file of tensor rank {tp} and stage {pp}, but {len(paths)} others")
            ranks[tp, pp] = _rank(paths[tp, pp])
    first = ranks[0, 0]
    for rank in ranks.values():
        check_agreed(first.args, first.file.path, rank.args, rank.file.path)
        _check_same(first, rank)
    said = {
        "tensor_model_parallel_size": n_tp,
        "model_parallel_size": n_tp,
        "pipeline_model_parallel_size": n_pp,
        "virtual_pipeline_model_parallel_size": len(first.chunks),
    }
    for key, n in said.items():
        if first.args.get(key) not in (None, n):
            raise ValueError(f"{first.file.path}: {key}={first.args[key]!r:.80} by its arguments, but there are {n}")
    return ranks


def _paths(folder: Path) -> dict[tuple[int, int], Path]:
    paths: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.glob("mp_rank_*")):
        match = FOLDER.fullmatch(path.name)
        if match is None:
            raise ValueError(f"{path}: expected a name such as mp_rank_00 or mp_rank_00_000")
        place = int(match[1]), int(match[2] or 0)
        if place in paths:
            raise ValueError(f"{path} and {paths[place].parent} are of the same rank")
        paths[place] = path / FILE
    if not paths:
        raise ValueError(f"{folder} has no folder such as mp_rank_00, with {FILE} in it")
    return paths


def _rank(path: Path) -> Rank:
    file = SavedFile(path, SCALERS)
    try:
        content = entries(file.value, "the checkpoint")
        args = arguments(content)
        said = content.get("checkpoint_version", 0)
        if type(said) not in (int, float) or said not in VERSIONS:
            raise ValueError(f"checkpoint_version={plain(said)!r:.80}, expected one of {', '.join(map(str, VERSIONS))}")
        numbers = sorted(
            int(match[1] or 0) for key in content if type(key) is str and (match := CHUNK_KEY.fullmatch(key))
        )
        if numbers != [*range(len(numbers))] or not numbers:
            raise ValueError("expected 'model', or 'model0', 'model1', ... of virtual stages")
        keys = ["model"] if "model" in content else [f"model{number}" for number in numbers]
        chunks = [dict(_tensors(file, content[key])) for key in keys]
    except ValueError as error:
        raise ValueError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None
    check_apart(path, (stored for chunk in chunks for stored in chunk.values()))
    return Rank(file, args, int(said), chunks, content)


def iteration_of(content: Mapping[Any, Any]) -> int:
    """The iterations that were done; 0 where a file does not say."""
    found = content.get("iteration", 0)
    return found if type(found) is int and found >= 0 else 0


def arguments(content: Mapping[Any, Any]) -> dict[str, Any]:
    """The arguments in a file as plain values; empty where it has none."""
    if content.get("args") is None:
        return {}
    return {key: plain(value) for key, value in entries(content["args"], "the arguments").items() if type(key) is str}


def _tensors(file: SavedFile, nested: Any) -> Iterator[tuple[str, Stored]]:
    """Names within a stage, as today's files have them, and tensors, of dicts in each other."""
    seen: set[str] = set()
    left = file.n_pickle_bytes  # one dict under many names would be work without end

    def walk(value: Any, path: str, depth: int) -> Iterator[tuple[str, Stored]]:
        nonlocal left
        for key, inner in entries(value, f"'{path or 'model'}'").items():
            left -= 1
            if type(key) is not str or not key.isprintable() or len(key) > 200 or depth > DEEPEST or left < 0:
                raise ValueError("expected dicts of tensors by their names, a few in each other")
            name = f"{path}.{key}" if path else key
            if type(inner) is PickledObject and type(items_of(inner)) is not dict:
                flat = names.flat_name(name)
                if flat in seen:
                    raise ValueError(f"'{flat}' is there twice")
                seen.add(flat)
                yield flat, file.tensor(inner)
            else:
                yield from walk(inner, name, depth + 1)

    return walk(nested, "", 0)


def check_agreed(args: Mapping[str, Any], path: Path, others: Mapping[str, Any], other: Path) -> None:
    """Refuse arguments of two files that do not agree on what decides which tensors there are.

    Raises:
        ValueError: two files are of other models.
    """
    for key in AGREED:
        if args.get(key) != others.get(key):
            raise ValueError(f"{path} has {key}={args.get(key)!r:.80}, but {other} has {key}={others.get(key)!r:.80}")


def _check_same(first: Rank, other: Rank) -> None:
    for what, values in {
        "checkpoint_version": (first.version, other.version),
        "iteration": (first.iteration, other.iteration),
        "virtual stages": (len(first.chunks), len(other.chunks)),
    }.items():
        if values[0] != values[1]:
            raise ValueError(f"{first.file.path} has {values[0]} as {what}, but {other.file.path} has {values[1]}")


# ----------------------------------------------------------------------------------------------------- whole names


def whole_names(ranks: Grid) -> dict[tuple[int, int], dict[str, str]]:
    """The names of all tensors: (stage, chunk) -> name within it -> name in the whole model.

    Raises:
        ValueError: stages of another depth, layers that are missing, or a tensor in two stages.
    """
    n_stages = 1 + max(pp for _, pp in ranks)
    n_chunks = len(ranks[0, 0].chunks)
    stages = {(pp, v): ranks[0, pp].chunks[v] for pp in range(n_stages) for v in range(n_chunks)}
    offsets: dict[tuple[int, int, str], int] = {}
    for stack in ("encoder", "decoder"):
        depths = {place: _depth(ranks[0, place[0]], chunk, stack) for place, chunk in stages.items()}
        held = [place for place in sorted(depths, key=lambda place: place[::-1]) if depths[place]]
        if len({depths[place] for place in held}) > 1:
            said = ", ".join(f"{depths[place]} in {ranks[0, place[0]].file.path}" for place in held)
            raise ValueError(f"expected as many layers of the {stack} in each stage, got {said}")
        for number, place in enumerate(held):
            offsets[(*place, stack)] = number * depths[place]
    found: dict[tuple[int, int], dict[str, str]] = {}
    stage_of: dict[str, int] = {}
    for (pp, v), chunk in stages.items():
        found[pp, v] = {name: _whole_name(name, pp, offsets, v) for name in chunk}
        for name in found[pp, v].values():
            if name in stage_of:
                raise ValueError(
                    f"'{name}' is in {ranks[0, stage_of[name]].file.path} and in {ranks[0, pp].file.path}, or twice "
                    f"in one; expected it once"
                )
            stage_of[name] = pp
    return found


def _depth(rank: Rank, chunk: Mapping[str, Stored], stack: str) -> int:
    """The number of layers of a stack in a chunk."""
    numbers = {int(match[2]) for name in chunk if (match := LAYER.fullmatch(name)) and match[1] == stack}
    if numbers != {*range(len(numbers))}:
        lost = min({*range(len(numbers))} - numbers)
        raise ValueError(f"{rank.file.path} has no {stack}.layers.{lost}, but {len(numbers)} others")
    return len(numbers)


def _whole_name(name: str, pp: int, offsets: Mapping[tuple[int, int, str], int], v: int) -> str:
    if match := LAYER.fullmatch(name):
        return f"{match[1]}.layers.{int(match[2]) + offsets[pp, v, match[1]]}.{match[3]}"
    # The stage where a T5's decoder begins has the embeddings again.
    return re.sub(r"^embedding\.", "decoder_embedding.", name) if pp else name


def join_ranks(
    ranks: Grid,
    whole: Mapping[tuple[int, int], Mapping[str, str]],
    tensors: Mapping[tuple[int, int, int], Mapping[str, Part]],
    n_heads: int,
) -> dict[str, list[Part]]:
    """Parts of each tensor of the whole model, rank by rank, QKV in today's order.

    Args:
        whole: see `whole_names`.
        tensors: (tp, pp, chunk) -> name within it -> part.
        n_heads: of the model; 0: not known.

    Raises:
        ValueError: ranks of one stage that do not have the same tensors, or heads that nobody counts.
    """
    found: dict[str, list[Part]] = {}
    n_tp = 1 + max(tp for tp, _ in ranks)
    for (tp, pp, v), held in sorted(tensors.items()):
        rank = ranks[tp, pp]
        if held.keys() != whole[pp, v].keys():
            name = sorted(held.keys() ^ whole[pp, v].keys())[0]
            raise ValueError(f"{rank.file.path}: '{name}' is in this file or in that of rank 0, not in both")
        for name, part in held.items():
            theirs = whole[pp, v][name]
            found.setdefault(theirs, []).append(_in_order(part, theirs, rank.version, n_heads, n_tp))
    return found


def _in_order(part: Part, name: str, version: int, n_heads: int, n_tp: int) -> Part:
    n_parts = names.fused(name)
    if n_parts == 1 or version >= 2:
        return part
    if n_heads < 1 or n_heads % n_tp:
        raise ValueError(
            f"{part.where} is of version {version}, in which the order of '{name}' depends on the number of heads: "
            f"expected a number that {n_tp} ranks share, got {n_heads or 'none'} (--config)"
        )
    return InOrder(part, version == 0, n_parts, n_heads // n_tp)
