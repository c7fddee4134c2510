"""Runs the notebooks and stores them with their outputs, for readers and for the site.

    python notebooks/run.py [NAME...]        # all if none is named

Pages of more than a few kilobytes are left out if there is a text that says the same: stored
notebooks should be small, and whoever runs the notebook sees the page.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbclient
import nbformat

FOLDER = Path(__file__).parent
MOST_PAGE_BYTES = 8_000


def run(path: Path) -> nbformat.NotebookNode:
    """The notebook as Jupyter executes it, with all its output.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    # The checkout, whether installed or not; and figures as the kernel shows them.
    paths = [str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **{key: value for key, value in os.environ.items() if key != "MPLBACKEND"},
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    client = nbclient.NotebookClient(
        notebook,
        timeout=1200,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
    )
    client.execute(env=environment)
    return notebook


def store(notebook: nbformat.NotebookNode, path: Path) -> None:
    """Writes what was run, without large outputs and without execution times."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type != "code":
            continue
        cell.execution_count = None
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = None
            data = output.get("data", {})
            if len(data.get("text/html", "")) > MOST_PAGE_BYTES and "text/plain" in data:
                del data["text/html"]
    nbformat.write(notebook, path)


if __name__ == "__main__":
    names = sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    for name in names:
        print(name, flush=True)
        store(run(FOLDER / f"{name}.ipynb"), FOLDER / f"{name}.ipynb")
