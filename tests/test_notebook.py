"""examples/one_gpu.ipynb has the cells of the script beside it, and does what it shows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tools import notebook

KEPT = json.loads(notebook.NOTEBOOK.read_text(encoding="utf-8"))


def test_the_notebook_has_the_cells_of_the_script():
    cells = []
    for part in notebook.SCRIPT.read_text(encoding="utf-8").split("\n# %%")[1:]:
        head, _, source = part.partition("\n")
        if "[markdown]" in head:
            source = "\n".join(line.removeprefix("#").removeprefix(" ") for line in source.splitlines())
        cells.append(("markdown" if "[markdown]" in head else "code", source.strip()))
    assert [(cell["cell_type"], "".join(cell["source"]).strip()) for cell in KEPT["cells"]] == cells


def test_the_notebook_shows_a_loss_that_falls_and_a_plot_of_it():
    outputs = [output for cell in KEPT["cells"] for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output["output_type"] == "error" for output in outputs)


@pytest.mark.filterwarnings("default")  # of the notebook's libraries, which warn of each other
def test_the_notebook_runs_and_its_losses_are_those_it_shows(tmp_path: Path):
    pytest.importorskip("jupytext", reason="pip install -e '.[notebook]'")
    import nbformat

    shown = notebook.losses(nbformat.read(notebook.NOTEBOOK, as_version=4))
    assert len(shown) >= 5
    done = notebook.run({"directory": str(tmp_path / "model"), "out": str(tmp_path / "trained"), "steps": 30})
    losses = notebook.losses(done)
    assert list(losses) == list(shown)
    # The text it learns from is this Python's own library.
    if KEPT["metadata"]["language_info"]["version"] == ".".join(map(str, sys.version_info[:3])):
        assert losses == pytest.approx(shown, rel=2e-2)
