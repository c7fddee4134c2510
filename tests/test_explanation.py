"""What a step's memory is spent on: shares, culprits and remedies, also where it does not fit."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import remat_opt
from remat_opt import device as device_table
from remat_opt.errors import CompileError, RematError
from remat_opt.measurement import compilation
from remat_opt.view import explanation_text
from tests.devices import needs_cuda_plugin, needs_libtpu

pytestmark = pytest.mark.usefixtures("quick_search")

S = jax.ShapeDtypeStruct
WIDTH = 128


def layer(x, w):
    return jnp.tanh(x @ w) + x


def loss(params, x):
    for number, w in enumerate(params["layers"]):
        with jax.named_scope(f"layer_{number}"):
            x = layer(x, w)
    return jnp.mean(x**2)


def step(params, state, x):
    gradients = jax.grad(loss)(params, x)
    state = jax.tree.map(lambda m, g: 0.9 * m + g, state, gradients)
    return jax.tree.map(lambda p, m: p - 1e-3 * m, params, state), state


def arguments(rows=4096, layers=6):
    params = {"layers": [S((WIDTH, WIDTH), "float32")] * layers}
    return params, params, S((rows, WIDTH), "float32")


def share_bytes(found):
    return {row["share"]: row["bytes"] for row in found.shares}


def remedy(found, share):
    return next(row["remedy"] for row in found.shares if row["share"] == share)


@pytest.fixture(scope="module")
def donated():
    return remat_opt.explain(step, *arguments(), device="cpu", donate_argnums=(0, 1))


def test_arguments_are_told_apart(donated):
    found = share_bytes(donated)
    assert found["parameters"] == found["optimizer state"] == 6 * WIDTH * WIDTH * 4
    assert found["inputs"] == 4096 * WIDTH * 4
    assert found["results"] < 1024


def test_shares_add_up_to_what_the_compiler_says(donated):
    measured = remat_opt.measure(step, *arguments(), device="cpu", donate_argnums=(0, 1))
    assert donated.needed_bytes == measured.device_bytes
    assert sum(share_bytes(donated).values()) == pytest.approx(measured.device_bytes, abs=4096)
    assert sum(row["bytes"] for row in donated.rows) + share_bytes(donated)["holes"] == sum(
        share_bytes(donated).values()
    )


def test_culprits_have_the_users_own_lines(donated):
    """Both values of each layer wait for the backward pass: tanh and the sum."""
    line = layer.__code__.co_firstlineno + 1
    first = donated.rows[0]
    assert first["share"] == "activations"
    assert first["source"] == f"test_explanation.py:{line} (layer)"
    assert first["module"] == "layer_*"
    assert first["type"] == f"f32[4096,{WIDTH}]"
    activations = share_bytes(donated)["activations"]
    assert activations >= 10 * 4096 * WIDTH * 4
    assert activations > 0.7 * donated.needed_bytes
    assert max(donated.timelines["activations"]) >= activations


def test_the_text_is_one_screen_and_says_what_to_do(donated):
    text = repr(donated)
    assert len(text.splitlines()) <= 30
    assert max(map(len, text.splitlines())) <= 120
    assert text.startswith("Memory of step on CPU")
    assert "it fits" in text
    assert "decorate the loss with @optimal_remat" in text
    assert "MiB at step " in text
    assert donated.fits


def test_a_narrow_terminal_gets_narrow_tables(donated, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = repr(donated).splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 80
    # Sentences are broken, not cut, and lines are still whole.
    said = next(line for line in lines if line.startswith("activations  "))
    assert "decorate the loss with @optimal_remat" in said
    assert "..." not in said
    assert f".py:{layer.__code__.co_firstlineno + 1}" in "\n".join(lines)


@pytest.mark.parametrize("width", [80, 120])
def test_what_the_compiler_says_leaves_fewer_arrays_but_one_screen(donated, width):
    said = "RESOURCE_EXHAUSTED: Ran out of memory. " + "The total memory required is too much. " * 9
    notes = ("short of memory, the compiler itself computes 24 values again",)
    data = donated.to_dict() | {"refusal": said, "notes": notes}
    data["timelines"]["recomputed"] = data["timelines"]["activations"]
    lines = explanation_text.text(data, width).splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= width
    assert sum("test_explanation.py:" in line for line in lines) >= 4
    words = [line for line in lines if line.startswith("compiler  ")]
    assert words == [lines[2]]
    assert lines[3].endswith(" ...")


def test_the_page_and_the_data_say_the_same(donated):
    page = donated._repr_html_()
    assert "<svg" in page
    assert "optimizer state" in page
    data = json.loads(donated.to_json())
    assert data["fits"] is True
    assert data["rows"] == list(donated.rows)


def test_results_that_could_lie_in_arguments():
    found = remat_opt.explain(step, *arguments(rows=8), device="cpu")
    assert share_bytes(found)["results"] >= 2 * 6 * WIDTH * WIDTH * 4
    assert remedy(found, "results") == "donate_argnums=(0, 1) saves 768 KiB"
    half = remat_opt.explain(step, *arguments(rows=8), device="cpu", donate_argnums=1)
    assert remedy(half, "results") == "donate_argnums=(0, 1) saves 384 KiB"


def test_donation_is_read_off_the_jit():
    found = remat_opt.explain(
        jax.jit(step, donate_argnums=(0, 1)), *arguments(rows=8), device="cpu"
    )
    assert share_bytes(found)["results"] < 1024


def test_what_is_computed_again_is_told_apart():
    def in_regions(params, x):
        for w in params["layers"]:
            x = jax.checkpoint(lambda x, w: layer(jnp.sin(layer(x, w)), w))(x, w)
        return jnp.mean(x**2)

    params, _, x = arguments()
    found = remat_opt.explain(jax.grad(in_regions), params, x, device="cpu")
    assert max(found.timelines["recomputed"]) >= 4096 * WIDTH * 4
    assert share_bytes(found)["activations"] >= 4 * 4096 * WIDTH * 4


def test_gradients_that_wait_for_one_another():
    """If clipped by their norm, all gradients exist at once."""

    def clipped(params, x):
        gradients = jax.grad(loss)(params, x)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
        return jax.tree.map(lambda p, g: p - g / norm, params, gradients)

    params, _, x = arguments(rows=8)
    found = remat_opt.explain(clipped, params, x, device="cpu", donate_argnums=0)
    assert share_bytes(found)["gradients"] >= 5 * WIDTH * WIDTH * 4
    assert "keeps all" in remedy(found, "gradients")


@needs_cuda_plugin
@pytest.mark.cuda
def test_scratch_memory_of_a_product_is_no_gradient():
    """The library's products of small matrices take 4 MiB each while they run."""
    found = remat_opt.explain(step, *arguments(), device="h200", donate_argnums=(0, 1))
    scratch = [row for row in found.rows if row["type"].startswith("s8[")]
    assert {row["share"] for row in scratch} == {"workspace"}
    assert max(found.timelines["gradients"]) <= 2 * WIDTH * WIDTH * 4


