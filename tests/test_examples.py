"""The quickstart, run as a user runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from remat_opt import policies

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart.py"


@pytest.fixture(scope="module")
def printed():
    # The checkout, whether it is installed or not.
    paths = [str(QUICKSTART.parents[1]), os.environ.get("PYTHONPATH", "")]
    run = subprocess.run(
        [sys.executable, str(QUICKSTART)],
        capture_output=True,
        text=True,
        timeout=900,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        },
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def figures(printed: str, line_start: str) -> list[float]:
    (line,) = [line for line in printed.splitlines() if line.startswith(line_start)]
    return [float(figure) for figure in re.findall(r"\d[\d.]*(?:e[+-]\d+)?", line)]


@pytest.mark.slow
@pytest.mark.versions
def test_shows_the_plan(printed):
    assert "Plan of loss_fn for cpu" in printed
    assert re.search(r"^Kept: \d+ values", printed, re.MULTILINE)
    assert re.search(r"^Recomputed: \d+ values", printed, re.MULTILINE)
    # Where a value comes from: the module and the line.
    assert re.search(r"conv_general_dilated .* ResNet/Block_\S+ +quickstart\.py:\d+", printed)


@pytest.mark.slow
@pytest.mark.versions
def test_is_within_the_budget_as_compiled(printed):
    compiled, budget = figures(printed, "Compiled temporaries")
    _, trained = figures(printed, "temporary memory")
    # What is compiled for the plan is a step, where gradients are temporaries; what is trained with
    # is the gradient alone.
    assert trained <= compiled <= budget
    assert "Chosen by compiling, for a budget of " in printed


@pytest.mark.slow
@pytest.mark.versions
def test_compares_with_every_policy_of_jax(printed):
    compared = [line.split("  ")[0] for line in printed.splitlines()]
    for label in ("plain", *policies.default_policies(), "least memory"):
        assert label in compared
    assert "failed" not in printed.lower()


@pytest.mark.slow
@pytest.mark.versions
def test_learns_the_same(printed):
    (curves,) = figures(printed, "largest difference of the loss curves")
    (gradients,) = figures(printed, "largest difference of the gradients")
    assert curves <= 1e-2
    assert gradients <= 1e-4
    plain, planned = figures(printed, "test accuracy")
    assert plain > 80
    assert planned > 80


@pytest.mark.slow
@pytest.mark.versions
def test_trains_in_less_than_half_of_the_memory(printed):
    plain, planned = figures(printed, "temporary memory")
    assert planned < plain / 2
    assert re.search(r"^The same curve in \d\d% of the memory\.$", printed, re.MULTILINE)
