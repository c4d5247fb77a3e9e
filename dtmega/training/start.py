"""The steps that start a run. `dtmega/train.py` calls these functions in order, on all ranks together.

Errors that a rank can find by itself are reported before the process group is made. A step ends only when all ranks
have reached its end (`dtmega/distributed/agreement.py`), so no rank continues alone after another rank has failed.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dtmega import config, families, mesh, rooms
from dtmega.checkpoint import changes, found, resume, starting
from dtmega.checkpoint.files import open_root
from dtmega.checkpoint.reader import Checkpoint
from dtmega.checkpoint.run import Checkpoints
from dtmega.checkpoint.sources import Source
from dtmega.checkpoint.state import START, Progress, State
from dtmega.config import Config, RunEnd
from dtmega.data.loader import TrainBatches
from dtmega.data.text import Text, open_text, repetition_notes
from dtmega.distributed import flight_recorder
from dtmega.distributed.agreement import Startup, same_job
from dtmega.distributed.exit_codes import ExitStatus
from dtmega.distributed.watchdog import Watch
from dtmega.files import atomic, console
from dtmega.files.console import counted
from dtmega.mesh import World
from dtmega.models.trainable import Elements
from dtmega.ops import optim
from dtmega.ops.cost import Piece
from dtmega.training import choices, history, out_of_memory
from dtmega.training.checks import check
from dtmega.training.choices import compiling, with_micro_batch_size, with_params_dtype
from dtmega.training.metrics import Metrics, describe_run
from dtmega.training.parallelize import parallelize
from dtmega.training.phases import Phases
from dtmega.training.sharded_model import ShardedModel

if TYPE_CHECKING:
    from dtmega.training.profile import Profiler
    from dtmega.training.records.rank_log import RankLog


class Settings(NamedTuple):
    """The configuration of a run, and values derived from the configuration before the data is opened.

    Attributes:
        saved_cfg: configuration that config.toml and checkpoints store. Values that the user left open stay open.
        cfg: copy of `saved_cfg` with all open values filled in for this layout and machine.
        device: device of this rank.
        sizes: size of each axis of the mesh, keyed by name.
        pieces: embedding, layers and head of the model, with their parameter counts and FLOPs.
        elements: numbers of trained and frozen elements in the model's parameters.
        digest: digest of the directory that [model] path names; '' if the model has no directory.
        memory_bytes: memory of rank 0's device, passed to all ranks; None on CPUs.
        auto_dtype: whether the configuration left the parameters' dtype open.
        machine: description of this rank's machine (`training/exact/machine.py`); {} without [run] exact.
    """

    saved_cfg: Config
    cfg: Config
    device: torch.device
    sizes: dict[str, int]
    pieces: list[Piece]
    elements: Elements
    digest: str
    memory_bytes: int | None
    auto_dtype: bool
    machine: dict[str, Any]


class Origin(NamedTuple):
    """The source of a run's weights.

    Attributes:
        candidates: checkpoints to resume from, newest first; empty for a new run.
        init: weights that a new run starts with, or that a resumed run's checkpoint leaves out; None if there are no
            such weights.
        damage: messages about damaged checkpoints, one line each.
    """

    candidates: list[Checkpoint]
    init: Source | None
    damage: list[str]


def read_configuration(
    argv: list[str], startup: Startup, elsewhere: tuple[int, torch.device, int | None] | None = None
) -> Settings:
    """Read the configuration, and refuse a configuration that cannot run on this mesh and device.

    Args:
        argv: arguments of the command line.
        startup: coordinator that lets the ranks wait for each other at the end of each startup step.
        elsewhere: number of processes, device and device memory (`mesh.memory_bytes`) of the job that a dry run
            examines; None for this job.
    """
    with startup.step("configuration") as step:
        saved_cfg = families.resolve(config.load(argv))
        if saved_cfg.replaced and startup.rank == 0:
            console.say("\n".join(saved_cfg.replaced))
        if elsewhere is None:
            device = mesh.pick_device(saved_cfg.run.device)
            elsewhere = startup.size, device, mesh.memory_bytes(device)
        world, device, device_bytes = elsewhere
        sizes = mesh.resolve(saved_cfg.mesh, world, "--nproc-per-node" if startup.size == world else "--world")
        cfg = with_micro_batch_size(saved_cfg, sizes)
        check(cfg, sizes, device)
        if cfg.profile != config.Profile():
            rooms.profile().check_profile(cfg.profile, device, world)
        if cfg.log.trackers:
            rooms.trackers().check(cfg.log.trackers)
        pieces = families.pieces_of_run(cfg)
        elements = families.elements(cfg)
        startup.timeout_s = cfg.run.collective_timeout_s()
        family = families.of(cfg.model)
        digest = family.digest(cfg.model)
        step.must_match = same_job(cfg, device, family.libraries) | {"digest of [model] path": digest}
        machine: dict[str, Any] = {}
        if cfg.run.exact:
            machine = rooms.exact_machine().prepare(device)
            step.must_match |= machine
        # All ranks use rank 0's memory size: devices may differ, but all must choose the same [fsdp] accumulate.
        step.send = device_bytes
    memory_bytes = step.received
    cfg = choices.with_accumulation(cfg, sizes, memory_bytes)
    auto_dtype = cfg.precision.params == "auto"
    return Settings(saved_cfg, cfg, device, sizes, pieces, elements, digest, memory_bytes, auto_dtype, machine)


def open_data(settings: Settings, startup: Startup) -> tuple[Settings, Text, TrainBatches]:
    """Open the run's data and this rank's training batches. The workers that load the batches are not started yet.

    Returns:
        The settings, with [train] epochs converted to a number of samples; the data; and the batches.
    """
    cfg = settings.cfg
    with startup.step("data") as step:
        text = open_text(cfg, families.objective(cfg))
        cfg = cfg.completed(text.samples_in)
        # Before any folder is made, check the checkpoint paths that the user named.
        resume.named_checkpoints(cfg)
        if cfg.eval.only and startup.rank == 0:
            found.check_is_trained(cfg, weights_of(cfg.model))
        data_rank, data_size = mesh.data_coordinate(settings.sizes, startup.rank)
        batches = TrainBatches(
            text.rows("train"),
            cfg.data,
            cfg.batch,
            data_rank,
            data_size,
            pin_memory=settings.device.type == "cuda",
        )
        if cfg.train.stop_validation_rises and not text.compared:
            raise ValueError(
                f"there is no validation loss to compare: expected a validation split with documents, got split="
                f"'{cfg.data.split}' ([train] stop_validation_rises, [data] split, [data] validation)"
            )
        step.must_match = text.identity
    return settings._replace(cfg=cfg), text, batches


def claim_run_directory(
    settings: Settings, text: Text, startup: Startup, closing: ExitStack, exit_status: ExitStatus
) -> found.CandidatePaths:
    """Claim (lock) the run's folders on rank 0, and send all ranks the paths of checkpoints to resume from."""
    cfg = settings.cfg
    with startup.step("run directory") as step:
        if startup.rank == 0:
            run_dir = Path(cfg.run.dir)
            claims = found.claims(cfg)
            run_dir_claim = next(claims)
            closing.callback(run_dir_claim.close)
            # exit.json is written after all other claims are released, and before the run directory is released.
            closing.enter_context(exit_status.recorded_in(run_dir, partial(resume.newest_of_run, run_dir)))
            # The other claims make the folder of checkpoints, which may be missing because a disk is not mounted.
            check_sees_checkpoints(cfg, exit_status.checkpoint)
            for claim in claims:
                closing.callback(claim.close)
            paths = found.find_candidates(cfg, text.identity, settings.digest)
            closing.callback(found.remove_probe, cfg, paths)
            step.send = paths._asdict()
            if cfg.pipeline.draw:
                _, data_size = mesh.data_coordinate(settings.sizes, startup.rank)
                rooms.drawn_schedule().draw_schedule(cfg, settings.sizes["pp"], data_size)
    return found.CandidatePaths(**step.received)


