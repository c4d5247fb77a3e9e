"""Train a model: `torchrun [--nproc-per-node N] train.py --config bloom.toml [--section.key value ...]`.

The story, top to bottom: configuration and data (what is wrong with them ends here, with exit code 2), process group,
model, resume, the loop, the last evaluation and a sample. `--help` lists every key. SIGTERM, SIGUSR1, SIGUSR2, Ctrl-C
or a closed terminal: the step is finished, saved, exit 75; the same command goes on from there, with the numbers it
would have had anyway. All exit codes are in `dtmega/distributed/exit_codes.py`.
"""

from __future__ import annotations

import shlex
import time
import traceback
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from dtmega import config, families, mesh
from dtmega.checkpoint import changes, found, resume
from dtmega.checkpoint.resume import Progress, State
from dtmega.checkpoint.run import Checkpoints, tensors_of
from dtmega.checkpoint.weights import load_weights
from dtmega.config import RunEnd
from dtmega.data.loader import StepBatch, TrainBatches
from dtmega.data.text import open_text, repetition_notes
from dtmega.distributed import exit_codes
from dtmega.distributed.agreement import Refused, Startup, same_job
from dtmega.distributed.watchdog import SAVING, Watch
from dtmega.files import atomic, console
from dtmega.ops import cost, optim
from dtmega.ops.cpu import huge_pages
from dtmega.ops.cpu.contention import Contention
from dtmega.ops.loss_scale import LossScale
from dtmega.ops.optim import Spikes
from dtmega.pipelining.draw import draw_schedule
from dtmega.training import history, trackers
from dtmega.training.evaluate import evaluate, evaluate_validation, show_sample
from dtmega.training.metrics import Metrics, describe_run, several
from dtmega.training.parallelize import check, parallelize, with_micro_batch_size, with_params_dtype
from dtmega.training.step import Run, check_same_batch, train_step

FINISHED = "finished"
EVALUATED = "[eval] only"
SIGNALLED = "a signal asked for it"
KILLED = "[train] kill_switch"


@console.guarded()
def main(argv: list[str]) -> int:
    """Train or evaluate; returns the exit code. The process group is left to the caller."""
    exit_codes.die_with_parent()
    ending = exit_codes.Ending()
    with ExitStack() as closing:
        try:
            run, at = begin(argv, Startup(), closing, ending)
        except Refused as refused:
            return ending.because(refused.exit_code, refused.reason)
        if run.world.device.type == "cpu":
            huge_pages.keep_freed_memory()
        try:
            return evaluate_only(run, at) if run.cfg.eval.only else train(run, at)
        except RuntimeError as error:  # it may be torch's, of a collective whose other ranks have left
            if run.watch.signals:  # their grace time was over a moment before the watch would have ended this rank, too
                return run.watch.stuck(f"before this: {error}")
            if run.watch.leaving_alone(exit_codes.FAILED, exit_codes.described(error)):
                raise
            return run.watch.followed(error)
        except Exception as error:
            run.watch.leaving_alone(exit_codes.FAILED, exit_codes.described(error))
            raise


