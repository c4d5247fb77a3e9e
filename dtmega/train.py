"""Train a model: `torchrun [--nproc-per-node N] train.py --config bloom.toml [--section.key value ...]`.

From top to bottom: `begin` reads the configuration and the data, makes the process group and the model, and resumes
from a checkpoint. `train` runs the loop and the last evaluation, and generates a sample. An error in the configuration
or in the data ends the run with exit code 2. `--help` lists every key. `--dry-run` checks whether training would start,
and prints each rank's memory (`planning/answers/dry_run.py`).

On SIGTERM, SIGUSR1, SIGUSR2, Ctrl-C or a closed terminal, the run finishes its step, saves and exits with code 75. To
continue the run, repeat the command; the numbers are the same as in an uninterrupted run. All exit codes are in
`dtmega/distributed/exit_codes.py`.
"""

from __future__ import annotations

import os
import shlex
import time
import traceback
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist

from dtmega import config, mesh, rooms
from dtmega.checkpoint import found, resume
from dtmega.checkpoint.run import SaveOutcome
from dtmega.checkpoint.state import HEALTHY, START, Progress, State
from dtmega.checkpoint.tensors import tensors_of
from dtmega.config import RunEnd
from dtmega.data.loader import StepBatch
from dtmega.distributed import exit_codes, flight_recorder, process
from dtmega.distributed.agreement import Refused, Startup
from dtmega.distributed.exit_codes import ExitStatus
from dtmega.distributed.watchdog import SAVING, Watch
from dtmega.files import console
from dtmega.mesh import World
from dtmega.ops import optim
from dtmega.ops.cpu import huge_pages
from dtmega.ops.cpu.contention import Contention
from dtmega.training import errors, start
from dtmega.training.evaluate import evaluate, evaluate_validation, show_sample
from dtmega.training.health import Health
from dtmega.training.metrics import Metrics, several
from dtmega.training.pace import Pace
from dtmega.training.phases import REDUCE
from dtmega.training.step import Run, check_same_batch, train_step

if TYPE_CHECKING:
    from dtmega.training.records.rank_log import RankLog

FINISHED = "finished"
EVALUATED = "[eval] only"
SIGNALLED = "a signal asked for it"
KILLED = "[train] kill_switch"
PROFILE_NOW = "profile-now"
GO_ON = "to go on all the same: --train.past_stop true"


@console.guarded()
def main(argv: list[str]) -> int:
    """Train or evaluate a model. The caller must destroy the process group afterwards.

    Returns:
        The exit code.
    """
    process.die_with_parent()
    if "--dry-run" in argv:
        return rooms.dry_run().main(argv)
    exit_status = ExitStatus()
    with ExitStack() as closing:
        try:
            run, at = begin(argv, Startup(), closing, exit_status)
        except Refused as refused:
            return exit_status.set(refused.exit_code, refused.reason)
        if run.world.device.type == "cpu":
            huge_pages.keep_freed_memory()
        try:
            return evaluate_only(run, at) if run.cfg.eval.only else train(run, at)
        except Exception as error:
            code = errors.exit_code(run, error)
            if code is None:
                raise
            return code