def check_sees_checkpoints(cfg: Config, newest: str) -> None:
    """Refuse to begin anew if the run has had checkpoints and none is visible, as on a disk that is not mounted.

    Args:
        cfg: configuration of the run.
        newest: the run's newest checkpoint by its `exit.json`; '' if the file is missing or names none.

    Raises:
        ValueError: the run directory names a checkpoint, and the folder of checkpoints has none.
        Unreachable: the object store with the checkpoints does not answer.
    """
    root = resume.root_of(cfg)
    if cfg.checkpoint.resume != "auto" or resume.finished(open_root(root)):
        return
    if recorded := newest or history.last_checkpoint(Path(cfg.run.dir)):
        raise ValueError(
            f"{cfg.run.dir} is of a run that had {recorded}, and {root} has no checkpoint: expected the folder where "
            f"they are ([checkpoint] dir; is its disk mounted?); to start anew, keeping the old metrics beside the new "
            f"ones: [checkpoint] resume = 'none'"
        )


def weights_of(model: config.Model) -> Source | None:
    """The weights that a new run starts with; None if initial values come from the seed."""
    return rooms.stored().weights(model) if families.of(model).has_weights(model) else None


def open_rank_log(settings: Settings, startup: Startup, closing: ExitStack) -> RankLog | None:
    """Open this rank's log, if [log] ranks asks for it. From here on, everything that the rank prints is logged."""
    cfg = settings.cfg
    with startup.step("rank logs"):
        if cfg.log.ranks != "all":
            return None
        logs = rooms.rank_log()
        folder = Path(cfg.run.dir, logs.FOLDER)
        return closing.enter_context(logs.RankLog(folder, startup.rank, settings.sizes, settings.device))


