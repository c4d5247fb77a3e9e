"""Evaluate a run: compute losses on the validation and test splits, and show a sample for a prompt.

All ranks call these functions together. A signal ends an evaluation between two batches, or a sample between two
tokens, so that the run can still save in time.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from dtmega import families
from dtmega.data.loader import eval_batches
from dtmega.data.objectives.sums import divisors, loss_of, means_of
from dtmega.training.metrics import several
from dtmega.training.step import Run, count, signalled, to


def evaluate_validation(run: Run, step: int) -> bool:
    """Evaluate the validation split and the [data] validation sets. Returns False if a signal ended an evaluation.

    The next start then evaluates all of them again, so a loss that was already counted is not counted twice.
    """
    before = run.health.state
    whole = all(evaluate(run, step, split) for split in run.text.evaluated)
    if not whole:
        run.health.state = before._replace(unvalidated=step)
    return whole


def evaluate(run: Run, step: int, split: str) -> bool:
    """Report the mean loss of a split. Returns False if a signal ended the evaluation early.

    Args:
        run: objects of the run.
        step: number of the last optimizer step.
        split: name of the split. A split without documents is not reported.
    """
    if run.text.splits[split] is None:
        return True
    means = mean_losses(run, split)
    if means is None:
        return False
    loss = loss_of(run.model.objective.sums, means, evaluates=True)
    if step > 0 and split == run.text.compared:
        run.health.after_validation(step, loss)
    if split == "test":
        run.metrics.test(step, loss, **several(means))
    else:
        run.metrics.validation(step, loss, "" if split == "valid" else split, **several(means))
    return True


def mean_losses(run: Run, split: str) -> dict[str, float] | None:
    """The mean losses over a split's first `eval.steps` global batches, keyed by name; None if a signal came first.

    Each mean is a sum over all batches divided by a count over all batches, not an average of the batches' means.
    """
    cfg, world, text, objective = run.cfg, run.world, run.text, run.model.objective
    totals = torch.zeros(len(objective.sums), dtype=torch.float64, device=world.device)
    counts: Counter[str] = Counter()
    batches = eval_batches(text.rows(split), cfg.batch, world.data_rank, world.data_size, cfg.eval.steps)
    for batch in run.metrics.evaluating(batches, split, cfg.eval.steps):
        if signalled(run):
            return None
        run.phases.enter("evaluation")
        totals += run.model.losses(to(world.device, batch.microbatches))
        # Counter.update adds, whereas dict.update would replace.
        counts.update(count(world, objective, batch))
    dist.all_reduce(totals, group=world.groups["loss"])
    if run.model.exact is not None:
        totals = run.model.exact.exact_or_infinite(totals)
    return means_of(objective.sums, totals, divisors(counts))


def show_sample(run: Run, step: int) -> bool:
    """Report a sample for `eval.prompt`. Returns False if a signal ended the sample early.

    The model family determines the kind of the sample (`Family.show`). With a pipeline, the command to make a sample
    is printed instead, because pipeline schedules cannot extend a sequence token by token.
    """
    cfg = run.cfg
    if not cfg.eval.prompt or not cfg.eval.sample_tokens:
        return True
    if run.model.pipeline is not None:
        command = f"python -m dtmega generate --run {cfg.run.dir} --prompt {cfg.eval.prompt!r}"
        run.metrics.message(f"for a sample: {command}")
        return True
    show = families.of(cfg.model).show
    configured = {"tokens": cfg.eval.sample_tokens, "seed": cfg.run.seed}
    options = {name: value for name, value in configured.items() if name in show.options}
    options |= families.sample_options(cfg)
    stopped = False

    def settle(token: Tensor) -> bool:
        nonlocal stopped
        run.phases.enter("sample")
        # Logits may differ in the last bit between ranks. One rank could therefore draw a different token, end the
        # sample with this token, and leave the other ranks waiting. To prevent this, all ranks use rank 0's token.
        dist.broadcast(token, src=0)
        stopped = signalled(run)
        return not stopped

    # Run eagerly, because compiled blocks would be recompiled for each new length of the sample.
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
    except ValueError as error:
        # The model refuses the prompt on all ranks. A finished run must not fail because of a sample.
        run.metrics.message(f"no sample of [eval] prompt: {error}")
        return True
    if not stopped:
        run.metrics.sample(step, shown)
    return not stopped
