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

from dtmega import config, cost, mesh
from dtmega.checkpoint import local as checkpoint
from dtmega.config import Config
from dtmega.data.corpus import prepare_stdlib
from dtmega.data.indexed import IndexedDataset, check_token_ids
from dtmega.data.loader import IGNORED, StepBatch, TrainBatches, eval_batches
from dtmega.data.samples import Blend, Samples, build_samples, fingerprint
from dtmega.data.tokenizer import Tokenizer, load_tokenizer
from dtmega.fsdp import sync_gradients
from dtmega.mesh import World
from dtmega.metrics import Metrics
from dtmega.models.bloom import Bloom
from dtmega.models.generate import generate
from dtmega.optim import build_optimizer, clip_gradients, learning_rate, set_learning_rate
from dtmega.parallelize import parallelize


class Progress(NamedTuple):
    """Where a run is: counts of what it has consumed. Batches, learning rate and dropout are functions of these."""

    step: int = 0
    samples: int = 0
    skipped: int = 0


class Text(NamedTuple):
    """What there is to read, per split, and the vocabulary it is written in."""

    tokenizer: Tokenizer
    splits: dict[str, Samples | Blend | None]
    fingerprint: str

    def samples(self, split: str) -> Samples | Blend:
        found = self.splits[split]
        assert found is not None
        return found


def main(argv: list[str]) -> int:
    try:
        cfg = config.load(argv)
        device = mesh.pick_device(cfg.run.device)
        text = open_text(cfg)
        resume_from = find_checkpoint(cfg)
        make_run_dir(cfg)
        batches = TrainBatches(
            text.samples("train"),
            cfg.data,
            cfg.batch,
            text.tokenizer.eod_id,
            mesh.rank(),
            mesh.world_size(),
            pin_memory=device.type == "cuda",
        )
    except ValueError as error:
        if mesh.rank() == 0:
            print(f"dtmega: {error}", file=sys.stderr)
        return 2

    signals = catch_signals()
    world = mesh.start(device)
    model = parallelize(cfg, world)
    optimizer = build_optimizer(model, cfg.optim)
    at = Progress()
    if resume_from:
        at = Progress(**checkpoint.load(resume_from, model, optimizer)["progress"])
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
    model: Bloom,
    optimizer: torch.optim.Optimizer,
    batches: TrainBatches,
    at: Progress,
    metrics: Metrics,
    signals: list[int],
) -> None:
    """The loop, from `at` to the last step or to a reason to stop."""
    checkpoints = Path(cfg.run.dir) / "checkpoints"
    started, total_steps, skipped_in_a_row, stopping = time.monotonic(), cfg.total_steps(), 0, ""
    validating = cfg.eval.interval > 0 and text.splits["valid"] is not None
    if at.step >= total_steps:
        metrics.message(f"nothing to train: this run has its {total_steps} steps (start anew with another --run.dir)")
    if validating and at.step == 0:
        metrics.validation(0, mean_loss(cfg, world, text, model, "valid"))

    while at.step < total_steps and not stopping:
        batch = next(batches)
        samples = range(batch.first_sample, batch.first_sample + batch.samples)
        rate = learning_rate(cfg.optim, **progress_units(cfg, at.step + 1, samples.stop))
        set_learning_rate(optimizer, rate)
        step_started = time.perf_counter()
        loss, grad_norm = train_step(cfg, world, model, optimizer, batch)
        step_time_s = time.perf_counter() - step_started

        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        at = Progress(at.step + 1, samples.stop, at.skipped + (not finite))
        skipped_in_a_row = 0 if finite else skipped_in_a_row + 1
        if finite:
            metrics.step(at.step, loss, grad_norm, rate, samples=samples, step_time_s=step_time_s)
        else:
            metrics.skipped(at.step, loss, grad_norm, samples=samples)
        if skipped_in_a_row > cfg.train.max_skipped:
            raise RuntimeError(
                f"{skipped_in_a_row} steps in a row had a loss or gradient that is not finite, the last one on samples "
                f"{samples.start} to {samples.stop - 1} ([train] max_skipped={cfg.train.max_skipped}); "
                f"the newest checkpoint in {checkpoints} is from before"
            )

        if validating and due(at.step, cfg.eval.interval) and at.step < total_steps:
            metrics.validation(at.step, mean_loss(cfg, world, text, model, "valid"))
        stopping = reason_to_stop(cfg, world, at.step, (time.monotonic() - started) / 60, signals)
        if due(at.step, cfg.checkpoint.interval) or at.step == total_steps or stopping:
            state = {"progress": at._asdict(), "data": text.fingerprint, "config": cfg.model_dump()}
            checkpoint.save(checkpoints, at.step, model, optimizer, state, keep=cfg.checkpoint.keep)

    if at.step >= total_steps:
        finish(cfg, world, text, model, metrics, at)
    else:
        metrics.message(
            f"stopped after step {at.step} of {total_steps}: {stopping}; the same command goes on from there"
        )
    metrics.message(f"written to {cfg.run.dir}/: config.toml, metrics.jsonl, checkpoints/{checkpoint.name(at.step)}")


