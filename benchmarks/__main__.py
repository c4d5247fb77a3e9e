"""Compare dtmega's speed with its alternatives in one table: `python -m benchmarks [--only NAME ...] [--quick]`.

    python -m benchmarks                      run all benchmarks, print the table, write benchmarks.json, .md and .png
    python -m benchmarks --only step head     run the benchmarks whose names contain one of these words
    python -m benchmarks --quick              run fewer rounds, to check that everything works
    python -m benchmarks --list               print the names of the benchmarks

Each benchmark runs in a process of its own, with one thread. A row compares dtmega with an installed library
(transformers, megatron-core), with a lower bound (only the essential part of the work), or with a closed form. Each
benchmark compares results before it takes times, so that wrong code cannot look fast, and the row states this
comparison. If a row misses its target ratio (its reach), the report also lists the operators that take most of the
time. `benchmarks/notes.toml` has the next cause to address, and earlier attempts.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks import rows

HERE = Path(__file__).resolve().parent
LIMIT_S = 3600
LAST_WORDS = 40  # lines of a benchmark that failed
LIBRARIES = ("torch", "transformers", "megatron-core", "tokenizers", "numpy")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("benchmarks.json"), help="beside it: .md, .png")
    parser.add_argument("--row", help=argparse.SUPPRESS)  # the benchmark of this process
    args = parser.parse_args()
    if args.row:
        return run_here(args.row, args.quick, args.output)
    everything = [*rows.benchmarks()]
    names = [name for name in everything if any(word in name for word in args.only)]
    if args.list:
        print("\n".join(names))
        return 0
    if not names:
        raise SystemExit(f"no benchmark has {args.only} in its name; --list shows them")
    found: dict[str, list[dict[str, Any]]] = {}
    for row in recorded(args.output):
        found.setdefault(row["benchmark"], []).append(row)
    failed = []
    for name in names:
        started_s = time.monotonic()
        load = round(os.getloadavg()[0], 1)
        about = {"benchmark": name, "date": now(), "commit": commit(), "load": load, "quick": args.quick}
        measured = run_apart(name, args.quick)
        if measured is None:
            failed.append(name)
            continue
        found[name] = [about | row for row in measured]
        for row in found[name]:
            print(line(row), flush=True)
        print(f"    {name}: {time.monotonic() - started_s:.0f} s", flush=True)
        in_order = [row for known in everything for row in found.get(known, [])]
        write({"machine": machine(), "rows": in_order}, args.output)
    if args.output.exists():
        print("\n" + args.output.with_suffix(".md").read_text())
    if failed:
        print(f"did not run: {', '.join(failed)}")
    return 1 if failed else 0


def recorded(output: Path) -> list[dict[str, Any]]:
    """Read the rows of an earlier record; [] if there is no record. Benchmarks that do not run now keep these rows.

    Raises:
        SystemExit: the rows come from another machine or from other versions of the libraries.
    """
    if not output.exists():
        return []
    record = json.loads(output.read_text())
    here = machine()
    if record["machine"] != here:
        raise SystemExit(f"{output} is of {record['machine']}, and this is {here}: name another file, with --output")
    return record["rows"]


def write(record: dict[str, Any], output: Path) -> None:
    """Write the record as JSON, as Markdown and, if matplotlib is installed, as a picture."""
    output.write_text(json.dumps(record, indent=1) + "\n")
    output.with_suffix(".md").write_text("\n".join(markdown(record)) + "\n", encoding="utf-8")
    with contextlib.suppress(ImportError):
        from benchmarks import picture

        picture.draw(record, output.with_suffix(".png"))


def run_apart(name: str, quick: bool) -> list[dict[str, Any]] | None:
    """Run a benchmark in a process of its own. Returns the benchmark's rows; None if the benchmark failed."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "rows.json")
        command = [sys.executable, "-m", "benchmarks", "--row", name, "--output", str(found)]
        one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
        environment = os.environ | one_thread | {"PYTHONPATH": _path(), "TOKENIZERS_PARALLELISM": "false"}
        words = Path(folder, "words.txt")
        with words.open("w") as file, contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                command + ["--quick"] * quick,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=LIMIT_S,
                check=False,
            )
        if not found.exists():
            print("\n".join(words.read_text(errors="replace").splitlines()[-LAST_WORDS:]), flush=True)
            return None
        return json.loads(found.read_text())


