"""The house stands: every file of dtmega belongs to a room, and imports go down a level, or sideways with leave."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
READING = (REPO / "docs" / "reading.md").read_text(encoding="utf-8")

# A room is a file or a folder of dtmega/, or train.py beside it: its level, and the rooms of the same level that it may
# import.
ROOMS: dict[str, tuple[int, set[str]]] = {
    "__init__": (0, set()),
    "declared": (0, set()),  # imports nothing of dtmega
    "sections": (0, {"declared", "strangers"}),
    "model_sections": (0, {"declared"}),
    "mixture": (0, set()),  # imports nothing of dtmega
    "config": (0, {"declared", "mixture", "model_sections", "sections"}),
    "durable": (0, set()),  # files that a power cut leaves whole; imports nothing of dtmega
    "lock": (0, {"output"}),  # one process at a time
    "extras": (0, set()),  # libraries that may be missing; imports nothing of dtmega
    "output": (0, set()),  # lines for people; imports nothing of dtmega
    "strangers": (0, set()),  # JSON and TOML of other people; imports nothing of dtmega
    "formats": (1, set()),  # names and forms of other people's files, as data
    "processor": (0, set()),  # what this CPU is fast at; imports nothing of dtmega
    "keyed": (1, set()),  # randomness as a function; imports nothing of dtmega
    "job": (1, set()),  # what a process owes its launcher
    "loss_scale": (1, set()),  # float16's
    "pages": (1, set()),  # huge pages; imports nothing of dtmega
    "softmax": (1, set()),  # passes over logits; imports nothing of dtmega
    "head_gradient": (1, {"pages", "softmax"}),  # of its weight, chunk by chunk
    "loss": (1, {"head_gradient", "pages", "softmax"}),  # one kernel for one device and for a vocabulary cut over ranks
    "rendezvous": (1, set()),  # imports nothing of dtmega
    "mesh": (1, {"rendezvous"}),  # the process group begins with the store of the rendezvous
    "startup": (1, {"job", "mesh", "rendezvous"}),  # ranks meet in the store that mesh.py opens
    "recompute": (2, {"models"}),  # of a stage
    "shards": (1, set()),  # which part of a tensor is here; imports nothing of dtmega
    "past": (1, set()),  # cache of keys and values; imports nothing of dtmega
    "rule": (1, {"past"}),  # which pairs attend
    "attention_cpu": (1, {"keyed", "rule"}),  # one of its kernels
    "linear_cpu": (1, set()),  # linears by the products that such a CPU is fast at
    "attention": (1, {"attention_cpu", "keyed", "rule"}),  # dropout on the probabilities
    "cost": (1, set()),
    "drift": (1, {"shards"}),
    "optim": (1, {"shards"}),  # the part of a parameter that is here
    "starts": (1, {"job"}),  # what a run was started with, each time
    "trackers": (1, set()),  # libraries of others, imported by their threads only
    "cores": (1, set()),  # whether others use them; imports nothing of dtmega
    "peak": (1, {"cost"}),  # FLOP/s of a known GPU
    "metrics": (1, {"cost", "job", "peak", "trackers"}),
    "watch": (1, {"job"}),  # how it ends the process
    "data": (1, {"keyed"}),  # the order of samples
    "models": (2, set()),
    "plans": (2, set()),
    "fsdp": (2, set()),
    "pipelining": (2, set()),
    "checkpoint": (2, set()),
    "foreign": (2, {"checkpoint"}),  # files of torch's, as data; boxes that make a whole
    "family": (3, set()),  # what is asked of a family
    "hf": (3, {"family"}),  # models of transformers: their files, their place in the trainer, their plans
    "families": (3, {"family", "hf"}),  # a model, its plan, its files
    "parallelize": (3, {"families"}),
    "megatron": (2, {"checkpoint", "foreign"}),  # flags, names and files of the original
    "planner": (4, set()),
    "report": (4, set()),  # a run as a page
    "convert": (4, {"report"}),  # weights between houses; what a run's record tells goes on their card
    "step": (4, set()),
    "evaluate": (4, {"step"}),  # what both loops do with a batch
    "train": (5, set()),
    "use": (4, set()),  # a trained model, opened to be used
    "harness": (4, {"use"}),  # lm-evaluation-harness on it
    "commands": (5, set()),  # one module for each, over what does the work
    "begin": (5, {"train"}),  # its imports
    "__main__": (5, {"begin", "commands"}),
    "train.py": (6, set()),  # for torchrun
}

# The one arrow that runs up: `from dtmega.plans import parallelize_hf`, a name that is looked for when it is asked for.
LAZY = ("dtmega.plans", "dtmega.interop.hf")

# What a first reader of the core may skip.
ANNEXES = {"convert", "foreign", "hf", "megatron"}


def modules(repo: Path) -> dict[str, Path]:
    """Dotted name -> file, of dtmega and train.py beside it; a package is named without its __init__."""
    found = {}
    for path in [*(repo / "dtmega").rglob("*.py"), *repo.glob("train.py")]:
        parts = path.relative_to(repo).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room(module: str) -> str:
    """dtmega.data.sampling.samples -> data, dtmega -> __init__, train -> train.py"""
    parts = module.split(".")
    return "train.py" if parts == ["train"] else (*parts, "__init__")[1]


def arrows(repo: Path) -> dict[str, set[str]]:
    """Module -> the modules of the house it imports, wherever in the file the import stands."""
    known = modules(repo)
    graph: dict[str, set[str]] = {}
    for module, path in known.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                source = ".".join([*above, *([node.module] if node.module else [])])
                # `from package import name` is an arrow to the module package.name, or else to the package itself.
                names |= {f"{source}.{a.name}" if f"{source}.{a.name}" in known else source for a in node.names}
        graph[module] = (names & known.keys()) - {module}
    return graph


def unhoused(repo: Path) -> list[str]:
    return sorted(module for module in modules(repo) if room(module) not in ROOMS)


def forbidden(repo: Path) -> list[str]:
    """Arrows between rooms that run up, or sideways without leave."""
    wrong = []
    for module, targets in arrows(repo).items():
        for target in targets:
            (level, beside), there = ROOMS[room(module)], room(target)
            if (module, target) == LAZY:
                continue
            if there != room(module) and ROOMS[there][0] >= level and there not in beside:
                wrong.append(f"{module} (level {level}) -> {target} (level {ROOMS[there][0]})")
    return sorted(wrong)


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, and those that import them; empty if there is none."""
    left = {module: set(targets) for module, targets in graph.items()}
    while free := [module for module, targets in left.items() if not targets & left.keys()]:
        for module in free:
            del left[module]
    return sorted(left)


