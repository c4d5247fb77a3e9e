"""Train a model: `torchrun [--nproc-per-node N] train.py --config bloom.toml [--section.key value ...]`.

The story, top to bottom: configuration and data (what is wrong with them ends here, with exit code 2), process group,
model, resume, the loop, the last evaluation and a sample. `--help` lists every key. SIGTERM or Ctrl-C: the step is
finished, saved, exit 0; the same command goes on from there, with the numbers it would have had anyway.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtmega import config, cost, drift, mesh
from dtmega.checkpoint import local as checkpoint
from dtmega.config import Config
from dtmega.data.loader import IGNORED, StepBatch, TrainBatches, eval_batches
from dtmega.data.text import Text, open_text
from dtmega.mesh import World
from dtmega.metrics import Metrics
from dtmega.models.generate import generate
from dtmega.optim import (
    build_optimizer,
    clip_gradients,
    count_zeros,
    learning_rate,
    progress,
    set_learning_rate,
    total_norm,
)
from dtmega.parallelize import ShardedModel, check, parallelize
from dtmega.pipelining.draw import draw_schedule


class Progress(NamedTuple):
    """Where a run is: counts of what it has consumed. Batches, learning rate and dropout are functions of these."""

    step: int = 0
    samples: int = 0
    skipped: int = 0


def main(argv: list[str]) -> int:
    try:
        cfg = config.load(argv)
        device, sizes = mesh.pick_device(cfg.run.device), mesh.resolve(cfg.mesh, mesh.world_size())
        check(cfg, sizes, device)
        text = open_text(cfg)
        resume_from = checkpoint.find(Path(cfg.run.dir, "checkpoints"), cfg)
        make_run_dir(cfg)
        if mesh.rank() == 0 and cfg.pipeline.draw:
            draw_schedule(cfg, sizes["pp"], mesh.data_coordinate(sizes, 0)[1])
        batches = TrainBatches(
            text.samples("train"),
            cfg.data,
            cfg.batch,
            text.tokenizer.eod_id,
            *mesh.data_coordinate(sizes, mesh.rank()),
            pin_memory=device.type == "cuda",
        )
    except ValueError as error:
        if mesh.rank() == 0:
            print(f"dtmega: {error}", file=sys.stderr)
        return 2

    signals = catch_signals()
    world = mesh.start(device, sizes)
    model = parallelize(cfg, world)
    optimizer = build_optimizer([p for _, p in model.named_parameters()], cfg.optim)
    at = Progress()
    if resume_from:
        at = Progress(**checkpoint.load(resume_from, model.named_parameters(), optimizer)["progress"])
        batches.load_state_dict({"samples": at.samples})
    if world.rank == 0:
        checkpoint.set_aside_newer(Path(cfg.run.dir) / "checkpoints", at.step)
        Path(cfg.run.dir, "config.toml").write_text(cfg.to_toml(), encoding="utf-8")
    metrics = Metrics(cfg, device, world.size, start_step=at.step, write=world.rank == 0)
    metrics.message(describe(cfg, world, text, at, resume_from))
    try:
        train(cfg, world, text, model, optimizer, batches, at, metrics, signals)
    finally:
        batches.close()
        metrics.close()
    mesh.stop()
    return 0


def train(
    cfg: Config,
    world: World,
    text: Text,
    model: ShardedModel,
    optimizer: torch.optim.Optimizer,
    batches: TrainBatches,
    at: Progress,
    metrics: Metrics,
    signals: list[int],
) -> None:
    """The loop, from `at` to the last step or to a reason to stop."""
    checkpoints = Path(cfg.run.dir) / "checkpoints"
    first_step, total_steps, started = at.step, cfg.total_steps(), time.monotonic()
    skipped_in_a_row, stopping = 0, ""
    validating = cfg.eval.interval > 0 and text.splits["valid"] is not None
    if at.step >= total_steps:
        metrics.message(f"nothing to train: this run has its {total_steps} steps (start anew with another --run.dir)")
    if validating and at.step == 0:
        metrics.validation(0, mean_loss(cfg, world, text, model, "valid"))

    while at.step < total_steps and not stopping:
        batch = next(batches)
        if at.step == first_step:
            check_same_batch(batch, world)
        samples = range(batch.first_sample, batch.first_sample + batch.samples)
        rate = learning_rate(cfg.optim, *progress(cfg, at.step + 1, samples.stop))
        set_learning_rate(optimizer, rate)
        step_started = time.perf_counter()
        loss, grad_norm = train_step(cfg, world, model, optimizer, batch)
        step_time_s = time.perf_counter() - step_started

        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        at = Progress(at.step + 1, samples.stop, at.skipped + (not finite))
        skipped_in_a_row = 0 if finite else skipped_in_a_row + 1
        if finite:
            more = optional_metrics(cfg, world, model)
            metrics.step(at.step, loss, grad_norm, rate, samples=samples, step_time_s=step_time_s, **more)
        else:
            metrics.skipped(at.step, loss, grad_norm, samples=samples)
        if skipped_in_a_row > cfg.train.max_skipped:
            raise RuntimeError(
                f"{skipped_in_a_row} steps in a row had a loss or gradient that is not finite, the last one on samples "
                f"{samples.start} to {samples.stop - 1} ([train] max_skipped={cfg.train.max_skipped}); "
                f"the newest checkpoint in {checkpoints} is from before"
            )

        if due(at.step, cfg.train.drift_interval):
            model.check_copies()
        if validating and due(at.step, cfg.eval.interval) and at.step < total_steps:
            metrics.validation(at.step, mean_loss(cfg, world, text, model, "valid"))
        stopping = reason_to_stop(cfg, world, at.step, (time.monotonic() - started) / 60, signals)
        if due(at.step, cfg.checkpoint.interval) or at.step == total_steps or stopping:
            state = {"progress": at._asdict(), "data": text.fingerprint, "config": cfg.model_dump()}
            checkpoint.save(
                checkpoints,
                at.step,
                model.owned(),
                optimizer,
                state,
                keep=cfg.checkpoint.keep,
                part=world.coordinate("pp"),
                writes=world.leads_stage,
            )

    if at.step >= total_steps:
        finish(cfg, world, text, model, metrics, at)
    else:
        metrics.message(
            f"stopped after step {at.step} of {total_steps}: {stopping}; the same command goes on from there"
        )
    metrics.message(f"written to {cfg.run.dir}/: config.toml, metrics.jsonl, checkpoints/{checkpoint.name(at.step)}")


def train_step(
    cfg: Config, world: World, model: ShardedModel, optimizer: torch.optim.Optimizer, batch: StepBatch
) -> tuple[float, float]:
    """One optimizer step on one global batch; loss and gradient norm of it, in which all ranks agree.

    The loss is the sum over all tokens divided by their number, so microbatches and layout cannot change it. A loss or
    gradient that is not finite changes no weight.
    """
    n_tokens = count_tokens(world, batch)
    optimizer.zero_grad()
    total = model.forward_backward(to(world.device, batch.microbatches), n_tokens)
    dist.all_reduce(total, group=world.groups["loss"])
    counted, gradients = model.gradients(), model.gradients(every=True)
    loss, grad_norm = total.item() / n_tokens, total_norm(counted, world.device, world.groups["shards"])
    if math.isfinite(loss) and math.isfinite(grad_norm):
        clip_gradients(gradients, grad_norm, cfg.optim.clip_grad)
        optimizer.step()
    return loss, grad_norm


def mean_loss(cfg: Config, world: World, text: Text, model: ShardedModel, split: str) -> float:
    """Per token, over the first `eval.steps` global batches of a split."""
    total, n_tokens = torch.zeros((), dtype=torch.float64, device=world.device), 0.0
    slices = world.data_rank, world.data_size, cfg.eval.steps
    for batch in eval_batches(text.samples(split), cfg.data, cfg.batch, text.tokenizer.eod_id, *slices):
        total += model.losses(to(world.device, batch.microbatches))
        n_tokens += count_tokens(world, batch)
    dist.all_reduce(total, group=world.groups["loss"])
    return total.item() / n_tokens


def count_tokens(world: World, batch: StepBatch) -> float:
    """Tokens of the global batch that have a loss; at least 1, to divide by."""
    mine = sum(int((microbatch["labels"] != IGNORED).sum()) for microbatch in batch.microbatches)
    count = torch.tensor(float(mine), dtype=torch.float64, device=world.device)
    dist.all_reduce(count, group=world.groups["data"])
    return max(count.item(), 1.0)


def check_same_batch(batch: StepBatch, world: World) -> None:
    """Ranks that compute a microbatch together were given the same one."""
    tokens = torch.cat([microbatch["tokens"] for microbatch in batch.microbatches]).to(world.device)
    drift.check_equal({"tokens": tokens}, world.groups["model"], "the first batch, which tp and pp ranks must share")


def optional_metrics(cfg: Config, world: World, model: ShardedModel) -> dict[str, float]:
    more: dict[str, float] = {}
    if cfg.log.num_zeros:
        more["num_zeros"] = count_zeros(model.gradients(), world.device, world.groups["shards"])
    if cfg.log.params_norm:
        more["params_norm"] = total_norm(model.weights(), world.device, world.groups["shards"])
    return more


def finish(cfg: Config, world: World, text: Text, model: ShardedModel, metrics: Metrics, at: Progress) -> None:
    """What a finished model is worth: validation and test loss, and how it goes on from `eval.prompt`."""
    if text.splits["valid"] is not None:
        metrics.validation(at.step, mean_loss(cfg, world, text, model, "valid"))
    if text.splits["test"] is not None:
        metrics.test(at.step, mean_loss(cfg, world, text, model, "test"))
    if model.pipeline is not None:
        metrics.message(f"for a sample: python -m dtmega generate --run {cfg.run.dir} --prompt {cfg.eval.prompt!r}")
    elif cfg.eval.prompt and cfg.eval.sample_tokens:
        prompt = text.tokenizer.encode(cfg.eval.prompt)
        new = generate(
            model.stages[0],
            prompt,
            cfg.eval.sample_tokens,
            vocab_size=text.tokenizer.vocab_size,
            eod_id=text.tokenizer.eod_id,
            seed=cfg.run.seed,
        )
        metrics.message(f"a sample:\n{cfg.eval.prompt}{text.tokenizer.decode(new)}")


def make_run_dir(cfg: Config) -> None:
    try:
        Path(cfg.run.dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the run directory {cfg.run.dir}: {error.strerror} ([run] dir)") from None


def catch_signals() -> list[int]:
    """SIGTERM and SIGINT from here on only leave their number in this list; the loop looks at it after each step."""
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _: received.append(n))
    return received


def reason_to_stop(cfg: Config, world: World, step: int, minutes: float, signals: list[int]) -> str:
    """Why to save and exit before the last step, or ''; the same on every rank, whichever saw it."""
    reasons = {
        "": True,
        "[train] exit_interval": due(step, cfg.train.exit_interval),
        "[train] exit_duration_min": 0 < cfg.train.exit_duration_min <= minutes,
        "a signal asked for it": bool(signals),
    }
    seen = torch.tensor(list(reasons.values()), dtype=torch.int32, device=world.device)
    dist.all_reduce(seen, dist.ReduceOp.MAX)
    return list(reasons)[int(seen.nonzero().max())]


def due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def to(device: torch.device, microbatches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [{name: t.to(device, non_blocking=True) for name, t in m.items()} for m in microbatches]


def describe(cfg: Config, world: World, text: Text, at: Progress, resume_from: Path | None) -> str:
    """The numbers that follow from the configuration, each once."""
    train, sequences = text.samples("train"), cfg.batch.global_batch_size
    steps, samples = cfg.total_steps(), cfg.total_samples()
    flops = cost.flops_per_token(cfg.model, cfg.data.seq_len)
    lines = [
        f"{cfg.model.name}: {cost.parameters(cfg.model):,} parameters, {flops / 1e6:,.1f} MFLOP/token, "
        f"{cfg.precision.params} on {world.size} x {world.device.type}",
        f"data: {train.n_tokens:,} training tokens; {steps:,} steps of {sequences} x {cfg.data.seq_len} tokens = "
        f"{samples * cfg.data.seq_len:,} tokens, {samples * cfg.data.seq_len / train.n_tokens:.2f} epochs",
        f"run: {cfg.run.dir}, "
        + (f"resumed from {resume_from} at step {at.step}" if resume_from else "from the start"),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
