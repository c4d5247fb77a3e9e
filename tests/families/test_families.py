"""Claims about families: a record is opened when its name is asked for, and nobody else knows a family by its name."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest

from dtmega import config, families
from dtmega.config.schema import SectionClasses
from dtmega.distributed.agreement import same_job
from dtmega.families.built_in import BuiltIn
from dtmega.interop import stored
from dtmega.training import sharded_model, start
from tests import layouts
from tests.test_house import ROOT, imports
from tests.test_train import losses, run

OWN = [name for name in families.names() if isinstance(families.named(name), BuiltIn)]
# Files whose subject is one family, or a format of other people's files.
OF_A_FAMILY = ("dtmega.families", "dtmega.models", "dtmega.plans", "dtmega.interop.formats", "dtmega.interop.hf")


def names_compared(file: Path) -> list[str]:
    """Names of families that a file compares with a `.name`."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(side, ast.Attribute) and side.attr == "name" for side in sides):
                found += [side.value for side in sides if isinstance(side, ast.Constant)]
    return [name for name in found if name in families.names()]


def test_no_file_asks_which_family_it_is():
    rooms = [ROOT / room.replace(".", "/") for room in OF_A_FAMILY]
    asking = {}
    for file in (ROOT / "dtmega").rglob("*.py"):
        of_a_family = any(room in file.parents for room in rooms)
        if not of_a_family and file.parent.name != "config" and (names := names_compared(file)):
            asking[file] = names
    assert asking == {}


def test_only_its_record_imports_the_model_and_the_plan_of_a_family():
    for name in OWN:
        of_one = {f"dtmega.models.{name}", f"dtmega.plans.{name}"}
        asking = {module for module, targets in imports().items() if targets & of_one}
        assert {module for module in asking if not module.startswith(OF_A_FAMILY[1:])} == {f"dtmega.families.{name}"}


def test_every_name_of_the_configuration_has_a_record():
    names = SectionClasses.of(config.Config.model_fields["model"]).classes
    assert {*families.names()} == names.keys()


@pytest.mark.parametrize("name", OWN)
def test_a_family_of_the_house_has_a_configuration_layouts_and_a_directory_format(name: str):
    assert config.load(["--config", f"{name}.toml"]).model.name == name
    assert name in layouts.FAMILIES
    assert {f"{name}, {layout}" for layout in layouts.EACH} <= layouts.LAYOUTS.keys() or name == "bloom"
    assert "hf" in stored.all_families()[name].formats


def test_the_ranks_of_a_run_compare_the_libraries_of_its_family(tmp_path, corpus, monkeypatch):
    family = dataclasses.replace(cast("Any", families.named("bloom")), libraries=("pytest",))
    monkeypatch.setitem(families.BUILT_IN, "bloom", lambda: family)
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