def begin(argv: list[str], startup: Startup, closing: ExitStack, exit_status: ExitStatus) -> tuple[Run, Progress]:
    """Start a run. All ranks go through the startup steps together.

    Args:
        argv: arguments of the command line.
        startup: coordinator that lets the ranks wait for each other at the end of each startup step.
        closing: exit stack that closes everything that this function opens.
        exit_status: record of how the run ends.

    Returns:
        The run, and its progress at the start: the progress stored in the checkpoint, or zero for a new run.
    """
    # The run directory is not claimed yet, so an error is recorded there only if the directory already holds a run.
    with found.early_end_recorded(config.run_dir_of(argv), exit_status, first=startup.rank == 0):
        settings = start.read_configuration(argv, startup)
        settings, text, batches = start.open_data(settings, startup)
    paths = start.claim_run_directory(settings, text, startup, closing, exit_status)
    # Open the log early, so that the exit stack closes the log late, after everything that takes time to close.
    log = start.open_rank_log(settings, startup, closing)
    settings, origin = start.open_checkpoints(settings, paths, startup)
    cfg = settings.cfg

    world = start.join_processes(settings, startup)
    watch = start_watch(cfg, world, startup, closing, exit_status)
    closing.callback(batches.close)
    if not origin.candidates and not cfg.eval.only:
        # A new run starts at the first sample, so the workers can already load batches while the model is built.
        batches.start()
    model, optimizer = start.build(cfg, world, startup)
    checkpoints, loaded = start.fill(settings, origin, model, optimizer, startup, closing)
    proof = start.prove_compiled(settings, world, model, startup)
    at = loaded.progress if loaded else START
    end = cfg.end(at.step, at.samples)
    batches.load_state_dict({"samples": at.samples})
    # An evaluation neither changes the run's progress nor writes to the run's files.
    if not cfg.eval.only:
        exit_status.step = at.step
        exit_status.checkpoint = checkpoints.newest
    health = Health(cfg.train, loaded.health if loaded else HEALTHY)
    if log is not None:
        log.line(f"after step {at.step} of {end.steps}")
    with startup.step("files of the run"):
        if world.rank == 0 and not cfg.eval.only:
            start.write_files(settings, world, checkpoints, loaded, at, end, exit_status.attempt)
        metrics = start.open_metrics(settings, world, model, at, end, begins_with_validation(cfg, health, at, end))
        closing.callback(metrics.close)
        digests = None
        if cfg.run.exact and not cfg.eval.only:
            digests = rooms.exact_record().Record(Path(cfg.run.dir), world, at.step)
            closing.callback(digests.close)
        watch.before_exit(partial(leave_traces, log, metrics))
    metrics.message("\n".join([start.announcement(settings, text, world, origin, loaded, end), *proof]))

    phases = start.watch_phases(settings, world, watch, metrics, at)
    closing.callback(phases.close)
    model.on_reduce = partial(phases.enter, REDUCE)
    loss_scale, spikes = None, None
    if cfg.precision.params == "float16":
        loss_scale = rooms.loss_scale().LossScale(cfg.precision, loaded and loaded.loss_scale)
    if cfg.train.skip_spikes:
        spikes = rooms.spikes().Spikes(cfg.train.skip_spikes, loaded.recent if loaded else [])
    run = Run(
        saved_cfg=settings.saved_cfg,
        cfg=cfg,
        world=world,
        text=text,
        model=model,
        optimizer=optimizer,
        batches=batches,
        checkpoints=checkpoints,
        metrics=metrics,
        watch=watch,
        phases=phases,
        health=health,
        pace=Pace(cfg.log.slow_steps if cfg.log.interval else 0, world.device),
        exit_status=exit_status,
        digest=settings.digest,
        loss_scale=loss_scale,
        spikes=spikes,
        digests=digests,
        log=log,
    )
    return run, at


def leave_traces(log: RankLog | None, metrics: Metrics) -> None:
    """Write the last log lines and tracker rows of a rank that the watchdog is about to end."""
    if log is not None:
        log.write_stacks()
    metrics.abandon()


def start_watch(
    cfg: config.Config, world: World, startup: Startup, closing: ExitStack, exit_status: ExitStatus
) -> Watch:
    """Start the watchdog. From then on, the watchdog catches signals and ends a rank that hangs."""
    records = Path(cfg.run.dir, flight_recorder.FOLDER)
    watch = Watch(cfg.run.grace_s, cfg.run.timeout_s, world.rank, exit_status, records)
    # Register the watchdog before anything that takes time to close. The watchdog then closes last, and catches a
    # second signal in the meantime.
    closing.callback(watch.close)
    watch.share(mesh.store(), world.size)
    startup.on_heartbeat = partial(watch.beat, 0, "load")
    return watch