def plant(repo: Path, files: dict[str, str]) -> Path:
    """A house of the given files in `repo`."""
    for name, text in files.items():
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_text(text)
    return repo


def test_every_file_has_a_room():
    assert unhoused(REPO) == []


def test_no_import_runs_up_or_sideways_without_leave():
    assert forbidden(REPO) == []


def test_no_modules_import_each_other_in_a_circle():
    assert cycle(arrows(REPO)) == []


def test_only_families_brings_models_and_plans_together():
    graph = arrows(REPO)
    both = [m for m, targets in graph.items() if {"models", "plans"} <= {room(t) for t in targets}]
    # `parallelize` draws the values of one and sums the gradients of the other, whatever the family.
    assert set(both) == {"dtmega.families", "dtmega.training.parallelize"}


def merging(repo: Path) -> list[str]:
    """Pages in which a merge has left both sides; of code and tables Python and TOML say so themselves."""
    pages = [*repo.glob("*.md"), *repo.glob("docs/*.md"), *repo.glob("benchmarks/*.md")]
    marks = re.compile(r"^(<{7}|>{7}) ", re.MULTILINE)
    return sorted(page.name for page in pages if marks.search(page.read_text(encoding="utf-8")))


def test_no_page_holds_both_sides_of_a_merge(tmp_path):
    assert merging(REPO) == []
    both = "\n".join(["a", "<" * 7 + " HEAD", "b", "=" * 7, "c", ">" * 7 + " other", ""])
    assert merging(plant(tmp_path, {"A.md": both, "docs/B.md": "a << b\n=======\n"})) == ["A.md"]


def core() -> list[Path]:
    """The files that docs/reading.md names, in its order."""
    table = [line for line in READING.splitlines() if line.startswith("| ")]
    return [REPO / "dtmega" / name for line in table for name in re.findall(r"`([\w/]+\.py)`", line)]


def test_the_core_has_the_lines_that_its_reading_order_says():
    (said,) = re.findall(r"about ([\d,]+) lines", READING)
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in core())
    assert abs(lines - int(said.replace(",", ""))) <= 500, lines


