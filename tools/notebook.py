"""Run the cells of examples/one_gpu.py and write examples/one_gpu.ipynb with their output: `make notebook`.

python tools/notebook.py        # needs the extra `notebook`
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "one_gpu.py"
NOTEBOOK = ROOT / "examples" / "one_gpu.ipynb"
TIMEOUT_S = 900


def run(names: dict[str, Any]) -> Any:
    """Return the script as a notebook, with the output of its cells.

    Args:
        names: values to run with, by variable; they replace those in the cell tagged `parameters`. The notebook shows
            the script's own values.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed; its traceback is in the message.
    """
    import jupytext
    from nbclient import NotebookClient

    notebook = jupytext.read(SCRIPT)
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    as_written = parameters.source
    parameters.source = "\n".join(f"{name} = {value!r}" for name, value in names.items())
    NotebookClient(notebook, timeout=TIMEOUT_S, resources={"metadata": {"path": str(ROOT)}}).execute()
    parameters.source = as_written
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # a random id would change in each run
        cell.metadata.pop("execution", None)  # times of execution, which change too
        # Warnings on stderr are about this machine's packages and folders.
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def losses(notebook: Any) -> dict[int, float]:
    """Losses that the cells have printed, by step."""
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", []))
    printed = "".join(output.get("text", "") for output in outputs)
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", printed)}


def main() -> None:
    """Run the notebook in a temporary folder, and write it with the paths that the script shows."""
    import nbformat

    with tempfile.TemporaryDirectory() as folder:
        notebook = run({"directory": f"{folder}/model", "out": f"{folder}/trained", "steps": 30})
        content = nbformat.writes(notebook).replace(folder, "runs/one-gpu")
    NOTEBOOK.write_text(content + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
