from remat_opt.view import plan_rows, plan_words, regions
from tests.view.plans import MIB, decision, loop_value, plan

STAGES = [
    {"roots": [0, 1], "kept": [0], "checkpointed": True, "inside": []},
    {"roots": [2, 3], "kept": [], "checkpointed": False, "inside": []},
]
DECISIONS = [
    decision(root=0, seconds=4e-6, bytes=2 * MIB, module="Net/Block_0/Conv_0"),
    decision(root=1, module="Net/Block_0"),
    decision("recomputed", root=2, region=1, times=2, module="Net/Block_1/Conv_0"),
    decision("not needed", root=3, region=1, bytes=0, module="Net/Block_1/Dense_0"),
]
GIVEN = plan(stages=STAGES, decisions=DECISIONS)


def test_why():
    assert [row["why"] for row in plan_rows.rows(GIVEN)] == [
        "Dropping it would free 2.00 MiB and cost at least 4.00 us of recomputation: 2.00 us for "
        "each MiB.",
        "A later region reads it. Dropping it would free 1.00 MiB and cost at least 1.00 us of "
        "recomputation: 1.00 us for each MiB.",
        "Keeping it would take 1.00 MiB more and save at most 2.00 us of recomputation: 2.00 us "
        "for each MiB.",
        "No backward step reads it.",
    ]


def test_rows_are_flat_and_alike():
    rows = plan_rows.rows(GIVEN)
    assert {tuple(row) for row in rows} == {
        (
            *("value", "what", "module", "source", "shape", "dtype", "primitive", "region"),
            *("iterations", "fate", "times", "bytes", "seconds", "flops", "seconds_per_mib", "why"),
        )
    }
    assert rows[0]["value"] == "matrix product with w, 8x8 float32"
    assert rows[0]["shape"] == (8, 8)
    assert [row["seconds_per_mib"] for row in rows] == [2e-6, 1e-6, 2e-6, None]


def test_margins():
    assert plan_rows.margins(GIVEN) == [
        "One more MiB would save at most 2.00 us: keep matrix product with w, 8x8 float32.",
        "One MiB less would cost at least 1.00 us: drop matrix product with w, 8x8 float32.",
    ]
    assert plan_rows.margins(plan()) == []


def test_what_is_small_is_no_way_to_save():
    small = decision(what="small", bytes=MIB // 100, seconds=1e-12)
    told = plan_rows.margins(plan(stages=STAGES, decisions=[*DECISIONS, small]))
    assert not [one for one in told if "small" in one]


LOOP = plan(
    stages=STAGES,
    decisions=DECISIONS,
    loop_values=[
        loop_value(loop=1, what="tanh"),
        loop_value(loop=1, what="carry", handed_on=True),
        loop_value("recomputed", loop=1, what="sum", part="iterations 5 to 6 of 6", runs=2),
    ],
)


def test_values_inside_loops_come_after_their_loop():
    rows = plan_rows.rows(LOOP)
    assert [row["what"] for row in rows[2:5]] == ["tanh", "carry", "sum"]
    tanh, carry, again = rows[2:5]
    assert tanh["iterations"] == "iterations 1 to 4 of 6"
    # All its iterations together.
    assert (tanh["bytes"], tanh["seconds"], tanh["flops"]) == (4 * MIB, 4e-6, 4000)
    assert tanh["why"] == (
        "Dropping it would free 4.00 MiB and cost at least 4.00 us of recomputation: 1.00 us for "
        "each MiB."
    )
    assert carry["seconds_per_mib"] is None
    assert carry["why"] == (
        "The next iteration starts from it. Fewer are kept if several iterations share a "
        "checkpoint."
    )
    assert (again["bytes"], again["fate"], again["region"]) == (2 * MIB, "recomputed", 0)
    assert {tuple(row) for row in rows} == {tuple(rows[0])}


def test_margins_name_the_iterations():
    cheap = [loop_value(loop=1, what="tanh", seconds=1e-9)]
    assert plan_rows.margins({**LOOP, "loop_values": cheap})[1] == (
        "One MiB less would cost at least 1.00 ns: drop tanh, 8x8 float32, of iterations 1 to 4 "
        "of 6."
    )


def tree(given):
    return regions.regions(given, plan_words.values(given))


def test_loops_hold_the_iterations_that_run_alike():
    (loop,) = [one for one in tree(LOOP)[0].children if one.label == "inside the scan"]
    assert loop.said == "train.py:3 (loss)"
    assert [(one.label, one.values) for one in loop.children] == [
        ("iterations 1 to 4 of 6", (2, 3)),
        ("iterations 5 to 6 of 6", (4,)),
    ]
    assert loop.bytes == (8 * MIB, 2 * MIB, 0)


def test_regions_hold_regions():
    def stage(*roots, **changes):
        told = {"roots": list(roots), "kept": [], "checkpointed": True, "inside": []}
        return {**told, **changes}

    inner = stage(0, 1, inside=[stage(0, kept=[0]), stage(1, checkpointed=False)])
    outer = stage(0, 1, 2, 3, inside=[inner, stage(2, 3)])
    decisions = [{**one, "region": 0} for one in DECISIONS]
    (found,) = tree(plan(stages=[outer], decisions=decisions))
    assert [one.label for one in found.all() if one.label.startswith("Region")] == [
        *("Region 1", "Region 1.1", "Region 1.1.1", "Region 1.1.2, not checkpointed", "Region 1.2"),
    ]
    assert found.said == "Net/Block_0 to Block_1, runs again as 2 regions"
    assert found.children[0].children[0].said == "Net/Block_0/Conv_0, keeps 1 value"
    assert found.children[0].children[0].values == (0,)
    assert (found.count, found.children[0].count) == (4, 2)


def test_regions_hold_modules_hold_values():
    first, second = tree(GIVEN)
    assert first.label == "Region 1"
    assert first.bytes == (3 * MIB, 0, 0)
    # Everything is in one block, which holds its own value and an inner module.
    assert [(child.label, child.values) for child in first.children] == [("Conv_0", (0,))]
    assert first.values == (1,)
    assert second.label == "Region 2, not checkpointed"
    assert [child.label for child in second.children] == ["Conv_0", "Dense_0"]
    assert (second.bytes, second.seconds, second.count) == ((0, MIB, 0), 2e-6, 2)


def test_regions_say_from_where_to_where_they_go():
    first, second = tree(GIVEN)
    assert first.said == "Net/Block_0"
    assert second.said == "Net/Block_1/Conv_0 to Dense_0"
