"""The folder of a Megatron-LM checkpoint: one file for each rank of tensor and pipeline parallelism.

    DIR/latest_checkpointed_iteration.txt                    a number, or "release"
    DIR/iter_0001000/mp_rank_TT/model_optim_rng.pt           mp_rank_TT_PPP with pipeline parallelism

In a file, the key `model` holds the tensors of one stage as nested dicts. With virtual stages (called chunks here), the
keys are `model0`, `model1`, .... Each chunk numbers its layers from 0, but this module numbers layers across the whole
model: chunk v of stage p begins with layer v * (L / VPP) + p * (L / PP / VPP). In a T5, encoder layers are counted over
the encoder's stages, and decoder layers over the decoder's stages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dtmega.interop.megatron import names
from dtmega.interop.megatron.parts import Part, ReorderedQKV
from dtmega.interop.megatron.saved import SavedFile, Stored, check_apart, entries, plain
from dtmega.interop.torch_files.inert import PickledObject, items_of

FILE = "model_optim_rng.pt"
FOLDER = re.compile(r"mp_rank_(\d{2,4})(?:_(\d{3,4}))?")
CHUNK_KEY = re.compile(r"model(\d*)")
LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d{1,6})\.(.+)")
VERSIONS = (0, 1, 2, 3)
MAX_DEPTH = 8  # maximum depth of nested dicts; today's BERT has 4
# Arguments that must be equal on all ranks, because the tensors or the run's progress depend on these arguments.
SHARED_ARGS = (
    *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels", "padded_vocab_size"),
    *("max_position_embeddings", "tensor_model_parallel_size", "model_parallel_size", "pipeline_model_parallel_size"),
    *("virtual_pipeline_model_parallel_size", "iteration", "consumed_train_samples"),
)
# Loss-scaler classes that older files contain as part of the optimizer's state.
SCALERS = {
    f"{module} {name}"
    for module in ("fp16.loss_scaler", "megatron.fp16.loss_scaler")
    for name in ("DynamicLossScaler", "LossScaler")
}


class Rank(NamedTuple):
    """The contents of one rank's file.

    Attributes:
        args: the run's arguments as plain values (numbers, strings, or lists of these); empty in files from 2019.
        version: checkpoint version; 0 if the file gives no version.
        chunks: one dict per virtual stage, which maps each name within the stage to its tensor; a dict's tensors are in
            the file's order.
        content: decoded content of the whole file.
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


def open_grid(folder: Path) -> Grid:
    """Open all ranks' files in an `iter_.......` or `release` folder, without reading the tensors yet.

    Raises:
        ValueError: a file is missing, exists twice, is not part of a checkpoint, or disagrees with the other files. The
            message names the file.
    """
    paths = _paths(folder)
    n_tp = 1 + max(tp for tp, _ in paths)
    n_pp = 1 + max(pp for _, pp in paths)
    ranks: Grid = {}
    for pp in range(n_pp):
        for tp in range(n_tp):
            if (tp, pp) not in paths:
                raise ValueError(f"{folder} has no file of tensor rank {tp} and stage {pp}, but {len(paths)} others")
            ranks[tp, pp] = _read_rank(paths[tp, pp])
    first = ranks[0, 0]
    for rank in ranks.values():
        check_agreed(first.args, first.file.path, rank.args, rank.file.path)
        _check_same(first, rank)
    sizes = {
        "tensor_model_parallel_size": n_tp,
        "model_parallel_size": n_tp,
        "pipeline_model_parallel_size": n_pp,
        "virtual_pipeline_model_parallel_size": len(first.chunks),
    }
    for key, n in sizes.items():
        if first.args.get(key) not in (None, n):
            raise ValueError(
                f"{first.file.path}: {key}={first.args[key]!r:.80} in its arguments, but the files have {n}"
            )
    return ranks


def _paths(folder: Path) -> dict[tuple[int, int], Path]:
    """The paths of the ranks' files, keyed by (tp, pp). The function does not check that the files exist.

    Raises:
        ValueError: a folder has an unexpected name, two folders belong to the same rank, or no rank has a folder.
    """
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


