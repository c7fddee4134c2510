import dataclasses
import json
import xml.etree.ElementTree as ET
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat_opt
from remat_opt import comparison
from remat_opt.comparison import Comparison, Contender
from remat_opt.errors import BudgetError, CompileError, RematError
from remat_opt.measurement.compilation import Measurement
from remat_opt.program.tracing import Signature
from tests.test_policies import NAMES

pytestmark = pytest.mark.usefixtures("quick_search")

X = jax.ShapeDtypeStruct((32, 32), "float32")


def sines(w, x):
    for _ in range(6):
        x = jnp.sin(x @ w)
    return jnp.sum(x)


def many_sines(w, x):
    """Of more than 12 vertices: the search of fewer takes most of the time."""
    for _ in range(8):
        x = jnp.sin(x @ w)
    return jnp.sum(x)


def measurement(temporary_bytes: int, **changes) -> Measurement:
    fields = {
        **{"device": "h200", "argument_bytes": 10, "output_bytes": 20, "host_bytes": 0},
        **{"temporary_bytes": temporary_bytes, "alias_bytes": 0, "flops": None, "notes": ()},
        "recomputation": None,
        **{"compile_seconds": 1.0, "jax_version": "", "compiler_version": ""},
    }
    return Measurement(**{**fields, **changes})


def contender(name, kind="policy"):
    """A function that is only a name."""
    return Contender(label=name, kind=kind, make=lambda: (name, None))


def contest(bytes_of, flops_of, kinds=None, failing=(), memory_bytes=None):
    """A comparison of functions that are only names."""

    def measure(name):
        if name in failing:
            raise failing[name]
        return measurement(*bytes_of[name])

    return comparison.contest(
        [contender(name, (kinds or {}).get(name, "policy")) for name in bytes_of],
        function="loss",
        device="h200",
        measure=measure,
        flops=flops_of.__getitem__,
        forward_flops=100,
        memory_bytes=memory_bytes,
    )


def test_rows_hold_figures_and_shares():
    found = contest(
        {"plain": (4096,), "whole": (2048,)}, {"plain": 300, "whole": 390}, {"plain": "plain"}
    )
    assert found.rows == (
        {
            **{"label": "plain", "kind": "plain", "predicted_temporary_bytes": None},
            **{"temporary_bytes": 4096, "argument_bytes": 10, "output_bytes": 20},
            **{"host_bytes": 0, "recomputed_flops_share": 0.0, "overhead_seconds_share": 0.0},
            **{"compile_seconds": 1.0, "plan_seconds": None, "error": None},
        },
        {
            **{"label": "whole", "kind": "policy", "predicted_temporary_bytes": None},
            **{"temporary_bytes": 2048, "argument_bytes": 10, "output_bytes": 20},
            **{"host_bytes": 0, "recomputed_flops_share": 0.9, "overhead_seconds_share": None},
            **{"compile_seconds": 1.0, "plan_seconds": None, "error": None},
        },
    )


def test_table():
    found = contest(
        {"plain": (4096,), "whole": (2048,)}, {"plain": 300, "whole": 390}, {"plain": "plain"}
    )
    assert repr(found) == (
        "Gradient of loss for h200\n"
        "       temporaries  of plain  predicted  recomputed FLOPs  time  to compile  to plan\n"
        "-----  -----------  --------  ---------  ----------------  ----  ----------  -------\n"
        "plain     4.00 KiB     100 %                          0 %   0 %      1.00 s\n"
        "whole     2.00 KiB    50.0 %                       90.0 %            1.00 s\n"
        "Temporaries as compiled; recomputed FLOPs and (predicted) time as shares of one "
        "forward pass."
    )


def test_a_failing_row_says_why_and_loses_no_other():
    refused = CompileError("The program does not fit.\nMore of it.", device="h200")
    found = contest(
        {"plain": (4096,), "a": (), "b": (), "c": (1024,)},
        {"plain": 300, "a": 310, "b": 320, "c": 330},
        {"plain": "plain"},
        failing={"a": refused, "b": ZeroDivisionError("by nothing")},
    )
    assert [row["temporary_bytes"] for row in found.rows] == [4096, None, None, 1024]
    assert [row["error"] for row in found.rows] == [
        None,
        "The program does not fit.",
        "ZeroDivisionError: by nothing",
        None,
    ]
    assert found.rows[1]["recomputed_flops_share"] == 0.1
    assert repr(found).endswith("a: The program does not fit.\nb: ZeroDivisionError: by nothing")
    assert repr(found).count("failed") == 2
    ET.fromstring(found._repr_html_())