def test_a_decorated_loss_is_told_what_plans_reach():
    decorated = remat_opt.optimal_remat(loss, device="cpu", budget=0.5)

    def decorated_step(params, x):
        gradients = jax.grad(decorated)(params, x)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradients)

    params, _, x = arguments()
    found = remat_opt.explain(decorated_step, params, x, device="cpu", donate_argnums=0)
    said = remedy(found, "activations")
    assert said.startswith("plans reach ")
    assert said.endswith('; budget="fit" recomputes 0 %')
    alone = remat_opt.explain(decorated, params, x, device="cpu")
    assert alone.function == "value_and_grad(loss)"
    assert share_bytes(alone)["parameters"] == 6 * WIDTH * WIDTH * 4
    small = dataclasses.replace(device_table.get_device("cpu"), memory_bytes=2**20)
    tight = remat_opt.explain(decorated_step, params, x, device=small, donate_argnums=0)
    assert not tight.fits
    assert "; only 0 B are left" in remedy(tight, "activations")
    assert "too much: it does not fit" in repr(tight)


def test_scanned_layers_are_activations_too():
    def scanned(params, x):
        x, _ = jax.lax.scan(lambda h, w: (layer(h, w), None), x, params)
        return jnp.mean(x)

    def scanned_step(params, x):
        return params - 1e-3 * jax.grad(scanned)(params, x)

    found = remat_opt.explain(
        scanned_step,
        S((8, WIDTH, WIDTH), "float32"),
        S((1024, WIDTH), "float32"),
        device="cpu",
        donate_argnums=0,
    )
    first = found.rows[0]
    assert (first["share"], first["type"]) == ("activations", f"f32[8,1024,{WIDTH}]")
    assert "scanned" in first["source"]


