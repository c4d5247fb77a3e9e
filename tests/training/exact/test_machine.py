"""What an exact run records of its machine shows each setting that changes a product, by its name or by its effect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dtmega.training.exact import machine

CPU = torch.device("cpu")
RECORD = """
import json, torch
from dtmega.training.exact import machine
print(json.dumps(machine.prepare(torch.device("cpu"))))
"""


@pytest.fixture(autouse=True)
def settings_as_before() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(n_threads)
    torch.set_flush_denormal(False)
    torch.set_float32_matmul_precision("highest")
    torch.backends.mkldnn.enabled = True
    torch.backends.cuda.enable_flash_sdp(True)
    torch.use_deterministic_algorithms(False)


def switch_mkldnn_off() -> None:
    torch.backends.mkldnn.enabled = False


CHANGES: dict[str, Callable[[], Any]] = {
    "the bits of products in float32": lambda: torch.set_flush_denormal(True),  # torch cannot read this setting
    "torch.set_float32_matmul_precision": lambda: torch.set_float32_matmul_precision("medium"),
    "torch.backends.mkldnn": switch_mkldnn_off,
    "torch.backends.cuda.enable_flash_sdp": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "torch.use_deterministic_algorithms": lambda: torch.use_deterministic_algorithms(True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_that_can_change_products_shows(name: str):
    before = machine.prepare(CPU)
    assert machine.prepare(CPU) == before
    CHANGES[name]()
    assert machine.prepare(CPU)[name] != before[name]


def test_to_ask_for_what_is_the_default_changes_nothing():
    before = machine.prepare(CPU)
    torch.set_float32_matmul_precision("highest")
    assert machine.prepare(CPU) == before


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
def test_a_variable_of_a_library_shows_by_its_name_and_by_its_effect():
    """A process of its own, because MKL reads its variable once."""
    before = machine.prepare(CPU)
    environment = os.environ | {"MKL_CBWR": "COMPATIBLE"}
    output = subprocess.run([sys.executable, "-c", RECORD], env=environment, check=True, capture_output=True).stdout
    now = json.loads(output)
    assert {name for name in before if now[name] != before[name]} >= {"MKL_CBWR", "the bits of products in float32"}
