"""The rows of ``benchmarks.planning_time``, on small networks; no time is judged."""

from __future__ import annotations

import json

import pytest

from benchmarks import planning_time
from benchmarks.networks import lstm

SMALL = lstm.Size(layers=2, width=8, inputs=3, classes=5, steps=4)


def test_what_is_timed() -> None:
    row = planning_time.timed(lstm.network("small", SMALL, 64, None), 64, "cpu")
    assert (row["network"], row["batch"], row["device"]) == ("small", 64, "cpu")
    assert 1 < row["vertices"] <= row["equations"]
    assert row["regions"] > 1
    assert row["candidates"] > 1
    parts = row["linearize_seconds"], row["graph_seconds"], row["plan_seconds"]
    assert all(seconds >= 0 for seconds in parts)


@pytest.mark.slow
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
