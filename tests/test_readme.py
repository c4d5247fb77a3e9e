"""What the README says is so."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def tree() -> list[str]:
    """Paths of the file tree in "The house", folders with a slash at their end."""
    (block,) = re.findall(r"## The house\n\n```\n(.*?)```", README, flags=re.DOTALL)
    paths, folder = [], ""
    for line in block.splitlines():
        name = line.split()[0]
        folder = folder if line.startswith("  ") else ""
        paths.append(folder + name)
        if name == "dtmega/":
            folder = name
    return paths


def test_every_room_of_the_tree_exists():
    missing = [p for p in tree() if not (ROOT / p).exists() or (ROOT / p).is_dir() != p.endswith("/")]
    assert missing == []


def test_every_room_of_the_package_is_in_the_tree():
    package = ROOT / "dtmega"
    rooms = {f"dtmega/{p.name}" for p in package.glob("*.py")} - {"dtmega/__init__.py"}
    rooms |= {f"dtmega/{p.parent.name}/" for p in package.glob("*/__init__.py")}
    assert rooms <= set(tree())


def test_the_configuration_shown_is_the_file():
    (block,) = re.findall(r"```toml\n(.*?)```", README, flags=re.DOTALL)
    assert block == (ROOT / "configs" / "bloom.toml").read_text(encoding="utf-8")


def test_the_commands_shown_are_targets_of_the_makefile():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert set(re.findall(r"^make (\w+)", README, flags=re.MULTILINE)) == {"train", "test"} <= targets


def test_ci_runs_the_readmes_test_command_and_nothing_else():
    commands = [
        line
        for line in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith(("#", "set ", "cd "))
    ]
    assert commands == ["exec make test"]


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert link.startswith("http") or (ROOT / link).exists(), link
