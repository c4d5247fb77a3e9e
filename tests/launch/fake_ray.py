"""What the files in launch/ ask of Ray, without Ray: each task runs at once, in the process that asks for it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.launch.pages import ROOT

CONTEXT = SimpleNamespace(get_world_rank=lambda: 1, get_experiment_name=lambda: "one-run")


def remote(**options: Any) -> Callable[[Any], Any]:
    """The decorator `ray.remote(...)` of a task or an actor."""
    return lambda made: SimpleNamespace(remote=made)


NAMES: dict[str, dict[str, Any]] = {
    "ray": {"remote": remote, "get": lambda result: result, "init": lambda: None},
    "ray.train": {"get_context": lambda: CONTEXT},
    "ray.train.torch": {"TorchConfig": None, "TorchTrainer": None},
}


def launch(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module launch/NAME.py."""
    for ray, members in NAMES.items():
        module = ModuleType(ray)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, ray, module)
    vars(sys.modules["ray"])["train"] = sys.modules["ray.train"]
    spec = importlib.util.spec_from_file_location(name, ROOT / "launch" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