def train_step(
    cfg: Config, world: World, model: Bloom, optimizer: torch.optim.Optimizer, batch: StepBatch
) -> tuple[float, float]:
    """One optimizer step on one global batch; loss and gradient norm of it, in which all ranks agree.

    The loss is the sum over all tokens divided by their number, so microbatches and data ranks cannot change it. A
    loss or gradient that is not finite changes no weight.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)  # sum of token losses, number of tokens
    totals[1] = sum(int((microbatch["labels"] != IGNORED).sum()) for microbatch in batch.microbatches)
    dist.all_reduce(totals)
    n_tokens = totals[1].clamp(min=1).item()
    totals.zero_()
    optimizer.zero_grad()
    for i, microbatch in enumerate(batch.microbatches, start=1):
        sync_gradients(model, last_microbatch=i == len(batch.microbatches))
        loss = model(**to(world.device, microbatch))
        (loss / n_tokens).backward()
        totals[0] += loss.detach()
    dist.all_reduce(totals)
    loss, grad_norm = totals[0].item() / n_tokens, clip_gradients(model.parameters(), cfg.optim.clip_grad).item()
    if math.isfinite(loss) and math.isfinite(grad_norm):
        optimizer.step()
    return loss, grad_norm


@torch.no_grad()
def mean_loss(cfg: Config, world: World, text: Text, model: Bloom, split: str) -> float:
    """Per token, over the first `eval.steps` global batches of a split."""
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)
    samples, eod_id, steps = text.samples(split), text.tokenizer.eod_id, cfg.eval.steps
    for batch in eval_batches(samples, cfg.data, cfg.batch, eod_id, world.rank, world.size, steps):
        for microbatch in batch.microbatches:
            totals[0] += model(**to(world.device, microbatch))
            totals[1] += (microbatch["labels"] != IGNORED).sum().item()
    dist.all_reduce(totals)
    model.train()
    return (totals[0] / totals[1].clamp(min=1)).item()


def finish(cfg: Config, world: World, text: Text, model: Bloom, metrics: Metrics, at: Progress) -> None:
    """What a finished model is worth: validation and test loss, and how it goes on from `eval.prompt`."""
    if text.splits["valid"] is not None:
        metrics.validation(at.step, mean_loss(cfg, world, text, model, "valid"))
    if text.splits["test"] is not None:
        metrics.test(at.step, mean_loss(cfg, world, text, model, "test"))
    if cfg.eval.prompt and cfg.eval.sample_tokens:
        prompt = text.tokenizer.encode(cfg.eval.prompt)
        new = generate(
            model,
            prompt,
            cfg.eval.sample_tokens,
            vocab_size=text.tokenizer.vocab_size,
            eod_id=text.tokenizer.eod_id,
            seed=cfg.run.seed,
        )
        metrics.message(f"a sample:\n{cfg.eval.prompt}{text.tokenizer.decode(new)}")


def open_text(cfg: Config) -> Text:
    """Tokenizer and data, checked whole before anything starts.

    Raises:
        ValueError: no such tokenizer or data, damaged files, ids outside the vocabulary, less than one sample.
    """
    tokenizer = load_tokenizer(cfg.data.tokenizer)
    if tokenizer.vocab_size > cfg.model.vocab_size:
        raise ValueError(
            f"vocab_size={cfg.model.vocab_size} is smaller than the {tokenizer.vocab_size} ids of tokenizer "
            f"'{cfg.data.tokenizer}' ([model] vocab_size, [data] tokenizer)"
        )
    prefixes = [prepare_stdlib(tokenizer) if path == "stdlib" else path for path in cfg.data.paths]
    for prefix in prefixes:
        check_token_ids(IndexedDataset(prefix), cfg.model.vocab_size)
    return Text(tokenizer, build_samples(cfg.data, prefixes, cfg.run.seed), fingerprint(prefixes))


def find_checkpoint(cfg: Config) -> Path | None:
    """What `[checkpoint] resume` names: the newest of the run directory, none, or a folder."""
    if cfg.checkpoint.resume == "none":
        return None
    if cfg.checkpoint.resume != "auto":
        return checkpoint.check(Path(cfg.checkpoint.resume))
    found = checkpoint.finished(Path(cfg.run.dir) / "checkpoints")
    return found[-1] if found else None


def make_run_dir(cfg: Config) -> None:
    try:
        Path(cfg.run.dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the run directory {cfg.run.dir}: {error.strerror} ([run] dir)") from None


def progress_units(cfg: Config, steps: int, samples: int) -> dict[str, int]:
    """Where the learning-rate schedule is when this update is done, and where training ends, in `[optim] unit`."""
    total_samples = cfg.total_samples()
    if cfg.optim.unit == "steps":
        return {"progress": steps, "total": cfg.total_steps()}
    unit = cfg.data.seq_len if cfg.optim.unit == "tokens" else 1
    return {"progress": samples * unit, "total": total_samples * unit}


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


def to(device: torch.device, microbatch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in microbatch.items()}


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
