"""Open a checkpoint from any Megatron fork: the run's state, and unsharded tensors under the fork's names.

    Megatron-LM            iter_......./mp_rank_*/, or release/        ranks.py, adam.py
    megatron-core          iter_......./metadata.json, common.pt       core.py
    Megatron-DeepSpeed     global_step*/layer_*-model_*                deepspeed.py, zero.py

The path to open is one of these folders, or its parent folder, which contains a tracker file
(`latest_checkpointed_iteration.txt` or `latest`). Nothing in a file is executed, and a tensor is read only when it is
needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dtmega import config
from dtmega.checkpoint.sources import Source
from dtmega.checkpoint.state import START, Progress, ScaleState
from dtmega.interop.megatron import adam, core, deepspeed, names, ranks, zero
from dtmega.interop.megatron.parts import Master, Part, Shard, WholeTensors, drift_note, drifted_copies
from dtmega.interop.megatron.saved import entries

TRACKERS = ("latest_checkpointed_iteration.txt", "latest")
ITERATION = re.compile(r"iter_\d{7,}|release|global_step\d+")
MAX_TRACKER_BYTES = 256


class Contents(NamedTuple):
    """The contents of a checkpoint.

    Attributes:
        path: the checkpoint's folder.
        args: the run's arguments as plain values; empty if the files have no arguments.
        weights: tensors of the whole model, named as in the formats that `program` selects.
        moments: sources of exp_avg and exp_avg_sq, under the weights' names; empty if the moments are incomplete.
        progress: counts of the run's steps and samples; meaningful only if there are moments.
        updates: number of updates made to the weights; meaningful only if there are moments.
        loss_scale: state of float16's loss scale; meaningful only if there are moments.
        order: value of [data] order for the Megatron fork that wrote the checkpoint.
        vocab_size: number of ids in the tokenizer, without padding; 0 if the files do not give the number.
        notes: lines for the user.
        program: key in `Family.formats` for the formats with these tensor names.
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
    program: str = "megatron"

    @property
    def embedding_rows(self) -> int:
        """The number of rows in the embedding, including padding rows.

        Raises:
            ValueError: the checkpoint has no embedding.
        """
        name = names.WORDS.theirs + "weight"
        if name not in self.weights.tensors:
            raise ValueError(f"{self.path} has no '{name}'")
        return self.weights.tensors[name][1][0]


def open_folder(path: Path, model: config.Model | None = None, average: bool = False) -> Contents:
    """Open a checkpoint from any Megatron fork.

    Args:
        path: the checkpoint's folder, or its parent folder, which contains the tracker.
        model: the user's [model] section, needed if the files hold no arguments; None if the user gives no section.
        average: whether to read the mean of the tp ranks' copies of a replicated tensor, instead of rank 0's copy.

    Raises:
        ValueError: the checkpoint is missing, damaged, crafted or incomplete. The message names the file.
    """
    folder = find_folder(path)
    if core.is_checkpoint(folder):
        args, weights, run_state = core.open_folder(folder)
        _check_model_is_known(folder, args, model)
        return _contents_of_core(folder, args, weights, run_state)
    if deepspeed.is_checkpoint(folder):
        layers = deepspeed.open_layers(folder)
        _check_model_is_known(folder, layers.args, model)
        return _contents_of_layers(folder, layers, average)
    grid = ranks.open_grid(folder)
    args = grid[0, 0].args
    _check_model_is_known(folder, args, model)
    n_heads = args.get("num_attention_heads", getattr(model, "n_heads", 0))
    return _contents_of_ranks(folder, grid, n_heads if type(n_heads) is int else 0, average)


def _check_model_is_known(folder: Path, args: Mapping[str, Any], model: config.Model | None) -> None:
    if not args and model is None:
        raise ValueError(f"{folder} has no arguments of its run, so describe the model: --config NAME.toml")


