"""The folders a run writes and the checkpoints it goes on from: claimed and found by rank 0, seen by all, or refused.

Rank 0 claims, then looks: another process may still be writing the checkpoint to go on from. The others open the
paths that it tells them; that they see the same files is checked, as every rank writes its part of a checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from dtmega import config, job, output
from dtmega.checkpoint import manifest, resume
from dtmega.checkpoint.files import Disk, Remote, open_root
from dtmega.checkpoint.manifest import Damaged
from dtmega.checkpoint.reader import Checkpoint
from dtmega.checkpoint.weights import Weights
from dtmega.formats.sources import Source
from dtmega.job import Claim
from dtmega.startup import Refused


class Found(NamedTuple):
    """The things that rank 0 found or made, for the other ranks.

    Attributes:
        paths: of checkpoints to go on from, the newest first.
        damage: what is wrong with others, one line each.
        probe: a folder that it has made where checkpoints are written, for the other ranks to see.
    """

    paths: list[str]
    damage: list[str]
    probe: str


def claims(cfg: config.Config) -> Iterator[Claim]:
    """The right to write in the run directory, and where the checkpoints are; the caller closes them.

    Raises:
        ValueError: somebody else has one of them, or it cannot be written.
    """
    run_dir, root = Path(cfg.run.dir), resume.root_of(cfg)
    yield Claim(run_dir)
    if "://" in root:
        output.say(f"{root} cannot be locked: a second run that writes there would not be noticed")
    elif not (Path(root).exists() and Path(root).samefile(run_dir)):
        yield Claim(Path(root), key="[checkpoint] dir")


@contextlib.contextmanager
def early_end_told(run_dir: Path | None, ending: job.Ending, *, first: bool) -> Iterator[None]:
    """Tell of what ends this block in the `exit.json` of the run in this directory, in which nothing is claimed yet.

    Nothing is written where no run has been, and where another process has the right to write.

    Args:
        run_dir: None if it cannot be told.
        first: this is the first rank, which writes for all.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, Refused):
            ending.because(error.exit_code, error.reason)
        else:
            ending.because(job.FAILED, job.described(error))
        if first and run_dir is not None and (run_dir / job.LOCK).exists():
            with contextlib.suppress(ValueError), contextlib.closing(Claim(run_dir, patience_s=0)):
                ending.go_on_from(run_dir, partial(resume.newest_of_run, run_dir))
                ending.write()
        raise


def check_is_trained(cfg: config.Config, init: Source | None) -> None:
    """Refuse to evaluate values that are drawn from the seed.

    Args:
        init: the weights that a new run would start with.

    Raises:
        ValueError: there is neither a checkpoint nor such weights.
    """
    own = resume.finished(open_root(resume.root_of(cfg))) if cfg.checkpoint.resume == "auto" else []
    if not own and not resume.named_checkpoints(cfg) and init is None:
        raise ValueError(
            f"nothing to evaluate: expected a checkpoint in {resume.root_of(cfg)}, or weights to start with, got none "
            f"([eval] only; [run] dir, [checkpoint] dir, resume; [model] init_from)"
        )


def find(cfg: config.Config, identity: Mapping[str, Any], digest: str = "") -> Found:
    """Find the checkpoints to go on from, on rank 0, and leave a probe where checkpoints are written.

    Raises:
        ValueError: as `resume.find_checkpoints`; or nothing can be written where checkpoints are.
    """
    checkpoints, damage = resume.find_checkpoints(cfg, identity, digest)
    return Found([checkpoint.path for checkpoint in checkpoints], damage, _leave_probe(open_root(resume.root_of(cfg))))


def see(cfg: config.Config, found: Found) -> list[Checkpoint]:
    """The checkpoints that rank 0 found, opened on this rank.

    Raises:
        ValueError: this rank does not see it.
    """
    files = open_root(resume.root_of(cfg))
    advice = "all ranks need one file system there ([run] dir, [checkpoint] dir)"
    if found.probe not in files.folders():
        raise ValueError(f"cannot see what rank 0 has written in {files.path('')}: {advice}")
    try:
        return [Checkpoint(*resume.split_path(path)) for path in found.paths]
    except Damaged as error:
        raise ValueError(f"cannot read what rank 0 has found, {', '.join(found.paths)}: {error}; {advice}") from None


def params(cfg: config.Config, candidates: Sequence[Checkpoint], fast_bfloat16: bool) -> str:
    """[precision] params, which `auto` leaves to the run that goes on here, and of a new one to the device."""
    if cfg.precision.params != "auto":
        return cfg.precision.params
    began_with = resume.state_of(candidates[0]).config.get("precision", {}).get("params") if candidates else None
    if began_with in ("float32", "bfloat16", "float16"):  # a converted one may have none
        return began_with
    return "bfloat16" if fast_bfloat16 else "float32"


def digests(sources: Sequence[Source | Checkpoint | None]) -> dict[str, str]:
    """Path -> digest of the manifest, in which all ranks must agree; of those that are checkpoints."""
    opened = [source.checkpoint if isinstance(source, Weights) else source for source in sources]
    return {c.path: manifest.digest(manifest.dump(c.manifest)) for c in opened if isinstance(c, Checkpoint)}


def remove_probe(cfg: config.Config, found: Found) -> None:
    """Remove the probe. Where a library behind a URL fails, the next start clears it up."""
    with contextlib.suppress(Exception):
        open_root(resume.root_of(cfg)).remove(found.probe)


def _leave_probe(files: Disk | Remote) -> str:
    probe = f".tmp-step-probe-{uuid4().hex}"  # a name that the next start cleans up if this one is killed
    try:
        files.make(probe)
        with files.create(probe, "probe") as file:
            file.write(b"is this one file system?")
    except Exception as error:  # whatever the library behind a URL raises
        raise ValueError(f"cannot write to {files.path('')}: {error} ([run] dir, [checkpoint] dir)") from None
    return probe
