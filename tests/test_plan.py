"""The plan as data: written, read back, and refused if it is not what it claims."""

from __future__ import annotations

import cProfile
import dataclasses
import json
import pstats
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat_opt
from remat_opt.checksum import checksum_of
from remat_opt.errors import PlanFileError
from remat_opt.plan import FORMAT, Plan
from remat_opt.timeline import KINDS
from tests.programs import ones

pytestmark = pytest.mark.usefixtures("quick_search")


def layers(weights: Any, x: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.tanh(x @ w) + x
    return jnp.sum(x**2)


#: Small weights: where ``tanh`` is 1 but for rounding, gradients are nothing but rounding.
ARGS = [jnp.full((8, 8), 1 / 64)] * 8, ones(64, 8)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return remat_opt.make_plan(layers, *ARGS, device="cpu")


def test_round_trip(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert Plan.load(str(path)) == plan
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    "options", [{"budget": 0.6}, {"budget": "1MiB"}, {"max_overhead": 0.1, "overhead": "flops"}]
)
def test_round_trip_of_every_objective(options: Any) -> None:
    plan = remat_opt.make_plan(layers, *ARGS, device="cpu", **options)
    assert Plan.from_json(plan.to_json()) == plan


def test_round_trip_with_a_measurement() -> None:
    plan = remat_opt.make_plan(layers, *ARGS, device="cpu", verify=True)
    assert plan.measured is not None
    assert plan.measured.temporary_bytes > 0
    assert Plan.from_json(plan.to_json()) == plan


def test_round_trip_of_a_plan_for_nothing() -> None:
    plan = remat_opt.make_plan(lambda x: x, 1.0, device="cpu")
    assert plan.stages == ()
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.notes == (
        "The function only returns its arguments or constants: there is nothing to plan.",
    )


def test_the_text_is_stable(plan: Plan) -> None:
    again = remat_opt.make_plan(layers, *ARGS, device="cpu")
    assert again.to_json() == plan.to_json()
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()


def test_what_a_plan_says(plan: Plan) -> None:
    assert plan.function == "layers"
    assert plan.device == "cpu"
    assert plan.predicted.temporary_bytes < plan.predicted.plain_temporary_bytes
    assert 0 < plan.predicted.overhead_share <= 1, "at most one forward pass, in time"
    assert plan.predicted.recomputed_share > 0
    assert 0 < plan.predicted.overhead_share <= 1
    assert plan.stages[-1].checkpointed is False
    assert {decision.fate for decision in plan.decisions} <= {"kept", "recomputed", "not needed"}
    assert all(decision.source.startswith("test_plan.py:") for decision in plan.decisions)
    roots = [root for stage in plan.stages for root in stage.roots]
    assert sorted(roots) == [decision.root for decision in plan.decisions]


def test_what_is_alive_at_the_peak_takes_part_of_it() -> None:
    """On h200 some cotangents are no arrays: they are not listed as one byte."""
    weights = [jax.ShapeDtypeStruct((64, 64), "float32")] * 6
    x = jax.ShapeDtypeStruct((2048, 64), "float32")
    found = remat_opt.make_plan(layers, weights, x, budget=0.6, device="h200")
    assert found.predicted.pins
    assert min(pin.bytes for pin in found.predicted.pins) * 1000 >= found.predicted.model_bytes


def test_a_saved_plan_is_followed(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    for fn in (
        remat_opt.apply_plan(path, layers),
        remat_opt.apply_plan(plan, layers),
        remat_opt.optimal_remat(layers, plan=path),
    ):
        assert fn.plan(*ARGS) == plan
        found, expected = (jax.jit(jax.grad(one))(*ARGS) for one in (fn, layers))
        assert all(jnp.allclose(a, b) for a, b in zip(found, expected, strict=True))


# --- Files that are refused ---------------------------------------------------------------


def refused(text: str) -> str:
    with pytest.raises(PlanFileError) as caught:
        Plan.from_json(text, where="'p.json'")
    return str(caught.value)


def resealed(plan: Plan, change: Any) -> str:
    """The plan's text after a change to its data, with a checksum that matches."""
    data = json.loads(plan.to_json())
    change(data["plan"])
    data["checksum"] = checksum_of(data["plan"])
    return json.dumps(data)


def test_not_json() -> None:
    assert refused("import os") == (
        "'p.json' is not a plan: it is not JSON, or is cut short (Expecting value: line 1 column 1 "
        "(char 0)). Make the plan again and save it."
    )


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_truncated(plan: Plan, share: float) -> None:
    text = plan.to_json()
    message = refused(text[: int(share * len(text))])
    assert message.startswith("'p.json' is not a plan: it is not JSON, or is cut short (")


@pytest.mark.parametrize("text", ["[]", "3", '{"a": 1}', '{"format": "x"}'])
def test_foreign(text: str) -> None:
    assert refused(text) == (
        "'p.json' is JSON, but not a plan of remat_opt: it has no 'format' and 'plan'."
    )


def test_another_format(plan: Plan) -> None:
    text = plan.to_json().replace(FORMAT, "remat_opt plan 0")
    assert refused(text) == (
        "'p.json' has the format 'remat_opt plan 0'; this version of remat_opt reads "
        f"{FORMAT!r}. Make the plan again with this version."
    )


def test_edited(plan: Plan) -> None:
    text = plan.to_json().replace('"cpu"', '"h100"', 1)
    assert refused(text) == (
        "'p.json' was changed after it was saved: its checksum does not match. Make the plan again "
        "rather than edit it."
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda body: body.pop("stages"), "plan does not have the fields "),
        (lambda body: body.update(extra=1), "plan does not have the fields "),
        (lambda body: body.update(function=3), "plan.function is 3, not of type str"),
        (lambda body: body.update(stages={}), "plan.stages is {}, not a list"),
        (
            lambda body: body["stages"][0].update(roots=["x"]),
            "plan.stages[0].roots[0] is 'x', not of type int",
        ),
        (
            lambda body: body["stages"][0].update(checkpointed=1),
            "plan.stages[0].checkpointed is 1, not of type bool",
        ),
        (lambda body: body["objective"].update(overhead="days"), "'days' is not a valid Overhead"),
    ],
)
def test_well_sealed_nonsense(plan: Plan, change: Any, reason: str) -> None:
    message = refused(resealed(plan, change))
    assert message.startswith(f"'p.json' does not hold a plan of this version: {reason}")
    assert message.endswith(". Make the plan again.")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 2000, "it is not JSON, or is cut short (Expecting value: line 1 column 2001"),
        ("[" * 200_000, "it nests too deep"),
        ("[" * 500 + "]" * 500, "it nests too deep"),
        ("1" * 5000, "Exceeds the limit"),
        ("NaN", "it holds a number that is not finite, or is out of range"),
        ("[1e999]", "it holds a number that is not finite, or is out of range"),
        (f"[{10**400}]", "it holds a number that is not finite, or is out of range"),
    ],
)
def test_json_that_is_no_data_of_ours(text: str, reason: str) -> None:
    # How deep Python's own reader goes depends on the version.
    reasons = (reason, "it nests too deep") if text.startswith("[[") else (reason,)
    assert refused(text).startswith(tuple(f"'p.json' is not a plan: {one}" for one in reasons))