def _read_rank(path: Path) -> Rank:
    """Decode one rank's file.

    Raises:
        ValueError: the file is missing or damaged, or has contents that Megatron does not write. The message names the
            file.
    """
    file = SavedFile(path, SCALERS)
    try:
        content = entries(file.value, "the checkpoint")
        args = arguments(content)
        version = content.get("checkpoint_version", 0)
        if type(version) not in (int, float) or version not in VERSIONS:
            known = ", ".join(map(str, VERSIONS))
            raise ValueError(f"checkpoint_version={plain(version)!r:.80}, expected one of {known}")
        numbers = []
        for key in content:
            if type(key) is str and (match := CHUNK_KEY.fullmatch(key)):
                numbers.append(int(match[1] or 0))
        numbers.sort()
        if numbers != [*range(len(numbers))] or not numbers:
            raise ValueError("expected 'model', or 'model0', 'model1', ... of virtual stages")
        keys = ["model"] if "model" in content else [f"model{number}" for number in numbers]
        chunks = [dict(_tensors(file, content[key])) for key in keys]
    except ValueError as error:
        raise ValueError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None
    tensors: list[Stored] = []
    for chunk in chunks:
        tensors += chunk.values()
    check_apart(path, tensors)
    return Rank(file, args, int(version), chunks, content)


def iteration_of(content: Mapping[Any, Any]) -> int:
    """The number of iterations done; 0 if the file does not give the number."""
    iteration = content.get("iteration", 0)
    return iteration if type(iteration) is int and iteration >= 0 else 0


def arguments(content: Mapping[Any, Any]) -> dict[str, Any]:
    """The run's arguments in a file, as plain values; empty if the file has no arguments."""
    if content.get("args") is None:
        return {}
    return {key: plain(value) for key, value in entries(content["args"], "the arguments").items() if type(key) is str}


def _tensors(file: SavedFile, nested: Any) -> Iterator[tuple[str, Stored]]:
    """Flatten nested dicts into pairs (name in Megatron's current format, tensor); layers count within the stage."""
    seen: set[str] = set()
    # A malicious pickle may refer to one dict from many places, and `walk` would visit each place. So limit the number
    # of entries: in a valid file, the pickle has more bytes than entries.
    entries_left = file.n_pickle_bytes

    def walk(value: Any, path: str, depth: int) -> Iterator[tuple[str, Stored]]:
        nonlocal entries_left
        for key, inner in entries(value, f"'{path or 'model'}'").items():
            entries_left -= 1
            too_much = depth > MAX_DEPTH or entries_left < 0
            if type(key) is not str or not key.isprintable() or len(key) > 200 or too_much:
                raise ValueError(f"expected tensors by name in dicts that are nested at most {MAX_DEPTH} deep")
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
    """Refuse two files whose arguments belong to different models or layouts.

    Raises:
        ValueError: an argument in SHARED_ARGS differs.
    """
    for key in SHARED_ARGS:
        if args.get(key) != others.get(key):
            raise ValueError(f"{path} has {key}={args.get(key)!r:.80}, but {other} has {key}={others.get(key)!r:.80}")


def _check_same(first: Rank, other: Rank) -> None:
    """Refuse two files that belong to different checkpoints.

    Raises:
        ValueError: the version, the iteration or the number of virtual stages differs.
    """
    properties = {
        "checkpoint_version": (first.version, other.version),
        "iteration": (first.iteration, other.iteration),
        "virtual stages": (len(first.chunks), len(other.chunks)),
    }
    for name, (expected, value) in properties.items():
        if expected != value:
            raise ValueError(f"{first.file.path} has {expected} as {name}, but {other.file.path} has {value}")


# ----------------------------------------------------------------------------------------------------- whole names


def whole_names(ranks: Grid) -> dict[tuple[int, int], dict[str, str]]:
    """Map all tensors to whole-model names: (stage, chunk) -> name within the chunk -> name in the whole model.

    Raises:
        ValueError: stages have different numbers of layers, a layer is missing, or a tensor is in two stages.
    """
    n_stages = 1 + max(pp for _, pp in ranks)
    n_chunks = len(ranks[0, 0].chunks)
    stages: dict[tuple[int, int], dict[str, Stored]] = {}
    for pp in range(n_stages):
        for v in range(n_chunks):
            stages[pp, v] = ranks[0, pp].chunks[v]
    offsets: dict[tuple[int, int, str], int] = {}
    for stack in ("encoder", "decoder"):
        depths = {place: _depth(ranks[0, place[0]], chunk, stack) for place, chunk in stages.items()}
        # The layers of chunk 0 come first, in stage order, then the layers of chunk 1, and so on.
        in_order = [place for place in sorted(depths, key=lambda place: place[::-1]) if depths[place]]
        if len({depths[place] for place in in_order}) > 1:
            counts = ", ".join(f"{depths[place]} in {ranks[0, place[0]].file.path}" for place in in_order)
            raise ValueError(f"expected as many layers of the {stack} in each stage, got {counts}")
        for number, place in enumerate(in_order):
            offsets[(*place, stack)] = number * depths[place]
    names_by_chunk: dict[tuple[int, int], dict[str, str]] = {}
    stage_of: dict[str, int] = {}
    for (pp, v), chunk in stages.items():
        names_by_chunk[pp, v] = {name: _whole_name(name, pp, offsets, v) for name in chunk}
        for name in names_by_chunk[pp, v].values():
            if name in stage_of:
                raise ValueError(
                    f"'{name}' is in {ranks[0, stage_of[name]].file.path} and in {ranks[0, pp].file.path}, or twice "
                    f"in one; expected it once"
                )
            stage_of[name] = pp
    return names_by_chunk