def train(run: Run, at: Progress) -> int:
    """Run the training loop from `at` until the last step, or until there is a reason to stop.

    Returns:
        The exit code.
    """
    cfg = run.cfg
    first_step, started = at.step, time.monotonic()
    end = cfg.end(at.step, at.samples)
    stopping = reason_not_to_begin(run, at, end)
    skipped_in_a_row = 0
    validated = False
    unsaved = ""
    contention = Contention(run.world.device)

    while at.step < end.steps and not stopping:
        run.phases.begin_step(at.step + 1)
        batch = next(run.batches)
        if at.step == first_step:
            check_same_batch(batch, run.world)
        at, faulty = one_step(run, batch, at, end)
        run.exit_status.step = at.step
        if faulty is not None:
            skipped_in_a_row = skipped_in_a_row + 1 if faulty else 0
        check_learns(cfg, skipped_in_a_row, batch, at)

        if advice := contention.after_step(at.step - first_step):
            run.metrics.message(advice)
        if due(at.step, cfg.train.drift_interval):
            run.model.check_copies()
        # The last validation comes after the last save, unless validation decides which checkpoint is the best.
        validating = due(at.step, cfg.eval.interval) or at.step == end.steps
        validating &= at.step < end.steps or cfg.train.stop_validation_rises > 0
        validated = validating and evaluate_validation(run, at.step)
        stopping = meet_after_step(run, at.step, (time.monotonic() - started) / 60)
        last = at.step == end.steps or stopping != ""
        wanted = stopping != "" or (validated and cfg.train.stop_validation_rises > 0)
        for outcome in save_if_due(run, at, wanted, last):
            run.metrics.saved(at.step, *outcome)
            unsaved = outcome.error
            run.exit_status.checkpoint = run.checkpoints.newest

    if at.step >= end.steps:
        validated = validated or evaluate_validation(run, at.step)
        whole = validated and evaluate(run, at.step, "test") and show_sample(run, at.step)
        stopping = "" if whole else SIGNALLED
    return finish(run, at, end, stopping, unsaved)


def reason_not_to_begin(run: Run, at: Progress, end: RunEnd) -> str:
    """Look for a reason not to train, and evaluate a run that begins with a validation.

    Returns:
        The reason not to train, such as high losses that stopped the run earlier; '' if there is no reason.
    """
    cfg = run.cfg
    if at.step >= end.steps:
        run.metrics.message(f"nothing to train: this run has its {end.steps} steps (start anew with another --run.dir)")
    elif cfg.train.kill_switch and killed_before_it_began(run):
        return KILLED
    elif not run.health.state.stopped:
        begins = begins_with_validation(cfg, run.health, at, end)
        if begins and not evaluate_validation(run, at.step):
            return SIGNALLED
    return run.health.state.stopped


def begins_with_validation(cfg: config.Config, health: Health, at: Progress, end: RunEnd) -> bool:
    """True for a new run, and for a run that a signal ended in the validation of its last step (with [eval] interval).

    A run that has all its steps ends with a validation, but does not begin with one.
    """
    return cfg.eval.interval > 0 and at.step == health.state.unvalidated and at.step < end.steps


def check_learns(cfg: config.Config, skipped_in_a_row: int, batch: StepBatch, at: Progress) -> None:
    """Raise a RuntimeError if more than [train] max_skipped steps in a row have left the weights unchanged."""
    if skipped_in_a_row > cfg.train.max_skipped:
        raise RuntimeError(
            f"{skipped_in_a_row} steps in a row had a loss or gradient that is not finite or a spike, the last one "
            f"on samples {batch.first_sample} to {at.samples - 1} ([train] max_skipped={cfg.train.max_skipped}); "
            f"the newest checkpoint is from before"
        )