def run_here(name: str, quick: bool, output: Path) -> int:
    import torch

    torch.set_num_threads(1)
    found = rows.benchmarks()[name](quick)
    as_dicts = [{**row._asdict(), "ratio": row.ratio, "falls_short": row.falls_short} for row in found]
    output.write_text(json.dumps(as_dicts))
    return 0


def _path() -> str:
    return os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH", "")]))


def machine() -> dict[str, Any]:
    """The processor, number of cores and versions. Figures mean little without these facts."""
    versions = {}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    flags: set[str] = set()
    model = platform.processor()
    with contextlib.suppress(OSError):
        for found in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = found.partition(":")
            model = value.strip() if key.strip() == "model name" else model
            flags |= set(value.split()) if key.strip() == "flags" else set()
    return {
        "processor": model,
        "bf16 instructions": sorted(flags & {"amx_bf16", "avx512_bf16"}),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")


def commit() -> str:
    """The short git hash of the measured commit; '' outside a repository."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
    )
    return found.stdout.strip()


def line(row: dict[str, Any]) -> str:
    reach = "" if row["reach"] is None else f" (reach {row['reach']:.2f})"
    return f"{row['ratio']:.3f}{reach}  {row['name']} / {row['peer']}, {row['equal']}"


def markdown(record: dict[str, Any]) -> list[str]:
    """The report in Markdown: the machine, the table, and the operators of rows that fall short."""
    about, found = record["machine"], record["rows"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    loads = [row["load"] for row in found]
    dates = [row["date"] for row in found]
    lines = [
        "# `python -m benchmarks`",
        "",
        f"{about['processor']}, {about['cores']} cores, {' '.join(about['bf16 instructions'])}; Python "
        f"{about['python']}, {versions}.",
        f"Measured from {min(dates)} to {max(dates)} UTC, at a load average of {min(loads)} to {max(loads)}"
        + (", some with few rounds." if any(row["quick"] for row in found) else "."),
        "How it is measured: [docs/speed.md](../docs/speed.md). Why rows fall short, and what was tried: "
        "[notes.toml](notes.toml).",
        "",
        *table(found),
    ]
    return [*lines, *shortfalls(found)]


def table(found: list[dict[str, Any]]) -> list[str]:
    """The table of all rows, in Markdown."""
    lines = ["| what | beside | ours | theirs | | ratio | reach | | when |"]
    lines.append("| --- | --- | ---: | ---: | --- | ---: | ---: | --- | --- |")
    for row in found:
        reach = "" if row["reach"] is None else f"≤ {row['reach']:.2f}"
        verdict = "" if row["reach"] is None else ("falls short" if row["falls_short"] else "reached")
        cells = [row["name"], row["peer"], number(row["ours"]), number(row["theirs"]), row["unit"]]
        lines.append(
            f"| {' | '.join(cells)} | {row['ratio']:.3f} | {reach} | {verdict} | {row['date']}, {row['commit']} |"
        )
    return lines


def number(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else f"{x:.4g}"


def shortfalls(found: list[dict[str, Any]]) -> list[str]:
    """Paragraphs on the rows that fall short: the operators that take most time."""
    lines = []
    for row in found:
        if not row["falls_short"]:
            continue
        lines += ["", f"**{row['name']}**, beside {row['peer']}: {row['ratio']:.3f}, reach {row['reach']:.2f}."]
        if row["top"]:
            lines += ["", "```text", *row["top"], "```"]
    return lines


if __name__ == "__main__":
    sys.exit(main())
