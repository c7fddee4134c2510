"""The ablation recovers the plans in truth's rows, and counts what rules earn."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks import ablation
from remat_opt import planning
from remat_opt.compilers.compiler import Compiler
from remat_opt.compilers.model import Model, model
from remat_opt.device import get_device
from remat_opt.plan import Objective
from remat_opt.program import tracing
from remat_opt.program.linearization import linearize
from remat_opt.schedule import Region, Schedule
from tests.programs import ones

W, X = [ones(64, 64)] * 4, ones(512, 64)


def loss(weights: Any, x: jax.Array) -> jax.Array:
    for w in weights:
        y = x @ w
        x = y * jnp.tanh(y) + x
    return jnp.mean(x**2)


def expected(*off: str, device: str = "h200") -> Model:
    program = tracing.trace(loss, W, X)
    compiler = Compiler(device=get_device(device), off=frozenset(off))
    return model(program, linearize(program), compiler)


def test_a_plan_of_a_row_is_the_schedule_it_was() -> None:
    program = tracing.trace(loss, W, X)
    of = planning.problem(program, get_device("h200"))
    schedules = [one.schedule for one in of.candidates if not one.schedule.unchanged]
    count = len(of.model.graph)
    inner = tuple(Region(vertices=tuple(range(a, a + 2))) for a in range(0, 4, 2))
    nested = Region(vertices=(0, 1, 2, 3), kept=(1,), inside=inner)
    rest = Region(vertices=tuple(range(4, count)), checkpointed=False)
    schedules.append(Schedule(regions=(nested, rest)))
    assert len(schedules) > 2
    for schedule in schedules:
        row = json.loads(
            json.dumps({"stages": [dataclasses.asdict(one) for one in of.model.stages(schedule)]})
        )
        assert ablation.schedule_of(of.model, ablation.stages_of(row)) == schedule


def test_vertices_that_a_plan_does_not_know_go_to_who_reads_them() -> None:
    with_it, without = expected(), expected("transcendental")
    assert len(with_it.graph) > len(without.graph)
    half = len(without.graph) // 2
    regions = (
        Region(vertices=tuple(range(half))),
        Region(vertices=tuple(range(half, len(without.graph))), checkpointed=False),
    )
    stages = without.stages(Schedule(regions=regions))
    found = ablation.schedule_of(with_it, stages)
    found.check(with_it.graph)
    assert sum(len(region.vertices) for region in found.regions) == len(with_it.graph)
    # And back: what has no vertex is left out.
    assert without.stages(ablation.schedule_of(without, with_it.stages(found))) == stages


def test_rows_and_summaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tracing.trace(loss, W, X)
    monkeypatch.setattr(ablation, "traced", lambda name: (program, linearize(program), (*W, X)))
    of = planning.problem(program, get_device("h200"))
    chosen = planning.solve(of, Objective())
    plans = [
        {
            "network": name,
            "device": "h200",
            "step": "adam",
            "share": share,
            # As if the compiler did exactly what is predicted without the rule.
            "compiled_bytes": size,
            "stages": [dataclasses.asdict(one) for one in of.model.stages(chosen.schedule)],
        }
        for name in ("gpt", "llama")
        for share, size in ((None, of.unchanged.peak_bytes), (0.0, chosen.peak_bytes))
    ]
    path = tmp_path / "rows.jsonl"
    table = ablation.Table("h200", "adam", plans, path)
    found = list(table.rows(["transcendental", "pooling_zeros"], compiling=False))
    assert [(row["network"], row["rule"]) for row in found] == [
        (name, rule)
        for name in ("gpt", "llama")
        for rule in ("", "transcendental", "pooling_zeros")
    ]
    tuned, off, nothing, *judged = ablation.summaries(found)
    assert (tuned["set"], tuned["plans"], tuned["median"]) == ("tuned", 2, 0.0)
    assert (off["helped"], off["hurt"]) == (1, 0)
    assert off["median"] > 0.01
    assert nothing["helped"] == nothing["hurt"] == nothing["least_changed"] == 0
    assert {row["set"] for row in judged} == {"judged"}
    # Without choosing plans the errors are the same, and so are their summaries.
    errors = ablation.Table("h200", "adam", plans, None, choosing=False)
    only = list(errors.rows(["transcendental", "pooling_zeros"], compiling=False))
    assert only == [{k: v for k, v in row.items() if k != "least_bytes"} for row in found]
    for all_of, some in zip(ablation.summaries(found), ablation.summaries(only), strict=True):
        assert some == all_of | ({"least_growth": None, "least_changed": 0} if some["rule"] else {})
    # Rows on file are not computed again.
    monkeypatch.setattr(ablation, "traced", None)
    again = ablation.Table("h200", "adam", plans, path)
    assert list(again.rows(["transcendental", "pooling_zeros"], compiling=False)) == found