def test_a_plain_function_too_large_for_the_device_leaves_a_comparison():
    found = contest(
        {"plain": (), "a": (1024,)},
        {"plain": 300, "a": 310},
        {"plain": "plain"},
        failing={"plain": CompileError("Too large.", device="h200")},
    )
    assert [row["error"] for row in found.rows] == ["Too large.", None]
    assert found.rows[1]["recomputed_flops_share"] == 0.1
    assert "1.00 KiB" in repr(found)


def test_a_fault_of_ours_is_not_a_row():
    def make():
        raise KeyError("a fault")

    with pytest.raises(KeyError):
        comparison.contest(
            [Contender(label="budget", kind="ours", make=make)],
            function="loss",
            device="h200",
            measure=lambda _: measurement(1),
            flops=lambda _: 1,
            forward_flops=1,
        )


def test_a_missing_compiler_is_not_a_row():
    """It would be the same in every row."""
    missing = remat_opt.MissingPackageError("Compiling", package="libtpu", extra="tpu")
    with pytest.raises(remat_opt.MissingPackageError, match="libtpu"):
        contest({"plain": 0}, {"plain": 1}, failing={"plain": missing})


def test_a_note_names_its_rows_unless_it_is_of_all():
    notes: dict[Any, tuple[str, ...]] = {"plain": ("all", "one"), "a": ("all",)}
    found = comparison.contest(
        [contender(name) for name in notes],
        function="loss",
        device="cpu",
        measure=lambda name: measurement(1, notes=notes[name]),
        flops=lambda _: 1,
        forward_flops=1,
    )
    assert found.notes == ("all", "plain: one")


def test_json_holds_the_record():
    found = Comparison(function="loss", device="cpu", rows=({"label": "plain"},), notes=("n",))
    assert json.loads(found.to_json()) == {
        "function": "loss",
        "device": "cpu",
        "rows": [{"label": "plain"}],
        "notes": ["n"],
        "step": "",
        "limit_bytes": None,
    }


def test_what_the_device_leaves_is_drawn():
    found = contest({"plain": (4096,)}, {"plain": 300}, {"plain": "plain"}, memory_bytes=5000)
    # Less 10 of arguments and 20 of outputs.
    assert found.limit_bytes == 4970
    assert "room on h200" in found._repr_html_()
    assert contest({"plain": (1,)}, {"plain": 1}, memory_bytes=20).limit_bytes is None


def test_policies_by_name_and_by_function():
    def other(w, x):
        return sines(w, x)

    def labels(policies, has_blocks=False):
        chosen = comparison.policy_contenders(policies, Signature(), has_blocks=has_blocks)
        assert all(one.kind == "policy" for one in chosen)
        return [one.label for one in chosen]

    chosen = {"mine": other, "dots": "checkpoint_dots"}
    assert labels(chosen) == ["mine", "dots"]
    assert labels(chosen, has_blocks=True) == ["mine", "dots", "dots, per block"]
    first = comparison.policy_contenders(chosen, Signature(), has_blocks=True)[0]
    how, plan = first.make()
    assert (how(sines), plan) == (other, None)
    assert labels(None) == list(NAMES)
    # Keeping everything in every block is the unchanged function.
    per_block = [f"{name}, per block" for name in NAMES if name != "everything_saveable"]
    assert labels(None, has_blocks=True) == [*NAMES, *per_block]
    assert labels("dots_saveable") == ["dots_saveable"]
    assert labels(()) == []


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        (
            ["save_only_these_names"],
            "'save_only_these_names' is not a policy of jax.checkpoint_policies that works "
            f"without arguments: give one of {', '.join(NAMES)}, or, for one of your own, a "
            "mapping from a label to the function wrapped in it.",
        ),
        (
            {"three": 3},
            "policies= has 3 (int) for 'three': give the name of a policy of "
            "jax.checkpoint_policies, or a function with the same results as the loss.",
        ),
        (
            {"dots": jax.checkpoint_policies.dots_saveable},
            "policies= has a policy itself for 'dots': give its name, or the function wrapped in "
            "it, as by jax.checkpoint(fn, policy=...).",
        ),
    ],
)
def test_policies_that_are_none(policies, message):
    with pytest.raises(RematError) as caught:
        comparison.policy_contenders(policies, Signature(), has_blocks=True)
    assert str(caught.value) == message


