"""What it takes to dominate a default, and how rows are summarised."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from benchmarks import compiled, dominance, networks
from benchmarks.dominance import Gain, gain, matches, summary
from benchmarks.networks import Network, lstm
from remat_opt.program import flop_count

FORWARD_FLOPS = 100_000


def row(kind: str, label: str, temporary_bytes: int, flops: int, **more: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "label": label,
        "temporary_bytes": temporary_bytes,
        "recomputed_flops": flops,
        "recomputed_flops_share": flops / FORWARD_FLOPS,
        **more,
    }


DEFAULT = row("policy", "default", 1000, 50_000)


@pytest.mark.parametrize(
    ("temporary_bytes", "flops", "expected"),
    [
        (950, 50_000, Gain(memory_share=0.05, flops_share=0.0)),
        (1000, 47_500, Gain(memory_share=0.0, flops_share=0.05)),
        (900, 25_000, Gain(memory_share=0.1, flops_share=0.5)),
        # Better by less than 5 % in both.
        (951, 47_501, None),
        (1000, 50_000, None),
        # Better in one, worse in the other.
        (1001, 0, None),
        (500, 50_001, None),
    ],
)
def test_gain(temporary_bytes: int, flops: int, expected: Gain | None) -> None:
    assert gain(row("ours", "plan", temporary_bytes, flops), DEFAULT) == expected


@pytest.mark.parametrize(
    ("temporary_bytes", "flops", "expected"),
    [(1010, 50_500, True), (1011, 0, False), (0, 50_501, False), (1000, 50_000, True)],
)
def test_matches(temporary_bytes: int, flops: int, expected: bool) -> None:
    assert matches(row("ours", "plan", temporary_bytes, flops), DEFAULT) == expected


def test_a_default_that_recomputes_nothing_is_beaten_in_memory_only() -> None:
    default = row("policy", "default", 1000, 0)
    assert gain(row("ours", "plan", 960, 0), default) is None
    found = gain(row("ours", "plan", 940, 0), default)
    assert found == Gain(memory_share=0.06, flops_share=0.0)


def test_summary() -> None:
    rows = [
        row("plain", "plain", 2000, 0),
        row("policy", "beaten", 1000, 50_000),
        row("policy", "unbeaten", 400, 90_000),
        {"kind": "policy", "label": "too large", "error": "no room"},
        row("ours", "a", 900, 50_000, predicted_temporary_bytes=990),
        row("ours", "b", 900, 30_000, predicted_temporary_bytes=900),
        row("ours", "deep", 300, 120_000, predicted_temporary_bytes=285),
        {"kind": "ours", "label": "none", "error": "budget"},
    ]
    found = summary(rows, FORWARD_FLOPS)
    assert found["plain_temporary_bytes"] == 2000
    beaten, unbeaten, failed = found["defaults"]
    assert beaten == {
        "label": "beaten",
        "temporary_bytes": 1000,
        "recomputed_flops_share": 0.5,
        "matched_by": "a",
        "beaten_by": "b",
        "memory_saved_share": 0.1,
        "recomputation_saved_share": 0.4,
        "our_least_bytes_for_its_flops": 900,
        "our_least_flops_share_within_its_bytes": 0.3,
    }
    assert unbeaten["beaten_by"] is unbeaten["matched_by"] is None
    assert unbeaten["our_least_bytes_for_its_flops"] == 900
    assert unbeaten["our_least_flops_share_within_its_bytes"] == 1.2
    assert failed == {"label": "too large", "error": "no room"}
    assert found["not_beaten"] == found["not_matched"] == ["unbeaten"]
    # "deep" recomputes more than a pass.
    assert (found["least_temporary_bytes"], found["least_label"]) == (900, "a")
    assert found["prediction_error_median"] == 0.05
    assert (found["prediction_error_worst"], found["prediction_error_worst_label"]) == (0.1, "a")


def test_summary_of_nothing_that_compiled() -> None:
    found = summary([{"kind": "plain", "label": "plain", "error": "no room"}], FORWARD_FLOPS)
    assert found["defaults"] == found["not_beaten"] == found["not_matched"] == []
    assert found["least_temporary_bytes"] is None
    assert found["prediction_error_worst"] is None


SIZE = lstm.Size(layers=1, width=16, inputs=3, classes=5, steps=8)


def small_subject() -> compiled.Subject:
    network = lstm.network("lstm", SIZE, 64, None)
    return compiled.Subject(
        name="lstm",
        batch=64,
        device="cpu",
        step="adam",
        network=network,
        forward_flops=flop_count.forward_flops(network.loss_fn, *network.arguments),
        gradient_flops=flop_count.gradient_flops(network.loss_fn, *network.arguments),
    )


@pytest.mark.slow
def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    of = small_subject()

    def block_policy(name: str, batch: int, *, block_policy: str) -> Network:
        return lstm.network(name, SIZE, batch, block_policy)

    monkeypatch.setattr(dominance, "subject", lambda *_: of)
    monkeypatch.setattr(networks, "build", block_policy)
    found = list(dominance.rows("lstm", None, "cpu", "adam"))
    assert [one["label"] for one in found[:7]] == [
        "plain",
        *(f"{policy}, whole" for policy in dominance.POLICIES),
        *(f"{policy}, per block" for policy in dominance.POLICIES),
    ]
    assert found[0]["recomputed_flops"] == 0
    assert all("temporary_bytes" in one for one in found[:7])
    *ours, last = found[7:]
    planned = [one for one in ours if "error" not in one]
    assert planned[0]["label"] == "least memory, try 1"
    assert planned[0]["temporary_bytes"] < found[0]["temporary_bytes"]
    assert last["kind"] == "summary"
    assert [one["label"] for one in last["defaults"]] == [one["label"] for one in found[1:7]]
    assert json.loads(json.dumps(last)) == last
    # What is recomputed is counted, not predicted.
    for one in ours:
        if one["label"].startswith("FLOPs of") and one["label"].endswith("try 1"):
            default = next(d for d in found[1:7] if one["label"] == f"FLOPs of {d['label']}, try 1")
            assert one["recomputed_flops"] <= max(0, default["recomputed_flops"])
    # No default is compiled again; on another device or version all are.
    monkeypatch.setattr(compiled.Subject, "row", lambda *_: pytest.fail("compiled"))
    again = itertools.islice(dominance.rows("lstm", None, "cpu", "adam", known=found), 7)
    assert list(again) == found[:7]
    monkeypatch.setattr(compiled.Subject, "row", lambda *_: {"row": "new"})
    older = [one | {"jax": "0.1"} for one in found]
    assert next(dominance.rows("lstm", None, "cpu", "adam", known=older)) == {"row": "new"}