def open_checkpoints(settings: Settings, paths: found.CandidatePaths, startup: Startup) -> tuple[Settings, Origin]:
    """Open the checkpoints that rank 0 has found, and choose the parameters' dtype if the user left it open."""
    with startup.step("checkpoints") as step:
        candidates = found.open_candidates(settings.cfg, paths)
        if startup.rank == 0:
            # Rank 0 chooses the dtype for all ranks, because their processors may differ.
            step.send = found.params_dtype(settings.cfg, candidates, mesh.has_fast_bfloat16(settings.device))
        init = starting.weights_beside(settings.cfg, candidates, weights_of)
        step.must_match = found.manifest_digests([*candidates, init])
    dtype = step.received
    settings = settings._replace(
        saved_cfg=with_params_dtype(settings.saved_cfg, dtype),
        cfg=with_params_dtype(settings.cfg, dtype),
    )
    return settings, Origin(candidates, init, paths.damage)


def join_processes(settings: Settings, startup: Startup) -> World:
    """Create the process group and the mesh."""
    with startup.step("process groups"):
        flight_recorder.switch_on(settings.device)
        ep = settings.cfg.mesh.ep
        return mesh.start(settings.device, settings.sizes, startup.timeout_s, startup.store, ep=ep)


def build(cfg: Config, world: World, startup: Startup) -> tuple[ShardedModel, torch.optim.Optimizer]:
    """Build this rank's shard of the model, and the optimizer of this shard. Parameters have no values yet."""
    with startup.step("model"), out_of_memory.refused(cfg, world.device, "the model is built"):
        model = parallelize(cfg, world)
        return model, optim.build_optimizer(model.named_parameters(), cfg.optim, cfg.run.exact, model.matrices)


def fill(
    settings: Settings,
    origin: Origin,
    model: ShardedModel,
    optimizer: torch.optim.Optimizer,
    startup: Startup,
    closing: ExitStack,
) -> tuple[Checkpoints, State | None]:
    """Set the weights: load the newest checkpoint, load the weights that a new run starts with, or draw initial values.

    Returns:
        The writer of the run's checkpoints, and the state of the checkpoint that was loaded (None for a new run).
    """
    cfg = settings.cfg
    with startup.step("checkpoint"), out_of_memory.refused(cfg, settings.device, "the weights get their values"):
        checkpoints = Checkpoints(cfg, settings.device)
        closing.callback(checkpoints.close)
        loaded = checkpoints.load(origin.candidates, model.stored_tensors(), optimizer, origin.damage, startup)
        if origin.init is not None:
            was = loaded and loaded.base
            checkpoints.base = rooms.weights_beside().load_beside(model, origin.init, cfg, was, startup.with_heartbeats)
        elif loaded is None:
            model.draw(cfg.run.seed)
        if model.exact is not None:
            compiled, was = compiling(cfg, settings.device), loaded and loaded.exact
            rooms.exact().begin(model.exact, cfg, settings.sizes, settings.machine, compiled, was)
    return checkpoints, loaded


def prove_compiled(settings: Settings, world: World, model: ShardedModel, startup: Startup) -> list[str]:
    """Prove that compiled blocks compute what eager blocks do, or let them run eagerly (`compiled_proof.prove`).

    Exact runs compile only what tests have proven to the bit (`training/exact`), and an evaluation learns nothing.
    """
    cfg = settings.cfg
    if cfg.eval.only or cfg.run.exact or not compiling(cfg, world.device):
        return []
    return rooms.compiled_proof().prove(cfg, settings.digest, world, model, startup)


