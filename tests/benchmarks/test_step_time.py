"""The rows of ``benchmarks.step_time`` and the order in which variants run; no time is judged."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks import networks, step_time
from benchmarks.dominance import POLICIES
from benchmarks.networks import Network
from benchmarks.networks.judged import residual_mlp
from benchmarks.networks.small import SMALL, Small
from benchmarks.step_time import Case, Rows, Run, State, Subject

LABELS = [variant.label for variant in step_time.VARIANTS]
POLICY = "dots_saveable"
TINY = Small(
    family=residual_mlp,
    batch=64,
    changes={"layers": 4, "width": 8, "hidden": 32},
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SMALL, "residual_mlp", TINY)


def run(*more: str) -> None:
    arguments = ["--network", "residual_mlp", "--rounds", "2", "--seconds", "0", "--json", *more]
    assert step_time.main(arguments) == 0


def printed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
def test_every_variant_is_timed_and_then_on_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.jsonl"
    run("--rows", str(file), "--workers", "2")
    rows = printed(capsys)
    assert [row["variant"] for row in rows] == LABELS
    for row in rows:
        assert "error" not in row, row["error"]
        assert row["rounds"] == 2
        assert 0 < row["quartile_seconds"][0] <= row["median_seconds"] <= row["quartile_seconds"][1]
        assert 0 < row["ratio_quartiles"][0] <= row["ratio_to_plain"] <= row["ratio_quartiles"][1]
        assert (row["set"], row["small"], row["batch"], row["step"]) == ("judged", True, 64, "adam")
        assert row["size_changes"] == TINY.changes
        assert row["device_kind"] == jax.devices()[0].device_kind
        assert row["temporary_bytes"] > 0
    by_label = {row["variant"]: row for row in rows}
    plain, forward = by_label["plain"], by_label["forward pass alone"]
    assert plain["ratio_to_plain"] == 1
    assert plain["recomputed_flops_share"] == 0
    assert by_label["nothing_saveable, whole"]["recomputed_flops_share"] > 0
    for policy in POLICIES:
        ours = by_label[f"ours, memory of {policy}, per block"]
        assert ours["budget_bytes"] == by_label[f"{policy}, per block"]["temporary_bytes"]
    least = by_label["ours, least memory"]
    share = least["predicted_overhead_share"]
    assert least["predicted_ratio"] == pytest.approx(
        1 + share * forward["ratio_to_plain"], abs=1e-4
    )

    # Existing rows are not timed again.
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr(step_time, "measured", refuse)
    run("--rows", str(file))
    assert printed(capsys) == rows
    with pytest.raises(AssertionError, match="measured again"):
        run("--rows", str(file), "--step", "gradient")
    # An incomplete network is.
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]))
    with pytest.raises(AssertionError, match="measured again"):
        run("--rows", str(file))


def test_rows_of_a_run_that_was_cut_off_do_not_mix_with_the_next(tmp_path: Path) -> None:
    case = Case(network="residual_mlp", step="adam", small=True)
    file = tmp_path / "rows.jsonl"

    def rows(of: str) -> list[dict[str, Any]]:
        return [{**case.heading(), "variant": label, "of": of} for label in LABELS]

    Rows(file).put(rows("first")[:7])
    Rows(file).put(rows("second")[:9])
    assert Rows(file).find(case) is None
    Rows(file).put(rows("third"))
    assert Rows(file).find(case) == rows("third")
    assert (
        Rows(file).find(Case(network="residual_mlp", step="adam", small=True, given_batch=2))
        is None
    )


@pytest.mark.slow
def test_a_variant_that_fails_has_a_row_that_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build = residual_mlp.network
    some = [one for one in step_time.VARIANTS if one.kind in ("forward", "plain")]
    some += [one for one in step_time.VARIANTS if one.policy == POLICY]
    monkeypatch.setattr(step_time, "VARIANTS", some)

    def refuse(name: str, size: Any, batch: int, block_policy: str | None) -> Network:
        if block_policy == POLICY:
            raise ValueError("no such\nluck")
        return build(name, size, batch, block_policy)

    monkeypatch.setattr(residual_mlp, "network", refuse)
    run("--step", "gradient")
    rows = {row["variant"]: row for row in printed(capsys)}
    assert list(rows) == [one.label for one in some]
    errors = {label: row["error"] for label, row in rows.items() if "error" in row}
    per_block = f"{POLICY}, per block"
    assert errors == {
        per_block: "ValueError: no such",
        f"ours, memory of {per_block}": f"There is no budget: {per_block!r} did not compile.",
    }
    assert all("median_seconds" in row for label, row in rows.items() if label not in errors)


@pytest.mark.slow
@pytest.mark.versions
def test_the_state_goes_from_variant_to_variant() -> None:
    case = Case(network="residual_mlp", step="adam", small=True)
    subject = Subject(case)
    runs = {
        variant.label: subject.compiled(variant)[1]
        for variant in step_time.VARIANTS
        if variant.label in ("plain", "nothing_saveable, whole")
    }
    state, batch = subject.arrays()
    for taken in runs.values():
        before = state
        state, seconds = taken(before, batch)
        assert seconds > 0
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before)), "it was donated"
    counts = [leaf for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.int32]
    assert list(map(int, counts)) == [2], "Adam's own count of steps"


class Recorder:
    """Runs that record their turns; the one called ``bad`` fails when its turn is ``fails``."""

    def __init__(self, labels: str, fails: int = 0) -> None:
        self.order: list[str] = []
        self.made = 0
        self.runs: dict[str, Run] = {label: self._run(label, fails) for label in labels}

    def arrays(self) -> tuple[State, Any]:
        self.made += 1
        return (0,), None

    def _run(self, label: str, fails: int) -> Run:
        def run(state: State, batch: Any) -> tuple[State, float]:
            self.order.append(label)
            if label == "b" and self.order.count("b") == fails:
                raise MemoryError("out of memory\nat length")
            return (state[0] + 1,), float(state[0])

        return run


def test_order_rotates_and_every_second_round_goes_backward() -> None:
    recorder = Recorder("abc")
    times = step_time.timed(recorder.runs, recorder.arrays, rounds=4, seconds=0)
    warm_up, rest = recorder.order[:6], recorder.order[6:]
    assert "".join(warm_up) == "aabbcc"
    assert "".join(rest) == "abc" + "acb" + "cab" + "cba"
    assert {label: len(seconds) for label, seconds in times.seconds.items()} == dict.fromkeys(
        "abc", 4
    )
    # Each took the state that the previous one returned.
    assert sorted(itertools.chain(*times.seconds.values())) == list(range(6, 18))
    assert recorder.made == 1


@pytest.mark.parametrize(("fails", "turns"), [(1, 1), (2, 2), (4, 4)])
def test_one_that_fails_is_left_out_and_others_get_a_new_state(fails: int, turns: int) -> None:
    recorder = Recorder("abc", fails)
    times = step_time.timed(recorder.runs, recorder.arrays, rounds=3, seconds=0)
    assert dict(times.errors) == {"b": "MemoryError: out of memory"}
    assert {label: len(seconds) for label, seconds in times.seconds.items()} == {"a": 3, "c": 3}
    assert recorder.order.count("b") == turns
    assert recorder.made == 2


def test_rounds_go_on_for_some_time() -> None:
    recorder = Recorder("a")
    times = step_time.timed(recorder.runs, recorder.arrays, rounds=2, seconds=60)
    assert len(times.seconds["a"]) == step_time._MOST_ROUNDS


def test_ratios_are_of_the_same_round() -> None:
    # Twice as slow while everything is slow, and as fast otherwise.
    found = step_time.figures([2.0, 2.0, 20.0, 40.0], [1.0, 1.0, 10.0, 40.0])
    assert found["ratio_to_plain"] == 2
    assert found["ratio_quartiles"] == [1.75, 2]
    assert found["median_seconds"] == 11
    assert "ratio_to_plain" not in step_time.figures([1.0, 2.0], None)


def test_small_networks_are_of_the_sizes_that_rows_say() -> None:
    for name, small in SMALL.items():
        heading = Case(network=name, step="adam", small=True).heading()
        assert heading["batch"] == small.batch
        assert set(heading["size_changes"]) == set(small.changes)
        json.dumps(heading)
    vit = Case(network="vit_b16", step="adam", small=True).build()
    assert vit.arguments[1]["images"].shape == (8, 64, 64, 3)
    assert SMALL.keys() == set(networks.names())


def test_a_table_says_all_variants(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    case = Case(network="residual_mlp", step="adam", small=True)
    rows = [
        {**case.heading(), "variant": label, "kind": "ours", "error": "no room"} for label in LABELS
    ]
    Rows(tmp_path / "rows.jsonl").put(rows)
    arguments = ["--network", "residual_mlp", "--rows", str(tmp_path / "rows.jsonl")]
    assert step_time.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Judged")
    assert all(any(line.startswith(label) for line in lines) for label in LABELS)


def test_one_round_has_no_quartiles(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        step_time.main(["--rounds", "1"])
    assert "give at least 2" in capsys.readouterr().err
