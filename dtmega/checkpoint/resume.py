"""Find the checkpoint that a run resumes from; refuse a checkpoint that belongs to a different run.

A run resumes from its newest intact checkpoint, or from the checkpoint that [checkpoint] resume names. A new run has no
checkpoint.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dtmega import config, rooms
from dtmega.checkpoint import manifest
from dtmega.checkpoint.files import Place, open_root
from dtmega.checkpoint.manifest import Damaged
from dtmega.checkpoint.reader import Checkpoint
from dtmega.checkpoint.state import ELSEWHERE, State
from dtmega.config.reading import read_toml
from dtmega.files import console

FINISHED = re.compile(r"step-\d{8}")


def name(step: int) -> str:
    """The folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(folder: str) -> int:
    """The step number in a checkpoint's folder name."""
    return int(folder.partition("-")[2])


def finished(files: Place) -> list[str]:
    """The folder names of the complete checkpoints, oldest first."""
    folders = [folder for folder in files.folders() if FINISHED.fullmatch(folder)]
    return [folder for folder in folders if files.is_complete(folder)]


def root_of(cfg: config.Config) -> str:
    """The folder or URL where a run writes its checkpoints."""
    return cfg.checkpoint.dir or str(Path(cfg.run.dir, "checkpoints"))


def split_path(path: str) -> tuple[Place, str]:
    """Open the parent folder of a checkpoint's path. Return the parent and the name of the checkpoint's folder."""
    parent, _, folder = path.rstrip("/").rpartition("/")
    return open_root(parent or ("/" if path.startswith("/") else ".")), folder


def open_checkpoint(path: str, step: int | None = None) -> Checkpoint:
    """Open the checkpoint at `path`, or the newest intact checkpoint if `path` is a run or a folder of checkpoints.

    If a run directory's `config.toml` sets `[checkpoint] dir`, only that folder is searched for checkpoints. Data files
    on a local disk are held open, because the run may still be training and delete the checkpoint.

    Args:
        path: folder or URL of a checkpoint, a run directory, or a folder of checkpoints.
        step: step of the checkpoint to open; None for the newest intact checkpoint.

    Raises:
        ValueError: `path` has no checkpoint, or no checkpoint of this step.
        Damaged: all checkpoints are damaged.
    """
    files, folder = split_path(path)
    if folder in files.folders() and manifest.NAME in files.sizes(folder):
        return Checkpoint(files, folder).hold()
    damage: list[str] = []
    for root in _roots(path):
        if step is not None and (folders := finished(open_root(root))):
            return _open_step(open_root(root), folders, step)
        newest = _open_newest(open_root(root), damage)
        if newest is not None:
            return newest
    if damage:
        raise Damaged("\n".join(damage))
    raise ValueError(_no_checkpoint(path))


def _roots(path: str) -> list[str]:
    """The folders or URLs to search for checkpoints, in order. `path` is a run directory or a folder of checkpoints."""
    separate_dir = _checkpoint_dir_of_run(path)
    return [separate_dir] if separate_dir else [f"{path}/checkpoints", path]


def _no_checkpoint(path: str) -> str:
    """The error message for a path that has no checkpoint."""
    if separate_dir := _checkpoint_dir_of_run(path):
        return (
            f"{path}/config.toml has its checkpoints in {separate_dir} ([checkpoint] dir; relative to the working "
            f"directory, {Path.cwd()}), and there are none"
        )
    cure = "; the newest checkpoint of this run is 'auto'" if path.lower() in ("latest", "last", "newest") else ""
    if Path(path, "config.json").is_file():
        cure = ", but a model of transformers (config.json): generate with transformers, or train with [model] path"
    return f"{path} is neither a checkpoint nor a run directory with one{cure}"


def newest_of_run(run_dir: Path) -> tuple[int, str]:
    """Return (step, path) of a run's newest checkpoint without opening it; (0, "") if there is no checkpoint."""
    try:
        files = open_root(_checkpoint_dir_of_run(str(run_dir)) or str(run_dir / "checkpoints"))
        folders = finished(files)
    # The libraries that serve URLs may raise any type of exception.
    except Exception:
        return 0, ""
    return (step_of(folders[-1]), files.path(folders[-1])) if folders else (0, "")


def _open_step(files: Place, folders: list[str], step: int) -> Checkpoint:
    """Open the checkpoint of a step.

    Args:
        files: disk or object store that holds the checkpoints.
        folders: folder names of all complete checkpoints in `files`.
        step: step number.

    Raises:
        ValueError: there is no checkpoint of this step.
    """
    if name(step) not in folders:
        steps = ", ".join(str(step_of(folder)) for folder in folders)
        raise ValueError(f"{files.path('')} has no checkpoint of step {step}: expected one of {steps}")
    return Checkpoint(files, name(step)).hold()


