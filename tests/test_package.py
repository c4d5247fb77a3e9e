"""What `pip install` of a wheel gives: the package, its configurations, and the command `dtmega`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import tomli

from tests.test_train import arguments

ROOT = Path(__file__).resolve().parent.parent
SETUPTOOLS = tomli.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]

# What one process does without, and what takes long to import.
UNNEEDED = {
    *("torch.distributed.pipelining", "torch.distributed.pipelining.schedules", "dtmega.pipelining.stage"),
    *("torch._inductor.compile_fx", "transformers", "pyarrow"),
}


def trained(site: Path, program: list[str], corpus: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`dtmega train` for one step, from a folder without the repository and with the package of `site`."""
    _, _, *overrides = arguments(folder / "run", corpus, train__steps=1, checkpoint__final="false")
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [*program, "train", "--config", "bloom.toml", *overrides],
        cwd=folder,
        env=clean | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_every_folder_with_modules_is_a_package_of_the_wheel_and_configs_are_beside_it():
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "dtmega").rglob("*.py")}
    assert set(SETUPTOOLS["packages"]) == folders | {"dtmega.config.shipped"}
    assert (ROOT / "dtmega" / "config" / "shipped").samefile(ROOT / "configs")


def test_installed_without_the_repository_it_trains_a_configuration_by_name_without_transformers(corpus, tmp_path):
    site = tmp_path / "site"
    shutil.copytree(ROOT / "dtmega", site / "dtmega", ignore=shutil.ignore_patterns("__pycache__"))
    done = trained(site, [sys.executable, "-X", "importtime", "-m", "dtmega"], corpus, tmp_path)
    assert "step 1/1 | loss " in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "dtmega.training.parallelize" in imported
    assert not imported & UNNEEDED


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A clone with data/ in it, and two folders up `site`: what an editable install puts into site-packages."""
    if int(version("setuptools").partition(".")[0]) < 77:  # an older torch asks for none
        pytest.skip("setuptools >= 77 builds it, as pyproject.toml says")
    home = tmp_path_factory.mktemp("home")
    clone = home / "src" / "dtmega"
    code = shutil.ignore_patterns("__pycache__", "*.tiktoken")
    shutil.copytree(ROOT / "dtmega", clone / "dtmega", ignore=code, symlinks=True)
    for folder in ("configs", "examples"):
        shutil.copytree(ROOT / folder, clone / folder)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, clone)
    (clone / "data").mkdir()
    build = "import setuptools.build_meta; setuptools.build_meta.build_editable('../..')"
    subprocess.run([sys.executable, "-c", build], cwd=clone, check=True, capture_output=True)
    (wheel,) = home.glob("*.whl")
    shutil.unpack_archive(wheel, home / "site", "zip")
    return clone


@pytest.mark.parametrize("folder", ["..", ".", "examples", "/"])
def test_installed_editable_the_package_is_the_clones_from_any_folder(clone: Path, folder: str):
    script = [
        f"import site; site.addsitedir({str(clone.parent.parent / 'site')!r})",
        "import dtmega.data; print(dtmega.__file__, *dtmega.data.__path__)",
    ]
    # -S and -E: a Python without packages of its own, so that no other dtmega is there.
    alone = [sys.executable, "-S", "-E", "-c", "\n".join(script)]
    done = subprocess.run(alone, cwd=clone / folder, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(clone / "dtmega" / name) for name in ("__init__.py", "data")]


def printed(*lines: str) -> list[str]:
    """The words that a fresh Python prints for these lines."""
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_a_process_that_reads_data_imports_nothing_of_the_trainer_by_its_main_file():
    again = 'import runpy, sys; runpy.run_path("train.py", run_name="__mp_main__")'  # as multiprocessing spawns it
    assert printed(again, 'print("dtmega.cli.entry" in sys.modules, "torch" in sys.modules)') == ["True", "False"]


def test_no_garbage_is_looked_for_while_it_imports():
    stand_in = [
        "class Trainer(types.ModuleType):",
        "    def __getattr__(self, name):",  # of a module, what an import takes from it
        "        return lambda argv, while_imported=gc.isenabled(): print(name, while_imported)",
        'sys.modules["dtmega.train"] = Trainer("dtmega.train")',
    ]
    said = printed("import gc, sys, types", *stand_in, "from dtmega.cli import entry; entry.train([])")
    assert said == ["run_and_leave", "False"]


def test_garbage_is_collected_while_it_trains_but_not_of_what_was_imported():
    said = "dtmega.train.run_and_leave = lambda argv: print(*argv, gc.isenabled(), gc.get_freeze_count() > 10**5)"
    begun = 'from dtmega.cli import entry; entry.train(["--config"])'
    assert printed("import gc, dtmega.train", said, begun) == ["--config", "True", "True"]


@pytest.mark.full
def test_a_wheel_holds_what_the_command_needs(corpus, tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    copy = tmp_path / "copy"  # setuptools leaves its own files in what it builds from
    copied = ("dtmega", "configs", "pyproject.toml", "README.md", "LICENSE")
    shutil.copytree(ROOT, copy, ignore=lambda folder, names: set(names) - set(copied) if folder == str(ROOT) else set())
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(copy)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    done = trained(site, [sys.executable, str(site / "bin" / "dtmega")], corpus, tmp_path)
    assert "step 1/1 | loss " in done.stdout
