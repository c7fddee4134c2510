"""The frontier: what its rows promise, and how it shows itself."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat_opt
from remat_opt import planning
from remat_opt.compilers.materialization import Materialization
from remat_opt.errors import RematError
from remat_opt.recent import Recent

SHAPES = (
    [jax.ShapeDtypeStruct((64, 64), "float32")] * 12,
    jax.ShapeDtypeStruct((1024, 64), "float32"),
)


def layers(weights: Any, x: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.tanh(x @ w) + x
    return jnp.sum(x**2)


@pytest.mark.parametrize("overhead", ["seconds", "flops"])
def test_rows_ascend_and_are_budgets(overhead: str) -> None:
    found = remat_opt.frontier(layers, *SHAPES, device="cpu", overhead=overhead)
    counted = {"seconds": "overhead_seconds_share", "flops": "recomputed_flops_share"}[overhead]
    for left, right in itertools.pairwise(found.rows):
        assert left["temporary_bytes"] < right["temporary_bytes"]
        assert left[counted] > right[counted]
    assert found.rows[-1]["of_plain"] <= 1
    assert found.rows[-1][counted] == 0
    for row in found.rows[:: len(found.rows) // 4]:
        plan = remat_opt.make_plan(
            layers, *SHAPES, device="cpu", overhead=overhead, budget=row["temporary_bytes"]
        )
        assert plan.predicted.temporary_bytes == row["temporary_bytes"]
        assert plan.predicted.recomputed_share == pytest.approx(row["recomputed_flops_share"])
        assert len(plan.stages) == row["regions"]


def test_plans_for_a_cpu_are_searched_with_bfloat16_as_it_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = [jax.ShapeDtypeStruct((64, 64), "bfloat16")] * 12
    narrow = weights, jax.ShapeDtypeStruct((1024, 64), "bfloat16")
    both = remat_opt.frontier(layers, *narrow, device="cpu").rows
    monkeypatch.setattr(Materialization, "searched_graphs", property(lambda self: (self.graph,)))
    monkeypatch.setattr(planning, "_sweeps", Recent(16))
    widened = remat_opt.frontier(layers, *narrow, device="cpu").rows

    def least(rows: Any, budget_bytes: float) -> float:
        within = [row for row in rows if row["temporary_bytes"] <= budget_bytes]
        return min(row["overhead_seconds_share"] for row in within)

    gains = [
        least(widened, row["temporary_bytes"]) - least(both, row["temporary_bytes"])
        for row in widened
    ]
    assert min(gains) >= 0
    assert max(gains) > 0.1


def test_a_decorated_function_has_the_frontier_of_the_plain_one() -> None:
    decorated = remat_opt.optimal_remat(layers, budget=0.5, device="cpu")
    found = remat_opt.frontier(decorated, *SHAPES, device="cpu")
    assert found == remat_opt.frontier(layers, *SHAPES, device="cpu")


def test_it_shows_itself() -> None:
    found = remat_opt.frontier(layers, *SHAPES, device="cpu")
    lines = repr(found).splitlines()
    assert lines[0] == "Best plans of layers for cpu"
    assert lines[-2].split()[-1] == "1", "the unchanged function is one region"
    assert "100 %" in lines[-2]
    assert "<svg" in found._repr_html_()
    assert json.loads(found.to_json())["rows"] == list(found.rows)


def test_nothing_to_plan() -> None:
    with pytest.raises(RematError) as caught:
        remat_opt.frontier(lambda x: x, 1.0, device="cpu")
    assert "there is nothing to plan" in str(caught.value)
