"""Published speeds beside the closed form, with one efficiency per GPU kind: `python benchmarks/published.py`.

The efficiency is the share of the peak that large products reach. It is fitted to the published figures of a GPU kind,
each source with the same weight. A row's held-out error comes from a fit without this row; the last column, from a fit
without any row of its source, says more about a run of one's own. The closed form
(`closed_form.py`) stands in for counted work until `dtmega plan` can run every one of these models.

    python benchmarks/published.py           print the table and the values for dtmega/planning/prices/fabrics/*.toml
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomli

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import closed_form
from benchmarks.closed_form import Run
from dtmega.planning.prices import fabric as fabrics
from dtmega.planning.prices.fabric import Fabric

DATA = Path(__file__).with_suffix(".toml")
MODEL_KEYS = ("layers", "hidden", "heads", "kv_heads", "feed_forward", "vocab", "gated")
GPU_KINDS = {"h100-ib": "H100", "h200-ib": "H100", "a100-ib": "A100", "a100-opa": "A100"}


class Figure(NamedTuple):
    """A published figure.

    Attributes:
        fabric: name of the fabric.
        model: name of the model.
        run: sizes and layout.
        tokens_per_s_per_gpu: the figure.
        source: name of the source.
        unstated: what the source does not say.
    """

    fabric: str
    model: str
    run: Run
    tokens_per_s_per_gpu: float
    source: str
    unstated: str


def read() -> tuple[list[Figure], dict[str, str]]:
    """The figures of `published.toml`, and the address of each source."""
    data = tomli.loads(DATA.read_text(encoding="utf-8"))
    figures = []
    for row in data["rows"]:
        values: dict[str, Any] = data["defaults"] | row
        sizes = dict(zip(MODEL_KEYS, data["models"][values["model"]], strict=True))
        keys = {key: values[key] for key in Run._fields if key in values}
        run = Run(**sizes, **keys)
        speed = values.get("tokens_per_s_per_gpu")
        if speed is None:
            speed = run.global_batch * run.seq_len / run.n_gpus / values["step_s"]
        figures.append(Figure(values["fabric"], values["model"], run, speed, values["source"], values["unstated"]))
    return figures, data["sources"]


def at(fabric: Fabric, efficiency: float) -> Fabric:
    """The fabric with another efficiency."""
    return fabric.model_copy(update={"gpu": fabric.gpu.model_copy(update={"efficiency": efficiency})})


def predicted(figure: Figure, loaded: dict[str, Fabric], efficiency: float) -> float:
    """Tokens per second and GPU by the closed form."""
    return closed_form.tokens_per_s_per_gpu(figure.run, at(loaded[figure.fabric], efficiency))


def fit(figures: Sequence[Figure], loaded: dict[str, Fabric]) -> float:
    """The efficiency with the least mean squared logarithm of predicted / published; sources have equal weights."""
    counts = Counter(figure.source for figure in figures)

    def loss(efficiency: float) -> float:
        total = 0.0
        for figure in figures:
            off = math.log(predicted(figure, loaded, efficiency) / figure.tokens_per_s_per_gpu)
            total += off**2 / counts[figure.source]
        return total

    low, high = 0.05, 1.0
    golden = (math.sqrt(5) - 1) / 2
    while high - low > 1e-4:
        left, right = high - golden * (high - low), low + golden * (high - low)
        if loss(left) < loss(right):
            high = right
        else:
            low = left
    return (low + high) / 2


def layout(run: Run) -> str:
    """The layout in short."""
    data = "FSDP" if run.data == "fsdp" else "dp"
    parts = [f"{run.n_gpus} GPUs", f"{data} {run.data_ranks}"]
    parts += [f"tp {run.tp}"] * (run.tp > 1) + [f"pp {run.pp}"] * (run.pp > 1)
    parts += [f"v {run.virtual}"] * (run.virtual > 1) + [f"S {run.seq_len}", f"b {run.micro_batch}"]
    if run.recompute or run.recompute_attention:
        parts.append(f"recompute {run.recompute:g}" if run.recompute else "recompute attention")
    return ", ".join(parts)


def main() -> None:
    figures, sources = read()
    loaded = {name: fabrics.load(name) for name in GPU_KINDS}
    by_kind: dict[str, list[Figure]] = defaultdict(list)
    for figure in figures:
        by_kind[GPU_KINDS[figure.fabric]].append(figure)
    summary = []
    for kind, rows in by_kind.items():
        efficiency = fit(rows, loaded)
        print(f"\n**{kind}**, efficiency {efficiency:.3f}\n")
        print("| model | layout | source | tokens/s/GPU | fit | off | held out | source held out |")
        print("| --- | --- | --- |" + " ---: |" * 5)
        without_source = {}
        for source in {row.source for row in rows}:
            without_source[source] = fit([row for row in rows if row.source != source], loaded)
        alone, by_source = [], defaultdict(list)
        for i, row in enumerate(rows):
            published = row.tokens_per_s_per_gpu
            speeds = [predicted(row, loaded, efficiency)]
            speeds.append(predicted(row, loaded, fit(rows[:i] + rows[i + 1 :], loaded)))
            speeds.append(predicted(row, loaded, without_source[row.source]))
            errors = [speed / published - 1 for speed in speeds]
            alone.append(abs(errors[1]))
            by_source[row.source].append(abs(errors[2]))
            mark = f" (unstated: {row.unstated})" if row.unstated else ""
            offs = " | ".join(f"{100 * error:+.1f} %" for error in errors)
            cells = f"{row.model} | {layout(row.run)}{mark} | {row.source} | {published:,.0f} | {speeds[0]:,.0f}"
            print(f"| {cells} | {offs} |")
        of_sources = {source: statistics.mean(errors) for source, errors in by_source.items()}
        held_out = statistics.mean(of_sources.values())
        summary.append(
            f"{kind}: efficiency = {efficiency:.3f}, held_out_error = {held_out:.3f} (mean over sources of "
            f"{', '.join(f'{source} {error:.1%}' for source, error in of_sources.items())}); one row held out "
            f"{statistics.mean(alone):.1%} in the mean, {max(alone):.1%} at most"
        )
    print("\n" + "\n".join(summary) + "\n")
    for name, address in sources.items():
        print(f"{name}: {address}")


if __name__ == "__main__":
    main()
