"""Startup of a run: rank 0 locks the folders and finds checkpoints to resume from, and all ranks open the checkpoints.

Rank 0 locks the folders before reading their content, because a different process may still be writing the checkpoint
to resume from. All ranks then open the paths that rank 0 sends. Every rank writes its part of a checkpoint, so each
rank also checks that it sees rank 0's files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from dtmega import config
from dtmega.checkpoint import manifest, resume
from dtmega.checkpoint.files import Place, open_root
from dtmega.checkpoint.manifest import Damaged
from dtmega.checkpoint.reader import Checkpoint
from dtmega.checkpoint.sources import Source
from dtmega.distributed import exit_codes, process
from dtmega.distributed.agreement import Refused
from dtmega.distributed.exit_codes import ExitStatus
from dtmega.distributed.process import Claim
from dtmega.files import console
from dtmega.files.outages import at_start


class CandidatePaths(NamedTuple):
    """Results of rank 0's search for checkpoints, sent to the other ranks.

    Attributes:
        paths: checkpoints that the run may resume from, newest first.
        damage: one line for each damaged checkpoint.
        probe: name of a folder that rank 0 has made next to the checkpoints. A rank that does not see this folder is on
            a different file system.
    """

    paths: list[str]
    damage: list[str]
    probe: str


def claims(cfg: config.Config) -> Iterator[Claim]:
    """Lock the run directory, and the checkpoint folder if it is a different folder.

    Each yielded `Claim` holds a lock until the caller closes it.

    Raises:
        ValueError: another process has claimed one of the two folders, or one of the folders is not writable.
    """
    run_dir, root = Path(cfg.run.dir), resume.root_of(cfg)
    yield Claim(run_dir)
    if "://" in root:
        # A URL with credentials is refused before it is printed.
        console.say(f"{root} cannot be locked: {open_root(root).second_writer}")
    elif not (Path(root).exists() and Path(root).samefile(run_dir)):
        yield Claim(Path(root), key="[checkpoint] dir")


@contextlib.contextmanager
def early_end_recorded(run_dir: Path | None, exit_status: ExitStatus, *, first: bool) -> Iterator[None]:
    """Write `exit.json` if the `with` block raises an exception. Used until the run directory is claimed.

    The file is not written if the directory has never held a run, or if another process has claimed the directory.

    Args:
        run_dir: run directory; None if the command line does not name it.
        exit_status: object that receives the exit code and the reason, and writes `exit.json`.
        first: whether this is the first rank, which writes for all ranks.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, Refused):
            exit_status.set(error.exit_code, error.reason)
        else:
            exit_status.set(exit_codes.FAILED, exit_codes.error_summary(error))
        # Write `exit.json` only if the run directory has a lock file, which shows that a run has used the directory.
        # If another process is using the directory now, `Claim` raises ValueError and nothing is written.
        if first and run_dir is not None and (run_dir / process.LOCK).exists():
            with contextlib.suppress(ValueError), contextlib.closing(Claim(run_dir, patience_s=0)):
                exit_status.attach(run_dir, partial(resume.newest_of_run, run_dir))
                exit_status.write()
        raise


def check_is_trained(cfg: config.Config, init: Source | None) -> None:
    """Refuse to evaluate a model with random initial values.

    Args:
        cfg: configuration of the run.
        init: weights that a new run would start with; None if a new run would draw its weights from the seed.

    Raises:
        ValueError: there is no checkpoint, and `init` is None.
    """
    own_checkpoints = resume.finished(open_root(resume.root_of(cfg))) if cfg.checkpoint.resume == "auto" else []
    if not own_checkpoints and not resume.named_checkpoints(cfg) and init is None:
        raise ValueError(
            f"nothing to evaluate: expected a checkpoint in {resume.root_of(cfg)}, or weights to start with, got none "
            f"([eval] only; [run] dir, [checkpoint] dir, resume; [model] init_from)"
        )


def find_candidates(cfg: config.Config, identity: Mapping[str, Any], digest: str = "") -> CandidatePaths:
    """Find the checkpoints to resume from; leave a probe folder next to the checkpoints. Called on rank 0.

    Args:
        cfg: configuration of the run.
        identity: seed and digests that identify the run's data, as in `State.identity`.
        digest: digest of the model directory; '' if there is no model directory.

    Raises:
        ValueError: `resume.find_checkpoints` raises ValueError, or the checkpoint folder is not writable.
    """
    checkpoints, damage = resume.find_checkpoints(cfg, identity, digest)
    probe = _make_probe(open_root(resume.root_of(cfg)))
    return CandidatePaths([checkpoint.path for checkpoint in checkpoints], damage, probe)


def open_candidates(cfg: config.Config, by_rank_0: CandidatePaths) -> list[Checkpoint]:
    """Open rank 0's candidates on this rank, newest first.

    Raises:
        ValueError: this rank does not see rank 0's files.
    """
    files = open_root(resume.root_of(cfg))
    advice = "all ranks need one file system there ([run] dir, [checkpoint] dir)"
    if by_rank_0.probe not in files.folders():
        raise ValueError(f"cannot see what rank 0 has written in {files.path('')}: {advice}")
    paths = by_rank_0.paths
    try:
        return [Checkpoint(*resume.split_path(path)) for path in paths]
    except Damaged as error:
        raise ValueError(f"cannot read what rank 0 has found, {', '.join(paths)}: {error}; {advice}") from None


def params_dtype(cfg: config.Config, candidates: Sequence[Checkpoint], fast_bfloat16: bool) -> str:
    """The dtype that [precision] params selects.

    With `auto`, a resumed run keeps the dtype that it began with. A new run uses bfloat16 if bfloat16 is fast on
    the device, and float32 otherwise.

    Args:
        cfg: configuration of the run.
        candidates: checkpoints to resume from, newest first; empty for a new run.
        fast_bfloat16: whether bfloat16 is fast on the device.
    """
    if cfg.precision.params != "auto":
        return cfg.precision.params
    began_with = resume.state_of(candidates[0]).config.get("precision", {}).get("params") if candidates else None
    # The configuration in a converted checkpoint may lack the section [precision].
    if began_with in ("float32", "bfloat16", "float16"):
        return began_with
    return "bfloat16" if fast_bfloat16 else "float32"


def manifest_digests(sources: Sequence[Source | Checkpoint | None]) -> dict[str, str]:
    """The manifest digest of each checkpoint among `sources`, keyed by path. All ranks must get equal digests."""
    unwrapped = [getattr(source, "checkpoint", source) for source in sources]
    checkpoints = [source for source in unwrapped if isinstance(source, Checkpoint)]
    return {c.path: manifest.digest(manifest.dump(c.manifest)) for c in checkpoints}


def remove_probe(cfg: config.Config, by_rank_0: CandidatePaths) -> None:
    """Remove the probe folder. If the removal fails, as may happen under a URL, the next startup removes the folder."""
    with contextlib.suppress(Exception):
        open_root(resume.root_of(cfg)).remove(by_rank_0.probe)


def _make_probe(files: Place) -> str:
    """Make a folder that other ranks see only if they share this file system; return the folder's name."""
    # If this process is killed, the next process of the run removes folders with this prefix
    # (`resume.set_aside_newer`).
    probe = f".tmp-step-probe-{uuid4().hex}"
    try:
        files.make(probe)
        with files.create(probe, "probe") as file:
            file.write(b"is this one file system?")
    # The libraries that serve URLs may raise any type of exception.
    except Exception as error:
        raise at_start(error, f"cannot write to {files.path('')}: {error} ([run] dir, [checkpoint] dir)") from None
    return probe
