"""The notebook, executed as Jupyter executes it. It is stored without outputs."""

import base64
import importlib.util
import os
from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "first_steps.ipynb"
PNG_START = b"\x89PNG\r\n\x1a\n"


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def cell_with(notebook, source: str):
    (cell,) = [cell for cell in code_cells(notebook) if source in cell.source]
    return cell


def shown(cell) -> dict[str, str]:
    """What a cell displays, by MIME type."""
    return {
        kind: data
        for output in cell.outputs
        if output.output_type in ("display_data", "execute_result")
        for kind, data in output.data.items()
    }


def printed(cell) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def test_is_stored_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(cell.outputs == [] for cell in code_cells(notebook))
    assert all(cell.execution_count is None for cell in code_cells(notebook))


@pytest.fixture(scope="module")
def executed():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    # The checkout, whether it is installed or not; and figures as the kernel shows them.
    paths = [str(NOTEBOOK.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **{key: value for key, value in os.environ.items() if key != "MPLBACKEND"},
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    client = nbclient.NotebookClient(
        notebook,
        timeout=1200,
        kernel_name="python3",
        resources={"metadata": {"path": str(NOTEBOOK.parent)}},
    )
    # Raises CellExecutionError with the traceback if a cell fails.
    client.execute(env=environment)
    return notebook


@pytest.mark.slow
@pytest.mark.versions
def test_runs_without_an_error(executed):
    outputs = [output for cell in code_cells(executed) for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    warnings = [output for output in outputs if output.get("name") == "stderr"]
    assert not [output.text for output in warnings if "Warning" in output.text]


@pytest.mark.slow
@pytest.mark.versions
def test_shows_the_plan_as_a_page(executed):
    page = shown(cell_with(executed, "plan = lean_loss_fn.plan"))["text/html"]
    assert "<table" in page
    assert "<svg" in page
    assert "With this plan" in page


@pytest.mark.slow
@pytest.mark.versions
def test_gradients_agree(executed):
    assert printed(cell_with(executed, "lean_gradient = ")) == "The gradients agree.\n"


@pytest.mark.slow
@pytest.mark.versions
def test_draws_memory_against_overhead(executed):
    figure = shown(cell_with(executed, "draw(found, ax)"))["image/png"]
    assert base64.b64decode(figure).startswith(PNG_START)


@pytest.mark.slow
@pytest.mark.versions
def test_plans_for_a_tpu_or_says_why_not(executed):
    cell = cell_with(executed, 'device="v5e"')
    if importlib.util.find_spec("libtpu") is None:
        assert printed(cell).startswith("Skipped: ")
        assert "image/png" not in shown(cell)
    else:
        assert "Gradient of loss_fn for v5e" in printed(cell)
        assert base64.b64decode(shown(cell)["image/png"]).startswith(PNG_START)