def find_folder(path: Path) -> Path:
    """Find a checkpoint's folder: `path` itself, or a folder inside `path`.

    If `path` has a tracker, the tracker names the folder. Without a tracker, `path` must contain a single checkpoint.

    Raises:
        ValueError: `path` contains no checkpoint, or several checkpoints but no tracker.
    """
    if not path.is_dir():
        raise ValueError(f"{path} is not the folder of a checkpoint")
    is_checkpoint = deepspeed.is_checkpoint(path) or core.is_checkpoint(path)
    if ITERATION.fullmatch(path.name) or any(path.glob("mp_rank_*")) or is_checkpoint:
        return path
    for tracker in TRACKERS:
        file = path / tracker
        if file.is_file():
            with file.open("rb") as tracker_file:
                text = tracker_file.read(MAX_TRACKER_BYTES).decode("utf-8", "replace").strip()
            name = f"iter_{int(text):07d}" if re.fullmatch(r"[0-9]{1,12}", text) else text
            # Only names that Megatron writes are accepted: text such as "../other" would lead out of the folder.
            if not ITERATION.fullmatch(name) or not (path / name).is_dir():
                raise ValueError(f"{file} says {text!a:.80}, and there is no such checkpoint")
            return path / name
    folders = sorted(inner.name for inner in path.iterdir() if ITERATION.fullmatch(inner.name))
    if not folders:
        raise ValueError(f"{path} has neither {' nor '.join(TRACKERS)}, and no folder such as iter_0001000")
    if len(folders) > 1:
        raise ValueError(
            f"{path} has neither {' nor '.join(TRACKERS)}, but several checkpoints: {', '.join(folders[:5])}; name one"
        )
    return path / folders[0]


def _contents_of_ranks(folder: Path, grid: ranks.Grid, n_heads: int, average: bool) -> Contents:
    """The contents of a Megatron-LM checkpoint.

    Args:
        n_heads: number of attention heads in the model; 0 if unknown.
        average: whether to read the mean of the tp ranks' copies, as in `open_folder`.
    """
    first = grid[0, 0]
    whole_names = ranks.whole_names(grid)
    optimizers = {place: adam.read_adam(rank) for place, rank in grid.items()}

    def join(part_of: Callable[[tuple[int, int], adam.TensorPlace], Part]) -> WholeTensors:
        tensors: dict[tuple[int, int, int], dict[str, Part]] = {}  # (tp, pp, chunk)
        for (tp, pp), rank in grid.items():
            for v, chunk in enumerate(rank.chunks):
                tensors[tp, pp, v] = {name: part_of((tp, pp), (v, name)) for name in chunk}
        return WholeTensors(ranks.join_ranks(grid, whole_names, tensors, n_heads), average)

    def weight(rank: tuple[int, int], place: adam.TensorPlace) -> Part:
        v, name = place
        shard = Shard(grid[rank].file, grid[rank].chunks[v][name])
        master = optimizers[rank].masters.get(place)
        return shard if master is None else Master(master, shard, name)

    weights = join(weight)
    notes = []
    if drifts := drifted_copies(weights):
        notes.append(drift_note(drifts, average))
    why = next((optimizer.why for optimizer in optimizers.values() if optimizer.why), "")
    scheduler = first.content.get("opt_param_scheduler", first.content.get("lr_scheduler"))
    steps = {optimizer.step for optimizer in optimizers.values()}
    progress, updates, why_no_progress = _progress(first.args, first.iteration, steps, scheduler)
    why = why or why_no_progress
    moments: dict[str, Source] = {}
    if why:
        notes.append(f"weights only: {why}")
    else:
        for kind in adam.MOMENTS:
            moments[kind] = join(lambda rank, place, kind=kind: optimizers[rank].moments[kind][place])
    scale = optimizers[0, 0].scale
    return Contents(folder, first.args, weights, moments, progress, updates, scale, notes=tuple(notes))


