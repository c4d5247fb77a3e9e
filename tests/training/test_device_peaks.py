"""Claims about device_peaks.py: FLOP/s by the datasheet or by a measurement, and memory by the kernel's count."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from dtmega.training import device_peaks


def test_mfu_of_a_known_gpu_refers_to_its_datasheet(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert device_peaks.reference_flops(torch.device("cuda", 0), "bfloat16") == 989e12


def test_mfu_of_an_unknown_gpu_refers_to_a_measurement(monkeypatch: pytest.MonkeyPatch):
    measured = {torch.bfloat16: 1e12, torch.float32: 1e11}
    monkeypatch.setattr(device_peaks, "matmul_flops", lambda device, dtype: measured[dtype])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Something New")
    assert device_peaks.reference_flops(torch.device("cuda", 0), "bfloat16") == 1e12
    assert device_peaks.reference_flops(torch.device("cuda", 0), "float32") == 1e11


@pytest.mark.parametrize("flops_per_s", [1e9, 1e12, 1e16])
def test_the_measurement_finds_the_rate_of_a_machine_by_its_clock(monkeypatch: pytest.MonkeyPatch, flops_per_s: float):
    sizes: list[int] = []

    def seconds(a: torch.Tensor) -> float:
        assert (a.shape, a.dtype) == ((a.shape[0], a.shape[0]), torch.bfloat16)
        sizes.append(a.shape[0])
        disturbed = 1 if len(sizes) % 3 == 2 else 5  # one of three is not
        return disturbed * 2 * a.shape[0] ** 3 / flops_per_s

    monkeypatch.setattr(device_peaks, "_seconds", seconds)
    assert device_peaks.matmul_flops(torch.device("cpu"), torch.bfloat16) == pytest.approx(flops_per_s)
    # It ends with the first product that takes more than 10 ms.
    last = next((n for n in (256, 512, 1024, 2048) if 2 * n**3 / flops_per_s > 0.01), 4096)
    assert sizes[-1] == last


def test_a_faster_small_product_is_not_forgotten_for_a_slower_large_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_peaks, "_seconds", lambda a: 2 * a.shape[0] ** 3 / (1e9 if a.shape[0] > 256 else 1e10))
    assert device_peaks.matmul_flops(torch.device("cpu"), torch.float32) == pytest.approx(1e10)


def test_peak_memory_is_what_the_kernel_counts():
    kib = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert kib
    assert device_peaks.PeakMemory(torch.device("cpu")).since_start_bytes() == pytest.approx(
        int(kib[1]) * 1024, rel=0.02
    )
