import xml.etree.ElementTree as ET

import pytest

from remat_opt.view import plan_text

MIB = 1024**2


def decision(fate="kept", **changes):
    return {
        "root": 0,
        "label": "dot_general f32[8,8]",
        "module": "",
        "source": "train.py:3 (loss)",
        "region": 0,
        "fate": fate,
        "times": 1 if fate == "recomputed" else 0,
        "bytes": MIB,
        "seconds": 1e-6,
        "flops": 1000,
        **changes,
    }


def plan(*, decisions=(), predicted=None, objective=None, **changes):
    return {
        "function": "loss",
        "fingerprint": "0123456789abcdef",
        "device": "h200",
        "objective": {
            **{"budget_bytes": None, "budget_share": None, "max_overhead": None},
            **{"fit": False, "reserve_bytes": 0},
            "overhead": "seconds",
            **(objective or {}),
        },
        "budget_bytes": None,
        "solver": "portfolio",
        "loops": [],
        "stages": [
            {"roots": [0], "kept": [0], "checkpointed": True, "inside": []},
            {"roots": [1], "kept": [], "checkpointed": False, "inside": []},
        ],
        "decisions": list(decisions),
        "predicted": {
            "temporary_bytes": 3 * MIB,
            "model_bytes": 3 * MIB,
            "plain_temporary_bytes": 4 * MIB,
            "kept_bytes": 2 * MIB,
            "overhead_seconds": 1e-6,
            "forward_seconds": 1e-5,
            "recomputed_flops": 1000,
            "forward_flops": 4000,
            "timeline": [MIB, 3 * MIB, 2 * MIB],
            "pins": [],
            **(predicted or {}),
        },
        "measured": None,
        "as_compiled": [],
        "notes": [],
        "remat_opt_version": "0.1.0",
        "jax_version": "0.10.2",
        **changes,
    }


