import pytest

from remat_opt.view import plan_text, plan_words
from tests.view.plans import MEASURED, MIB, RESIDENT, decision, loop_value, named, plan, timeline


def line(text: str, word: str) -> str:
    return next(found for found in text.split("\n") if found.startswith(word))


WHOLE = plan(
    decisions=[
        decision(),
        decision(
            fate="recomputed",
            what="tanh in loss",
            primitive="tanh",
            source="train.py:4 (loss)",
            bytes=2 * MIB,
        ),
        decision(fate="not needed", what="unseen"),
    ],
    predicted={"pins": [{"name": named(), "role": "kept", "bytes": MIB}]},
)


def test_a_whole_plan():
    assert plan_text.text(WHOLE, 80) == (
        "Plan of loss for h200\n"
        "asked for   least memory\n"
        "predicted   3.00 MiB of temporaries at the peak (unchanged function: 4.00 MiB,\n"
        "            75.0 % of it)\n"
        "recomputed  10.0 % of a forward pass in time (1.00 us), 25.0 % in FLOPs (1.00\n"
        "            kFLOP)\n"
        "kept        2.00 MiB in 1 value wait for the backward pass\n"
        "regions     2, 1 of them under jax.checkpoint\n"
        "made by     remat_opt 0.1.0, JAX 0.10.2, solver portfolio, program 0123456789ab\n"
        "\n"
        "Memory over time, planned: highest 3.00 MiB at moment 2 of 3 (backward)\n"
        "▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▆▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄\n"
        "at the highest: kept 2.00 MiB, gradients 1.00 MiB\n"
        "\n"
        "Memory over time, unchanged function: highest 4.00 MiB at moment 2 of 3\n"
        "(backward)\n"
        "▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂███████████████████████████▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄\n"
        "at the highest: kept 3.00 MiB, gradients 1.00 MiB\n"
        "\n"
        "Kept: 1 value, 1.00 MiB of which computing again would take 1.00 us\n"
        "value                                 source         bytes  to recompute\n"
        "----------------------------------    ----------  --------  ------------\n"
        "matrix product with w, 8x8 float32    train.py:3  1.00 MiB       1.00 us\n"
        "\n"
        "Recomputed: 1 value, in 1.00 us\n"
        "value                        source         bytes  to recompute\n"
        "-------------------------    ----------  --------  ------------\n"
        "tanh in loss, 8x8 float32    train.py:4  2.00 MiB       1.00 us\n"
        "\n"
        "Alive at the predicted peak\n"
        "value                           source         bytes  why\n"
        "----------------------------    ----------  --------  --------------------------\n"
        "matrix product with w...        train.py:3  1.00 MiB  kept for the backward pass\n"
        "and others, 2.00 MiB\n"
        "\n"
        "One more MiB would save at most 500 ns: keep tanh in loss, 8x8 float32.\n"
        "One MiB less would cost at least 1.00 us: drop matrix product with w, 8x8\n"
        "float32."
    )


def test_what_was_asked_for():
    asked = {
        "least memory": {},
        "least overhead (in seconds) with temporaries within 2.00 MiB": {"budget_bytes": 2 * MIB},
        "least memory with at most 5.0 % of a forward pass recomputed (in FLOPs)": {
            "objective": {"max_overhead": 0.05, "overhead": "flops"}
        },
        "least overhead (in seconds) with temporaries within 2.00 MiB, "
        "50.0 % of the unchanged function's": {
            "budget_bytes": 2 * MIB,
            "objective": {"budget_share": 0.5},
        },
    }
    for said, changes in asked.items():
        assert line(plan_text.text(plan(**changes)), "asked for") == f"asked for   {said}"


@pytest.mark.parametrize("early_values", [0, 2])
def test_what_survived_the_compiler(early_values):
    found = {
        **{"asked_products": 3, "compiled_products": 3},
        **{"early_values": early_values, "compiler_values": 0},
        **{"merged": [], "not_kept": []},
    }
    text = plan_text.text(plan(measured={**MEASURED, "recomputation": found}))
    said = "survived    3 of 3 matrix products and convolutions that were to be computed again are"
    # A note of the measurement says what did not survive.
    assert (said in text) is (early_values == 0)


def test_measured_figures_with_their_difference():
    text = plan_text.text(plan(measured=MEASURED))
    assert line(text, "compiled") == (
        "compiled    3.25 MiB of temporaries, +8.3% from predicted; arguments 1.00 MiB, "
        "outputs 2.00 MiB; in 2.00 s"
    )


