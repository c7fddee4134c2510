"""The rows of ``benchmarks.planning_time``, on the smallest network; no time is judged."""

from __future__ import annotations

import json

import pytest

from benchmarks import planning_time


def test_rows_say_what_was_planned_and_with_what(capsys: pytest.CaptureFixture[str]) -> None:
    assert planning_time.main(["--only", "unet", "--device", "cpu", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    row = json.loads(line)
    assert row["network"] == "unet"
    assert row["vertices"] <= row["equations"]
    assert row["regions"] > 1
    assert row["candidates"] > 1
    assert row["jax"]
    assert row["date"]
    assert "compile_seconds" not in row, "nothing is compiled unless asked for"


def test_deep_networks_are_as_deep_as_their_names_say() -> None:
    for name, blocks in planning_time.DEEP.items():
        assert name == f"resnet{3 * sum(blocks) + 2}"
