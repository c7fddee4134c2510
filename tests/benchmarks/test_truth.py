"""Predictions stand beside what the same thing compiles to."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat_opt
from benchmarks import networks, truth
from benchmarks.networks import Network
from remat_opt import planning
from remat_opt.device import get_device
from remat_opt.plan import Objective

#: Steps of a recurrent network: unchanged, a part of its weight's gradient waits for each.
STEPS = 24


def recurrent(weight: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(STEPS):
        x = jnp.tanh(x @ weight)
    return x.sum()


def arguments(seed: int = 0) -> tuple[jax.Array, jax.Array]:
    return jnp.full((128, 128), 1.0 + seed), jnp.ones((4, 128))


@pytest.fixture
def subject(monkeypatch: pytest.MonkeyPatch) -> truth.Subject:
    network = Network(
        name="recurrent",
        loss_fn=recurrent,
        has_aux=False,
        make_arguments=arguments,
    )
    monkeypatch.setattr(networks, "build", lambda name, batch: network)
    monkeypatch.setattr(networks, "default_batch", lambda name: 4)
    return truth.Subject("recurrent", get_device("cpu"), "gradient")


@pytest.mark.usefixtures("subject")
def test_rows_with_compiler_options_are_rows_of_their_own() -> None:
    """They stand beside those without, and say what was given."""
    option = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    on_file = truth.Rows(None)
    for given in ({}, option):
        found = truth.rows(["recurrent"], get_device("cpu").told(given), ["gradient"], on_file)
        row = next(iter(found))
        assert row.get("options", []) == [f"{name}={value}" for name, value in given.items()]
        assert on_file.find(row) == row
    assert len(on_file._known) == 2


@pytest.mark.slow
@pytest.mark.versions
def test_a_function_as_it_is_is_compiled_without_what_transform_writes_differently(
    subject: truth.Subject,
) -> None:
    row: dict[str, Any] = subject.row(None, None)
    plain = remat_opt.measure(jax.value_and_grad(recurrent), *arguments(), device="cpu")
    assert row["compiled_bytes"] == pytest.approx(plain.temporary_bytes, rel=0.01)
    without_recomputation = planning.solve(subject.problem, Objective(max_overhead=0.0))
    plan = planning.describe(
        subject.problem, subject.problem.program, without_recomputation, Objective()
    )
    assert subject.compiled(plan).temporary_bytes < 0.5 * row["compiled_bytes"]


@pytest.mark.usefixtures("subject")
def test_a_plan_chosen_in_the_users_step_takes_there_what_it_promises() -> None:
    """One chosen for the loss alone promises what the planner's step takes: optax counts steps."""
    device = get_device("cpu")
    for loop in truth.LOOPS:
        plain, least, within, *_ = truth.rows(
            ["recurrent"], device, ["adam"], truth.Rows(None), loop=loop
        )
        assert (plain["loop"], least["loop"]) == (None, loop)
        for row in (least, within):
            assert 1 <= row["compiles"] <= 4
            assert row["compiled_bytes"] < 0.2 * plain["compiled_bytes"]
            assert 0 <= row["step_bytes"] - row["compiled_bytes"] < 1024
            assert (row["step_bytes"] == row["compiled_bytes"]) is (loop == "step")
        assert within["step_bytes"] <= within["budget_bytes"]
        before, promised, _ = truth.summaries([plain, least, within])
        assert (before["plans"], before["met"], before["missed"]) == (2, 1, 0)
        assert promised["worst"] < 0.001 < before["worst"]
