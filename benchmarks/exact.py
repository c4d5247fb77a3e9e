"""Print what [run] exact keeps to the bit, how precise its sums are, and what it costs, for docs/exact.md.

    python benchmarks/exact.py                  all tables; some minutes
    python benchmarks/exact.py bits llama       one of `bits`, `precision`, `cost`; with families, their rows only

Each row of the first tables trains a small model for 20 steps on a layout, and compares all losses, norms, weights and
moments after each step, and the sums of a validation, with those of one process (with tp or cp: of as few processes as
have the same tp and cp). A cell counts the steps up to the first difference.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dtmega.ops.fixed_point import Grid
from tests import ranks
from tests.fsdp import test_exact
from tests.fsdp.test_exact import (
    BF16,
    CASES,
    FP16,
    LAYOUTS,
    MODELS,
    Bits,
    Layout,
    begun,
    bits_of,
    configured,
    stepped,
    truth_of,
)
from tests.planning.real_step import Measured, measured

STEPS = 20
PRECISIONS: dict[str, dict[str, Any]] = {"float32": {}, "bfloat16": BF16, "float16": FP16}
ELEMENTS, TERMS = 1_000_000, 64
# A model with 0.9 M parameters.
WIDE = {"model": {"name": "bloom", "vocab_size": 1024, "hidden_size": 128, "n_heads": 4, "n_layers": 4}}


def long_bits_of(cases: list[tuple[str, Layout]]) -> list[Bits]:
    with patch.object(test_exact, "STEPS", STEPS):
        return bits_of(cases)


def bits(families: list[str]) -> None:
    """A table for each precision: a row for each layout, a column for each family."""
    for title, same in PRECISIONS.items():
        print(f"| {title} | processes | " + " | ".join(families) + " |\n| --- |" + " --- |" * (1 + len(families)))
        truths: dict[tuple[str, str], Bits] = {}
        for name, layout in LAYOUTS.items():
            here = [family for family in families if _has(family, name, title)]
            if layout.same or not here:
                continue
            layout = layout._replace(same=same)
            truth = truth_of(layout)
            missing = [family for family in here if (family, repr(truth)) not in truths]
            if missing:
                alone = _trained(truth, missing)[0]
                truths |= {(family, repr(truth)): bits for family, bits in zip(missing, alone, strict=True)}
            of_ranks = _trained(layout, here)
            cells = dict.fromkeys(families, "")
            for i, family in enumerate(here):
                cells[family] = _cell([of_rank[i] for of_rank in of_ranks], truths[family, repr(truth)])
            print(f"| {name} | {layout.n} | " + " | ".join(cells.values()) + " |", flush=True)
        print()


def _has(family: str, name: str, precision: str) -> bool:
    """False for a case that is refused when a run starts, and for tp and cp of most families and precisions."""
    if {"tp", "cp"} & LAYOUTS[name].sizes.keys():
        return precision == "float32" and family in ("bloom", "llama", "qwen")
    return (family, name) in CASES and not (precision == "float16" and family.startswith("hf"))


def _trained(layout: Layout, families: list[str]) -> list[list[Bits]]:
    """For each rank, the bits of each family."""
    return ranks.run(layout.n, long_bits_of, [(family, layout) for family in families], timeout_s=1800.0)


def _cell(of_ranks: list[Bits], truth: Bits) -> str:
    """How many steps are equal in every number and tensor, of all steps; and how many tensors there are."""
    equal = STEPS
    for rank in of_ranks:
        for step in range(STEPS):
            expected = {key: truth.tensors[step][key] for key in rank.tensors[step]}
            if rank.steps[step] != truth.steps[step] or rank.tensors[step] != expected:
                equal = min(equal, step)
    sums = all(rank.validation == truth.validation and rank.statistics == truth.statistics for rank in of_ranks)
    return f"{equal} of {STEPS}, {len(truth.tensors[0])} tensors" + ("" if sums else ", validation differs")


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
    print("\n| layout | [run] exact | CPU ms of a step | held MiB | peak MiB | sent MiB |\n| --- |" + " --- |" * 5)
    for name in ("dp_shard 2", "dp_replicate 2", "pp 2, 1F1B"):
        for exactly in (False, True):
            layout = LAYOUTS[name]._replace(same={**WIDE, "run": {"exact": exactly}})
            seconds = max(ranks.run(2, step_seconds, layout))
            of_ranks = ranks.run(2, measured, configured("bloom", layout).model_dump(), timeout_s=600.0)
            held = max(rank.held_bytes for rank in of_ranks) / 2**20
            peak = max(rank.peak_bytes for rank in of_ranks) / 2**20
            sent = max(map(sent_bytes, of_ranks)) / 2**20
            print(f"| {name} | {exactly} | {seconds * 1e3:.0f} | {held:.1f} | {peak:.1f} | {sent:.1f} |", flush=True)


def sent_bytes(measured: Measured) -> int:
    """Bytes that a rank hands to others in a step, each payload counted once."""
    return sum(n * n_bytes for (kind, _, n_bytes), n in measured.messages.items() if kind != "receive")


def step_seconds(layout: Layout) -> float:
    """CPU seconds of a step."""
    run = begun("bloom", layout)
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
