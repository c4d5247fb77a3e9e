"""A checkpoint of Megatron's, whichever of them wrote it: whole tensors by the names of names.py, and what a run says.

    Megatron-LM            iter_......./mp_rank_*/, or release/        ranks.py, adam.py
    megatron-core          iter_......./metadata.json, common.pt       core.py
    Megatron-DeepSpeed     global_step*/layer_*-model_*                deepspeed.py

The path names one of these, or the folder above with its `latest_checkpointed_iteration.txt` or `latest`. Nothing that
is in a file runs, and tensors are read when they are asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dtmega import config
from dtmega.checkpoint.resume import START, Progress
from dtmega.formats.sources import Source
from dtmega.loss_scale import ScaleState
from dtmega.megatron import adam, core, deepspeed, names, ranks, zero
from dtmega.megatron.parts import Master, Part, Shard, WholeTensors, copies, said_of
from dtmega.megatron.saved import entries

TRACKERS = ("latest_checkpointed_iteration.txt", "latest")
ITERATION = re.compile(r"iter_\d{7,}|release|global_step\d+")
MAX_TRACKER_BYTES = 256


class Contents(NamedTuple):
    """The contents of a folder.

    Attributes:
        path: of that folder.
        args: the arguments of the run as plain values; empty where the files have none.
        weights: by Megatron's names of the whole model.
        moments: exp_avg and exp_avg_sq by the same names; empty where they are not whole.
        progress, updates, loss_scale: how far the run was; meant with moments only.
        order: of samples, as [data] has it.
        vocab_size: ids of the tokenizer, without padding; 0: the files do not say.
        notes: a line for each thing that a user should know.
    """

    path: Path
    args: dict[str, Any]
    weights: Source
    moments: Mapping[str, Source]
    progress: Progress = START
    updates: int = 0
    loss_scale: ScaleState | None = None
    order: str = "megatron-lm"
    vocab_size: int = 0
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """The rows of the embedding, those of padding included.

        Raises:
            ValueError: there is none.
        """
        if names.WORDS.theirs + "weight" not in self.weights.tensors:
            raise ValueError(f"{self.path} has no '{names.WORDS.theirs}weight'")
        return self.weights.tensors[names.WORDS.theirs + "weight"][1][0]


def opened(path: Path, asked: config.Model | None = None, average: bool = False) -> Contents:
    """The contents of a checkpoint, whichever program wrote it.

    Args:
        asked: the model, where the files may not say what it is.
        average: of copies that have drifted apart take the mean.

    Raises:
        ValueError: no such checkpoint, or a damaged, a crafted or an incomplete one; names the file.
    """
    folder = found(path)
    if core.holds(folder):
        args, weights, training = core.opened(folder)
        _check_described(folder, args, asked)
        return _of_core(folder, args, weights, training)
    if deepspeed.holds(folder):
        layers = deepspeed.opened(folder)
        _check_described(folder, layers.args, asked)
        return _of_layers(folder, layers, average)
    grid = ranks.opened(folder)
    _check_described(folder, grid[0, 0].args, asked)
    n_heads = grid[0, 0].args.get("num_attention_heads", getattr(asked, "n_heads", 0))
    return _of_ranks(folder, grid, n_heads if type(n_heads) is int else 0, average)


def _check_described(folder: Path, args: Mapping[str, Any], asked: config.Model | None) -> None:
    if not args and asked is None:
        raise ValueError(f"{folder} holds no arguments of its run: --config NAME.toml says what model it is of")


def found(path: Path) -> Path:
    """The folder of one checkpoint: the path itself, or what the tracker's file in it names.

    Raises:
        ValueError: there is none.
    """
    if not path.is_dir():
        raise ValueError(f"{path} is no folder of a checkpoint")
    if ITERATION.fullmatch(path.name) or any(path.glob("mp_rank_*")) or deepspeed.holds(path) or core.holds(path):
        return path
    for tracker in TRACKERS:
        file = path / tracker
        if file.is_file():
            with file.open("rb") as opened_file:
                said = opened_file.read(MAX_TRACKER_BYTES).decode("utf-8", "replace").strip()
            name = f"iter_{int(said):07d}" if re.fullmatch(r"[0-9]{1,12}", said) else said
            if not ITERATION.fullmatch(name) or not (path / name).is_dir():
                raise ValueError(f"{file} says {said!a:.80}, and there is no such checkpoint")
            return path / name
    there = sorted(inner.name for inner in path.iterdir() if ITERATION.fullmatch(inner.name))
    if len(there) != 1:
        said = f"several: {', '.join(there[:5])}; name one" if there else "none"
        raise ValueError(f"{path} has neither {' nor '.join(TRACKERS)}, and of folders such as iter_0001000 {said}")
    return path / there[0]


def _of_ranks(folder: Path, grid: ranks.Grid, n_heads: int, average: bool) -> Contents:
    first = grid[0, 0]
    whole = ranks.whole_names(grid)
    optimizers = {place: adam.read_adam(rank) for place, rank in grid.items()}

    def joined(part: Callable[[tuple[int, int], adam.TensorPlace], Part]) -> WholeTensors:
        tensors = {
            (*place, v): {name: part(place, (v, name)) for name in chunk}
            for place, rank in grid.items()
            for v, chunk in enumerate(rank.chunks)
        }
        return WholeTensors(ranks.join_ranks(grid, whole, tensors, n_heads), average)

    def weight(place: tuple[int, int], where: adam.TensorPlace) -> Part:
        v, name = where
        shard = Shard(grid[place].file, grid[place].chunks[v][name])
        master = optimizers[place].masters.get(where)
        return shard if master is None else Master(master, shard, name)

    weights = joined(weight)
    notes = []
    if drifts := copies(weights):
        notes.append(said_of(drifts, average))
    why = next((optimizer.why for optimizer in optimizers.values() if optimizer.why), "")
    scheduler = first.content.get("opt_param_scheduler", first.content.get("lr_scheduler"))
    steps = {optimizer.step for optimizer in optimizers.values()}
    progress, updates, cause = _progress(first.args, first.iteration, steps, scheduler)
    moments: dict[str, Source] = {}
    if why or cause:
        notes.append(f"weights alone: {why or cause}")
    else:
        for kind in adam.MOMENTS:
            moments[kind] = joined(lambda place, where, kind=kind: optimizers[place].moments[kind][where])
    scale = optimizers[0, 0].scale
    return Contents(folder, first.args, weights, moments, progress, updates, scale, notes=tuple(notes))


def _of_layers(folder: Path, layers: deepspeed.Layers, average: bool) -> Contents:
    parts: Mapping[str, Sequence[Part]] = layers.parts
    moments: dict[str, Source] = {}
    progress, updates = START, 0
    why = ""
    try:
        n_stages = layers.args.get("pipeline_model_parallel_size")
        n_layers = layers.args.get("num_layers")
        if type(n_stages) is not int or type(n_layers) is not int:
            raise adam.NotWhole("no mp_rank file says how many stages there were")
        kinds, step = zero.opened(folder, layers.parts, n_layers, n_stages)
        progress, updates, why = _progress(layers.args, ranks.iteration_of(layers.content), {step}, None)
        masters = kinds.pop(zero.MASTER)
        parts = {
            name: [Master(master, weight, name) for master, weight in zip(masters[name], those, strict=True)]
            for name, those in layers.parts.items()
        }
        if not why:
            moments |= {kind: WholeTensors(those, average) for kind, those in kinds.items()}
    except adam.NotWhole as reason:
        why = str(reason)
    weights = WholeTensors(parts, average)
    notes = [said_of(drifts, average)] if (drifts := copies(weights)) else []
    if why:
        notes.append(f"weights alone: {why}")
    size = layers.vocab_size
    return Contents(
        *(folder, layers.args, weights, moments, progress, updates),
        order="megatron-deepspeed",
        vocab_size=size,
        notes=tuple(notes),
    )


def _of_core(folder: Path, args: dict[str, Any], weights: Source, training: core.RunState) -> Contents:
    progress, updates, why = START, 0, training.why
    if not why:
        progress, updates, why = _progress(args, training.iteration, training.steps, training.scheduler)
    moments = {} if why else training.moments
    notes = (f"weights alone: {why}",) if why else ()
    return Contents(
        *(folder, args, weights, moments, progress, updates, training.scale),
        order="megatron-core",
        notes=notes,
    )


def _progress(
    args: Mapping[str, Any], iteration: int, steps: Collection[int], scheduler: Any
) -> tuple[Progress, int, str]:
    """The progress of a run, the updates that Adam counts, and the reason why these are not known.

    Args:
        steps: that the ranks' optimizers say.
        scheduler: of the learning rate, as the files have it; None: not known.
    """
    if len(steps) != 1:
        return START, 0, f"the ranks made different numbers of updates, {', '.join(map(str, sorted(steps)[:4]))}"
    (updates,) = steps
    per_step = args.get("global_batch_size")
    if per_step is None:  # before version 3
        sizes = [args.get(key) for key in ("batch_size", "world_size", "model_parallel_size")]
        batch, world, model_parallel = (size if type(size) is int and size > 0 else 0 for size in sizes)
        per_step = batch * (world // model_parallel) if model_parallel else 0
    samples = args.get("consumed_train_samples") or (per_step or 0) * iteration
    if type(samples) is not int or samples < 1 or iteration < 1:
        return START, 0, "the files do not say how many samples the run has seen"
    skipped = iteration - updates
    if skipped < 0:
        return START, 0, f"Adam has made {updates} updates, but the run only {iteration} iterations"
    # float16 skips a step that overflows, and the scheduler does not count its samples.
    overflowed = skipped if args.get("fp16") else 0
    moved = None if scheduler is None else entries(scheduler, "the scheduler").get("num_steps")
    lost = samples - moved if overflowed and type(moved) is int and 0 <= moved <= samples else 0
    return Progress(iteration, samples, skipped, overflowed, lost), updates, ""
