"""The blocks that a program repeats: by names of modules, and by repetition."""

from __future__ import annotations

import cProfile
import itertools
import pstats
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from benchmarks import networks
from remat_opt.program import tracing
from remat_opt.program.blocks import blocks
from remat_opt.program.record import Program
from remat_opt.program.tracing import Signature

Array = jax.ShapeDtypeStruct


def made_by(program: Program, run: range) -> list[str]:
    return [program.equations[index].operation.primitive for index in run]


def check(program: Program, runs: tuple[range, ...]) -> None:
    assert all(run.step == 1 and 0 <= run.start < run.stop for run in runs)
    assert all(left.stop <= right.start for left, right in itertools.pairwise(runs))
    assert not runs or runs[-1].stop <= len(program.equations)


def residual_layers(layers: int, rows: int = 8) -> Program:
    def loss(weights: Any, x: jax.Array) -> jax.Array:
        x = x * 2
        for first, second in weights:
            x = x + jnp.tanh(x @ first) @ second
        return jnp.mean(jnp.square(x))

    weights = [(Array((4, 16), "float32"), Array((16, 4), "float32"))] * layers
    return tracing.trace(loss, weights, Array((rows, 4), "float32"))


def test_a_loop_of_residual_layers() -> None:
    program = residual_layers(12)
    runs = blocks(program)
    check(program, runs)
    assert len(runs) == 12
    assert {tuple(made_by(program, run)) for run in runs} == {
        ("dot_general", "tanh", "dot_general", "add")
    }
    assert runs[0].start == 1, "what is before the layers is no part of them"
    assert runs == blocks(residual_layers(12)), "the same in every trace"


class Residual(nn.Module):
    features: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.Conv(self.features, (3, 3), (self.stride, self.stride))(x)
        y = nn.Conv(self.features, (3, 3))(nn.relu(nn.GroupNorm(2)(y)))
        if y.shape != x.shape:
            x = nn.Conv(self.features, (1, 1), (self.stride, self.stride))(x)
        return nn.relu(x + y)


class Residuals(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(4, (3, 3), name="stem")(x)
        for features, stride in ((4, 1), (4, 1), (8, 2), (8, 1)):
            x = Residual(features, stride)(x)
        return jnp.mean(jnp.square(nn.Dense(3)(jnp.mean(x, (1, 2)))))


def flax_program(network: nn.Module, x: Any) -> Program:
    params = jax.eval_shape(network.init, jax.random.key(0), x)
    return tracing.trace(network.apply, params, x)


def test_modules_of_flax_are_told_by_their_names() -> None:
    program = flax_program(Residuals(), Array((2, 8, 8, 3), "float32"))
    runs = blocks(program)
    check(program, runs)
    for number, run in enumerate(runs):
        modules = {program.equations[index].module for index in run}
        assert all(f"Residual_{number}" in module for module in modules)
    assert len(runs) == 4
    inside = {index for run in runs for index in run}
    assert not any(
        "Residual_" in one.module for n, one in enumerate(program.equations) if n not in inside
    )


def test_modules_under_vmap_keep_their_names() -> None:
    network = Residuals()
    image = Array((2, 8, 8, 3), "float32")
    params = jax.eval_shape(network.init, jax.random.key(0), image)

    def loss(params: Any, images: jax.Array) -> jax.Array:
        return jnp.mean(jax.vmap(network.apply, (None, 0))(params, images))

    program = tracing.trace(loss, params, Array((2, 2, 8, 8, 3), "float32"))
    assert len(blocks(program)) == 4


class Flat(nn.Module):
    """Numbered modules that are not blocks: single layers, one after the other."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(6):
            x = x + nn.relu(nn.LayerNorm()(nn.Dense(8)(x)))
        return jnp.mean(jnp.square(x))


def test_where_modules_are_single_layers_repetition_tells() -> None:
    program = flax_program(Flat(), Array((16, 8), "float32"))
    runs = blocks(program)
    assert len(runs) == 6
    for number, run in enumerate(runs):
        modules = {program.equations[index].module for index in run}
        assert f"Flat/Dense_{number}" in modules
        assert f"Flat/LayerNorm_{number}" in modules


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *[("gpt", 12), ("resnet18", 8), ("unet", 8), ("lstm", 64)],
        pytest.param("vit_b16", 12, marks=pytest.mark.slow),
    ],
)
def test_networks_of_the_benchmark(name: str, count: int) -> None:
    network = networks.build(name, 2)
    signature = Signature(has_aux=network.has_aux)
    program = tracing.trace(network.loss_fn, *network.arguments, signature=signature)
    runs = blocks(program)
    check(program, runs)
    assert len(runs) == count


def test_embedding_and_head_are_no_blocks() -> None:
    network = networks.build("gpt", 2)
    program = tracing.trace(network.loss_fn, *network.arguments)
    runs = blocks(program)
    before, after = range(runs[0].start), range(runs[-1].stop, len(program.equations))
    assert "gather" in made_by(program, before)
    assert "dot_general" in made_by(program, after)
    # Only the residual stream goes from one layer to the next.
    maker = program.makers()
    for run in runs[1:]:
        read = {v for index in run for v in program.equations[index].value_inputs}
        assert len({v for v in read if v in maker and maker[v] < run.start}) == 1


def without(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(x) @ jnp.cos(x).T)


def scanned(x: jax.Array) -> jax.Array:
    return jnp.sum(jax.lax.scan(lambda c, _: (jnp.sin(c @ x.T @ x), None), x, length=9)[0])


@pytest.mark.parametrize("fn", [without, scanned, lambda x: x])
def test_programs_without_blocks(fn: Callable[..., Any]) -> None:
    assert blocks(tracing.trace(fn, Array((4, 4), "float32"))) == ()


def test_stages_of_different_widths_are_blocks_too() -> None:
    def loss(weights: Any, x: jax.Array) -> jax.Array:
        for first, second in weights:
            x = jnp.sin(x @ first) @ second
        return jnp.sum(x)

    widths = [16, 32, 64, 48, 24]
    weights = [
        (Array((a, b), "float32"), Array((b, b), "float32")) for a, b in itertools.pairwise(widths)
    ]
    assert len(blocks(tracing.trace(loss, weights, Array((8, 16), "float32")))) == 4


def test_thousands_of_equations_take_a_moment() -> None:
    """Calls made, not seconds: n log^2 n would make 2.4 times as many for twice the layers."""
    calls = {}
    for layers in (200, 400):
        program = residual_layers(layers, rows=1)
        assert len(program.equations) >= 4 * layers
        profile = cProfile.Profile()
        assert len(profile.runcall(blocks, program)) == layers
        calls[layers] = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    assert calls[400] < 2.5 * calls[200]
