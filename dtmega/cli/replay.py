"""`dtmega replay`: replay steps of a run that used [run] exact, on any data layout; compare every bit.

A replay is a separate run in a temporary folder. A replay of step N resumes from the original run's newest checkpoint
before step N, with the recipe that the original run had at step N. The replay does not record its digests, but compares
them with the original run's digests (`training/exact/recorded.py`) and stops at the first step that differs.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dtmega import config, train
from dtmega.checkpoint import changes
from dtmega.checkpoint.files import open_root
from dtmega.checkpoint.reader import Checkpoint
from dtmega.checkpoint.resume import finished, name, state_of, step_of
from dtmega.checkpoint.state import Progress
from dtmega.distributed import exit_codes
from dtmega.distributed.agreement import Startup
from dtmega.distributed.exit_codes import ExitStatus
from dtmega.training import errors, exact, history
from dtmega.training.exact import recorded
from dtmega.training.exact.recorded import Comparison, Recorded
from dtmega.training.step import Run

SECTIONS = ("mesh", "pipeline", "fsdp")
KEYS = ("data.path", "data.train", "data.tokenizer", "data.num_workers", "model.path", "run.timeout_s")
# Keys that do not change what a step computes, although they are part of the recipe.
ENDINGS = ("exit_interval", "exit_duration_min", "drift_interval", "max_skipped")


class Source(NamedTuple):
    """The original run's digests and configuration, as a replay needs them.

    Attributes:
        recorded: digests that the run recorded.
        cfg: configuration of the replay, without the keys from the command line.
    """

    recorded: Recorded
    cfg: config.Config


def replay(run_dir: str, step: int, keys: Sequence[str], scratch: str | None, startup: Startup) -> int:
    """Replay a run up to `step`, from the run's newest checkpoint before `step`. All ranks call this function.

    Args:
        run_dir: the run directory, which is only read.
        step: number of the last step to replay.
        keys: configuration keys from the command line, with their values.
        scratch: folder for temporary files; None for the system's folder.
        startup: `Startup` of the ranks.

    Returns:
        The exit code: DONE if all bits are equal; DIFFERS on rank 0 if a bit differs; PREEMPTED if a signal ended the
        replay.

    Raises:
        Refused: the step cannot be replayed. The reason has already been printed.
    """
    comparison = Comparison(None)
    exit_status = ExitStatus()
    told: list[str] = []
    with ExitStack() as closing:
        with startup.step("run") as search:
            if startup.rank == 0:
                check_keys(keys)
                source = source_of(Path(run_dir), step)
                comparison = Comparison(source.recorded)
                folder = Path(tempfile.mkdtemp(prefix="dtmega-replay-", dir=scratch))
                closing.callback(shutil.rmtree, folder, ignore_errors=True)
                file = folder / "replay.toml"
                file.write_text(source.cfg.to_toml(), encoding="utf-8")
                search.send = ["--config", str(file), "--run.dir", str(folder / "run")]
        with exact.another_machine_allowed(told.append):
            run, at = train.begin([*search.received, *keys], startup, closing, exit_status)
        elsewhere = f"this is another machine than the run's: {'; '.join(told)}" if told else ""
        if elsewhere:
            run.metrics.message(elsewhere)
        try:
            differs, reached = go_over(run._replace(digests=comparison), at, step)
        except Exception as error:
            code = errors.exit_code(run, error)
            if code is None:
                raise
            return code
        if differs:
            doubt = f" (but {elsewhere})" if elsewhere else ""
            run.metrics.message(comparison.difference + doubt)
            # Only rank 0 exits with DIFFERS. If another rank exited with DIFFERS first, the launcher would kill rank 0
            # before rank 0 could remove its folder.
            return exit_status.set(exit_codes.DIFFERS, comparison.difference) if startup.rank == 0 else exit_codes.DONE
        run.metrics.message(comparison.summary())
        if reached < step:
            return exit_status.set(exit_codes.PREEMPTED, train.SIGNALLED)
        return exit_status.set(exit_codes.DONE, "the bits are equal")


def go_over(run: Run, at: Progress, step: int) -> tuple[bool, int]:
    """Run steps until a digest differs, the last step is done, or a signal arrives.

    Args:
        run: the replay. Rank 0 compares the replay's digests with the original run's digests.
        at: progress before the first step.
        step: number of the last step.

    Returns:
        A flag (True if a digest differs) and the number of the last completed step. All ranks return equal values.
    """
    end = run.cfg.end(at.step, at.samples)
    seen = torch.zeros(2, dtype=torch.int32, device=run.world.device)
    while at.step < step and not seen.any():
        run.phases.begin_step(at.step + 1)
        at, _ = train.one_step(run, next(run.batches), at, end)
        assert isinstance(run.digests, Comparison)
        seen = torch.tensor([run.digests.difference != "", bool(run.watch.signals)], dtype=torch.int32).to(seen.device)
        dist.all_reduce(seen, dist.ReduceOp.MAX)
    return bool(seen[0]), at.step


def check_keys(keys: Sequence[str]) -> None:
    """Refuse keys that could change what a step computes, or make the replay write to the original run.

    Raises:
        ValueError: a key is neither in SECTIONS nor in KEYS.
    """
    words = iter(keys)
    for word in words:
        flag, has_value, _ = word.partition("=")
        key = flag.removeprefix("--")
        if key.partition(".")[0] not in SECTIONS and key not in KEYS:
            expected = ", ".join([*(f"--{section}.*" for section in SECTIONS), *(f"--{known}" for known in KEYS)])
            raise ValueError(f"a replay has the run's recipe: expected one of {expected}, got {flag}")
        if not has_value:
            next(words, None)


def source_of(run_dir: Path, step: int) -> Source:
    """Find the digests and the configuration that the replay of a step needs.

    Raises:
        ValueError: the directory does not hold a run with [run] exact, or the step cannot be replayed.
    """
    cfg = config.read(run_dir / "config.toml")
    if not cfg.run.exact:
        raise ValueError(f"{run_dir} has written down no bits: expected a run with [run] exact = true")
    digests = recorded.read(run_dir)
    files = open_root(cfg.checkpoint.dir or str(run_dir / "checkpoints"))
    kept = list(map(step_of, finished(files)))
    possible = [number for number in sorted(digests.steps) if kept and number > min(kept)]
    if step not in possible:
        expected = f"one of {spans(possible)}" if possible else "a run that keeps a checkpoint"
        raise ValueError(
            f"step {step} of {run_dir} cannot be replayed, which needs its digests and a checkpoint before it: "
            f"expected {expected} (--step; [checkpoint] keep)"
        )
    first = max(number for number in kept if number < step)
    checkpoint = Checkpoint(files, name(first))
    state = state_of(checkpoint)
    if state.exact is None:
        raise ValueError(f"{checkpoint.path} is of a run without [run] exact")
    recipe = recipe_of(run_dir, first, step) or cfg.model_dump()
    return Source(digests, configured(recipe, checkpoint.path, state.exact.fixed))


def recipe_of(run_dir: Path, begin: int, step: int) -> Mapping[str, Mapping[str, Any]]:
    """The configuration that the run had at a step; {} if the configuration is unknown.

    Args:
        run_dir: the run directory.
        begin: step of the checkpoint that the replay resumes from.
        step: number of the last step to replay.

    Raises:
        ValueError: the run was restarted with a different recipe between the checkpoint and `step`.
    """
    parts = [start for start in history.parts(history.read(run_dir)) if start.step < step]
    if not parts:
        return {}
    recipe = parts[-1].config
    now = config.validate(recipe, history.NAME)
    ends = [start.step for start in parts[1:]]
    for start, end in zip(parts, ends, strict=False):
        if end <= begin:
            continue
        changed = [change.name for change in changes.changed(start.config, now, "printed") if change.key not in ENDINGS]
        if changed:
            raise ValueError(
                f"the recipe has changed after step {end}, of which no checkpoint is kept: {', '.join(changed)}; "
                f"expected a --step up to {end}"
            )
    return recipe


def configured(recipe: Mapping[str, Mapping[str, Any]], checkpoint: str, fixed: Mapping[str, Any]) -> config.Config:
    """The configuration for a replay on the smallest possible number of processes.

    Args:
        recipe: the run's configuration, keyed by section.
        checkpoint: path of the checkpoint that the replay resumes from.
        fixed: values that the run recorded at its first step (`training/exact`).
    """
    replaced: dict[str, dict[str, Any]] = {
        "mesh": {
            "tp": fixed["[mesh] tp"],
            "cp": fixed["[mesh] cp"],
            "cp_form": "heads" if fixed["[mesh] cp_form = 'heads'"] else "gather",
            "sequence_parallel": recipe["mesh"]["sequence_parallel"],
        },
        "log": {"interval": recipe["log"]["interval"], "tensorboard": False},
        "checkpoint": {
            "resume": checkpoint,
            "allow_changed_data": recipe["checkpoint"]["allow_changed_data"],
            "interval": 0,
            "final": False,
        },
        "train": {**recipe["train"], "stop_validation_rises": 0, "stop_loss_above": [], "kill_switch": ""},
    }
    rest = {section: keys for section, keys in recipe.items() if section not in (*replaced, *SECTIONS, "profile")}
    return config.validate(rest | replaced, "the run's configuration")


def spans(numbers: Sequence[int]) -> str:
    """Format ascending numbers as ranges: [3, 4, 5, 9] -> 3 to 5, 9."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(f"{low} to {high}" if low < high else str(low) for low, high in found)