MEASURED = {
    **{"device": "h200", "argument_bytes": MIB, "output_bytes": 2 * MIB, "host_bytes": 0},
    **{"temporary_bytes": 3 * MIB + MIB // 4, "alias_bytes": 0, "flops": None},
    "recomputation": None,
    **{"compile_seconds": 2.0, "jax_version": "0.10.2", "compiler_version": "", "notes": []},
}


def line(text: str, word: str) -> str:
    return next(found for found in text.split("\n") if found.startswith(word))


def test_a_whole_plan():
    text = plan_text.text(
        plan(
            decisions=[
                decision(),
                decision(fate="recomputed", label="tanh f32[8,8]", source="train.py:4 (loss)"),
                decision(fate="not needed", label="unseen"),
            ],
            predicted={
                "pins": [
                    {
                        **{"label": "dot_general f32[8,8]", "module": "", "role": "kept"},
                        **{"source": "train.py:3 (loss)", "bytes": MIB},
                    }
                ]
            },
        )
    )
    assert text == (
        "Plan of loss for h200\n"
        "asked for   least memory\n"
        "predicted   3.00 MiB of temporaries at the peak "
        "(unchanged function: 4.00 MiB, 75.0 % of it)\n"
        "recomputed  10.0 % of a forward pass in time (1.00 us), 25.0 % in FLOPs (1.00 kFLOP)\n"
        "kept        2.00 MiB in 1 value wait for the backward pass\n"
        "regions     2, 1 of them under jax.checkpoint\n"
        "made by     remat_opt 0.1.0, JAX 0.10.2, solver portfolio, program 0123456789ab\n"
        "\n"
        "Temporaries over time (predicted): highest 3.00 MiB at step 2 of 3; "
        "unchanged function 4.00 MiB\n"
        "▃█▆\n"
        "\n"
        "Kept: 1 value, 1.00 MiB of which computing again would take 1.00 us\n"
        "value                   module  source                bytes  to recompute       FLOPs\n"
        "--------------------    ------  -----------------  --------  ------------  ----------\n"
        "dot_general f32[8,8]            train.py:3 (loss)  1.00 MiB       1.00 us  1.00 kFLOP\n"
        "\n"
        "Recomputed: 1 value, in 1.00 us\n"
        "value            module  source                bytes  to recompute       FLOPs\n"
        "-------------    ------  -----------------  --------  ------------  ----------\n"
        "tanh f32[8,8]            train.py:4 (loss)  1.00 MiB       1.00 us  1.00 kFLOP\n"
        "\n"
        "Alive at the predicted peak\n"
        "value                   module  source                bytes  why\n"
        "--------------------    ------  -----------------  --------  --------------------------\n"
        "dot_general f32[8,8]            train.py:3 (loss)  1.00 MiB  kept for the backward pass\n"
        "and smaller ones, 2.00 MiB"
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
    # What did not survive is told by a note of the measurement.
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
    layers = [decision(module=f"Net/stage_1/block_{n}/Conv_0") for n in range(3)]
    text = plan_text.text(plan(decisions=[*layers, decision(module="Net/head")]))
    rows = [row for row in text.split("\n") if row.startswith("dot_general")]
    assert len(rows) == 2
    assert "3 x  Net/stage_1/block_*/Conv_0" in rows[0]
    assert "3.00 MiB" in rows[0]
    assert "3.00 us" in rows[0]
    assert "3.00 kFLOP" in rows[0]


def test_a_long_plan_stays_short_and_says_what_is_left():
    many = [decision(label=f"value{n:03}", bytes=(400 - n) * MIB) for n in range(400)]
    text = plan_text.text(plan(decisions=many))
    assert len(text.split("\n")) < 40
    assert text.index("value000") < text.index("value011")
    assert "value012" not in text
    assert "and 388 more, 73.7 GiB" in text


def test_long_module_paths_are_cut_in_text_and_whole_in_html():
    path = "/".join(f"layer{n}" for n in range(20))
    given = plan(decisions=[decision(module=path)])
    assert path not in plan_text.text(given)
    assert "..." + path[-41:] in plan_text.text(given)
    assert path in plan_text.html(given)


def test_html_escapes_and_draws():
    markup = plan_text.html(
        plan(function="<lambda>", decisions=[decision(label="<script>")], budget_bytes=2 * MIB)
    )
    page = ET.fromstring(markup)
    assert "<script>" not in markup
    assert "Plan of <lambda> for h200" in list(page.itertext())
    (picture,) = [found for found in page.iter() if found.tag.endswith("svg")]
    assert picture.get("aria-label") == (
        "Temporaries over time (predicted): highest 3.00 MiB at step 2 of 3; "
        "unchanged function 4.00 MiB; budget 2.00 MiB"
    )


def test_a_plan_of_nothing():
    nothing = dict.fromkeys(plan()["predicted"], 0)
    given = plan(
        stages=[],
        predicted={**nothing, "timeline": [], "pins": []},
        notes=["there is nothing to plan."],
    )
    text = plan_text.text(given)
    assert line(text, "predicted") == (
        "predicted   0 B of temporaries at the peak (unchanged function: 0 B)"
    )
    assert "there is nothing to plan." in text
    ET.fromstring(plan_text.html(given))


def test_loops_say_what_their_iterations_keep() -> None:
    inner = {"length": 4, "inside": [], "kept": [], "kept_bytes": 0, "stages": [], "loops": []}
    last = {**inner, "length": 8, "kept": [3], "kept_bytes": 2**20}
    last["loops"] = [{"root": 5, "parts": [inner]}]
    first = {**inner, "length": 40, "inside": [inner, {**last, "length": 6, "loops": []}]}
    assert plan_text._loop({"root": 0, "parts": [first, last]}) == (
        "scan of 48: 40 in chunks of 10 (4 that keep nothing but what they are handed, then 6 that "
        "keep 1.00 MiB in 1 value each), then 8 that keep 1.00 MiB in 1 value each (inside: scan "
        "of 4: 4 that keep nothing but what they are handed)"
    )
