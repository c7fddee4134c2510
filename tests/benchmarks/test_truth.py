"""What is predicted beside what was compiled, as ``benchmarks/results`` has it: a two-way ratchet.

A change that makes predictions worse fails here, and so does one that makes them better: then
the results are taken again, and the figures below with them.
"""

from __future__ import annotations

import functools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks import networks
from benchmarks.dominance import NETWORKS
from remat_opt import measurement, planning, tracing
from remat_opt.solvers.base import Overhead

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

#: |predicted - compiled| / compiled over our plans for h200: the median, and the worst.
PLANS = {
    "lstm": (0.3641, 0.5075),
    "vit_b16": (0.0348, 0.1488),
    "unet": (0.0101, 0.0754),
    "gpt": (0.0046, 0.0613),
    "resnet50": (0.0102, 0.0804),
    "densenet121": (0.0112, 0.0799),
    "inception_v3": (0.0099, 0.1208),
    "resnet152": (0.0191, 0.0584),
}
#: (predicted - compiled) / compiled of the function as it is, on h200.
UNCHANGED = {
    "lstm": 1.8305,
    "vit_b16": -0.1488,
    "unet": 0.0668,
    "gpt": -0.05,
    "resnet50": 0.0224,
    "densenet121": 0.0037,
    "inception_v3": 0.032,
    "resnet152": 0.0179,
}


@functools.cache
def rows(network: str) -> list[dict[str, Any]]:
    text = (RESULTS / "dominance_h200.jsonl").read_text(encoding="utf-8")
    found = [json.loads(line) for line in text.splitlines()]
    return [row for row in found if row["network"] == network and "error" not in row]


def test_every_network_was_measured() -> None:
    assert set(PLANS) == set(UNCHANGED) == set(NETWORKS)


@pytest.mark.parametrize("network", PLANS)
def test_plans_are_as_true_as_recorded(network: str) -> None:
    errors = [
        abs(row["predicted_temporary_bytes"] / row["temporary_bytes"] - 1)
        for row in rows(network)
        if row["kind"] == "ours"
    ]
    found = statistics.median(errors), max(errors)
    assert found == pytest.approx(PLANS[network], abs=5e-4)


@pytest.mark.parametrize("network", PLANS)
def test_every_default_is_dominated(network: str) -> None:
    (summary,) = (row for row in rows(network) if row["kind"] == "summary")
    assert len(summary["defaults"]) == 6
    assert summary["not_dominated"] == []


@pytest.mark.slow
@pytest.mark.parametrize("network", UNCHANGED)
def test_the_unchanged_function_is_predicted_as_truly_as_recorded(network: str) -> None:
    (plain,) = (row for row in rows(network) if row["kind"] == "plain")
    of = networks.build(network, plain["batch"])
    program = tracing.trace(
        of.loss_fn, *of.arguments, signature=tracing.Signature(has_aux=of.has_aux)
    )
    device = measurement.resolve_device(plain["device"])
    found = planning.problem(program, device, measure=Overhead.FLOPS).unchanged.peak_bytes
    assert found / plain["temporary_bytes"] - 1 == pytest.approx(UNCHANGED[network], abs=2e-3)