def test_a_whole_comparison_on_the_cpu():
    per_layer = jax.checkpoint(sines)
    per_layer.__name__ = "per_layer"
    decorated = remat_opt.optimal_remat(sines, device="cpu")
    found = remat_opt.compare(
        *(decorated, X, X),
        budgets=[0.7, 1, None],
        max_overheads=[0.0],
        policies={"nothing": "nothing_saveable", "mine": per_layer},
        device="cpu",
    )
    rows = {row["label"]: row for row in found.rows}
    assert list(rows) == [
        *("plain", "nothing", "mine", "nothing, per block"),
        *("budget 70.0 %", "budget 1 B", "least memory", "overhead 0 %"),
    ]
    assert [row["kind"] for row in found.rows] == ["plain", *["policy"] * 3, *["ours"] * 4]
    assert rows["budget 1 B"]["error"].startswith("No plan has temporaries within 1 B: ")
    assert all(row["error"] is None for name, row in rows.items() if name != "budget 1 B")
    assert rows["nothing"]["recomputed_flops_share"] == pytest.approx(1.0, abs=0.02)
    assert rows["mine"]["recomputed_flops_share"] == rows["nothing"]["recomputed_flops_share"]
    assert rows["least memory"]["temporary_bytes"] < rows["plain"]["temporary_bytes"]
    assert rows["least memory"]["plan_seconds"] > 0
    assert rows["plain"]["predicted_temporary_bytes"] > 0
    assert rows["overhead 0 %"]["overhead_seconds_share"] == 0.0
    assert found.function == "sines"
    json.loads(found.to_json())
    picture = next(p for p in ET.fromstring(found._repr_html_()).iter() if p.tag.endswith("svg"))
    assert "temporaries, compiled against recomputed FLOPs" in picture.get("aria-label")


def test_plans_that_differ_inside_a_loop_are_compiled_apart():
    def loss(weights, x):
        def body(h, w):
            return h + jnp.tanh(h @ w), None

        return jnp.sum(jax.lax.scan(body, x, weights)[0] ** 2)

    weights = jax.ShapeDtypeStruct((16, 32, 32), "float32")
    x = jax.ShapeDtypeStruct((512, 32), "float32")
    plans = [
        remat_opt.make_plan(loss, weights, x, budget=budget, device="cpu") for budget in (0.3, 0.6)
    ]
    assert plans[0].stages == plans[1].stages
    found = remat_opt.compare(loss, weights, x, budgets=[0.3, 0.6], policies=[], device="cpu")
    small, large = found.rows[-2:]
    assert small["temporary_bytes"] < large["temporary_bytes"]
    assert small["recomputed_flops_share"] > large["recomputed_flops_share"]


@pytest.mark.slow
@pytest.mark.versions
def test_ours_can_be_chosen_by_compiling():
    decorated = remat_opt.optimal_remat(many_sines, device="cpu")

    def step(w, x):
        return w - 0.1 * jax.grad(decorated)(w, x)

    found = remat_opt.compare(
        *(step, X, X),
        budgets=[0.7, None],
        policies=(),
        donate_argnums=0,
        device="cpu",
        verify="compile",
    )
    plain, budget, least = (row["temporary_bytes"] for row in found.rows)
    assert least <= budget <= 0.7 * plain
    chosen = [note for note in found.notes if "Chosen by compiling" in note]
    assert [note.split(":")[0] for note in chosen] == ["budget 70.0 %", "least memory"]


def test_a_comparison_is_never_without_compiling():
    with pytest.raises(RematError, match="compare compiles every row anyway"):
        remat_opt.compare(sines, X, X, device="cpu", verify=False)


def test_fit_leaves_room_for_what_the_step_holds():
    """The state that the step passes through is not an argument of the loss."""
    decorated = remat_opt.optimal_remat(sines, device="cpu")

    def step(w, state, x):
        return w - 0.1 * jax.grad(decorated)(w, x), state

    state = jax.ShapeDtypeStruct((1024, 1024), "float32")
    cpu = remat_opt.device.get_device("cpu")
    small = dataclasses.replace(cpu, memory_bytes=2 * 2**20)
    found = remat_opt.compare(step, X, state, X, budgets="fit", policies=(), device=small)
    assert found.rows[-1]["error"].startswith("Nothing is left for temporaries on cpu")


def test_static_arguments_reach_policies_and_plans():
    def loss(w, depth, *, kind):
        x = w
        for _ in range(depth):
            x = getattr(jnp, kind)(x @ w)
        return jnp.sum(x), x

    found = remat_opt.compare(
        *(loss, X, 4),
        budgets=[None],
        policies="nothing_saveable",
        has_aux=True,
        static_argnums=1,
        static_argnames="kind",
        device="cpu",
        kind="sin",
    )
    assert [row["error"] for row in found.rows] == [None] * 4


def test_a_budget_error_is_still_raised_by_make_plan():
    with pytest.raises(BudgetError):
        remat_opt.make_plan(sines, X, X, budget=1, device="cpu")
