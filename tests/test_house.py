"""Rules of the tree that `lint-imports` cannot hold, and the reading list of docs/reading.md."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dtmega"
READING = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")

# Rooms that a first reader of the core may skip.
ANNEXES = ("dtmega.interop", "dtmega.cli.convert")


@functools.cache
def imports() -> dict[str, set[str]]:
    """Module -> the modules of dtmega that it imports, wherever in the file the import stands."""
    graph = grimp.build_graph("dtmega", cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def in_room(module: str, *rooms: str) -> bool:
    return any(module == room or module.startswith(f"{room}.") for room in rooms)


def tracked(*patterns: str) -> list[Path]:
    """Files that git knows, below the root."""
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(name) for name in listed.stdout.splitlines()]


def test_no_modules_import_each_other_in_a_circle():
    waiting = {module: set(targets) for module, targets in imports().items()}
    while free := [module for module, targets in waiting.items() if not targets & waiting.keys()]:
        for module in free:
            del waiting[module]
    assert sorted(waiting) == []


def test_only_families_brings_models_and_plans_together():
    both = [
        module
        for module, targets in imports().items()
        if any(in_room(target, "dtmega.models") for target in targets if target != "dtmega.models.family")
        and any(in_room(target, "dtmega.plans") for target in targets)
        and not in_room(module, "dtmega.interop")
    ]
    # The last two take any model and any plan: they shard the model, draw its values and sum its gradients.
    assert sorted(both) == ["dtmega.families", "dtmega.training.parallelize", "dtmega.training.sharded_model"]


def test_the_tests_of_a_module_lie_where_the_module_lies():
    folders = {path.parent.relative_to("dtmega") for path in tracked("dtmega/*.py")} | {Path("launch")}
    astray = [path for path in tracked("tests/**/test_*.py") if path.parent.relative_to("tests") not in folders]
    assert astray == []


def core() -> list[Path]:
    """The files that docs/reading.md names, in its order."""
    table = [line for line in READING.splitlines() if line.startswith("| ")]
    return [PACKAGE / name for line in table for name in re.findall(r"`([\w/]+\.py)`", line)]


def test_the_core_can_be_read_without_the_annexes():
    files = {str(file.relative_to(ROOT).with_suffix("")).replace("/", ".").removesuffix(".__init__") for file in core()}
    needing = {module for module in files if any(in_room(target, *ANNEXES) for target in imports()[module])}
    assert needing == {"dtmega.families"}


def test_the_names_that_plans_lends_are_those_of_the_room_for_transformers():
    from dtmega import plans
    from dtmega.interop import hf

    lent = [name for name in plans.__all__ if name in hf.__all__]
    assert lent == ["load_hf", "parallelize_hf", "plan_for", "verify_plan"]
    assert [getattr(plans, name) for name in lent] == [getattr(hf, name) for name in lent]


def test_no_page_holds_both_sides_of_a_merge():
    marks = re.compile(r"^(<{7}|>{7}) ", re.MULTILINE)
    pages = tracked("*.md")
    assert [page for page in pages if marks.search((ROOT / page).read_text(encoding="utf-8"))] == []
