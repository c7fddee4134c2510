"""What gradients take while they wait."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import remat_opt
from remat_opt import planning
from remat_opt.device import get_device
from remat_opt.gradients import Gradients, ParameterGradient, Wait, workspace_bytes
from remat_opt.program import tracing

pytestmark = pytest.mark.usefixtures("quick_search")

TWO = (
    ParameterGradient(first=3, last=3, bytes=5),
    ParameterGradient(first=1, last=2, bytes=2),
)


@pytest.mark.parametrize(
    ("fate", "expected"),
    [
        (Gradients.RESULTS, [0, 0, 0, 0]),
        (Gradients.CONSUMED, [0, 2, 2, 5]),
        (Gradients.TOGETHER, [7, 7, 7, 5]),
    ],
)
def test_from_the_step_that_begins_a_gradient(fate: Gradients, expected: list[int]) -> None:
    assert workspace_bytes(TWO, fate, 4).tolist() == expected


def test_none_of_its_own_where_it_is_another_cotangent() -> None:
    one = (ParameterGradient(first=2, last=0, bytes=5),)
    assert workspace_bytes(one, Gradients.CONSUMED, 4).tolist() == [0, 0, 0, 0]
    assert workspace_bytes(one, Gradients.TOGETHER, 4).tolist() == [5, 0, 0, 0]


def test_none_of_its_own_where_what_consumes_it_computes_it() -> None:
    one = (ParameterGradient(first=1, last=1, bytes=5, fused=True),)
    assert workspace_bytes(one, Gradients.RESULTS, 3).tolist() == [0, 0, 0]
    assert workspace_bytes(one, Gradients.CONSUMED, 3).tolist() == [0, 0, 0]
    assert workspace_bytes(one, Gradients.TOGETHER, 3).tolist() == [5, 5, 0]


def test_those_that_wait_are_there_to_the_end() -> None:
    one = (ParameterGradient(first=2, last=2, bytes=5, fused=True, waits=True),)
    assert workspace_bytes(one, Gradients.RESULTS, 4).tolist() == [0, 0, 0, 0]
    assert workspace_bytes(one, Gradients.CONSUMED, 4).tolist() == [5, 5, 5, 0]
    assert workspace_bytes(one, Gradients.TOGETHER, 4).tolist() == [5, 5, 5, 0]


@pytest.mark.parametrize(
    ("fate", "expected"),
    [
        (Gradients.RESULTS, [0, 0, 0, 0]),
        (Gradients.CONSUMED, [0, 3, 3, 5]),
        (Gradients.TOGETHER, [5, 5, 5, 5]),
    ],
)
def test_a_narrower_one_where_it_waits_for_its_update(fate: Gradients, expected: list[int]) -> None:
    one = (ParameterGradient(first=3, last=3, bytes=5),)
    waits = (Wait(first=1, last=2, bytes=3),)
    assert workspace_bytes(one, fate, 4, waits).tolist() == expected


def layers(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.sin(x @ w)
    return jnp.sum(x)


WEIGHTS = [jax.ShapeDtypeStruct((256, 256), "float32")] * 6
X = jax.ShapeDtypeStruct((64, 256), "float32")
SIZE = 256 * 256 * 4


def least_peaks(device: str) -> dict[Gradients, int]:
    """The least temporaries of any plan, by what happens to the gradients."""
    program = tracing.trace(layers, WEIGHTS, X)
    return {
        fate: min(
            one.peak_bytes
            for one in planning.problem(program, get_device(device), gradients=fate).candidates
        )
        for fate in Gradients
    }


def test_more_is_there_where_more_waits() -> None:
    least = least_peaks("cpu")
    assert least[Gradients.RESULTS] < least[Gradients.CONSUMED] < least[Gradients.TOGETHER]
    assert least[Gradients.TOGETHER] >= 6 * SIZE


def test_where_updates_wait_all_gradients_are_there_together() -> None:
    """With so few rows XLA for NVIDIA runs all updates at the end."""
    least = least_peaks("h200")
    assert least[Gradients.RESULTS] < least[Gradients.CONSUMED] == least[Gradients.TOGETHER]
    assert least[Gradients.CONSUMED] >= 6 * SIZE


def test_a_plan_is_verified_in_the_step_that_it_is_for() -> None:
    measured = {
        fate: remat_opt.make_plan(
            layers, WEIGHTS, X, device="cpu", gradients=fate.value, budget=1.0, verify=True
        ).measured
        for fate in Gradients
    }
    results = measured[Gradients.RESULTS]
    consumed = measured[Gradients.CONSUMED]
    together = measured[Gradients.TOGETHER]
    assert results is not None
    assert consumed is not None
    assert together is not None
    assert results.alias_bytes == 0
    # Parameters and two moments of each are donated.
    assert consumed.alias_bytes == together.alias_bytes == 3 * 6 * SIZE
    assert consumed.temporary_bytes < together.temporary_bytes
