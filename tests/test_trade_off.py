"""The frontier: what its rows promise, and how it shows itself."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat_opt
import remat_opt.device
from remat_opt import planning
from remat_opt.errors import RematError
from remat_opt.graph import Graph
from remat_opt.schedule import plain
from remat_opt.solvers.base import judge

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
        # The unchanged function is last, even if a plan recomputes no FLOPs either.
        assert left[counted] > right[counted] or (right is found.rows[-1] and not right[counted])
    assert found.rows[-1]["of_plain"] <= 1
    assert found.rows[-1][counted] == 0
    for row in found.rows[:: len(found.rows) // 4]:
        plan = remat_opt.make_plan(
            layers, *SHAPES, device="cpu", overhead=overhead, budget=row["temporary_bytes"]
        )
        assert plan.predicted.temporary_bytes == row["temporary_bytes"]
        assert plan.predicted.recomputed_share == pytest.approx(row["recomputed_flops_share"])
        assert len(plan.stages) == row["regions"]


def test_of_plans_that_hardly_differ_in_memory_the_cheapest_counts_too() -> None:
    graph = Graph.from_edges([4, 4], [(0, 1)])
    one = judge(graph, plain(graph))
    front = [
        dataclasses.replace(one, peak_bytes=peak_bytes, overhead_seconds=float(seconds))
        for peak_bytes, seconds in ((1000, 90), (1005, 60), (1010, 20), (1040, 19), (1045, 18.5))
    ]
    kept = [(one.peak_bytes, one.overhead_seconds) for one in planning._spaced(front)]
    # The last one stays anyway.
    assert kept == [(1000, 90), (1010, 20), (1040, 19), (1045, 18.5)]
    assert planning._spaced(front[:4]) == [front[0], front[2], front[3]]
    dear = dataclasses.replace(front[2], overhead_seconds=88.0)
    assert planning._spaced([front[0], dear, front[3]]) == [front[0], front[3]]


def test_a_decorated_function_has_the_frontier_of_the_plain_one() -> None:
    decorated = remat_opt.optimal_remat(layers, budget=0.5, device="cpu")
    found = remat_opt.frontier(decorated, *SHAPES, device="cpu")
    assert found == remat_opt.frontier(layers, *SHAPES, device="cpu")


def test_it_shows_itself() -> None:
    found = remat_opt.frontier(layers, *SHAPES, device="cpu")
    lines = repr(found).splitlines()
    assert lines[0] == "Best plans of layers for cpu"
    assert lines[-2].split()[-1] == "none", "the unchanged function is last"
    assert "100 %" in lines[-2]
    assert "<svg" in found._repr_html_()
    assert json.loads(found.to_json())["rows"] == list(found.rows)


def test_defaults_and_the_device_s_room_are_beside_it() -> None:
    found = remat_opt.frontier(layers, *SHAPES, device="h200")
    labels = [row["label"] for row in found.defaults]
    assert labels[0] == "plain"
    assert "nothing_saveable, per block" in labels
    assert "dots_saveable" in labels
    assert found.defaults[0]["temporary_bytes"] == found.rows[-1]["temporary_bytes"]
    figures = [(row["temporary_bytes"], row["overhead_seconds_share"]) for row in found.defaults]
    assert len(set(figures)) == len(figures)
    series = [one.label for one in found._picture().series]
    assert series == ["plain", "jax.checkpoint", "remat_opt"]
    assert found.limit_bytes is not None
    # What is left besides the arguments and the loss.
    arguments = 12 * 64 * 64 * 4 + 1024 * 64 * 4
    room = remat_opt.device.get_device("h200").memory_bytes - arguments
    assert 0 <= room - found.limit_bytes < 2**20
    shown = found._repr_html_()
    assert "dots_saveable" in shown
    assert "room on h200" in shown


def test_nothing_to_plan() -> None:
    with pytest.raises(RematError) as caught:
        remat_opt.frontier(lambda x: x, 1.0, device="cpu")
    assert "there is nothing to plan" in str(caught.value)