def test_nothing_is_differentiated():
    params, _, x = arguments(rows=8)
    found = remat_opt.explain(loss, params, x, device="cpu")
    assert share_bytes(found)["activations"] == 0
    assert any("nothing is differentiated here" in note for note in found.notes)


def test_a_compiler_that_tells_nothing(monkeypatch):
    """Refused, with no memory layout: only arguments and one figure are left."""

    def refuse(*args, **kwargs):
        raise CompileError(
            "too large",
            device="cpu",
            needed_bytes=2**30,
            available_bytes=2**29,
            compiler_message="RESOURCE_EXHAUSTED",
        )

    monkeypatch.setattr(compilation, "measure", refuse)
    found = remat_opt.explain(step, *arguments(rows=8), device="cpu", donate_argnums=(0, 1))
    assert not found.fits
    assert found.needed_bytes == 2**30
    assert found.rows == ()
    assert "compiler  RESOURCE_EXHAUSTED" in repr(found)
    assert any("does not say what is in memory" in note for note in found.notes)
    assert "<svg" not in found._repr_html_()


def test_other_refusals_are_errors(monkeypatch):
    def refuse(*args, **kwargs):
        raise CompileError("broken", device="cpu")

    monkeypatch.setattr(compilation, "measure", refuse)
    with pytest.raises(CompileError, match="broken"):
        remat_opt.explain(step, *arguments(rows=8), device="cpu")


def test_modules_of_nnx_are_refused():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with pytest.raises(RematError, match=r"some of the arguments are flax\.nnx modules"):
        remat_opt.explain(lambda m, x: jnp.sum(m(x)), model, S((2, 2), "float32"), device="cpu")


def does_not_fit(device, rows):
    found = remat_opt.explain(step, *arguments(rows), device=device, donate_argnums=(0, 1))
    assert found.needed_bytes > found.memory_bytes
    assert not found.fits
    lines = {row["source"] for row in found.rows[:3]}
    assert any("test_explanation.py" in line and "(layer)" in line for line in lines)
    by_share = share_bytes(found)
    assert by_share["activations"] + by_share["recomputed"] > 0.5 * found.memory_bytes
    assert "too much: it does not fit" in repr(found)
    return found


@pytest.mark.tpu
@pytest.mark.slow
@pytest.mark.versions
@needs_libtpu
def test_a_step_that_does_not_fit_a_v5e():
    found = does_not_fit("v5e", 5_000_000)
    assert "Ran out of memory" in found.refusal


@pytest.mark.cuda
@needs_cuda_plugin
@pytest.mark.slow
def test_a_step_that_does_not_fit_an_h200():
    found = does_not_fit("h200", 50_000_000)
    assert found.refusal == ""
    # XLA's own rematerialisation would hide what waits for the backward pass.
    assert found.rows[0]["share"] == "activations"
    assert share_bytes(found)["recomputed"] == 0
    assert any("which brings it down to" in note for note in found.notes)
