"""The benchmark of meshes: what each way to split and to write the layers takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import meshes

pytestmark = pytest.mark.usefixtures("quick_search")

SMALL = ["--device", "cpu", "--layers", "3", "--width", "16", "--batch", "256", "--budgets", "1"]


def test_a_run_appends_its_rows_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    command = [*SMALL, "--split", "data", "--json", "--rows", str(file)]
    assert meshes.main(command) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["how"], row["label"]) for row in rows] == [
        (how, label)
        for how in ("compiler", "map", "layers")
        for label in ("plain", *meshes.POLICIES, "budget 1 of 1")
    ]
    plain, planned = rows[::4], rows[3::4]
    assert len({row["temporary_bytes"] for row in plain}) <= 2
    for one, other in zip(plain, planned, strict=True):
        assert one["recomputed_share"] == 0 < other["recomputed_share"]
        assert other["predicted_bytes"] < one["predicted_bytes"]
    written = file.read_text(encoding="utf-8")
    assert meshes.main(command) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows
    assert file.read_text(encoding="utf-8") == written


@pytest.mark.slow
def test_all_ways_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert meshes.main([*SMALL, "--collectives", "recompute"]) == 0
    *rows, last = capsys.readouterr().out.splitlines()
    assert len(rows) == 4 * len(meshes.CASES)
    assert last.startswith("error: ")
