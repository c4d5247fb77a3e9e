"""planning/prices/fabric.py: the shipped fabrics and what a wrong file is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtmega.planning.prices import fabric


def values() -> dict[str, dict[str, object]]:
    return {
        "gpu": {"name": "x", "memory_bytes": 1, "memory_bytes_per_s": 1.0, "peak_flops": {"bfloat16": 1.0}},
        "node": {"ranks": 8, "bytes_per_s": 1.0},
        "network": {"bytes_per_s": 1.0},
    }


@pytest.mark.parametrize("name", fabric.names())
def test_a_shipped_fabric_says_where_each_of_its_numbers_comes_from(name: str):
    shipped = fabric.load(name)
    for section in (shipped.gpu, shipped.node, shipped.network):
        given = section.model_fields_set - {"sources", "name", "currency"}
        assert sorted(section.sources) == sorted(given), type(section).__name__


def test_the_clusters_that_people_rent_are_shipped():
    assert {"a100-ib", "h100-ib", "h200-ib", "cpu-gloo"} <= set(fabric.names())


def test_a_fabric_is_read_from_a_file(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(
        '[gpu]\nname = "x"\nmemory_bytes = 5\nmemory_bytes_per_s = 2e12\npeak_flops.bfloat16 = 1e15\n'
        "measured.bfloat16 = [[64, 1e12], [128, 2e12]]\n[node]\nranks = 4\nbytes_per_s = 1e9\n"
        "[network]\nbytes_per_s = 1\n"
    )
    read = fabric.load(str(path))
    assert (read.gpu.memory_bytes, read.node.ranks, read.network.latency_s) == (5, 4, 0)
    assert read.gpu.measured == {"bfloat16": [(64, 1e12), (128, 2e12)]}


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("gpu", "memory_bytes", -1, r"f\.toml: \[gpu\] memory_bytes: .*greater than 0, got -1"),
        ("gpu", "memory_bytes", "80 GB", r"f\.toml: \[gpu\] memory_bytes: .*integer, got '80 GB'"),
        ("gpu", "efficiency", 1.5, r"f\.toml: \[gpu\] efficiency: .*less than or equal to 1, got 1.5"),
        ("gpu", "eficiency", 0.5, r"f\.toml: unknown key 'eficiency' in \[gpu\]; did you mean efficiency\?"),
        ("gpu", "peak_flops", {}, r"f\.toml: peak_flops is empty, expected FLOP/s by dtype"),
        ("gpu", "peak_flops", {"bfloat16": 0}, r"f\.toml: \[gpu\] peak_flops: .*greater than 0, got 0"),
        ("gpu", "measured", {"bfloat16": [(9, 1.0), (8, 1.0)]}, r"measured.bfloat16 has sides \[9, 8\], .*ascending"),
        ("node", "ranks", 0, r"f\.toml: \[node\] ranks: .*greater than or equal to 1, got 0"),
        ("network", "bytes_per_s", float("nan"), r"f\.toml: \[network\] bytes_per_s: .*, got nan"),
        ("link", "bytes_per_s", 1.0, r"f\.toml: unknown section \[link\].*; expected \[gpu\], \[node\], \[network\]"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(section: str, key: str, value: object, message: str):
    wrong = values()
    wrong.setdefault(section, {})[key] = value
    with pytest.raises(ValueError, match=message):
        fabric.parse(wrong, "f.toml")


def test_all_missing_keys_are_named_at_once():
    wrong = values()
    del wrong["network"], wrong["gpu"]["memory_bytes"]
    with pytest.raises(ValueError) as refusal:
        fabric.parse(wrong, "f.toml")
    assert str(refusal.value).splitlines() == [
        "f.toml: [gpu] memory_bytes is missing: memory of one device",
        "f.toml: [network] bytes_per_s is missing: bandwidth between nodes for each rank, in each direction",
    ]


def test_an_unknown_name_is_refused_with_the_names_that_there_are():
    with pytest.raises(ValueError, match=r"--fabric h1000: expected one of .*h100-ib.*, or the path of a TOML file"):
        fabric.load("h1000")
    with pytest.raises(ValueError, match=r"none\.toml cannot be read: No such file"):
        fabric.load("none.toml")