def save_if_due(run: Run, at: Progress, wanted: bool, last: bool) -> list[SaveOutcome]:
    """Begin a save if this step should be saved.

    Args:
        run: the run.
        at: progress of the run after the step.
        wanted: whether to save regardless of the interval, because the run stops here or was just validated.
        last: whether this is the last step. If so, the function waits for all saves to end.

    Returns:
        The outcomes of the saves that have ended since the last call: this save, earlier asynchronous saves, or both.
    """
    cfg = run.cfg.checkpoint
    if due(at.step, cfg.interval) or wanted or (last and cfg.final):
        run.phases.enter(SAVING)
        # Write the metrics to disk before the checkpoint: a run that resumes from the checkpoint needs these metrics.
        run.metrics.sync()
        if run.digests is not None:
            run.digests.sync()
        state = State.of(
            run.saved_cfg.model_dump(),
            progress=at,
            updates=at.step - at.skipped,
            recent=run.spikes.recent if run.spikes else (),
            loss_scale=run.loss_scale and run.loss_scale.state,
            exact=run.model.exact and run.model.exact.state,
            health=run.health.state,
            base=run.checkpoints.base,
            identity=run.text.identity,
            digest=run.digest,
            layout={"processes": run.world.size, **run.world.sizes},
        )
        ended = run.checkpoints.save(tensors_of(run.model.owned(), run.optimizer, run.checkpoints.base), state)
    else:
        ended = run.checkpoints.poll()
    if last:
        ended += run.checkpoints.wait()
    return ended


def finish(run: Run, at: Progress, end: RunEnd, stopping: str, unsaved: str) -> int:
    """Report how the run has ended and which files it leaves.

    Args:
        run: the run.
        at: progress of the run.
        end: configured end of the run.
        stopping: reason why the run stopped before its end; '' if it did not stop early.
        unsaved: reason why the last save failed; '' if the save succeeded.

    Returns:
        The exit code.
    """
    metrics = run.metrics
    if stopping:
        how = GO_ON if run.health.state.stopped else resume.how_to_resume(run.cfg)
        if stopping == KILLED:
            how = f"while '{run.cfg.train.kill_switch}' exists, no start trains; without it, {how}"
        metrics.message(f"stopped after step {at.step} of {end.steps}: {stopping}; {how}")
    if unsaved:
        metrics.message(f"NOT SAVED: step {at.step}; the newest checkpoint: {run.checkpoints.newest or 'none'}")
        return run.exit_status.set(exit_codes.STUCK, f"not saved: {unsaved}")
    checkpoint = f", {run.checkpoints.newest}" if run.checkpoints.newest else ""
    metrics.message(f"written: config.toml and metrics.jsonl in {run.cfg.run.dir}{checkpoint}")
    metrics.message(f"to look at it: dtmega report {shlex.quote(run.cfg.run.dir)}")
    code = exit_codes.PREEMPTED if stopping == SIGNALLED else exit_codes.DONE
    return run.exit_status.set(code, stopping or FINISHED)


def one_step(run: Run, batch: StepBatch, at: Progress, end: RunEnd) -> tuple[Progress, bool | None]:
    """Train on a batch unless [train] skip_steps excludes the step, and report the step.

    Args:
        run: the run.
        batch: this rank's share of the global batch.
        at: progress before the step.
        end: configured end of the run, which affects the learning rate.

    Returns:
        The progress after the step, and whether the weights stayed the same (`StepResult.skipped`). The second value is
        None if skip_steps excludes the step, or if float16's loss scale was too large but can still be halved.
    """
    cfg, metrics = run.cfg, run.metrics
    samples = range(batch.first_sample, batch.first_sample + batch.samples)
    step = at.step + 1
    if cfg.train.skips(step):
        run.phases.end_step()
        metrics.passed_over(step, "[train] skip_steps", samples=samples)
        return at._replace(step=step, samples=samples.stop, skipped=at.skipped + 1), None
    learned = step - at.overflowed, samples.stop - at.overflowed_samples
    rate = optim.rate_at(cfg, *learned, end)
    optim.set_rates(run.optimizer, rate, optim.weight_decay_at(cfg, *learned, end))
    done = train_step(run, batch)
    if run.digests is not None and done.digests is not None:
        run.digests.write(step, done.digests)
    times = run.phases.end_step()
    if not done.overflowed:
        run.health.after_step(step, done.loss)
    if warning := run.pace.after_step(len(samples) * cfg.data.seq_len, times, due(step, cfg.log.interval)):
        metrics.message(warning)
    if due(step, cfg.log.interval) and run.model.loads is not None and (warning := run.model.loads.unused()):
        metrics.message(warning)
    if run.log is not None and due(step, cfg.log.interval):
        run.log.line(times.in_words(f"step {step} | loss {done.loss:.4f} | grad_norm {done.grad_norm:.2f}"))

    scale = {} if done.loss_scale is None else {"loss_scale": done.loss_scale}
    if done.beyond_grid:
        metrics.message(rooms.exact().grid_overflow(step, done.beyond_grid))
    if done.skipped:
        metrics.skipped(step, done.loss, done.grad_norm, samples=samples, **scale)
    else:
        more = several(done.means) | scale | run.model.statistics(cfg.log.num_zeros, cfg.log.params_norm)
        metrics.step(
            step, done.loss, done.grad_norm, rate, samples=samples, step_time_s=times.step_s, **times.phases, **more
        )
    overflowed_samples = at.overflowed_samples + done.overflowed * batch.samples
    at = Progress(step, samples.stop, at.skipped + done.skipped, at.overflowed + done.overflowed, overflowed_samples)
    can_be_halved = done.overflowed and scale["loss_scale"] > cfg.precision.min_loss_scale
    return at, None if can_be_halved else done.skipped


