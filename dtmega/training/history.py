"""Write and read `starts.jsonl`, which gets one line each time a run starts.

    append(run_dir, step=100, attempt="4711-0", config=cfg.model_dump(), layout={"processes": 4, "tp": 2, ...}, ...)
    starts = read(run_dir)        # oldest first
    parts(starts)                 # the starts that wrote the steps in metrics.jsonl

The lines are for people and for `dtmega report`. A run reads them only if it sees no checkpoint, to learn whether it
has had one. `config.toml` and the newest checkpoint describe only the last start.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator

from dtmega import __version__
from dtmega.distributed.exit_codes import MAX_STEP
from dtmega.files import atomic
from dtmega.files.untrusted_json import parse_object
from dtmega.training.records.lines import parse_line

NAME = "starts.jsonl"


Count = Annotated[int, Field(ge=0, le=MAX_STEP)]


class Start(BaseModel):
    """One start of a run.

    Attributes:
        step: number of steps done before this start; 0 for a new run.
        time: time of the start, UTC in ISO 8601.
        attempt: name of the attempt, as in `ExitStatus`; '' if an earlier version wrote the line.
        config: resolved configuration, as section -> key -> value.
        layout: number of processes, under the key "processes", and size of each mesh axis, under the axis's name.
        device: name of the device on which each process computes, such as "cpu" or "NVIDIA H100 80GB HBM3".
        parameters: number of parameters in the whole model.
        frozen: number of parameters that are not trained.
        steps: last planned step of the run at this start.
        versions: versions of dtmega, torch and Python, keyed by name.
    """

    model_config = ConfigDict(extra="ignore", strict=True)  # a later version may write more keys
    step: Count
    time: str
    attempt: str = ""
    config: dict[str, dict[str, Any]]
    layout: dict[str, Count]
    device: str
    parameters: Count
    frozen: Count = 0
    steps: Count
    versions: dict[str, str]

    @field_validator("config")
    @classmethod
    def _is_a_configuration(cls, config: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Refuse values that cannot be printed as TOML, such as null in a list or 10^30."""
        for keys in config.values():
            for value in keys.values():
                if value is not None and not _is_toml(value):
                    raise ValueError("expected values that a TOML file has")
        return config


def _is_toml(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_toml, value.values()))
    if isinstance(value, list):
        return all(map(_is_toml, value))
    if isinstance(value, int):
        return abs(value) < 2**63
    return isinstance(value, float | str)


def append(
    run_dir: Path,
    *,
    step: int,
    attempt: str,
    config: Mapping[str, Any],
    layout: Mapping[str, int],
    device: torch.device,
    parameters: int,
    steps: int,
    frozen: int = 0,
) -> None:
    """Add the line for a start. If the process or machine stops during the write, the line is complete or absent.

    Args:
        run_dir: run directory.
        step, attempt, config, layout, parameters, steps, frozen: attributes of `Start`.
        device: device on which this process computes.

    Raises:
        OSError: the line could not be written; the file is unchanged.
    """
    start = Start(
        step=step,
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        attempt=attempt,
        config=dict(config),
        layout=dict(layout),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        parameters=parameters,
        frozen=frozen,
        steps=steps,
        versions={"dtmega": __version__, "torch": torch.__version__, "python": platform.python_version()},
    )
    path = run_dir / NAME
    before = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    if before and not before.endswith("\n"):
        before += "\n"
    with atomic.replaced(path) as file:
        file.write(before + json.dumps(start.model_dump()) + "\n")


def read(run_dir: Path) -> list[Start]:
    """The starts of a run, oldest first; [] if the run directory has no `starts.jsonl`. Damaged lines are skipped."""
    try:
        lines = (run_dir / NAME).read_bytes().splitlines()
    except OSError:
        return []
    return [*_starts(lines)]


def last_checkpoint(run_dir: Path) -> str:
    """Describe the last checkpoint that a killed run wrote or resumed from, by its records; '' if it had none."""
    with suppress(OSError), (run_dir / "metrics.jsonl").open("rb") as file:
        saves = [parse_line(line) or {} for line in file if b'"checkpoint"' in line]
        if steps := [save["checkpoint"] for save in saves if "checkpoint" in save and "checkpoint_error" not in save]:
            return f"a checkpoint of step {steps[-1]} (metrics.jsonl)"
    *_, last = [None, *read(run_dir)]
    return f"a checkpoint of step {last.step} ({NAME})" if last and last.step else ""


def _starts(lines: Sequence[bytes]) -> Iterator[Start]:
    for line in lines:
        try:
            yield Start.model_validate(parse_object(line, NAME))
        except ValueError:  # pydantic's ValidationError is a ValueError too
            continue


def parts(starts: Sequence[Start]) -> list[Start]:
    """The starts whose lines are still in metrics.jsonl, in step order.

    Each of these starts wrote the steps after its own `step`, up to the `step` of the next start. When
    a run restarts at an earlier step, it removes the lines of later steps from metrics.jsonl. A start is left out if
    all its lines were removed.
    """
    found: list[Start] = []
    for start in starts:
        found = [*(earlier for earlier in found if earlier.step < start.step), start]
    return found
