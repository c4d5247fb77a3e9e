"""Print what [run] exact keeps to the bit, how precise its sums are, and what it costs, for docs/exact.md.

    python benchmarks/exact.py                  all tables; some minutes
    python benchmarks/exact.py bits llama       one of `bits`, `precision`, `cost`; with families, their rows only

Each row of the first table trains a small model for 20 steps on a layout, and compares all losses, norms, validation
sums and weights with those of one process (with tp or cp: of as few processes as have the same tp and cp). The row
"without" is the same layout without [run] exact.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dtmega.ops.fixed_point import Grid
from tests import ranks
from tests.fsdp import test_exact
from tests.fsdp.test_exact import CASES, LAYOUTS, MODELS, Bits, Layout, begun, bits_of, stepped, truth_of

STEPS = 20
ELEMENTS, TERMS = 1_000_000, 64


def long_bits_of(cases: list[tuple[str, Layout]]) -> list[Bits]:
    with patch.object(test_exact, "STEPS", STEPS):
        return bits_of(cases)


def bits(families: list[str]) -> None:
    """A row for each layout, and a column for each family: how many of the tensors of all ranks have equal bits."""
    print("| layout | processes | " + " | ".join(families) + " |\n| --- |" + " --- |" * (1 + len(families)), flush=True)
    truths: dict[tuple[str, str], Bits] = {}
    for name, layout in LAYOUTS.items():
        here = [family for family in families if (family, name) in CASES]
        if not here:
            continue
        truth = truth_of(layout)
        missing = [family for family in here if (family, repr(truth)) not in truths]
        if missing:
            found = ranks.run(truth.n, long_bits_of, [(f, truth) for f in missing], timeout_s=600.0)[0]
            truths |= {(family, repr(truth)): of_one for family, of_one in zip(missing, found, strict=True)}
        of_ranks = ranks.run(layout.n, long_bits_of, [(f, layout) for f in here], timeout_s=600.0)
        cells = dict.fromkeys(families, "refused")
        for i, family in enumerate(here):
            cells[family] = _cell([of_rank[i] for of_rank in of_ranks], truths[family, repr(truth)])
        print(f"| {name} | {layout.n} | " + " | ".join(cells.values()) + " |", flush=True)


def _cell(of_ranks: list[Bits], truth: Bits) -> str:
    """The number of steps with an equal loss and norm, and of tensors with equal bits."""
    steps = min(sum(a == b for a, b in zip(rank.steps, truth.steps, strict=True)) for rank in of_ranks)
    sums = all(rank.validation == truth.validation and rank.statistics == truth.statistics for rank in of_ranks)
    equal = sum(rank.weights[name] == truth.weights[name] for rank in of_ranks for name in rank.weights)
    n_tensors = sum(len(rank.weights) for rank in of_ranks)
    return f"{steps}/{STEPS} steps, {equal}/{n_tensors} tensors" + ("" if sums else ", validation differs")


def precision() -> None:
    """Errors of the sum of 64 microbatches' gradients, whose elements differ by six orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** (-6 * torch.rand(ELEMENTS, generator=generator))
    terms = [torch.randn(ELEMENTS, generator=generator) * sizes for _ in range(TERMS)]
    exact = torch.stack(terms).double().sum(0)
    grid = Grid.of(max(float(term.abs().max()) for term in terms), TERMS)
    total, ours, plain = torch.zeros(ELEMENTS, dtype=torch.int64), torch.empty(ELEMENTS), torch.zeros(ELEMENTS)
    for term in terms:
        grid.add(total, term)
        plain += term
    grid.write(total, ours)
    print("| size of an element | exact: largest, mean relative error | fp32: largest, mean |\n| --- | --- | --- |")
    for low in range(-6, 0):
        chosen = (sizes >= 10.0**low) & (sizes < 10.0 ** (low + 1))
        errors = [(found.double() - exact).abs()[chosen] / exact.abs()[chosen] for found in (ours, plain)]
        cells = [f"{error.max():.1e}, {error.mean():.1e}" for error in errors]
        print(f"| 1e{low} to 1e{low + 1} of the largest | " + " | ".join(cells) + " |", flush=True)
    worst = [(found.double() - exact).abs().max() for found in (ours, plain)]
    print(f"| largest absolute error | {worst[0]:.1e} | {worst[1]:.1e} |")


def cost() -> None:
    """Time of rounding and adding, beside an addition in fp32."""
    gradient, total = torch.randn(2**22), torch.zeros(2**22, dtype=torch.int64)
    accumulated, out = torch.zeros(2**22), torch.empty(2**22)
    grid = Grid.of(1.0, TERMS)
    rows = {
        "add a gradient as integers": lambda: grid.add(total, gradient),
        "add a gradient in fp32": lambda: accumulated.add_(gradient),
        "write the sum as fp32": lambda: grid.write(total, out),
    }
    print("| one thread | ns per element |\n| --- | --- |")
    for name, action in rows.items():
        print(f"| {name} | {_seconds(action) / 2**22 * 1e9:.2f} |", flush=True)
    for name in ("dp_shard 2", "dp_replicate 2"):
        seconds = [max(ranks.run(2, step_seconds, LAYOUTS[name], exactly)) for exactly in (True, False)]
        print(f"| CPU ms of a step, {name}, with and without | {seconds[0] * 1e3:.0f}, {seconds[1] * 1e3:.0f} |")


def step_seconds(layout: Layout, exactly: bool) -> float:
    """CPU seconds of a step of a model with 6.5 M parameters."""
    wide = {"model": {"name": "bloom", "vocab_size": 2048, "hidden_size": 256, "n_heads": 8, "n_layers": 8}}
    run = begun("bloom", Layout(layout.n, layout.sizes, {**wide, "run": {"exact": exactly}}))
    stepped(run, 0)
    started = time.process_time()
    for step in range(1, 4):
        stepped(run, step)
    return (time.process_time() - started) / 3


def _seconds(action: object) -> float:
    """The least of five times."""
    assert callable(action)
    times: list[float] = []
    for _ in range(5):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return min(times)


def main(words: list[str]) -> None:
    torch.set_num_threads(1)
    tables = [word for word in words if word not in MODELS] or ["bits", "precision", "cost"]
    for table in tables:
        if table == "bits":
            bits([word for word in words if word in MODELS] or [*MODELS])
        elif table == "precision":
            precision()
        else:
            cost()
        print()


if __name__ == "__main__":
    main(sys.argv[1:])