def evaluate_only(run: Run, at: Progress) -> int:
    """Report the validation and test losses of the newest checkpoint, or of a new run's initial weights.

    Returns:
        The exit code.
    """
    whole = evaluate_validation(run, at.step) and evaluate(run, at.step, "test")
    if whole:
        return run.exit_status.set(exit_codes.DONE, EVALUATED)
    return run.exit_status.set(exit_codes.PREEMPTED, SIGNALLED)


def meet_after_step(run: Run, step: int, minutes: float) -> str:
    """Exchange reasons to stop, and requests to profile the next steps, among all ranks.

    Args:
        run: the run.
        step: number of the step that has just ended.
        minutes: minutes since training started in this process.

    Returns:
        The reason to save and exit before the last step; '' if no rank has a reason. All ranks get the same reason.
    """
    cfg = run.cfg.train
    # If several reasons apply, on one rank or on different ranks, the last of them in this dict wins.
    reasons = {
        "": True,
        "[train] exit_interval": due(step, cfg.exit_interval),
        "[train] exit_duration_min": 0 < cfg.exit_duration_min <= minutes,
        run.health.state.stopped or "losses": run.health.state.stopped != "",
        KILLED: killed(run),
        SIGNALLED: bool(run.watch.signals),
    }
    request = Path(run.cfg.run.dir, PROFILE_NOW)
    n_profiled = rooms.profile().take_request(request, step) if sees(run, request) else 0
    seen = torch.tensor([*reasons.values(), n_profiled], dtype=torch.int32, device=run.world.device)
    dist.all_reduce(seen, dist.ReduceOp.MAX)
    *hold, n_profiled = seen.tolist()
    if n_profiled:
        run.phases.profiler = run.phases.profiler or start.open_profiler(run.cfg, run.world, run.metrics)
        run.phases.profiler.request(step + 1, n_profiled)
    return [reason for reason, holds in zip(reasons, hold, strict=True) if holds][-1]


def killed(run: Run) -> bool:
    """True on rank 0 if the [train] kill_switch file exists."""
    return sees(run, run.cfg.train.kill_switch)


def sees(run: Run, path: str | Path) -> bool:
    """True on rank 0 if a file exists, by which a user tells the run something. Other ranks spare the file system."""
    # Unlike Path.exists, os.path.exists raises no error if the file system fails for a moment (EIO, ESTALE, EACCES).
    return run.world.rank == 0 and os.path.exists(path)


def killed_before_it_began(run: Run) -> bool:
    """True on all ranks if the [train] kill_switch file exists at startup. One file can end a whole queue of jobs."""
    seen = torch.tensor(int(killed(run)), device=run.world.device)
    dist.broadcast(seen, src=0)
    return bool(seen.item())


def due(step: int, interval: int) -> bool:
    """True if `step` is a multiple of `interval`; always False if `interval` is 0."""
    return interval > 0 and step % interval == 0


def run_and_leave(argv: list[str]) -> NoReturn:
    """Train, then exit with the exit code. After an unexpected error, print the traceback before exiting."""
    with console.guarded():
        try:
            code = main(argv)
        except Exception:
            traceback.print_exc()
            code = exit_codes.FAILED
        process.leave(code)