def begin(
    argv: list[str], startup: Startup, closing: ExitStack, ending: exit_codes.Ending | None = None
) -> tuple[Run, Progress]:
    """The start, in steps that all ranks take together. What is opened is closed by `closing`.

    Args:
        ending: what is to be told of the run's end; None: nothing.
    """
    ending = exit_codes.Ending() if ending is None else ending
    with found.early_end_recorded(config.run_dir_of(argv), ending, first=startup.rank == 0):
        with startup.step("configuration") as step:
            asked = families.resolve(config.load(argv))
            device, sizes = mesh.pick_device(asked.run.device), mesh.resolve(asked.mesh, startup.size)
            cfg = with_micro_batch_size(asked, sizes)
            check(cfg, sizes, device)
            trackers.check(cfg.log.trackers)
            pieces = families.pieces(cfg.model)
            startup.timeout_s = cfg.run.collective_timeout_s()
            digest = families.of(cfg.model).digest(cfg.model)
            step.same = same_job(cfg, device, families.of(cfg.model).libraries) | {"digest of [model] path": digest}

        with startup.step("data") as step:
            text = open_text(cfg, families.objective(cfg))
            resume.named_checkpoints(cfg)  # before anything is made
            if cfg.eval.only and startup.rank == 0:
                found.check_is_trained(cfg, families.of(cfg.model).weights(cfg.model))
            data_rank, data_size = mesh.data_coordinate(sizes, startup.rank)
            batches = TrainBatches(
                text.rows("train"),
                cfg.data,
                cfg.batch,
                data_rank,
                data_size,
                pin_memory=device.type == "cuda",
            )
            step.same = text.identity

    with startup.step("run directory") as step:
        if startup.rank == 0:
            run_dir = Path(cfg.run.dir)
            claims = found.claims(cfg)
            closing.callback(next(claims).close)  # that of the run directory
            closing.enter_context(ending.told_in(run_dir, partial(resume.newest_of_run, run_dir)))
            for claim in claims:
                closing.callback(claim.close)
            candidate_paths = found.find_candidates(cfg, text.identity, digest)
            closing.callback(found.remove_probe, cfg, candidate_paths)
            step.tell = candidate_paths._asdict()
            if cfg.pipeline.draw:
                draw_schedule(cfg, sizes["pp"], data_size)

    candidate_paths = found.CandidatePaths(**step.told)
    with startup.step("checkpoints") as step:
        candidates = found.open_candidates(cfg, candidate_paths)
        if startup.rank == 0:  # for all: processors may differ
            step.tell = found.params_dtype(cfg, candidates, mesh.has_fast_bfloat16(device))
        init = None if candidates else families.of(cfg.model).weights(cfg.model)
        step.same = found.manifest_digests([*candidates, init])

    left_open = asked.precision.params == "auto"
    asked, cfg = with_params_dtype(asked, step.told), with_params_dtype(cfg, step.told)
    with startup.step("process groups"):
        world = mesh.start(device, sizes, startup.timeout_s, startup.store)
    watch = Watch(cfg.run.grace_s, cfg.run.timeout_s, world.rank, ending)
    closing.callback(watch.close)  # the last of those that take time: until then it hears a second signal
    closing.callback(batches.close)
    if not candidates and not cfg.eval.only:
        batches.start()  # at the first sample: the processes come up while the model is built
    watch.share(mesh.store(), world.size)
    startup.beat = partial(watch.beat, 0, "load")
    with startup.step("model"):
        model = parallelize(cfg, world)
        optimizer = optim.build_optimizer(model.named_parameters(), cfg.optim)
    with startup.step("checkpoint"):
        checkpoints = Checkpoints(cfg, device)
        closing.callback(checkpoints.close)
        loaded = checkpoints.load(candidates, model.stored_tensors(), optimizer, candidate_paths.damage, startup)
        if init is not None:
            load_weights(init, startup.at_work(model.stored_tensors()), cfg.model.vocab_size)
        elif loaded is None:
            model.draw(cfg.run.seed)

    at, recent = (loaded.progress, loaded.recent) if loaded else (resume.START, [])
    batches.load_state_dict({"samples": at.samples})
    if not cfg.eval.only:  # which leaves the run where it is
        ending.step = at.step
        ending.checkpoint = checkpoints.newest
    end = cfg.end(at.step, at.samples)
    with startup.step("files of the run"):
        if world.rank == 0 and not cfg.eval.only:
            resume.set_aside_newer(cfg, at.step)
            if loaded and cfg.checkpoint.resume == "auto":  # one that goes back keeps where it could go back to
                checkpoints.purge_strays(loaded.config)
            with atomic.replaced(Path(cfg.run.dir, "config.toml")) as file:
                file.write(asked.to_toml())
            history.append(
                Path(cfg.run.dir),
                step=at.step,
                config=asked.model_dump(),
                layout={"processes": world.size, **world.sizes},
                device=device,
                parameters=cost.n_parameters(pieces),
                steps=end.steps,
            )
        metrics = Metrics(cfg, pieces, device, world.size, end, start_step=at.step, write=world.rank == 0)
        closing.callback(metrics.close)
        watch.before_the_end(metrics.abandon)
    samples = text.samples("train")
    epochs = end.samples / samples.n_samples
    about = describe_run(cfg, pieces, device, world.size, samples.n_tokens, epochs, at.step, end)
    lines = [about, *families.of(cfg.model).notes(cfg.model)]
    if not cfg.eval.only:
        lines += optim.notes_on_warmup(cfg, end)
    if loaded:
        overflowed = at.overflowed, at.overflowed_samples
        lines += changes.lines(loaded.config, asked, at.step, at.samples, overflowed)
    if left_open:
        why = "as it began" if loaded else f"bfloat16 is {'' if mesh.has_fast_bfloat16(device) else 'not '}fast here"
        lines.append(f"computed in {cfg.precision.params}: {why} ([precision] params = 'auto')")
    lines += repetition_notes(cfg, text)
    metrics.message("\n".join([*lines, *text.notes, *candidate_paths.damage]))
    spikes = Spikes(cfg.train.skip_spikes, recent)
    scale = LossScale(cfg.precision, loaded and loaded.loss_scale) if cfg.precision.params == "float16" else None
    run = Run(
        saved_cfg=asked,
        cfg=cfg,
        world=world,
        text=text,
        model=model,
        optimizer=optimizer,
        batches=batches,
        spikes=spikes,
        checkpoints=checkpoints,
        metrics=metrics,
        watch=watch,
        ending=ending,
        digest=digest,
        loss_scale=scale,
    )
    return run, at


