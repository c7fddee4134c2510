"""The difference of two plans, by the names of values."""

import jax
import jax.numpy as jnp
import pytest

import remat_opt
from remat_opt.plan_difference import difference

SHAPE = jax.ShapeDtypeStruct((64, 64), "float32")
ROWS = jax.ShapeDtypeStruct((256, 64), "float32")


def loss(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


def plan(**options):
    return remat_opt.make_plan(loss, [SHAPE] * 8, ROWS, device="cpu", **options)


@pytest.fixture(scope="module")
def plans():
    return plan(max_overhead=0.0), plan(budget=0.5)


def test_a_plan_does_not_differ_from_itself(plans):
    found = plans[0].diff(plans[0])
    assert found.is_empty
    assert "No value has another fate." in repr(found)


def test_tells_whose_fates_differ(plans):
    found = plans[0].diff(plans[1])
    assert found.same_program
    assert not found.is_empty
    fates = {root.root: root.fate for root in plans[0].decisions}
    changed = sum(one.fate != fates[one.root] for one in plans[1].decisions)
    assert sum(one.count for one in found.changes) == changed > 0
    assert {(one.before, one.after) for one in found.changes} >= {("kept", "recomputed")}
    before, after = found.figures["temporaries, predicted"]
    assert before == plans[0].predicted.temporary_bytes > after
    text = repr(found)
    assert "256x64 float32" in text
    assert "test_plan_difference.py:" in text
    assert "under a checkpoint" in text


def test_is_the_other_way_round_from_the_other_side(plans):
    there, back = plans[0].diff(plans[1]), plans[1].diff(plans[0])
    assert [(one.before, one.after) for one in there.changes] == [
        (one.after, one.before) for one in back.changes
    ]


def test_plans_for_different_programs_are_matched_by_words(plans):
    deeper = remat_opt.make_plan(loss, [SHAPE] * 10, ROWS, device="cpu", max_overhead=0.0)
    found = plans[0].diff(deeper)
    assert not found.same_program
    assert sum(one.count for one in found.changes if not one.before) >= 2
    assert "different programs" in repr(found)


def test_tells_how_loops_differ():
    def scanned(weights, x):
        return jnp.sum(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w) @ w, None), x, weights)[0])

    weights = jax.ShapeDtypeStruct((32, 64, 64), "float32")
    plain, small = (
        remat_opt.make_plan(scanned, weights, ROWS, device="cpu", **options)
        for options in ({"max_overhead": 0.0}, {"budget": 0.5})
    )
    ((before, after),) = plain.diff(small).loops.values()
    assert "that keep 64.0 KiB" in before
    assert after != before
    ((_, also),) = small.diff(plain).loops.values()
    assert also == before
    text = repr(plain.diff(small))
    assert f"{before} -> {after}" in text
    assert "Loop scan in scanned (test_plan_difference.py:" in text
    assert "No value outside of loops has another fate." in text


def test_loops_that_keep_as_much_of_other_values_differ(plans):
    part = {
        "length": 8,
        "inside": [],
        "checkpointed": True,
        "kept": [3],
        "kept_bytes": 2**20,
        "loops": [],
    }
    data = plans[0].to_dict()
    first, second = (
        {**data, "loops": [{"root": 0, "in_gradients": [], "parts": [{**part, "kept": [kept]}]}]}
        for kept in (3, 4)
    )
    found = difference(first, second)
    assert not found.is_empty
    told = "scan of 8: 8 that keep 1.00 MiB in 1 value each, though not of the same"
    assert told in repr(found)
    assert difference(first, first).is_empty


def test_values_of_modules_that_differ_in_their_numbers_are_one_row():
    def named(weights, x):
        for number, w in enumerate(weights):
            with jax.named_scope(f"Layer_{number}"):
                x = jnp.tanh(x @ w)
        return jnp.sum(x)

    first, second = (
        remat_opt.make_plan(named, [SHAPE] * 8, ROWS, device="cpu", **options)
        for options in ({"max_overhead": 0.0}, {"budget": 0.5})
    )
    found = first.diff(second)
    several = [one for one in found.changes if one.count > 1]
    assert several
    assert all(one.module == "Layer_*" for one in several)
    assert sum(one.bytes for one in found.changes) == sum(
        one.bytes
        for one, other in zip(first.decisions, second.decisions, strict=True)
        if (one.fate, one.times) != (other.fate, other.times)
    )
