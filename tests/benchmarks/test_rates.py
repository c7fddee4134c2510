"""The rows of ``benchmarks.rates``; no time is judged."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest

from benchmarks import rates
from remat_opt.device import get_device


@pytest.mark.slow
def test_every_operation_runs_and_has_a_roofline(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert rates.main(["--device", "cpu", "--elements", "65536", "--rows", str(path)]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["operation"] for row in rows] == list(rates.operations(65536))
    assert all(row["seconds"] > 0 and row["predicted_seconds"] > 0 for row in rows)


def test_the_roofline_reads_and_writes_every_array_once() -> None:
    array = jax.ShapeDtypeStruct((1024, 1024), "float32")
    found = rates.predicted_seconds(lambda x: x + 1, [array], get_device("h200"))
    assert found == pytest.approx(2 * 4 * 2**20 / 4.8e12)