def test_the_core_can_be_read_without_the_annexes():
    named = set(re.findall(r"^- `(\w+)/`", READING, flags=re.MULTILINE))
    assert named == ANNEXES
    files, graph = core(), arrows(REPO)
    needing = {m for m, path in modules(REPO).items() if path in files and {room(t) for t in graph[m]} & ANNEXES}
    assert needing == {"dtmega.families"}
    # And whatever else is no annex: the commands, and what `plans` lends.
    others = {m for m, targets in graph.items() if {room(t) for t in targets} & ANNEXES and room(m) not in ANNEXES}
    assert {room(m) for m in others} == {"commands", "families", "plans"}


def test_the_parts_of_the_wing_for_transformers_see_each_other_downward_only():
    below = {"families": 0, "files": 0, "initial": 0, "directory": 1, "model": 2, "resolve": 3, "tp": 1, "record": 4}
    prefix = "dtmega.interop.hf."
    seen = set()
    for module, targets in arrows(REPO).items():
        part = module.removeprefix(prefix).partition(".")[0]
        others = {target.removeprefix(prefix).partition(".")[0] for target in targets if target.startswith(prefix)}
        if module.startswith(prefix):
            seen |= {(part, other) for other in others - {part}}
    assert {(part, other) for part, other in seen if below[other] >= below[part]} == set()
    assert ("model", "tp") not in seen  # record.py joins them


def test_the_names_of_the_wing_that_plans_lends_are_those_of_the_wing():
    from dtmega import plans
    from dtmega.interop import hf

    lent = [name for name in plans.__all__ if name in hf.__all__]
    assert lent == ["load_hf", "parallelize_hf", "plan_for", "verify_plan"]
    assert [getattr(plans, name) for name in lent] == [getattr(hf, name) for name in lent]


def test_a_planted_file_without_a_room_is_found(tmp_path: Path):
    assert unhoused(plant(tmp_path, {"dtmega/utils.py": ""})) == ["dtmega.utils"]


@pytest.mark.parametrize(
    "text",
    [
        "import dtmega.training.parallelize",
        "from dtmega import parallelize",
        "from dtmega.training.parallelize import parallelize",
        "from ..parallelize import parallelize",
        "from .. import parallelize",
        "def f():\n    from dtmega.training.parallelize import parallelize",
        "if TYPE_CHECKING:\n    import dtmega.training.parallelize as p",
    ],
)
def test_a_planted_upward_import_is_found_however_it_is_written(tmp_path: Path, text: str):
    plant(tmp_path, {"dtmega/training/parallelize.py": "", "dtmega/models/bloom.py": text})
    assert forbidden(tmp_path) == ["dtmega.models.bloom (level 2) -> dtmega.training.parallelize (level 3)"]


def test_a_planted_sideways_import_is_found(tmp_path: Path):
    plant(tmp_path, {"dtmega/plans/bloom.py": "", "dtmega/models/bloom.py": "from dtmega.plans import bloom"})
    assert forbidden(tmp_path) == ["dtmega.models.bloom (level 2) -> dtmega.plans.bloom (level 2)"]


def test_a_planted_import_of_train_is_found(tmp_path: Path):
    plant(tmp_path, {"train.py": "", "dtmega/train.py": "import train", "dtmega/planner.py": "import dtmega.train"})
    assert forbidden(tmp_path) == [
        "dtmega.planner (level 4) -> dtmega.train (level 5)",
        "dtmega.train (level 5) -> train (level 6)",
    ]


def test_downward_imports_and_sideways_ones_with_leave_are_fine(tmp_path: Path):
    text = "import torch\nfrom dtmega import config, cost"
    plant(tmp_path, {"dtmega/config.py": "", "dtmega/ops/cost.py": "", "dtmega/training/metrics.py": text})
    assert (forbidden(tmp_path), arrows(tmp_path)["dtmega.training.metrics"]) == (
        [],
        {"dtmega.config", "dtmega.ops.cost"},
    )


def test_a_planted_circle_is_found_and_names_those_in_it(tmp_path: Path):
    files = {
        "dtmega/data/__init__.py": "",
        "dtmega/data/indexed_files/dataset.py": "from dtmega.data.sampling.samples import x",
        "dtmega/data/sampling/samples.py": "from .loader import x",
        "dtmega/data/loader.py": "def f():\n    from . import indexed",
        "dtmega/data/tokenizers/tokenizer.py": "",
    }
    assert cycle(arrows(plant(tmp_path, files))) == [
        "dtmega.data.indexed_files.dataset",
        "dtmega.data.loader",
        "dtmega.data.sampling.samples",
    ]