def _contents_of_layers(folder: Path, layers: deepspeed.Layers, average: bool) -> Contents:
    """The contents of a Megatron-DeepSpeed checkpoint."""
    parts: Mapping[str, Sequence[Part]] = layers.parts
    moments: dict[str, Source] = {}
    progress, updates = START, 0
    why = ""
    try:
        n_stages = layers.args.get("pipeline_model_parallel_size")
        n_layers = layers.args.get("num_layers")
        if type(n_stages) is not int or type(n_layers) is not int:
            raise adam.IncompleteMoments("no mp_rank file says how many stages there were")
        kinds, step = zero.open_optimizer(folder, layers.parts, n_layers, n_stages)
        progress, updates, why = _progress(layers.args, ranks.iteration_of(layers.content), {step}, None)
        # A complete optimizer state includes the masters, so read the weights in fp32 even if the progress is unknown.
        masters = kinds.pop(zero.MASTER)
        with_masters: dict[str, list[Part]] = {}
        for name, weights_of_name in layers.parts.items():
            pairs = zip(masters[name], weights_of_name, strict=True)
            with_masters[name] = [Master(master, weight, name) for master, weight in pairs]
        parts = with_masters
        if not why:
            moments |= {kind: WholeTensors(parts_of_kind, average) for kind, parts_of_kind in kinds.items()}
    except adam.IncompleteMoments as reason:
        why = str(reason)
    weights = WholeTensors(parts, average)
    notes = []
    if drifts := drifted_copies(weights):
        notes.append(drift_note(drifts, average))
    if why:
        notes.append(f"weights only: {why}")
    return Contents(
        *(folder, layers.args, weights, moments, progress, updates),
        order="megatron-deepspeed",
        vocab_size=layers.vocab_size,
        notes=tuple(notes),
    )


def _contents_of_core(folder: Path, args: dict[str, Any], weights: Source, run_state: core.RunState) -> Contents:
    """The contents of a megatron-core checkpoint."""
    progress, updates, why = START, 0, run_state.why
    if not why:
        progress, updates, why = _progress(args, run_state.iteration, run_state.steps, run_state.scheduler)
    moments = {} if why else run_state.moments
    notes = (f"weights only: {why}",) if why else ()
    return Contents(
        *(folder, args, weights, moments, progress, updates, run_state.scale),
        order="megatron-core",
        notes=notes,
        program="megatron-core",
    )


def _progress(
    args: Mapping[str, Any], iteration: int, steps: Collection[int], scheduler: Any
) -> tuple[Progress, int, str]:
    """The counts of a run's steps and samples, and the number of updates that Adam has made.

    Args:
        args: the run's arguments.
        iteration: number of iterations done.
        steps: update counts in the ranks' optimizers, without duplicates.
        scheduler: state of the learning-rate scheduler, as stored in the files; None if not known.

    Returns:
        The counts, the number of Adam's updates, and the reason why both are unknown ('' if they are known).
    """
    if len(steps) != 1:
        return START, 0, f"the ranks made different numbers of updates, {', '.join(map(str, sorted(steps)[:4]))}"
    (updates,) = steps
    samples = args.get("consumed_train_samples") or _global_batch_size(args) * iteration
    if type(samples) is not int or samples < 1 or iteration < 1:
        return START, 0, "the files do not say how many samples the run has seen"
    skipped = iteration - updates
    if skipped < 0:
        return START, 0, f"Adam has made {updates} updates, but the run only {iteration} iterations"
    # With float16, a step that overflows is skipped, and the scheduler does not count the step's samples.
    overflowed = skipped if args.get("fp16") else 0
    overflowed_samples = 0
    scheduled = None if scheduler is None else entries(scheduler, "the scheduler").get("num_steps")
    if overflowed and type(scheduled) is int and 0 <= scheduled <= samples:
        overflowed_samples = samples - scheduled
    return Progress(iteration, samples, skipped, overflowed, overflowed_samples), updates, ""


def _global_batch_size(args: Mapping[str, Any]) -> Any:
    """The number of samples in one iteration; 0 if the arguments do not give the number."""
    if args.get("global_batch_size") is not None:
        return args["global_batch_size"]
    # Before checkpoint version 3, `batch_size` was the batch size of one model replica.
    sizes = [args.get(key) for key in ("batch_size", "world_size", "model_parallel_size")]
    batch, world, model_parallel = (size if type(size) is int and size > 0 else 0 for size in sizes)
    return batch * (world // model_parallel) if model_parallel else 0
