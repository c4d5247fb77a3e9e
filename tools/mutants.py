"""Change one module in small ways, one at a time, and list the changes that no test of it notices.

    make mutants ARGS="--only ops/cross_entropy.py"
    python tools/mutants.py --only ops/cross_entropy.py [--tests tests/ops/test_cross_entropy.py ...] [--jobs N]

mutmut makes the changes, of function bodies only, in `.mutants/`, a copy of this repository that git ignores. The tests
are those of the file that mirrors the module (tests/ops/test_cross_entropy.py for dtmega/ops/cross_entropy.py), or if
there is none, those of every file that imports the module.
mutmut runs twice. In the first run each function gets the tests that called it in mutmut's own process. Many tests call
the code in forked ranks, which mutmut does not see, so in the second run each change that survived gets all tests.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPY = ROOT / ".mutants"
STATS = COPY / "mutants" / "mutmut-stats.json"
MUTMUT = [sys.executable, "-m", "mutmut"]
SETTINGS = """
[tool.mutmut]
source_paths = ["dtmega"]
only_mutate = ["{module}"]
also_copy = {others}
pytest_add_cli_args_test_selection = {tests}
process_isolation = "forkserver"
"""
# mutmut's codes for a change that survived its tests, and for one that it found no tests for.
UNNOTICED = (0, 5, 33)


def tests_of(module: Path) -> list[str]:
    """The test files of a module, as paths from the root of the repository."""
    mirrored = ROOT / "tests" / module.parent.relative_to("dtmega") / f"test_{module.stem}.py"
    package, name = ".".join(module.parent.parts), module.stem
    imports = re.compile(rf"^\s*(from|import) {package}(\.{name}\b| import .*\b{name}\b)", re.M)
    files = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if imports.search(file.read_text())]
    return [str(file.relative_to(ROOT)) for file in ([mirrored] if mirrored.exists() else files)]


def copy_repository(module: Path, tests: list[str]) -> None:
    """Copy the files that git does not ignore, and write mutmut's settings into the copy's pyproject.toml."""
    shutil.rmtree(COPY, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, stdout=-1, check=True)
    for name in listed.stdout.decode().splitlines():
        (COPY / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():  # dtmega/config/shipped is a link to a folder, and mutmut follows none
            shutil.copytree(ROOT / name, COPY / name)
        elif (ROOT / name).exists():
            shutil.copy2(ROOT / name, COPY / name)
    others = sorted({path.name for path in COPY.iterdir()} - {"dtmega", "pyproject.toml"})
    with (COPY / "pyproject.toml").open("a") as file:
        file.write(SETTINGS.format(module=module, others=json.dumps(others), tests=json.dumps(tests)))


def run_mutmut(*arguments: str) -> None:
    # Python must find the copy's dtmega, with its changes, and not this repository's.
    environment = os.environ | {"PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([*MUTMUT, "run", *arguments], cwd=COPY, env=environment, check=False)
    if ended.returncode:
        sys.exit(f"mutmut ended with {ended.returncode}: do the tests pass in {COPY}/mutants?")


def unnoticed(module: Path) -> list[str]:
    codes = json.loads((COPY / "mutants" / f"{module}.meta").read_text())["exit_code_by_key"]
    return [name for name, code in codes.items() if code in UNNOTICED]


def describe(mutant: str, module: Path) -> str:
    """The place of a mutant in the module, and the lines that it removes and adds."""
    shown = subprocess.run([*MUTMUT, "show", mutant], cwd=COPY, stdout=-1, check=True).stdout.decode()
    changed = [line for line in shown.splitlines() if re.match(r"[-+](?!--|\+\+)", line)]
    lines = [line.strip() for line in (ROOT / module).read_text().splitlines()]
    # mutmut names a function's mutant x_function__mutmut_1, and a method's xǁClassǁmethod__mutmut_1.
    mangled = mutant.rpartition(".")[2].rpartition("__mutmut_")[0]
    names = mangled.split("ǁ")[1:] or [mangled.removeprefix("x_")]
    at = 0
    for name in names:
        at = next(i for i in range(at, len(lines)) if re.match(rf"(class|def) {name}\b", lines[i]))
    at = lines.index(changed[0][1:].strip(), at) if changed[0][1:].strip() in lines[at:] else at
    return "\n    ".join([f"{module}:{at + 1}: {'.'.join(names)}", *(re.sub(r"\s+", " ", line) for line in changed)])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", required=True, metavar="MODULE", help="the module to change: a path below dtmega/")
    parser.add_argument("--tests", nargs="+", metavar="FILE", help="the test files to run instead of the module's own")
    parser.add_argument("--jobs", default=str(os.cpu_count()), help="test runs at a time (default: one a core)")
    args = parser.parse_args(argv)
    if importlib.util.find_spec("mutmut") is None:
        parser.error("there is no mutmut (Python >= 3.11): pip install -c constraints.txt -e '.[mutants]'")
    module = Path("dtmega", args.only)
    tests = args.tests or (tests_of(module) if (ROOT / module).is_file() else [])
    if not tests:
        parser.error(f"there is no {module}, or no test imports it: name test files with --tests")
    print(f"{module}, by {' '.join(tests)}", flush=True)
    copy_repository(module, tests)
    run_mutmut("--max-children", args.jobs)
    if names := unnoticed(module):
        stats = json.loads(STATS.read_text())
        functions = {name.rpartition("__mutmut_")[0] for name in names}
        stats["tests_by_mangled_function_name"] |= {name: [*stats["duration_by_test"]] for name in functions}
        STATS.write_text(json.dumps(stats))
        run_mutmut("--max-children", args.jobs, *names)
    survivors = [describe(name, module) for name in unnoticed(module)]
    print(*survivors, f"no test noticed {len(survivors)} of the changes", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