@pytest.mark.parametrize("number", [10**400, 1e31, float("inf"), float("nan")])
@pytest.mark.parametrize("field", ["temporary_bytes", "overhead_seconds", "forward_flops"])
def test_well_sealed_numbers_out_of_range(plan: Plan, field: str, number: Any) -> None:
    text = resealed(plan, lambda body: body["predicted"].update({field: number}))
    assert "out of range" in refused(text)


def test_large_numbers_are_shown(plan: Plan) -> None:
    def change(body: Any) -> None:
        for name, value in body["predicted"].items():
            if type(value) in (int, float):
                body["predicted"][name] = type(value)(1e29)

    shown = Plan.from_json(resealed(plan, change))
    assert repr(shown)
    assert shown._repr_html_()


def nested(stage: Any, depth: int) -> Any:
    for _ in range(depth):
        stage = {**stage, "inside": [stage]}
    return stage


def test_regions_that_nest(plan: Plan) -> None:
    def change(depth: int) -> Any:
        def nest(body: Any) -> None:
            checkpointed = {**body["stages"][0], "checkpointed": True}
            body["stages"] = [nested(checkpointed, depth), *body["stages"][1:]]

        return nest

    assert "it nests too deep" in refused(resealed(plan, change(300)))
    deep = Plan.from_json(resealed(plan, change(60)))
    assert deep == Plan.from_json(deep.to_json())
    assert repr(deep)
    assert deep._repr_html_()


def test_regions_that_compute_nothing(plan: Plan) -> None:
    empty = {"roots": [], "kept": [], "checkpointed": True, "inside": []}
    text = resealed(plan, lambda body: body.update(stages=[empty] * 50_000))
    assert "plan.stages[0] is a region that computes nothing" in refused(text)


def test_the_work_of_reading_grows_with_the_number_of_regions(plan: Plan) -> None:
    """Calls made, not seconds."""
    calls = {}
    for count in (1_000, 2_000):
        region = {"kept": [], "checkpointed": True, "inside": []}
        many = [{**region, "roots": [root]} for root in range(count)]
        text = resealed(plan, lambda body, many=many: body.update(stages=many))
        profile = cProfile.Profile()
        assert len(profile.runcall(Plan.from_json, text).stages) == count
        calls[count] = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    assert calls[2_000] < 2.1 * calls[1_000]


def test_what_a_terminal_would_obey_is_escaped(plan: Plan) -> None:
    def change(body: Any) -> None:
        body["function"] = "f\x1b[31m\x07\u202e\ud800\n"
        body["notes"] = ["\x9b2J"]
        body["jax_version"] = body["fingerprint"] = "\x1b]0;title\x07"
        for one in body["decisions"]:
            one["name"].update(module="\x1b[2J", source="\r", what="\x00")

    forged = Plan.from_json(resealed(plan, change))
    for shown in (repr(forged), forged._repr_html_()):
        assert all(line.isprintable() for line in shown.splitlines())
        assert r"f\x1b[31m\x07\u202e\ud800\n" in shown
    with pytest.raises(PlanFileError) as caught:
        remat_opt.apply_plan(forged, layers)(*ARGS)
    assert str(caught.value).isprintable()


