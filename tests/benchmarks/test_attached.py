"""The rows of ``benchmarks.attached``; no time is judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks import attached


@pytest.mark.slow
@pytest.mark.parametrize("program", attached.PROGRAMS)
def test_all_variants_run_and_agree(
    program: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    given = ["--program", program, "--rounds", "2", "--seconds", "0", "--rows", str(path)]
    assert attached.main(given) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows == [json.loads(line) for line in path.read_text().splitlines()]
    ran = [row for row in rows if "error" not in row]
    assert {row["variant"] for row in rows} > {"plain"}
    assert all(row["program"] == program and row["small"] for row in rows)
    # Rounding alone, which is coarse in bfloat16; a small budget may be out of reach.
    assert all(row["difference"] < (0.05 if program == "fit" else 1e-4) for row in ran)
    assert all(row["rounds"] == 2 and row["temporary_bytes"] > 0 for row in ran)
    refused = [row for row in rows if "error" in row]
    assert all(row["variant"].startswith("ours, memory of") for row in refused)
    assert len(ran) >= 3


def test_what_does_not_run_says_why_and_the_rest_is_compared() -> None:
    program = attached.Program("offload", small=True)

    def step(factor: float) -> Any:
        def run(params: Any, state: Any, batch: jax.Array) -> tuple[Any, Any, jax.Array]:
            return jax.tree.map(lambda one: one * factor, params), state, jnp.sum(batch)

        return run

    def broken(*given: Any) -> Any:
        raise ValueError("no\nluck")

    found = program.differences({"broken": broken, "first": step(1.0), "other": step(1.5)})
    assert found["broken"] == "ValueError: no"
    assert found["first"] == 0
    assert found["other"] == pytest.approx(0.5)