def train(run: Run, at: Progress) -> int:
    """Run the loop, from `at` to the last step or to a reason to stop. Returns the exit code."""
    cfg, world, model, metrics, watch = run.cfg, run.world, run.model, run.metrics, run.watch
    first_step, started = at.step, time.monotonic()
    end = cfg.end(at.step, at.samples)
    total_steps = end.steps
    skipped_in_a_row = 0
    stopping = ""
    unsaved = ""
    contention = Contention(world.device)
    if at.step >= total_steps:
        metrics.message(f"nothing to train: this run has its {total_steps} steps (start anew with another --run.dir)")
    elif cfg.train.kill_switch and killed_before_it_began(run):
        stopping = KILLED
    if not stopping and cfg.eval.interval and at.step == 0 and not evaluate_validation(run, 0):
        stopping = SIGNALLED

    while at.step < total_steps and not stopping:
        step_started = time.perf_counter()
        watch.beat(at.step + 1, "data")
        batch = next(run.batches)
        if at.step == first_step:
            check_same_batch(batch, world)
        at, faulty = one_step(run, batch, at, end, step_started)
        run.ending.step = at.step
        if faulty is not None:
            skipped_in_a_row = skipped_in_a_row + 1 if faulty else 0
        if skipped_in_a_row > cfg.train.max_skipped:
            raise RuntimeError(
                f"{skipped_in_a_row} steps in a row had a loss or gradient that is not finite or a spike, the last one "
                f"on samples {batch.first_sample} to {at.samples - 1} ([train] max_skipped={cfg.train.max_skipped}); "
                f"the newest checkpoint is from before"
            )

        if advice := contention.after_step(at.step - first_step):
            metrics.message(advice)
        if due(at.step, cfg.train.drift_interval):
            model.check_copies()
        if due(at.step, cfg.eval.interval) and at.step < total_steps:
            evaluate_validation(run, at.step)
        stopping = reason_to_stop(run, at.step, (time.monotonic() - started) / 60)
        last = at.step == total_steps or stopping != ""
        if due(at.step, cfg.checkpoint.interval) or stopping or (last and cfg.checkpoint.final):
            watch.beat(at.step, SAVING)
            metrics.sync()
            state = State.of(
                run.saved_cfg.model_dump(),
                progress=at,
                updates=at.step - at.skipped,
                recent=run.spikes.recent,
                loss_scale=run.loss_scale and run.loss_scale.state,
                identity=run.text.identity,
                digest=run.digest,
                layout={"processes": world.size, **world.sizes},
            )
            ended = run.checkpoints.save(tensors_of(model.owned(), run.optimizer), state)
        else:
            ended = run.checkpoints.poll()
        ended += run.checkpoints.wait() if last else []
        for outcome in ended:
            metrics.saved(at.step, *outcome)
            unsaved = outcome.error
            run.ending.checkpoint = run.checkpoints.newest

    if at.step >= total_steps:
        whole = evaluate_validation(run, at.step) and evaluate(run, at.step, "test") and show_sample(run, at.step)
        stopping = "" if whole else SIGNALLED
    if stopping:
        metrics.message(f"stopped after step {at.step} of {total_steps}: {stopping}; {resume.how_to_resume(cfg)}")
    if unsaved:
        metrics.message(f"NOT SAVED: step {at.step}; the newest checkpoint is older")
        return run.ending.because(exit_codes.STUCK, f"not saved: {unsaved}")
    checkpoint = f", {run.checkpoints.newest}" if run.checkpoints.newest else ""
    metrics.message(f"written: config.toml and metrics.jsonl in {cfg.run.dir}{checkpoint}")
    metrics.message(f"to look at it: dtmega report {shlex.quote(cfg.run.dir)}")
    code = exit_codes.PREEMPTED if stopping == SIGNALLED else exit_codes.DONE
    return run.ending.because(code, stopping or FINISHED)