def _open_newest(files: Place, damage: list[str]) -> Checkpoint | None:
    """Open the newest intact checkpoint, if any. Append a line to `damage` for each damaged checkpoint."""
    damaged: set[str] = set()
    # List the folders anew each time, because the run may save and delete checkpoints meanwhile.
    while folders := [folder for folder in finished(files) if folder not in damaged]:
        newest = folders[-1]
        try:
            return Checkpoint(files, newest).hold()
        except Damaged as error:
            # If the folder is gone, the run has deleted this checkpoint and saved a newer checkpoint.
            if newest in finished(files):
                damaged.add(newest)
                damage.append(f"{files.path(newest)}: {error}")
    return None


def _checkpoint_dir_of_run(run_dir: str) -> str:
    """The value of `[checkpoint] dir` in a run's `config.toml`; '' if the key is not set, or if there is no run."""
    try:
        table = read_toml(Path(run_dir, "config.toml"))
    except ValueError:
        return ""
    section = table.get("checkpoint")
    checkpoint_dir = section.get("dir") if isinstance(section, dict) else None
    return checkpoint_dir if isinstance(checkpoint_dir, str) else ""


def named_checkpoints(cfg: config.Config) -> list[tuple[Place, str]]:
    """The checkpoint that `[checkpoint] resume` names or, if that key names a run, the run's checkpoints, newest first.

    Returns:
        Pairs (disk or object store, name of the checkpoint's folder); [] if `resume` is "auto" or "none".

    Raises:
        ValueError: the path in `[checkpoint] resume` has no checkpoint.
    """
    path = cfg.checkpoint.resume
    if path in ("auto", "none"):
        return []
    files, folder = split_path(path)
    if folder in files.folders() and (FINISHED.fullmatch(folder) or manifest.NAME in files.sizes(folder)):
        return [(files, folder)]
    for root in map(open_root, _roots(path)):
        if folders := finished(root):
            return [(root, folder) for folder in folders[::-1]]
    raise ValueError(f"{_no_checkpoint(path)} ([checkpoint] resume)")


def find_checkpoints(
    cfg: config.Config, identity: Mapping[str, Any], digest: str = ""
) -> tuple[list[Checkpoint], list[str]]:
    """The checkpoints from which `[checkpoint] resume` allows the run to resume.

    Args:
        cfg: configuration of the run.
        identity: seed and digests that identify the run's data, as in `State.identity`.
        digest: digest of the model directory; '' if there is no model directory.

    Returns:
        The checkpoints, newest first, and a line for each checkpoint whose manifest is damaged.

    Raises:
        ValueError: the named checkpoint does not exist, or the newest checkpoint belongs to a run with a different
            model, data, tokenizer or seed.
        Damaged: there are checkpoints, but no manifest can be read.
    """
    requested = cfg.checkpoint.resume
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    own_root = open_root(root_of(cfg))
    places = []
    if requested == "auto" or restarted:
        places = [(own_root, folder) for folder in finished(own_root)[::-1]]
    places += named_checkpoints(cfg)
    candidates, damage = [], []
    for files, folder in places:
        try:
            checkpoint = Checkpoint(files, folder)
            written_under = state_of(checkpoint).config.get("checkpoint", {}).get("resume")
        except Damaged as error:
            damage.append(f"damaged: {files.path(folder)}: {error}")
            continue
        # Without "auto", the run's own folder is read only if torchrun has restarted the job. Checkpoints that the
        # previous attempt saved there are candidates: they record the same value of [checkpoint] resume as this
        # attempt. The folder also holds older checkpoints if the previous attempt died before setting them aside.
        # Older checkpoints are not candidates, because the user asked not to resume from them.
        if requested == "auto" or files is not own_root or written_under == requested:
            candidates.append(checkpoint)
    if damage and not candidates:
        raise Damaged("\n".join(damage))
    # Compare only the newest checkpoint: older checkpoints may predate a change of the data that [checkpoint]
    # allow_changed_data permitted.
    if candidates:
        check_same(candidates[0], cfg, identity, digest)
    return candidates, damage


