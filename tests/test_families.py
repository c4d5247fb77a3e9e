"""Claims about families.py: it alone knows a family by its name, and memory is apart from values."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from dtmega import config, families
from dtmega.config.schema import SectionClasses
from dtmega.distributed.agreement import same_job
from dtmega.training import sharded_model, start
from tests import layouts
from tests.test_house import ROOT, imports
from tests.test_train import losses, run

OWN = {name: family for name, family in families.FAMILIES.items() if isinstance(family, families.BuiltInFamily)}
# Files whose subject is one family, or a format of other people's files.
OF_A_FAMILY = ("dtmega.models", "dtmega.plans", "dtmega.interop.hf")


def names_compared(file: Path) -> list[str]:
    """Names of families that a file compares with a `.name`."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(side, ast.Attribute) and side.attr == "name" for side in sides):
                found += [side.value for side in sides if isinstance(side, ast.Constant)]
    return [name for name in found if name in families.FAMILIES]


def test_no_file_asks_which_family_it_is():
    rooms = [ROOT / room.replace(".", "/") for room in OF_A_FAMILY]
    asking = {}
    for file in (ROOT / "dtmega").rglob("*.py"):
        of_a_family = any(room in file.parents for room in rooms)
        if not of_a_family and file.parent.name != "config" and (names := names_compared(file)):
            asking[file] = names
    assert asking == {}


def test_only_families_imports_the_models_and_plans_of_families():
    of_one = {f"dtmega.{room}.{name}" for room in ("models", "plans") for name in OWN}
    of_one |= {f"dtmega.interop.hf.{name}" for name in ("record", "model", "resolve")}
    asking = {module for module, targets in imports().items() if targets & of_one}
    assert {module for module in asking if not module.startswith(OF_A_FAMILY)} == {"dtmega.families"}


def test_every_name_of_the_configuration_has_a_record():
    names = SectionClasses.of(config.Config.model_fields["model"]).classes
    assert families.FAMILIES.keys() == names.keys()


@pytest.mark.parametrize("name", OWN)
def test_a_family_of_the_house_has_a_configuration_layouts_and_a_directory_format(name: str):
    assert config.load(["--config", f"{name}.toml"]).model.name == name
    assert name in layouts.FAMILIES
    assert {f"{name}, {layout}" for layout in layouts.EACH} <= layouts.LAYOUTS.keys() or name == "bloom"
    assert "hf" in OWN[name].formats


def test_the_ranks_of_a_run_compare_the_libraries_of_its_family(tmp_path, corpus, monkeypatch):
    family: Any = families.FAMILIES["bloom"]
    monkeypatch.setitem(families.FAMILIES, "bloom", dataclasses.replace(family, libraries=("pytest",)))
    compared = []
    monkeypatch.setattr(start, "same_job", lambda *args: compared.append(same_job(*args)) or compared[-1])
    assert run(tmp_path, corpus, train__steps=1) == 0
    assert compared[0]["pytest"] == pytest.__version__


def test_a_resumed_run_draws_no_value_that_its_checkpoint_overwrites(tmp_path, corpus, monkeypatch):
    assert run(tmp_path / "whole", corpus) == 0
    assert run(tmp_path / "cut", corpus, train__exit_interval=5) == 0
    drawn = []
    monkeypatch.setattr(sharded_model, "init_weights", lambda *_: drawn.append(1))
    assert run(tmp_path / "cut", corpus) == 0
    assert drawn == []
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
