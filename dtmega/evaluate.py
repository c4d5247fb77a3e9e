"""Evaluation: the loss on the other splits, and what the model makes of a prompt.

All ranks call these together. A signal ends them between two batches or tokens, so that the run can save in time.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from dtmega import families
from dtmega.data.loader import eval_batches
from dtmega.data.sums import divisors, loss_of, means_of
from dtmega.metrics import several
from dtmega.step import Run, count, signalled, to


def evaluate_validation(run: Run, step: int) -> bool:
    """Evaluate the validation split, and each set of [data] validation; False if a signal came before the end."""
    return all(evaluate(run, step, split) for split in run.text.evaluated)


def evaluate(run: Run, step: int, split: str) -> bool:
    """Report the mean loss of a split, if there is such a split; False if a signal came before the end."""
    if run.text.splits[split] is None:
        return True
    means = mean_losses(run, step, split)
    if means is None:
        return False
    loss = loss_of(run.model.objective.sums, means)
    if split == "test":
        run.metrics.test(step, loss, **several(means))
    else:
        run.metrics.validation(step, loss, "" if split == "valid" else split, **several(means))
    return True


def mean_losses(run: Run, step: int, split: str) -> dict[str, float] | None:
    """Each sum over the first `eval.steps` global batches of a split by its count, by name.

    None if a signal came between two batches.
    """
    cfg, world, text, objective = run.cfg, run.world, run.text, run.model.objective
    totals = torch.zeros(len(objective.sums), dtype=torch.float64, device=world.device)
    counts: Counter[str] = Counter()
    slices = world.data_rank, world.data_size, cfg.eval.steps
    batches = eval_batches(text.rows(split), cfg.batch, *slices)
    for batch in run.metrics.evaluating(batches, split, cfg.eval.steps):
        if signalled(run):
            return None
        run.watch.beat(step, "evaluation")
        totals += run.model.losses(to(world.device, batch.microbatches))
        counts.update(count(world, objective, batch))
    dist.all_reduce(totals, group=world.groups["loss"])
    return means_of(objective.sums, totals, divisors(counts))


def show_sample(run: Run, step: int) -> bool:
    """Report what the model makes of `eval.prompt`, as its family shows it; False if a signal came before the end."""
    cfg = run.cfg
    if not cfg.eval.prompt or not cfg.eval.sample_tokens:
        return True
    if run.model.pipeline is not None:
        how = f"python -m dtmega generate --run {cfg.run.dir} --prompt {cfg.eval.prompt!r}"
        run.metrics.message(f"for a sample: {how}")
        return True
    show = families.of(cfg.model).show
    asked = {"tokens": cfg.eval.sample_tokens, "seed": cfg.run.seed}
    options = {name: value for name, value in asked.items() if name in show.options}
    options |= families.sample_options(cfg)
    stopped = False

    def settle(token: Tensor) -> bool:
        nonlocal stopped
        run.watch.beat(step, "sample")
        # Logits may differ in the last bit: a rank that drew another token and ended would leave the others waiting.
        dist.broadcast(token, src=0)
        stopped = signalled(run)
        return not stopped

    # Blocks are compiled for the shapes of training; those of a sample are not worth compiling for.
    try:
        with torch.compiler.set_stance("force_eager"):
            shown = show.text(
                run.model.stages[0],
                run.text.tokenizer,
                cfg.eval.prompt,
                multiple=run.world.sizes["tp"],
                settle=settle,
                **options,
            )
    except ValueError as error:  # the same on all ranks; a run that is done does not fail for its sample
        run.metrics.message(f"no sample of [eval] prompt: {error}")
        return True
    if not stopped:
        run.metrics.sample(step, shown)
    return not stopped