def check_same(checkpoint: Checkpoint, cfg: config.Config, identity: Mapping[str, Any], digest: str = "") -> None:
    """Refuse to resume from a checkpoint that belongs to a different run.

    Args:
        checkpoint: checkpoint to resume from.
        cfg: configuration of the run.
        identity: seed and digests that identify the run's data, as in `State.identity`.
        digest: digest of the model directory; '' if there is no model directory.

    Raises:
        ValueError: a run with this configuration cannot resume from the checkpoint; the message names each difference.
    """
    state = state_of(checkpoint)
    how_to_start_anew = "to start anew: another [run] dir or [checkpoint] resume = 'none'"
    if not state.identity:
        raise ValueError(f"{checkpoint.path} holds weights only, no run: name it in [model] init_from")

    # Changed data or a changed seed may be allowed, so both are compared last. Refuse every other change here.
    refused = [] if is_unchanged(state.config, cfg) else rooms.changes().changed(state.config, cfg, "refused")
    data_changes = [change for change in refused if change.section == "data" or change.name == "[run] seed"]
    others = [f"{change.name} was {change.was}, is {change.now}" for change in refused if change not in data_changes]
    if state.digest != digest:
        others.append(f"the digest of config.json in [model] path was '{state.digest}', is '{digest}'")
    if others:
        raise ValueError(f"{checkpoint.path} is of another run: {'; '.join(others)} ({how_to_start_anew})")
    if state.identity == ELSEWHERE:
        if not cfg.checkpoint.allow_changed_data:
            raise ValueError(
                f"{checkpoint.path} is of a run of another program, on data that cannot be compared with these: to go "
                f"on, [checkpoint] allow_changed_data = true ({how_to_start_anew})"
            )
        return

    differing = {change.name: (change.was, change.now) for change in data_changes}
    # Compare the keys of both identities: a newer dtmega may have added or removed keys.
    for key in {**state.identity, **identity}:
        was, now = state.identity.get(key), identity.get(key)
        if was != now:
            differing[key] = was, now
    order_before, order = differing.pop("order", (0, 0))
    if order_before != order and not differing:
        raise ValueError(
            f"{checkpoint.path} is of a run that reads its samples in order number {order_before}, this dtmega in "
            f"number {order}: the order of samples has changed, so finish that run with the version that wrote it "
            f"({how_to_start_anew})"
        )
    lines = "; ".join(f"{key} was {was}, is {now}" for key, (was, now) in differing.items())
    if order_before != order:
        raise ValueError(
            f"{checkpoint.path} is of a run that reads its samples in another order: {lines} ({how_to_start_anew})"
        )
    if differing and not cfg.checkpoint.allow_changed_data:
        raise ValueError(
            f"{checkpoint.path} is of a run on other data: {lines} (to go on all the same: [checkpoint] "
            f"allow_changed_data = true; {how_to_start_anew})"
        )


def is_unchanged(then: Mapping[str, Mapping[str, Any]], now: config.Config) -> bool:
    """True if the configuration is that of a checkpoint. [precision] params = "auto" counts as equal to any dtype."""
    values = now.model_dump()
    if now.precision.params == "auto":
        values["precision"]["params"] = then.get("precision", {}).get("params")
    return values == then


def state_of(checkpoint: Checkpoint) -> State:
    """The state recorded in a checkpoint's manifest.

    Raises:
        Damaged: the manifest does not hold a valid state.
    """
    try:
        return State.model_validate(checkpoint.manifest.state)
    except ValidationError as error:
        raise Damaged(f"{manifest.NAME}: {error}") from None


def how_to_resume(cfg: config.Config) -> str:
    """Advice on how to resume a run that has stopped early and saved a checkpoint."""
    resume = cfg.checkpoint.resume
    if resume == "auto":
        return "the same command goes on from there"
    otherwise = "start anew" if resume == "none" else f"go back to {resume}"
    return f"with --checkpoint.resume auto the same command goes on from there; as it is, it would {otherwise}"


def set_aside_newer(cfg: config.Config, step: int) -> None:
    """Move the checkpoints of steps after `step` into a folder `superseded-N`.

    The run restarts from `step`. Without the move, the next startup would resume from one of the later checkpoints.
    Leftovers of killed saves are deleted. Files that may or may not be leftovers are reported to the user.
    """
    files = open_root(root_of(cfg))
    # A leftover that cannot be deleted only takes up space.
    with contextlib.suppress(Exception):
        for line in files.clear_leftovers():
            console.say(line)
    newer = [folder for folder in finished(files) if step_of(folder) > step]
    if newer:
        existing = files.folders()
        n = next(n for n in itertools.count(1) if f"superseded-{n}" not in existing)
        for folder in newer:
            files.move(folder, f"superseded-{n}")