def test_host_memory_and_notes_of_both():
    text = plan_text.text(
        plan(measured={**MEASURED, "host_bytes": MIB, "notes": ["first"]}, notes=["second"])
    )
    assert line(text, "host memory") == "host memory  1.00 MiB"
    assert "note         first" in text
    assert "note         second" in text


def test_repeated_layers_share_a_row():
    layers = [
        decision(module=f"Net/stage_1/block_{n}/Conv_0", what=f"convolution in block_{n}/Conv_0")
        for n in range(3)
    ]
    text = plan_text.text(plan(decisions=[*layers, decision(module="Net/head")]), 160)
    rows = [row for row in text.split("\n") if row.startswith(("convolution", "matrix"))]
    assert len(rows) == 2
    assert rows[0].startswith("convolution in block_*/Conv_0, 8x8 float32  3 x  ")
    assert "  Net/stage_1/block_*/Conv_0  " in rows[0]
    assert "3.00 MiB" in rows[0]
    assert "3.00 us" in rows[0]
    assert "3.00 kFLOP" in rows[0]


def test_a_long_plan_stays_short_and_says_what_is_left():
    many = [
        decision(what=f"value{chr(97 + n // 26)}{chr(97 + n % 26)}", bytes=(400 - n) * MIB)
        for n in range(400)
    ]
    text = plan_text.text(plan(decisions=many))
    assert len(text.split("\n")) < 45
    assert text.index("valueaa") < text.index("valueal")
    assert "valueam" not in text
    assert "and 388 more, 73.7 GiB" in text


@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
def test_no_line_is_longer_than_the_terminal(width):
    path = "/".join(f"layer{n}" for n in range(20))
    long = plan(decisions=[decision(module=path, what=f"sum in {path}")], notes=["word " * 50])
    lines = plan_text.text(long, width).split("\n")
    assert max(map(len, lines)) <= width
    assert any("..." in line for line in lines)


def test_a_plan_of_nothing():
    nothing = dict.fromkeys(plan()["predicted"], 0)
    given = plan(
        stages=[],
        predicted={**nothing, "timeline": timeline([]), "plain_timeline": timeline([]), "pins": []},
        notes=["there is nothing to plan."],
    )
    text = plan_text.text(given)
    assert line(text, "predicted") == (
        "predicted   0 B of temporaries at the peak (unchanged function: 0 B)"
    )
    assert "there is nothing to plan." in text


def test_what_is_amiss_comes_with_a_remedy():
    far = {**MEASURED, "temporary_bytes": 5 * MIB}
    assert plan_words.warnings(plan()) == []
    assert plan_words.warnings(plan(measured=MEASURED, budget_bytes=4 * MIB)) == []
    assert plan_words.warnings(plan(measured=far)) == [
        (
            "The compiler needs 167% of what was predicted: 5.00 MiB, not 3.00 MiB.",
            'verify="compile" learns from what was compiled and solves again.',
        )
    ]
    assert plan_words.warnings(plan(measured=far, budget_bytes=4 * MIB)) == [
        (
            "The budget is not met: compiled, the plan needs 5.00 MiB, and 4.00 MiB were asked "
            "for.",
            'verify="compile" chooses by what the compiler says.',
        )
    ]


#: Iterations of a loop.
PART = {
    "length": 4,
    "inside": [],
    "checkpointed": True,
    "kept": [],
    "kept_bytes": 0,
    "stages": [],
    "loops": [],
}


def test_loops_say_what_their_iterations_keep() -> None:
    inner = PART
    last = {**inner, "length": 8, "kept": [3], "kept_bytes": 2**20}
    last["loops"] = [{"root": 5, "parts": [inner], "in_gradients": []}]
    first = {**inner, "length": 40, "inside": [inner, {**last, "length": 6, "loops": []}]}
    loop = {"root": 0, "parts": [first, last], "in_gradients": []}
    assert plan_words.loop_words(loop) == (
        "scan of 48: 40 in chunks of 10 (4 that keep only their inputs, then 6 that keep 1.00 MiB "
        "in 1 value each), then 8 that keep 1.00 MiB in 1 value each (inside: scan of 4: 4 that "
        "keep only their inputs)"
    )


def test_loops_say_where_it_waits() -> None:
    assert plan_words.loop_words({"root": 0, "parts": [PART], "in_gradients": [0]}) == (
        "scan of 4: 4 that keep only their inputs, in the stacks of gradients where it fits"
    )


