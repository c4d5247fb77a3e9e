"""Rules of the tree that `lint-imports` cannot hold."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
TABLE = "dtmega.rooms"  # the imports that only a key of the configuration asks for


@functools.cache
def imports() -> dict[str, set[str]]:
    """Module -> the modules of dtmega that it imports, wherever in the file the import stands, or through the table."""
    graph = grimp.build_graph("dtmega", cache_dir=None)
    found = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    for module in found:
        if TABLE in found[module]:
            found[module] = found[module] | opened(module)
    return {**found, TABLE: set()}


def syntax(module: str) -> ast.Module:
    """The syntax tree of a module of dtmega."""
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def imported(statement: ast.ImportFrom) -> set[str]:
    """The modules that a statement `from dtmega.room import module` imports."""
    names = {f"{statement.module}.{alias.name}" for alias in statement.names}
    folders = {name for name in names if (ROOT / name.replace(".", "/")).is_dir()}
    files = {name for name in names if (ROOT / name.replace(".", "/")).with_suffix(".py").is_file()}
    return folders | files


@functools.cache
def table() -> dict[str, set[str]]:
    """Function of the table -> the modules that it imports."""
    functions = [node for node in syntax(TABLE).body if isinstance(node, ast.FunctionDef)]
    return {
        function.name: set().union(*(imported(node) for node in function.body if isinstance(node, ast.ImportFrom)))
        for function in functions
    }


def opened(module: str) -> set[str]:
    """The modules that a module imports through the table."""
    names = {
        node.attr
        for node in ast.walk(syntax(module))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "rooms"
    }
    return set().union(*(table()[name] for name in names))


def inside_functions(module: str) -> list[str]:
    """The imports of dtmega's modules that stand in functions of a module."""
    functions = [node for node in ast.walk(syntax(module)) if isinstance(node, ast.FunctionDef)]
    found = []
    for function in functions:
        for node in ast.walk(function):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dtmega"):
                found.append(f"{module}.{function.name}: {node.module}")
    return found


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


def test_an_import_in_a_function_stands_in_the_table():
    # A command imports what it does when it is called; users may import the names that `plans` lends from there too.
    elsewhere = ("dtmega.cli", "dtmega.__main__", "dtmega.plans", TABLE)
    found = [line for module in imports() if not in_room(module, *elsewhere) for line in inside_functions(module)]
    assert found == []


def test_the_table_has_no_function_that_nobody_calls():
    graph = grimp.build_graph("dtmega", cache_dir=None)
    callers = graph.find_modules_that_directly_import(TABLE)
    called = [target for module in callers for target in opened(module)]
    assert [name for name, targets in table().items() if not targets <= {*called}] == []


def test_only_the_records_of_families_bring_models_and_plans_together():
    both = [
        module
        for module, targets in imports().items()
        if any(in_room(target, "dtmega.models") for target in targets)
        and any(in_room(target, "dtmega.plans") for target in targets)
        and not in_room(module, "dtmega.families", "dtmega.interop")
    ]
    # It takes any model and any plan.
    assert sorted(both) == ["dtmega.training.parallelize"]


def test_the_tests_of_a_module_lie_where_the_module_lies():
    folders = {path.parent.relative_to("dtmega") for path in tracked("dtmega/*.py")} | {Path("launch")}
    astray = [path for path in tracked("tests/**/test_*.py") if path.parent.relative_to("tests") not in folders]
    assert astray == []


def test_the_names_that_plans_lends_are_those_of_the_room_for_transformers():
    from dtmega import plans
    from dtmega.interop import hf

    lent = [name for name in plans.__all__ if name in hf.__all__]
    assert lent == ["load_hf", "parallelize_hf", "plan_for", "verify_plan"]
    assert [getattr(plans, name) for name in lent] == [getattr(hf, name) for name in lent]


def test_every_python_file_that_a_page_names_is_there():
    # A page may name a file by its last folders; docs/reading.md names those of dtmega/.
    ends = {Path(*path.parts[i:]) for path in tracked("*.py") for i in range(len(path.parts))}
    for page in tracked("docs/*.md", "README.md", "CONTRIBUTING.md"):
        named = re.findall(r"`(?:\.\./)?([\w/]+\.py)(?:::\w+)?`", (ROOT / page).read_text(encoding="utf-8"))
        gone = [name for name in named if Path(name) not in ends and "NAME" not in name]
        assert set(gone) <= {"utils.py"}, page  # which there is not, as the pages say


def test_no_page_holds_both_sides_of_a_merge():
    marks = re.compile(r"^(<{7}|>{7}) ", re.MULTILINE)
    pages = tracked("*.md")
    assert [page for page in pages if marks.search((ROOT / page).read_text(encoding="utf-8"))] == []
