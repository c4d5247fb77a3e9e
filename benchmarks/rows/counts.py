"""Exact figures, without a clock: wire, collectives, memory of the state, graphs. Each is a test in `make test` too."""

from __future__ import annotations

from collections import Counter

from benchmarks.rows.measure import Row
from tests import counts, ranks, test_counts, test_wire

EXACT = "equal on every rank"


def wire(quick: bool) -> list[Row]:
    """Payload bytes that a rank hands over in a step, beside the closed form of `dtmega/ops/cost.py`."""
    rows = []
    for name, (n, _) in test_wire.configurations(False).items():
        for found in test_wire.measured(n, False):
            for counted, expected in found[name]:
                assert counted == expected, name
        counted, expected = test_wire.measured(n, False)[0][name][-1]
        rows.append(Row(f"wire, {name}", "closed form", _bytes(counted), _bytes(expected), "bytes", 1.0, EXACT))
    return rows


def _bytes(operations: Counter[tuple[str, str, int]]) -> float:
    return float(sum(payload * n for (_, _, payload), n in operations.items()))


def collectives(quick: bool) -> list[Row]:
    """The number of collectives of a layer and microbatch under tensor parallelism, beside Megatron's."""
    rows = []
    for name, megatrons in (("tp 2, no sequence parallel", 4), ("tp 2", 8)):
        _, values = test_wire.configurations(False)[name]
        totals = []
        for value, (counted, _) in zip(values, test_wire.measured(2, False)[0][name], strict=True):
            batch = value["batch"]
            n_microbatches = batch["global_batch_size"] // batch["micro_batch_size"]
            hidden_bytes = batch["micro_batch_size"] * value["data"]["seq_len"] * value["model"]["hidden_size"] * 4
            alike = sum(n for (_, _, payload), n in counted.items() if payload == hidden_bytes)
            totals.append((value["model"]["n_layers"], alike / n_microbatches))
        (few, at_few), (many, at_many) = totals
        each = (at_many - at_few) / (many - few)
        kept = " (2 of them gather again what was not kept)" if name == "tp 2" else ""
        reach = None if kept else 1.0
        rows.append(Row(f"collectives a layer, {name}{kept}", "Megatron", each, megatrons, "", reach))
    return rows


def memory(quick: bool) -> list[Row]:
    """Bytes of weights, gradients and moments on a rank."""
    n = test_counts.CUT + test_counts.WHOLE
    alone = ranks.run(1, test_counts.on_one_rank)[0]
    cut = ranks.run(2, test_counts.on_two_ranks)[0]
    halves = test_counts.CUT // 2 + test_counts.WHOLE
    return [
        Row("state, float32", "16 bytes a parameter", alone["float32"], 16 * n, "bytes", 1.0),
        Row("state, bfloat16", "16 bytes a parameter", alone["bfloat16"], 16 * n, "bytes", 1.0),
        Row("state, dp_shard 2", "8 bytes a parameter", cut["dp_shard 2"], 8 * n, "bytes", 1.0),
        Row("state, tp 2", "16 bytes a parameter here", cut["tp 2"], 16 * halves, "bytes", 1.0),
    ]


def graphs(quick: bool) -> list[Row]:
    """Graphs of a compiled step, and those that later steps on other batches add."""
    found, breaks = ranks.run(1, counts.graphs_by_step, 5)[0]
    return [
        Row("graph breaks in a compiled step", "none", sum(breaks.values()), 0, "", 0.0),
        Row("graphs made after the first step", "none", found[-1] - found[0], 0, "", 0.0),
        Row("graphs of a compiled step", "one for all blocks", found[0], 1, "", None),
    ]


BENCHMARKS = {"wire": wire, "collectives": collectives, "memory": memory, "graphs": graphs}