def one_step(run: Run, batch: StepBatch, at: Progress, end: RunEnd, started: float) -> tuple[Progress, bool | None]:
    """Train on a batch, or pass it over, and report it.

    Args:
        end: of the run.
        started: when the wait for the batch began, on the clock of `time.perf_counter`.

    Returns:
        Where the run is now; and whether something was wrong with the step. None: neither one nor the other, of a step
        that is passed over, or that only found the scale too large.
    """
    cfg, metrics = run.cfg, run.metrics
    samples = range(batch.first_sample, batch.first_sample + batch.samples)
    step = at.step + 1
    if cfg.train.skips(step):
        metrics.passed_over(step, "[train] skip_steps", samples=samples)
        return at._replace(step=step, samples=samples.stop, skipped=at.skipped + 1), None
    learned = step - at.overflowed, samples.stop - at.overflowed_samples
    rate = optim.rate_at(cfg, *learned, end)
    optim.set_rates(run.optimizer, rate, optim.weight_decay_at(cfg, *learned, end))
    done = train_step(run, batch)
    step_time_s = time.perf_counter() - started

    scale = {} if done.loss_scale is None else {"loss_scale": done.loss_scale}
    if done.skipped:
        metrics.skipped(step, done.loss, done.grad_norm, samples=samples, **scale)
    else:
        more = several(done.means) | scale | run.model.statistics(cfg.log.num_zeros, cfg.log.params_norm)
        metrics.step(step, done.loss, done.grad_norm, rate, samples=samples, step_time_s=step_time_s, **more)
    overflowed_samples = at.overflowed_samples + done.overflowed * batch.samples
    at = Progress(step, samples.stop, at.skipped + done.skipped, at.overflowed + done.overflowed, overflowed_samples)
    can_be_halved = done.overflowed and scale["loss_scale"] > cfg.precision.min_loss_scale
    return at, None if can_be_halved else done.skipped


def evaluate_only(run: Run, at: Progress) -> int:
    """Report the losses on the other splits, of the newest checkpoint or of the weights that a new run starts with."""
    whole = evaluate_validation(run, at.step) and evaluate(run, at.step, "test")
    return run.ending.because(*((exit_codes.DONE, EVALUATED) if whole else (exit_codes.PREEMPTED, SIGNALLED)))


def reason_to_stop(run: Run, step: int, minutes: float) -> str:
    """The reason to save and exit before the last step, or ''; the same on every rank, whichever saw it."""
    cfg = run.cfg.train
    reasons = {
        "": True,
        "[train] exit_interval": due(step, cfg.exit_interval),
        "[train] exit_duration_min": 0 < cfg.exit_duration_min <= minutes,
        KILLED: killed(run),
        SIGNALLED: bool(run.watch.signals),
    }
    seen = torch.tensor(list(reasons.values()), dtype=torch.int32, device=run.world.device)
    dist.all_reduce(seen, dist.ReduceOp.MAX)
    return list(reasons)[int(seen.nonzero().max())]


def killed(run: Run) -> bool:
    """True where the file of [train] kill_switch is. Only rank 0 looks: a thousand ranks are a thousand requests."""
    return run.world.rank == 0 and bool(run.cfg.train.kill_switch) and Path(run.cfg.train.kill_switch).exists()


def killed_before_it_began(run: Run) -> bool:
    """Tell all ranks at the start whether the file is there: one file empties a whole queue of jobs."""
    seen = torch.tensor(int(killed(run)), device=run.world.device)
    dist.broadcast(seen, src=0)
    return bool(seen.item())


def due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def run_and_leave(argv: list[str]) -> NoReturn:
    """Train, print the traceback of an unexpected error, and end this process with the exit code."""
    with console.guarded():
        try:
            code = main(argv)
        except Exception:
            traceback.print_exc()
            code = exit_codes.FAILED
        exit_codes.leave(code)
