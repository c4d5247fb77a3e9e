"""The checkpoint that a run goes on from: the newest intact one, a named one, or none; and whether it may."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dtmega import __version__, config
from dtmega.checkpoint import changes, manifest
from dtmega.checkpoint.files import Disk, Remote, open_root
from dtmega.checkpoint.manifest import Damaged
from dtmega.checkpoint.reader import Checkpoint
from dtmega.loss_scale import ScaleState
from dtmega.sections import read_toml

FINISHED = re.compile(r"step-\d{8}")
Count = Annotated[int, Field(ge=0, lt=2**60)]


class Progress(NamedTuple):
    """The counts of what a run has consumed. Batches, learning rate and dropout are functions of these.

    Attributes:
        skipped: steps that changed no weight.
        overflowed: those of them that were skipped because float16 could not hold a gradient, and their samples. The
            learning rate did not move in them.
    """

    step: Count = 0
    samples: Count = 0
    skipped: Count = 0
    overflowed: Count = 0
    overflowed_samples: Count = 0


START = Progress()
# The identity of a run of another program, of whose data nothing is known here.
ELSEWHERE = {"origin": "another program"}


class State(BaseModel):
    """The things that a run saves beside its tensors.

    Attributes:
        progress: what is done, as counts.
        updates: of the weights; what AdamW calls `step`.
        recent: (loss, gradient norm) of the last steps, where [train] skip_spikes looks at them.
        loss_scale: float16's; None in another precision.
        identity: what the numbers depend on beside weights: digests of data and tokenizer, the seed, ...; empty where
            there are weights only.
        config: of the run, resolved; by section.
        digest: of the directory that the model is read from; '' where there is none.
        layout, versions: where it was written, and by what; for people.
    """

    model_config = ConfigDict(extra="forbid")
    progress: Progress
    updates: Count
    recent: list[tuple[float, ...]]
    loss_scale: ScaleState | None = None
    identity: dict[str, Any]
    config: dict[str, dict[str, Any]]
    digest: str = ""
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
        identity: Mapping[str, Any] | None = None,
        digest: str = "",
        layout: Mapping[str, int] | None = None,
    ) -> State:
        """The versions of this dtmega, torch and Python."""
        versions = {"dtmega": __version__, "torch": torch.__version__, "python": platform.python_version()}
        return cls(
            progress=progress,
            updates=updates,
            recent=list(recent),
            loss_scale=loss_scale,
            identity=dict(identity or {}),
            config=config,
            digest=digest,
            layout=dict(layout or {}),
            versions=versions,
        )


def name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: str) -> int:
    """The step of a checkpoint's name."""
    return int(folder.partition("-")[2])


def finished(files: Disk | Remote) -> list[str]:
    """The complete checkpoints, oldest first."""
    found = [folder for folder in files.folders() if FINISHED.fullmatch(folder)]
    return found if isinstance(files, Disk) else [folder for folder in found if manifest.NAME in files.sizes(folder)]


def root_of(cfg: config.Config) -> str:
    return cfg.checkpoint.dir or str(Path(cfg.run.dir, "checkpoints"))


def split_path(path: str) -> tuple[Disk | Remote, str]:
    """A checkpoint's path -> what holds it, and its name in there."""
    parent, _, folder = path.rstrip("/").rpartition("/")
    return open_root(parent or ("/" if path.startswith("/") else ".")), folder


def open_checkpoint(path: str, step: int | None = None) -> Checkpoint:
    """The checkpoint at `path`, or the newest intact one of the run (or of the folder of checkpoints) that is there.

    A run directory whose `config.toml` has `[checkpoint] dir` has them there, and nowhere else. The run may go on, and
    delete on a disk what is being read.

    Args:
        step: take the one of this step, of a run.

    Raises:
        ValueError: nothing like that there.
        Damaged: nothing intact.
    """
    files, folder = split_path(path)
    if folder in files.folders() and manifest.NAME in files.sizes(folder):
        return Checkpoint(files, folder).hold()
    damage: list[str] = []
    for root in _roots(path):
        if step is not None and (there := finished(open_root(root))):
            return _of_step(open_root(root), there, step)
        newest = _newest(open_root(root), damage)
        if newest is not None:
            return newest
    if damage:
        raise Damaged("\n".join(damage))
    raise ValueError(_nothing_there(path))


