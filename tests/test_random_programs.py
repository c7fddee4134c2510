"""Random programs give the same as without the decorator; so do those that once did not."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import remat_opt
from tests import hunt
from tests.op_by_op import run_op_by_op
from tests.random_programs import (
    CHOOSING_FROM,
    COMMUNICATING_FROM,
    DEVICES,
    LOOKING_UP_FROM,
    MAPPED_FROM,
    MAPPING_FROM,
    SHARDED_FROM,
    UNSTEADY,
    attention,
    differences,
    draw,
    failures,
    loop,
    no_tangent,
)

pytestmark = pytest.mark.usefixtures("quick_search")

COUNT = 36
#: The default run takes some of these that compile fast, and each JAX some that take two seconds.
FAST = (10, 13, 15, 16, 26, 27)
VERSIONS = (3, 8, 9, 14, 17, 19, 22, 24, 32, 39)


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("seed", FAST)
def test_random_programs(seed: int) -> None:
    assert not failures(draw(seed), DEVICES[seed % 3 :][:1])


@pytest.mark.parametrize("seed", [CHOOSING_FROM + 6, CHOOSING_FROM + 7])
def test_random_programs_with_choices(seed: int) -> None:
    assert not failures(draw(seed), DEVICES[seed % 3 :][:1])


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.parametrize("seed", range(LOOKING_UP_FROM, LOOKING_UP_FROM + 6))
def test_random_programs_with_lookups(seed: int) -> None:
    assert not failures(draw(seed), DEVICES[seed % 3 :][:1])


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.parametrize("seed", range(MAPPED_FROM, MAPPED_FROM + 8))
def test_random_programs_in_maps(seed: int) -> None:
    assert not failures(draw(seed), DEVICES[seed % 3 :][:1])


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.parametrize("seed", range(COMMUNICATING_FROM, COMMUNICATING_FROM + 6))
def test_random_programs_with_collectives_in_loops(seed: int) -> None:
    assert not failures(draw(seed), DEVICES[seed % 3 :][:1])


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.parametrize("seed", range(MAPPING_FROM, MAPPING_FROM + 6))
def test_random_programs_with_maps_and_callbacks(seed: int) -> None:
    assert not failures(draw(seed), DEVICES[seed % 3 :][:1])


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.parametrize("seed", [SHARDED_FROM + number for number in (4, 7, 14, 23)])
def test_random_programs_on_a_mesh(seed: int) -> None:
    assert not failures(draw(seed), DEVICES[seed % 3 :][:1])
    # JAX 0.10 would give arrays of later programs, on one device, types that name the mesh.
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=[pytest.mark.versions] if seed in VERSIONS else [])
        for seed in range(COUNT)
        if seed not in FAST
    ],
)
def test_more_random_programs(seed: int) -> None:
    assert not failures(draw(seed), DEVICES[seed % 3 :][:1])


def test_jax_takes_most_of_them() -> None:
    taken = 0
    for seed in range(20):
        program = draw(seed)
        moving = (program.weights, program.x)
        jax.eval_shape(program.fn, *moving)
        taken += 1
    assert taken == 20


def test_a_program_is_told_by_its_seed() -> None:
    one, other = draw(7), draw(7)
    texts = [str(jax.make_jaxpr(p.fn)(p.weights, p.x)) for p in (one, other)]
    assert texts[0] == texts[1]
    assert str(jax.make_jaxpr(draw(8).fn)(draw(8).weights, draw(8).x)) != texts[0]


def test_op_by_op_is_as_compiled() -> None:
    def loss(w: Any, x: Any) -> Any:
        x, rows = lax.scan(lambda c, row: (jnp.tanh(c @ w), c * row), x, x[:3], reverse=True)
        x = lax.cond(x.sum() > 0, jnp.sin, jax.checkpoint(jnp.cos), loop(lax.stop_gradient(x))) + x
        return jax.nn.relu(x).sum() + rows[0].sum()

    gradient = jax.grad(loss, argnums=(0, 1))
    args = W[0], jnp.asarray(X[:16])
    assert differences(jax.jit(gradient)(*args), run_op_by_op(gradient, *args), 1e-12) == []


def test_differences_are_told() -> None:
    a = {"x": jnp.ones(3), "y": jnp.zeros(2)}
    assert differences(a, a, 1e-9) == []
    assert differences(a, {**a, "x": jnp.ones(3) * 1.5}, 1e-9) == [
        "['x'] is off by 0.5, allowed are 1e-09"
    ]
    assert "['y'] is int64[2], not float64[2]" in differences(
        a, {**a, "y": jnp.zeros(2, int)}, 1e-9
    )
    assert differences(a, [1], 1e-9)[0].startswith("the result is a PyTreeDef(")


def test_a_program_that_gives_different_results_by_itself_is_told() -> None:
    def loss(weights: Any, x: Any) -> Any:
        return jnp.sum(x @ weights[0]) + next(other)

    for numbers, expected in ((itertools.repeat(1), []), (itertools.count(), [UNSTEADY])):
        other = numbers
        program = dataclasses.replace(
            draw(0), fn=loss, has_aux=False, planned=(0,), taken=(1, False), jit=True
        )
        assert failures(program, ["cpu"]) == expected


def test_a_hunt_is_taken_up_where_it_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def found(program: Any, devices: Any, how: str) -> list[str] | None:
        assert how == "op by op"
        seen.append(program.seed)
        return [["cpu: wrong"], None, [UNSTEADY]][program.seed % 3]

    monkeypatch.setattr(hunt, "failures", found)
    file = tmp_path / "kept.jsonl"
    command = ["--devices", "cpu", "--keep", str(file), "--programs"]
    assert hunt.main([*command, "2"]) == 1
    assert capsys.readouterr().out == (
        "0: cpu: wrong\n2 programs: JAX does not take 1, 0 give different results without the "
        "decorator; 1 failed\n"
    )
    assert hunt.main([*command, "3"]) == 0
    assert capsys.readouterr().out == (
        "1 programs: JAX does not take 0, 1 give different results without the "
        "decorator; 0 failed\n"
    )
    assert seen == [0, 1, 2]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["seed"] for line in lines] == [0, 1, 2]
    assert [line["failures"] for line in lines] == [["cpu: wrong"], [], []]
    assert [line["taken_by_jax"] for line in lines] == [True, False, True]


# --- Programs that once failed ------------------------------------------------------------


def same(
    fn: Callable[..., Any],
    transform: Callable[..., Any],
    *args: Any,
    devices: Sequence[str] = DEVICES,
    **options: Any,
) -> None:
    """The decorated function gives the same as the function, for these devices."""
    expected = jax.jit(transform(fn))(*args)
    for device in devices:
        ours = remat_opt.optimal_remat(fn, device=device, errors="raise", **options)
        assert differences(expected, jax.jit(transform(ours))(*args), 1e-9) == []


def layers(w: Any, x: Any) -> Any:
    for one in w:
        x = jnp.tanh(x @ one)
    return x.sum()


W, X = [np.ones((16, 16)) * 0.1] * 3, np.linspace(-1, 1, 512).reshape(32, 16)


@pytest.mark.parametrize(
    "devices",
    [DEVICES[:1], pytest.param(DEVICES, marks=[pytest.mark.slow, pytest.mark.versions])],
    ids=["one device", "all devices"],
)
def test_frozen_layers(devices: Sequence[str]) -> None:
    everywhere = functools.partial(same, layers, devices=devices)
    everywhere(lambda f: jax.grad(lambda a: f([a, *W[1:]], X)), W[0])
    everywhere(lambda f: jax.grad(lambda a: f([*W[:-1], a], X)), W[0])
    everywhere(jax.grad, W, X, argnums=(0, 1))
    everywhere(lambda f: jax.grad(f, argnums=1), W, X)
    ours = remat_opt.optimal_remat(layers, device="h200", errors="raise")
    alone = jax.grad(lambda a: ours([a, *W[1:]], X))(W[0])
    assert differences(jax.grad(lambda a: layers([a, *W[1:]], X))(W[0]), alone, 1e-9) == []
    everywhere(lambda f: lambda a: jax.jvp(f, (a, X), (a, X)), W)


def test_statistics_as_masks() -> None:
    def loss(w: Any, x: Any) -> Any:
        for _ in range(2):
            t = jnp.tanh(x @ w)
            x = jnp.where(t > t.mean(), t, 0.0) @ w + t @ w
        return x.sum()

    same(loss, jax.grad, W[0], X)
    remat_opt.make_plan(loss, W[0].astype("float32"), jnp.ones((64, 16), "float32"), device="cpu")


def test_loss_terms_that_share_values() -> None:
    def loss(w: Any, x: Any) -> Any:
        y = x * 0.5 + 1
        n = y - jax.nn.logsumexp(y, -1, keepdims=True)
        z = jnp.einsum("ij,kj,kl->il", n, w, y) / 16
        terms = jnp.mean((x @ y / 8) ** 2) + jnp.mean(n) + jnp.mean(z) + jnp.mean(x @ y / 8)
        return terms, jnp.sum(x @ y)

    args = jnp.ones((8, 8)), jnp.ones((8, 8))
    same(loss, lambda f: jax.grad(f, has_aux=True), *args, has_aux=True)
    for dtype in ("float32", "bfloat16"):
        small = [one.astype(dtype) for one in args]
        remat_opt.make_plan(loss, *small, device="v5e", has_aux=True)


def test_a_weight_of_products_that_are_stored_in_another_form() -> None:
    """On a TPU the first product is stored in the form that the second reads."""

    def loss(w: Any, x: Any) -> Any:
        t = jnp.tanh(lax.stop_gradient(x) @ w) * 2
        return jnp.tanh(t @ w).sum()

    def completed(w: Any, x: Any) -> Any:
        t = (lax.stop_gradient(x) @ w) * 2
        return jnp.tanh(t @ w).sum()

    for fn in (loss, completed):
        remat_opt.make_plan(fn, W[0].astype("float32"), X.astype("float32"), device="v5e")


@pytest.mark.parametrize(
    "constant",
    [
        pytest.param(no_tangent, id="custom_jvp"),
        *(
            pytest.param(constant, id=name, marks=[pytest.mark.slow, pytest.mark.versions])
            for name, constant in (
                ("checkpoint", jax.checkpoint(lax.stop_gradient)),
                ("cond", lambda a: lax.cond(a.sum() > 0, jnp.ones_like, jnp.zeros_like, a)),
                ("while", lambda a: loop(lax.stop_gradient(a))),
                (
                    "while of a checkpoint",
                    lambda a: loop(jax.checkpoint(lambda b: lax.stop_gradient(jnp.tanh(b)))(a)),
                ),
                ("attention", lambda a: attention(lax.stop_gradient(a), W[0])),
            )
        ),
    ],
)
def test_values_without_a_derivative(constant: Callable[[Any], Any]) -> None:
    def loss(w: Any, x: Any) -> Any:
        for one in w:
            still = constant(x @ one)
            x = jnp.tanh((x + still) @ one) * still + constant(x)
        return x.sum() + constant(x).mean()

    same(loss, jax.grad, W, X)
    same(loss, lambda f: jax.grad(f, argnums=1), W, X)
