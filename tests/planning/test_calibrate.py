"""planning/prices/calibrate.py: what this machine measures can be written, read, and priced with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor

from dtmega.__main__ import main
from dtmega.planning.prices import calibrate, fabric, pricing
from dtmega.planning.prices.fabric import Fabric
from tests import ranks

CPU = torch.device("cpu")


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    with (
        patch.object(calibrate, "SIDES", (32, 64)),
        patch.object(calibrate, "LONG_SIDE", {"cpu": 64}),
        patch.object(calibrate, "COPY_BYTES", 2**16),
        patch.object(calibrate, "LEAST_S", 0.0),
        patch.object(calibrate, "GATHERS", 3),
    ):
        yield


def quick() -> Fabric:
    with quickly():
        return calibrate.calibrate(CPU)


def test_the_file_of_a_measured_machine_is_a_fabric_again(tmp_path: Path):
    measured = quick()
    path = tmp_path / "here.toml"
    calibrate.write(measured, str(path))
    assert fabric.load(str(path)) == measured


def test_several_ranks_measure_their_links_and_agree():
    one, two = ranks.run(2, quick)
    assert one.node == two.node
    assert one.node.ranks == 2
    assert one.network.bytes_per_s == one.node.bytes_per_s > 0
    assert one.node.sources["bytes_per_s"].startswith("measured")


def test_gathers_of_two_sizes_tell_the_latency_of_a_step_of_the_ring_and_the_bandwidth(monkeypatch):
    """Four ranks whose all-gathers take three latencies of 20 us, and 3/4 of the bytes by 1 GB/s."""
    clock_s = [0.0]

    def all_gather(parts: list[Tensor], part: Tensor) -> None:
        clock_s[0] += 3 * 20e-6 + 3 / 4 * len(parts) * part.nbytes / 1e9

    group = Mock(**{"get_world_size.return_value": 4}, all_gather=all_gather)
    group.all_gather_object = lambda hosts, host: hosts.__setitem__(slice(None), [host] * 4)
    monkeypatch.setattr(calibrate, "dist", group)
    monkeypatch.setattr(calibrate, "time", Mock(perf_counter=lambda: clock_s[0]))
    n_ranks, bytes_per_s, latency_s, n_nodes = calibrate._links(CPU)
    assert (n_ranks, n_nodes) == (4, 1)
    assert (bytes_per_s, latency_s) == pytest.approx((1e9, 20e-6), rel=1e-3)


def test_products_of_measured_sides_reach_what_was_measured():
    measured = quick()
    for dtype, points in measured.gpu.measured.items():
        for side, flops in points:
            assert pricing.reached_flops(measured.gpu, dtype, (side, 4096, 4096)) == pytest.approx(flops)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"cannot write the fabric to .*none/x\.toml: No such file"):
        calibrate.write(quick(), str(tmp_path / "none" / "x.toml"))


def test_the_command_writes_a_file_that_a_plan_takes_as_its_fabric(tmp_path: Path):
    path = tmp_path / "here.toml"
    with quickly():
        assert main(["plan", "--calibrate", str(path), "--device", "cpu"]) == 0
    assert fabric.load(str(path)).gpu.measured.keys() == {"float32", "bfloat16"}


@pytest.mark.parametrize("more", [["--world", "2"], ["--config", "bloom.toml"], ["--mesh.tp", "2"]])
def test_a_calibration_with_what_only_a_plan_reads_is_refused(more: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--calibrate", "here.toml", *more]) == 2
    assert f"plans nothing: expected no {more[0]}" in capsys.readouterr().err


def test_a_product_has_two_long_sides_and_a_short_one():
    shapes: list[tuple[int, ...]] = []

    def one_second(work: Callable[[], Tensor], _: torch.device) -> float:
        shapes.append(tuple(work().shape))
        return 1.0

    with quickly(), patch.object(calibrate, "ENOUGH_S", 2.0), patch.object(calibrate, "_shortest_s", one_second):
        points = calibrate._products(CPU, torch.float32)
    assert shapes == [(64, 64), (64, 64)]
    assert points == [(32, 2 * 64 * 32 * 64), (64, 2 * 64 * 64 * 64)]
