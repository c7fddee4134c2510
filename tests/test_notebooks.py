"""The notebook runs from top to bottom and shows what it is there to show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


@pytest.mark.slow
# Jupyter's own event loop and ports: nothing of ours.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
def test_first_steps_runs_and_shows_plan_and_picture() -> None:
    notebook = nbformat.read(NOTEBOOKS / "first_steps.ipynb", as_version=4)
    NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(NOTEBOOKS.parent)}},
    ).execute()
    outputs: dict[str, list[Any]] = {
        cell.source: cell.outputs for cell in notebook.cells if cell.cell_type == "code"
    }

    def shown(marker: str) -> set[str]:
        (cell,) = (outputs[source] for source in outputs if marker in source)
        return {kind for output in cell for kind in output.get("data", {})}

    assert "text/html" in shown("plan = lean_loss_fn.plan(params, x)")
    assert "image/png" in shown("def draw(")


def test_no_outputs_are_stored() -> None:
    for path in NOTEBOOKS.glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            assert not cell.get("outputs"), f"{path.name} stores outputs: clear them"