def write_files(
    settings: Settings,
    world: World,
    checkpoints: Checkpoints,
    loaded: State | None,
    at: Progress,
    end: RunEnd,
    attempt: str,
) -> None:
    """Write config.toml and a line in starts.jsonl, and clear away checkpoints that the run does not continue from.

    Checkpoints of later steps are moved aside. Old checkpoints that a killed attempt has left behind are deleted.

    Args:
        settings: configuration of the run, and values derived from it.
        world: processes and mesh of the run. One rank writes for all ranks.
        checkpoints: writer of the run's checkpoints.
        loaded: state of the checkpoint that the run resumes from; None for a new run.
        at: progress of the run at this start.
        end: configured end of the run.
        attempt: name of this attempt.
    """
    cfg, saved_cfg, elements = settings.cfg, settings.saved_cfg, settings.elements
    resume.set_aside_newer(cfg, at.step)
    # A run resumed from a named checkpoint deletes no other checkpoints: a later attempt may resume from one of them.
    if loaded and cfg.checkpoint.resume == "auto":
        checkpoints.purge_strays(loaded.config)
    with atomic.replaced(Path(cfg.run.dir, "config.toml")) as file:
        file.write(saved_cfg.to_toml())
    history.append(
        Path(cfg.run.dir),
        step=at.step,
        attempt=attempt,
        config=saved_cfg.model_dump(),
        layout={"processes": world.size, **world.sizes},
        device=settings.device,
        parameters=sum(elements),
        frozen=elements.frozen,
        steps=end.steps,
    )


def open_metrics(
    settings: Settings, world: World, model: ShardedModel, at: Progress, end: RunEnd, validates_first: bool
) -> Metrics:
    """Create the reporter of the run's steps. Only rank 0 writes reports."""
    return Metrics(
        settings.cfg,
        settings.pieces,
        world.device,
        world.size,
        end,
        start_step=at.step,
        validates_first=validates_first,
        write=world.rank == 0,
        loads=model.loads,
    )


def watch_phases(settings: Settings, world: World, watch: Watch, metrics: Metrics, at: Progress) -> Phases:
    """Create this rank's phase timer, which also reports each phase to the watchdog and to a profiler."""
    cfg = settings.cfg
    phases = Phases(watch, world.device, at.step)
    if cfg.profile.steps or cfg.profile.memory_history:
        phases.profiler = open_profiler(cfg, world, metrics)
    return phases


def open_profiler(cfg: Config, world: World, metrics: Metrics) -> Profiler:
    """Create this rank's profiler, at the start of a run or when a user asks for a profile."""
    profiler = rooms.profile().Profiler
    return profiler(cfg.profile, Path(cfg.run.dir), world.rank, world.device, metrics.peak_memory, console.say)


def announcement(
    settings: Settings, text: Text, world: World, origin: Origin, loaded: State | None, end: RunEnd
) -> str:
    """The first lines that a run prints: model, data, layout, changes since the checkpoint, and notes.

    Args:
        settings: configuration of the run, and values derived from it.
        text: data of the run.
        world: processes and mesh of the run.
        origin: source of the weights, with messages about damaged checkpoints.
        loaded: state of the checkpoint that the run resumes from; None for a new run.
        end: configured end of the run.
    """
    cfg, device = settings.cfg, settings.device
    at = loaded.progress if loaded else START
    samples = text.samples("train")
    epochs = end.samples / samples.n_samples
    lines = [describe_run(cfg, settings.pieces, device, world.size, samples.n_tokens, epochs, at.step, end)]
    lines += [*families.of(cfg.model).notes(cfg.model), *settings.elements.notes]
    if cfg.train.epochs:
        left_out = cfg.train.samples - end.samples
        lines.append(
            f"epochs: {cfg.train.epochs}, {counted(cfg.train.samples, 'sequence')}, the last {left_out} left out, less "
            f"than a batch ([train] epochs)"
        )
    if cfg.run.exact:
        lines.append(
            "sums are exact: equal bits on every data layout and pipeline, one thread per process ([run] exact)"
        )
        lines += rooms.exact().not_recorded(loaded and loaded.exact, settings.machine)
    else:
        lines += choices.accumulation_note(settings.saved_cfg, settings.sizes, settings.memory_bytes)
    if not cfg.eval.only:
        lines += optim.notes_on_warmup(cfg, end)
    if loaded:
        overflowed = at.overflowed, at.overflowed_samples
        saved_cfg = settings.saved_cfg
        lines += changes.lines(loaded.config, saved_cfg, at.step, at.samples, text.samples_in, overflowed)
    if settings.auto_dtype:
        why = "as it began" if loaded else f"bfloat16 is {'' if mesh.has_fast_bfloat16(device) else 'not '}fast here"
        lines.append(f"computed in {cfg.precision.params}: {why} ([precision] params = 'auto')")
    lines += repetition_notes(cfg, text)
    return "\n".join([*lines, *text.notes, *origin.damage])