def _roots(path: str) -> list[str]:
    """The places where the checkpoints are of the run, or of the folder of checkpoints, at a path."""
    elsewhere = _dir_of_run(path)
    return [elsewhere] if elsewhere else [f"{path}/checkpoints", path]


def _nothing_there(path: str) -> str:
    if elsewhere := _dir_of_run(path):
        return (
            f"{path}/config.toml has its checkpoints in {elsewhere} ([checkpoint] dir; relative to the working "
            f"directory, {Path.cwd()}), and there are none"
        )
    return f"{path} is neither a checkpoint nor a run directory with one"


def newest_of_run(run_dir: Path) -> tuple[int, str]:
    """Step and path of the newest checkpoint of the run in a directory, not opened; (0, "") if there is none."""
    try:
        files = open_root(_dir_of_run(str(run_dir)) or str(run_dir / "checkpoints"))
        there = finished(files)
    except Exception:  # whatever the library behind a URL raises
        return 0, ""
    return (step_of(there[-1]), files.path(there[-1])) if there else (0, "")


def _of_step(files: Disk | Remote, there: list[str], step: int) -> Checkpoint:
    if name(step) not in there:
        steps = ", ".join(str(step_of(folder)) for folder in there)
        raise ValueError(f"{files.path('')} has no checkpoint of step {step}: expected one of {steps}")
    return Checkpoint(files, name(step)).hold()


def _newest(files: Disk | Remote, damage: list[str]) -> Checkpoint | None:
    """The newest intact one, to read; what is wrong with others is added to `damage`."""
    damaged: set[str] = set()
    while folders := [folder for folder in finished(files) if folder not in damaged]:
        try:
            return Checkpoint(files, folders[-1]).hold()
        except Damaged as error:
            if folders[-1] in finished(files):  # else the run has deleted it since, and there is a newer one
                damaged.add(folders[-1])
                damage.append(f"{files.path(folders[-1])}: {error}")
    return None


def _dir_of_run(run_dir: str) -> str:
    """`[checkpoint] dir` of the run in this directory; '' where there is none, or no run."""
    try:
        table = read_toml(Path(run_dir, "config.toml"))
    except ValueError:
        return ""
    section = table.get("checkpoint")
    found = section.get("dir") if isinstance(section, dict) else None
    return found if isinstance(found, str) else ""


def named_checkpoints(cfg: config.Config) -> list[tuple[Disk | Remote, str]]:
    """The checkpoint that `[checkpoint] resume` names, or those of the run that it names, the newest first.

    Returns:
        [] where it names neither.

    Raises:
        ValueError: there is nothing like that.
    """
    path = cfg.checkpoint.resume
    if path in ("auto", "none"):
        return []
    files, folder = split_path(path)
    if folder in files.folders() and (FINISHED.fullmatch(folder) or manifest.NAME in files.sizes(folder)):
        return [(files, folder)]
    for root in map(open_root, _roots(path)):
        if there := finished(root):
            return [(root, of_a_step) for of_a_step in there[::-1]]
    raise ValueError(f"{_nothing_there(path)} ([checkpoint] resume)")


def find_checkpoints(
    cfg: config.Config, identity: Mapping[str, Any], digest: str = ""
) -> tuple[list[Checkpoint], list[str]]:
    """The checkpoints that `[checkpoint] resume` allows to go on from, the newest first; what is wrong with others.

    Raises:
        ValueError: no such folder, or of a run with another model, other data, tokenizer or seed.
        Damaged: there are checkpoints, and no manifest of one can be read.
    """
    resume, restarted = cfg.checkpoint.resume, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    own = open_root(root_of(cfg))
    places = [(own, folder) for folder in finished(own)[::-1]] if resume == "auto" or restarted else []
    places += named_checkpoints(cfg)
    found, damage = [], []
    for files, folder in places:
        try:
            checkpoint = Checkpoint(files, folder)
            written_under = state_of(checkpoint).config.get("checkpoint", {}).get("resume")
        except Damaged as error:
            damage.append(f"damaged: {files.path(folder)}: {error}")
            continue
        # What torchrun starts again goes on with what the attempt before it has saved, whose [checkpoint] resume was
        # the same; what else is there is what that attempt was to leave behind, and may not have set aside yet.
        if resume == "auto" or files is not own or written_under == resume:
            found.append(checkpoint)
    if damage and not found:
        raise Damaged("\n".join(damage))
    if found:
        check_same(found[0], cfg, identity, digest)
    return found, damage