def test_names_that_hold_the_sign_for_numbers(plan: Plan) -> None:
    def change(body: Any) -> None:
        for number, one in enumerate(body["decisions"]):
            one["name"]["module"] = "block_1" if number % 2 else "block_#"

    assert repr(Plan.from_json(resealed(plan, change)))


def test_well_sealed_plans_that_cannot_be_shown(plan: Plan) -> None:
    def told(change: Any) -> str:
        return refused(resealed(plan, change))

    assert "plan.predicted.timeline does not have one entry for each moment" in told(
        lambda body: body["predicted"]["timeline"]["kept"].pop()
    )
    assert "plan.predicted.timeline.arrays[0].kind is 'x', not one of kept, boundaries" in told(
        lambda body: body["predicted"]["timeline"]["arrays"][0].update(kind="x")
    )
    assert "decisions name region 99, but there are only" in told(
        lambda body: body["decisions"][0].update(region=99)
    )


def test_rows_and_pages(plan: Plan, tmp_path: Path) -> None:
    assert len(plan.rows) == len(plan.decisions)
    assert {row["fate"] for row in plan.rows} == {one.fate for one in plan.decisions}
    path = plan.show(tmp_path / "plan.html")
    assert path == tmp_path / "plan.html"
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert text == plan.show(str(path)).read_text(encoding="utf-8")
    assert "Plan of layers for cpu" in text


def test_a_data_frame_of_rows(plan: Plan) -> None:
    pytest.importorskip("pandas", reason="a DataFrame needs pandas")
    frame = plan.to_dataframe()
    assert list(frame.columns) == list(plan.rows[0])
    assert len(frame) == len(plan.rows)


def test_what_is_alive_when(plan: Plan) -> None:
    after, before = plan.predicted.timeline, plan.predicted.plain_timeline

    def most(told: Any) -> int:
        return max(map(sum, zip(*(getattr(told, kind) for kind in KINDS), strict=True)))

    assert most(after) < most(before)
    assert max(after.recomputed) > 0
    assert max(before.recomputed) == 0
    assert max(before.boundaries) == 0


def test_names_that_a_person_knows(plan: Plan) -> None:
    told = {decision.name.title for decision in plan.decisions}
    assert "matrix product with weights[3], 64x8 float32" in told
    assert "tanh in layers, 64x8 float32" in told


def test_well_sealed_stages_that_do_not_fit_the_program(plan: Plan) -> None:
    forged = Plan.from_json(
        resealed(plan, lambda body: body["stages"][0].update(roots=[10_000], kept=[]))
    )
    with pytest.raises(PlanFileError, match="names equation 10000, but the program has"):
        remat_opt.apply_plan(forged, layers)(*ARGS)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    with pytest.raises(PlanFileError) as caught:
        Plan.load(path)
    assert str(caught.value) == f"There is no plan file {str(path)!r}."
    with pytest.raises(PlanFileError) as caught:
        Plan.load(tmp_path)
    assert str(caught.value) == f"The plan file {str(tmp_path)!r} cannot be read: Is a directory."
    with pytest.raises(PlanFileError, match="cannot be read: embedded null"):
        Plan.load("a\0b")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanFileError) as caught:
        Plan.load(path)
    assert str(caught.value) == f"{str(path)!r} is not a plan: it is not a text file."


def test_of_another_program(plan: Plan) -> None:
    def other(weights: Any, x: jax.Array) -> jax.Array:
        return layers(weights, jnp.sin(x))

    for fn, args in ((other, ARGS), (layers, (ARGS[0], ARGS[1][:32]))):
        with pytest.raises(PlanFileError) as caught:
            remat_opt.apply_plan(plan, fn)(*args)
        message = str(caught.value)
        assert message.startswith(
            "The plan was made for another program: for 'layers' with the fingerprint "
            f"{plan.fingerprint[:12]}, traced by JAX {plan.jax_version}; this is "
            f"{fn.__name__!r} with "
        )
        assert message.endswith(
            f", traced by JAX {jax.__version__}. The function, the shapes of its arguments, "
            "argnums or the version of JAX have changed since then. Make the plan again."
        )


def test_of_another_argnums(plan: Plan) -> None:
    with pytest.raises(PlanFileError, match="argnums or the version of JAX have changed"):
        remat_opt.apply_plan(plan, layers, argnums=1)(*ARGS)


def test_a_plan_holds_data_only(plan: Plan) -> None:
    def check(thing: Any) -> None:
        if isinstance(thing, dict):
            for key, value in thing.items():
                assert isinstance(key, str)
                check(value)
        elif isinstance(thing, list):
            for value in thing:
                check(value)
        else:
            assert isinstance(thing, str | int | float | bool | None)

    check(plan.to_dict())
    assert dataclasses.is_dataclass(plan)
