"""The notebooks, executed as Jupyter executes them. They are stored with small outputs."""

import base64
import importlib.util
from pathlib import Path

import nbformat
import pytest

from notebooks import run
from tests.devices import quick_compiles

NOTEBOOKS = sorted(run.FOLDER.glob("*.ipynb"))
PNG_START = b"\x89PNG\r\n\x1a\n"
MOST_STORED_BYTES = 200_000


@pytest.fixture(scope="module", autouse=True)
def quick():
    with quick_compiles():
        yield


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


def check_ran(notebook):
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    warnings = [output for output in outputs if output.get("name") == "stderr"]
    assert not [output.text for output in warnings if "Warning" in output.text]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_stored_with_small_outputs_and_no_paths(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < MOST_STORED_BYTES
    notebook = nbformat.reads(text, as_version=4)
    check_ran(notebook)
    assert any(cell.outputs for cell in code_cells(notebook)), "run notebooks/run.py"
    assert str(Path.home()) not in text
    assert str(run.FOLDER) not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [path for path in NOTEBOOKS if path.stem != "first_steps"],
    ids=lambda path: path.stem,
)
def test_runs_without_an_error(path):
    executed = run.run(path)
    check_ran(executed)
    pictures = [shown(cell).get("image/png") for cell in code_cells(executed)]
    assert all(base64.b64decode(one).startswith(PNG_START) for one in filter(None, pictures))
    assert any(pictures)


@pytest.fixture(scope="module")
def first_steps():
    return run.run(run.FOLDER / "first_steps.ipynb")


@pytest.mark.slow
def test_first_steps_run_without_an_error(first_steps):
    check_ran(first_steps)


@pytest.mark.slow
def test_shows_the_plan_as_a_page(first_steps):
    page = shown(cell_with(first_steps, "plan = remat_opt.make_plan"))["text/html"]
    assert "<table" in page
    assert "<svg" in page
    assert "With this plan" in page
    # The user's own lines are those of a cell.
    assert "cell 1:" in page


@pytest.mark.slow
def test_the_step_trains_as_it_did(first_steps):
    assert printed(cell_with(first_steps, "planned = train")).startswith("after 20 steps: loss ")


@pytest.mark.slow
@pytest.mark.parametrize("source", ["plan.plot_memory", "found.plot(ax=axes)"])
def test_draws(first_steps, source):
    figure = shown(cell_with(first_steps, source))["image/png"]
    assert base64.b64decode(figure).startswith(PNG_START)


@pytest.mark.slow
def test_plans_for_a_tpu_or_says_why_not(first_steps):
    cell = cell_with(first_steps, 'device="v5e"')
    if importlib.util.find_spec("libtpu") is None:
        assert printed(cell).startswith("Skipped: ")
        assert "image/png" not in shown(cell)
    else:
        assert "train_step with plain_loss for v5e" in printed(cell)
        assert base64.b64decode(shown(cell)["image/png"]).startswith(PNG_START)