def check_same(checkpoint: Checkpoint, cfg: config.Config, identity: Mapping[str, Any], digest: str = "") -> None:
    """Refuse to go on from a checkpoint of another run.

    Raises:
        ValueError: a run with this configuration cannot go on from there; names what differs.
    """
    state = state_of(checkpoint)
    anew = "to start anew: another [run] dir or [checkpoint] resume = 'none'"
    if not state.identity:
        raise ValueError(f"{checkpoint.path} holds weights only, no run: name it in [model] init_from")
    refused = changes.changed(state.config, cfg, "refused")
    of_data = [change for change in refused if change.section == "data" or change.name == "[run] seed"]
    others = [f"{change.name} was {change.was}, is {change.now}" for change in refused if change not in of_data]
    if state.digest != digest:
        others.append(f"the digest of config.json in [model] path was '{state.digest}', is '{digest}'")
    if others:
        raise ValueError(f"{checkpoint.path} is of another run: {'; '.join(others)} ({anew})")
    if state.identity == ELSEWHERE:
        if not cfg.checkpoint.allow_changed_data:
            raise ValueError(
                f"{checkpoint.path} is of a run of another program, on data that cannot be compared with these: to go "
                f"on, [checkpoint] allow_changed_data = true ({anew})"
            )
        return
    order = state.identity.get("order", 1)  # runs that do not name it are from before it was ever changed
    if order != identity.get("order", order):
        raise ValueError(
            f"{checkpoint.path} is of a run that reads its samples in order number {order}, this dtmega in number "
            f"{identity['order']}: the order of samples has changed, so finish that run with the version that wrote it "
            f"({anew})"
        )
    differing = {change.name: (change.was, change.now) for change in of_data}
    for key in {**state.identity, **identity}:
        there, here = state.identity.get(key), identity.get(key)
        if there != here:
            differing[key] = there, here
    if differing and not cfg.checkpoint.allow_changed_data:
        lines = "; ".join(f"{key} was {there}, is {here}" for key, (there, here) in differing.items())
        raise ValueError(
            f"{checkpoint.path} is of a run on other data: {lines} (to go on all the same: [checkpoint] "
            f"allow_changed_data = true; {anew})"
        )


def state_of(checkpoint: Checkpoint) -> State:
    try:
        state = State.model_validate(checkpoint.manifest.state)
    except ValidationError as error:
        raise Damaged(f"{manifest.NAME}: {error}") from None
    earlier = state.config.get("model", {}).get("digest")  # where earlier versions kept it
    return state.model_copy(update={"digest": earlier}) if isinstance(earlier, str) else state


def command_that_goes_on(cfg: config.Config) -> str:
    """The command to give after a run has stopped and saved."""
    named = {"auto": "", "none": "start anew"}.get(cfg.checkpoint.resume, f"go back to {cfg.checkpoint.resume}")
    if not named:
        return "the same command goes on from there"
    return f"with --checkpoint.resume auto the same command goes on from there; as it is, it would {named}"


def set_aside_newer(cfg: config.Config, step: int) -> None:
    """Move checkpoints of later steps out of the way of a run that starts again from `step`; nothing is deleted.

    Leftovers of killed saves are deleted.
    """
    files = open_root(root_of(cfg))
    for folder in files.folders():
        if folder.startswith((".tmp-step-", ".old-step-")):
            with contextlib.suppress(Exception):  # what cannot be deleted takes room, no more
                files.remove(folder)
    newer = [folder for folder in finished(files) if step_of(folder) > step]
    if newer:
        there = files.folders()
        n = next(n for n in itertools.count(1) if f"superseded-{n}" not in there)
        for folder in newer:
            files.move(folder, f"superseded-{n}")