def test_parts_in_a_row_of_which_the_same_is_said_are_told_as_one() -> None:
    """The last iteration, under no checkpoint, keeps what the others do."""
    part = {"inside": [], "checkpointed": True, "kept": [3], "kept_bytes": 2**20, "loops": []}
    other = {**part, "length": 2, "kept": [3, 4]}
    parts = [{**part, "length": 5}, {**part, "length": 1}, other, {**part, "length": 1}]
    chunks = [
        {**part, "length": 12, "inside": parts[:2]},
        {**part, "length": 6, "inside": parts[:2]},
    ]
    loop = {"root": 0, "parts": [*parts, *chunks], "in_gradients": []}
    assert plan_words.loop_words(loop) == (
        "scan of 27: 6 that keep 1.00 MiB in 1 value each, then 2 that keep 1.00 MiB in 2 values "
        "each, then 1 that keeps 1.00 MiB in 1 value, then 18 in chunks of 6 (6 that keep 1.00 MiB "
        "in 1 value each)"
    )


def test_a_share_is_one_of_what_the_step_compiles_to() -> None:
    given = plan(budget_bytes=3 * MIB)
    given["objective"] = {**given["objective"], "budget_share": 0.5, "fit": False}
    given["predicted"] = {**given["predicted"], "plain_temporary_bytes": 6 * MIB}
    assert plan_words.asked(given).endswith("3.00 MiB, 50.0 % of the unchanged function's")
    given["predicted"]["plain_temporary_bytes"] = 5 * MIB
    said = "50.0 % of the 6.00 MiB that the unchanged function compiles to"
    assert plan_words.asked(given).endswith(said)


def test_choices_say_what_their_branches_keep() -> None:
    stage = {"roots": [0], "kept": [], "checkpointed": True, "inside": []}
    kept = {"stages": [stage, stage], "kept_bytes": 2**20, "loops": []}
    nested = {**kept, "loops": [{"root": 5, "branches": [kept, kept]}]}
    bare = {**kept, "stages": [], "kept_bytes": 0}
    assert plan_words.loop_words({"root": 0, "branches": [nested, bare]}) == (
        "cond of 2: one that keeps 1.00 MiB in 2 regions (inside: cond of 2: one that keeps "
        "1.00 MiB in 2 regions, or one that keeps 1.00 MiB in 2 regions), or one as it is"
    )


def test_what_a_step_has_all_the_time_is_below_the_temporaries() -> None:
    given = plan(resident=RESIDENT, budget_bytes=5 * MIB, as_compiled=[MIB, 3 * MIB])
    (chart, told), _ = plan_words.charts(given)
    assert [(band.label, set(band.amounts)) for band in chart.bands[:3]] == [
        ("parameters", {MIB}),
        ("optimizer state", {2 * MIB}),
        ("inputs", {MIB // 2}),
    ]
    assert chart.caption() == (
        "Memory over time, planned: highest 6.50 MiB at moment 2 of 3 (backward), 3.00 MiB of it "
        "temporaries; as compiled 3.00 MiB; budget for temporaries 5.00 MiB"
    )
    # The budget is only for temporaries, so its line lies above what is held throughout.
    assert chart.highest == 8 * MIB + MIB // 2
    assert [one["title"] for one in told["arrays"][:3]] == [
        *("parameters", "optimizer state", "inputs")
    ]
    text = plan_text.text(given)
    assert "at the highest: parameters 1.00 MiB, optimizer state 2.00 MiB, inputs 512 KiB" in text


def test_where_no_step_is_known_no_optimizer_is_drawn() -> None:
    (chart, _), _ = plan_words.charts(plan())
    assert chart.base == 0
    assert [band.label for band in chart.bands] == list(plan_words.KINDS.values())


@pytest.mark.parametrize(
    ("needed", "said"),
    [
        (3 * MIB, []),
        (
            4 * MIB,
            ["at most 3.00 MiB are alive at once; the other 1.00 MiB are gaps between arrays"],
        ),
        (
            2 * MIB,
            [
                "up to 3.00 MiB are alive at once; 1.00 MiB of it take no temporary memory, but "
                "lie where results go, or on the chip"
            ],
        ),
    ],
)
def test_temporaries_and_what_is_alive_agree_or_it_says_why(needed, said) -> None:
    given = plan(predicted={"temporary_bytes": needed})
    assert plan_words.alive(given) == said
    (chart, _), (unchanged, _) = plan_words.charts(given)
    assert ("temporaries" in chart.caption()) is bool(said)
    assert "temporaries" not in unchanged.caption()


def test_values_inside_loops_count_as_often_as_they_are_there() -> None:
    given = plan(decisions=[decision(what="scan")], loop_values=[loop_value(what="tanh")])
    text = plan_text.text(given)
    assert "kept        2.00 MiB in 5 values wait for the backward pass" in text
    assert "Kept: 5 values, 5.00 MiB of which computing again would take 5.00 us" in text
    assert "tanh, 8x8 float32  4 x  train.py:3  4.00 MiB       4.00 us" in text