def _depth(rank: Rank, chunk: Mapping[str, Stored], stack: str) -> int:
    """The number of layers that a chunk holds in one stack.

    Raises:
        ValueError: the layers are not numbered from 0 without gaps.
    """
    numbers = set()
    for name in chunk:
        match = LAYER.fullmatch(name)
        if match and match[1] == stack:
            numbers.add(int(match[2]))
    if numbers != {*range(len(numbers))}:
        missing = min({*range(len(numbers))} - numbers)
        raise ValueError(f"{rank.file.path} has no {stack}.layers.{missing}, but {len(numbers)} others")
    return len(numbers)


def _whole_name(name: str, pp: int, offsets: Mapping[tuple[int, int, str], int], v: int) -> str:
    """The whole-model name of a tensor in chunk `v` of stage `pp`.

    Args:
        name: name within the chunk.
        offsets: whole-model index of each chunk's first layer in a stack, keyed by (stage, chunk, stack).
    """
    if match := LAYER.fullmatch(name):
        return f"{match[1]}.layers.{int(match[2]) + offsets[pp, v, match[1]]}.{match[3]}"
    # After stage 0, only the stage where a T5's decoder begins has embeddings: copies for the decoder's input.
    return re.sub(r"^embedding\.", "decoder_embedding.", name) if pp else name


def join_ranks(
    ranks: Grid,
    names_by_chunk: Mapping[tuple[int, int], Mapping[str, str]],
    tensors: Mapping[tuple[int, int, int], Mapping[str, Part]],
    n_heads: int,
) -> dict[str, list[Part]]:
    """Collect the parts of each tensor, with the rows of a fused QKV in today's order.

    Args:
        names_by_chunk: names in the whole model, as returned by `whole_names`.
        tensors: parts of tensors, as (tp, pp, chunk) -> name within the chunk -> part.
        n_heads: number of attention heads in the model; 0 if unknown.

    Returns:
        A dict from each tensor's whole-model name to the tensor's parts, one per tensor-parallel rank, in rank order.

    Raises:
        ValueError: the ranks of a stage do not have the same tensors; or a QKV must be reordered, but the head count is
            unknown or not divisible by the number of ranks.
    """
    parts: dict[str, list[Part]] = {}
    n_tp = 1 + max(tp for tp, _ in ranks)
    # Sorting puts each tensor's parts in the order of the tensor-parallel ranks.
    for (tp, pp, v), chunk in sorted(tensors.items()):
        rank = ranks[tp, pp]
        if chunk.keys() != names_by_chunk[pp, v].keys():
            name = sorted(chunk.keys() ^ names_by_chunk[pp, v].keys())[0]
            raise ValueError(f"{rank.file.path}: '{name}' is in this file or in that of rank 0, not in both")
        for name, part in chunk.items():
            whole_name = names_by_chunk[pp, v][name]
            parts.setdefault(whole_name, []).append(_todays_order(part, whole_name, rank.version, n_heads, n_tp))
    return parts


def _todays_order(part: Part, name: str, version: int, n_heads: int, n_tp: int) -> Part:
    """Reorder the rows of a part to the order that Megatron's fused QKV has today.

    Only a fused QKV from a checkpoint older than version 2 is reordered. Any other part is returned unchanged.

    Args:
        part: part of a tensor.
        name: name of the tensor in the whole model.
        version: checkpoint version of the file.
        n_heads: number of attention heads of the whole model.
        n_tp: number of tensor-parallel ranks that wrote the checkpoint.
    """
    n_parts = names.qkv_parts(name)
    if n_parts == 1 or version >= 2:
        return part
    if n_heads < 1 or n_heads % n_tp:
        raise ValueError(
            f"{part.where} is of version {version}, in which the order of '{name}' depends on the number of heads: "
            f"expected a number that {n_tp} ranks share, got {n_heads or 'none'} (--config)"
        )
    return ReorderedQKV(part, version == 0, n_parts, n_heads // n_tp)
