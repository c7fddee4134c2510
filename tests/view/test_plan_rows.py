from remat_opt.view import plan_rows, regions
from tests.view.plans import MIB, decision, plan

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
            *("fate", "times", "bytes", "seconds", "flops", "seconds_per_mib", "why"),
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


def test_regions_hold_modules_hold_values():
    first, second = regions.regions(GIVEN)
    assert first.label == "Region 1"
    assert first.bytes == (3 * MIB, 0, 0)
    # All of it is in one block, whose own value it holds beside the module inside.
    assert [(child.label, child.values) for child in first.children] == [("Conv_0", (0,))]
    assert first.values == (1,)
    assert second.label == "Region 2, not checkpointed"
    assert [child.label for child in second.children] == ["Conv_0", "Dense_0"]
    assert (second.bytes, second.seconds, second.count) == ((0, MIB, 0), 2e-6, 2)


def test_regions_say_from_where_to_where_they_go():
    first, second = regions.regions(GIVEN)
    assert regions.span(first, DECISIONS) == "Net/Block_0"
    assert regions.span(second, DECISIONS) == "Net/Block_1/Conv_0 to Dense_0"
