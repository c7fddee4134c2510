"""The quickstart and the other examples, run as a user runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
#: What each plan's first contender by hand is called.
BY_HAND = {
    "gpt": "jax.checkpoint around every layer",
    "lstm": "jax.checkpoint around every time step",
    "quickstart": "nn.remat around every block",
    "resnet": "nn.remat around every block",
    "unet": "nn.remat around every stage",
}


def run(name, *flags):
    # The checkout, whether installed or not.
    paths = [str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]
    found = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *flags],
        capture_output=True,
        text=True,
        timeout=900,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        },
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def check_screen(name, printed):
    """One screen: what was decided, the table, the same loss curve."""
    lines = printed.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    assert re.search(r"^Kept: +\S+ \S+ in \d+ values, mostly [a-z ]+$", printed, re.MULTILINE)
    assert all(line == line.rstrip() for line in lines)
    assert re.search(r"^Recomputed: +\d+ values", printed, re.MULTILINE)
    labels = (
        "plain",
        BY_HAND[name],
        "... with dots_saveable",
        "ours, budget",
        "ours, least memory",
    )
    for label in labels:
        assert sum(line.startswith(label) and "iB" in line for line in lines) == 1, label
    (ours,) = (line for line in lines if line.startswith("ours, budget"))
    # Size and unit of the budget, then of the temporaries, then their share of the plain ones.
    share = float(re.findall(r"([\d.]+) %", ours)[0])
    assert share < 75
    assert "The same curve: " in printed
    plain, planned = (
        [float(one) for one in line.split()[2:]]
        for line in lines
        if line.startswith(("plain loss", "planned loss"))
    )
    assert plain[-1] < plain[0]
    assert planned == pytest.approx(plain, rel=1e-2)


@pytest.mark.slow
@pytest.mark.versions
def test_quickstart():
    printed = run("quickstart")
    check_screen("quickstart", printed)
    (line,) = (line for line in printed.splitlines() if line.startswith("Compiled:"))
    assert "within the budget of" in line


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "lstm", "resnet", "unet"])
def test_other_examples(name):
    check_screen(name, run(name))
