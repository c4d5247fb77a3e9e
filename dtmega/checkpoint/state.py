"""The part of a checkpoint that describes the run: progress, counters and configuration."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field

from dtmega import __version__

Count = Annotated[int, Field(ge=0, lt=2**60)]


class Progress(NamedTuple):
    """Counts of a run's steps and samples. Batches, learning rate and dropout are functions of these counts.

    Attributes:
        step: number of steps done, including skipped steps.
        samples: number of samples read.
        skipped: number of steps that changed no weight.
        overflowed: number of steps that were skipped because a gradient overflowed in float16. These steps did not
            advance the learning rate.
        overflowed_samples: number of samples that the overflowed steps read.
    """

    step: Count = 0
    samples: Count = 0
    skipped: Count = 0
    overflowed: Count = 0
    overflowed_samples: Count = 0


class HealthState(NamedTuple):
    """Counts of consecutive high losses (`training/health.py`), and the validation that a signal has cut short.

    Attributes:
        losses_above: number of consecutive steps, up to the last step, with a loss above [train] stop_loss_above.
        rises: number of validations since the validation with the smallest loss.
        best_loss: smallest validation loss; None if [train] stop_validation_rises has compared no finite loss.
        best_step: step of the validation with the smallest loss.
        stopped: reason why [train] stop_loss_above or stop_validation_rises ended the run; '' if neither did.
        unvalidated: last step whose validation a signal has cut short. A run that starts at this step begins with its
            validation, as a new run, which starts at step 0, does.
    """

    losses_above: Count = 0
    rises: Count = 0
    best_loss: float | None = None
    best_step: Count = 0
    stopped: str = ""
    unvalidated: Count = 0


class Base(NamedTuple):
    """The base of a run with frozen weights (`base.py`), as recorded in the run's checkpoints.

    Attributes:
        path: directory or checkpoint of the base.
        digests: name of each tensor that the run's checkpoints leave out -> digest of the tensor.
        transposed: names of the layers that have adapters and whose weights are stored as [in, out].
        elements: number of elements in the tensors of `digests`.
    """

    path: str
    digests: dict[str, str]
    transposed: tuple[str, ...] = ()
    elements: int = 0


class ScaleState(NamedTuple):
    """The state of float16's loss scale (`training/loss_scale.py`).

    Attributes:
        scale: factor of the loss.
        growth: number of steps since the last overflow or the last doubling of the scale.
        hysteresis: number of overflows left until the scale is halved, including the overflow that halves it. At 0,
            every overflow halves the scale, until a doubling restores the initial number.
    """

    scale: Annotated[float, Field(gt=0)]
    growth: Annotated[int, Field(ge=0)]
    hysteresis: Annotated[int, Field(ge=0)]


class ExactState(NamedTuple):
    """The state of a run with [run] exact, from which it resumes (`training/exact`).

    Attributes:
        maxima: tensor name -> largest magnitude in any microbatch's gradient, in the last step that was not skipped.
        fixed: setting name -> value at the run's start, which must not change when the run resumes.
    """

    maxima: dict[str, Annotated[float, Field(gt=0)]]
    fixed: dict[str, Any]


START = Progress()
HEALTHY = HealthState()
# Identity of a run that another program began: dtmega cannot describe the data of such a run.
ELSEWHERE = {"origin": "another program"}


class State(BaseModel):
    """The part of a checkpoint that describes the run; the tensors are stored separately.

    Attributes:
        progress: counts of steps and samples done.
        updates: number of weight updates; AdamW calls this number `step`.
        recent: (loss, gradient norm) pairs of the last steps, if [train] skip_spikes needs them.
        loss_scale: state of float16's loss scale; None in other precisions.
        exact: largest gradient magnitudes and fixed settings of a run with [run] exact; otherwise None.
        health: counts of high losses.
        base: weights that the run started from, if the checkpoint holds only trained weights; otherwise None.
        identity: everything that determines the run's results apart from the weights, such as the seed and the digests
            of the data and the tokenizer; empty in a checkpoint that holds only weights.
        config: resolved configuration of the run, keyed by section.
        digest: digest of the directory from which the model is read; '' if there is no such directory.
        layout: number of processes, and size of each mesh axis; for human readers.
        versions: versions of dtmega, torch and Python that wrote the checkpoint; for human readers.
    """

    model_config = ConfigDict(extra="forbid")
    progress: Progress
    updates: Count
    recent: list[tuple[float, ...]]
    loss_scale: ScaleState | None
    exact: ExactState | None = None
    health: HealthState = HEALTHY
    base: Base | None = None
    identity: dict[str, Any]
    config: dict[str, dict[str, Any]]
    digest: str
    layout: dict[str, int]
    versions: dict[str, str]

    @classmethod
    def of(
        cls,
        config: dict[str, Any],
        *,
        progress: Progress = START,
        updates: int = 0,
        recent: Iterable[tuple[float, ...]] = (),
        loss_scale: ScaleState | None = None,
        exact: ExactState | None = None,
        health: HealthState = HEALTHY,
        base: Base | None = None,
        identity: Mapping[str, Any] | None = None,
        digest: str = "",
        layout: Mapping[str, int] | None = None,
    ) -> State:
        """Make a state with the versions of the running software. Each argument sets the attribute of the same name."""
        versions = {"dtmega": __version__, "torch": torch.__version__, "python": platform.python_version()}
        return cls(
            progress=progress,
            updates=updates,
            recent=list(recent),
            loss_scale=loss_scale,
            exact=exact,
            health=health,
            base=base,
            identity=dict(identity or {}),
            config=config,
            digest=digest,
            layout=dict(layout or {}),
            versions=versions,
        )
