"""Frameworks and ways to hold state, judged by training: losses are equal, step by step.

A few steps of small networks by default; a hundred on real images in the slow tests.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import remat_opt
from tests.kernels import USERS_KERNELS

pytestmark = pytest.mark.usefixtures("quick_search")

#: Decorates a loss, or returns it unchanged.
Decorate = Callable[..., Callable[..., Any]]
#: Takes decorator, images, labels and steps to the loss at every step.
Training = Callable[[Decorate, jax.Array, jax.Array, int], list[float]]


def undecorated(fn: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    return fn


ours = functools.partial(remat_opt.optimal_remat, device="cpu", errors="raise")


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def run(step: Callable[..., Any], state: Any, steps: int, *batch: Any) -> list[float]:
    """Trains with a step that takes (state, number, batch) to (state, loss)."""
    losses = []
    for number in range(steps):
        state, loss = step(state, number, *batch)
        losses.append(float(loss))
    return losses


# --- Flax linen: statistics, dropout keys, a checkpoint of the user's ----------------------


class Block(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        y = nn.Conv(self.features, (3, 3))(x)
        y = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(y))
        y = nn.Conv(self.features, (3, 3))(y)
        y = nn.BatchNorm(use_running_average=not train, momentum=0.9)(y)
        return nn.relu(x + nn.Dropout(0.1, deterministic=not train)(y))


class ResNet(nn.Module):
    blocks: int
    features: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        x = nn.Conv(self.features, (3, 3))(x)
        for number in range(self.blocks):
            kind = nn.remat(Block, static_argnums=(2,)) if number == 0 else Block
            x = kind(self.features)(x, train)
        return nn.Dense(10)(jnp.mean(x, (1, 2)))


def linen(
    decorate: Decorate, x: jax.Array, y: jax.Array, steps: int, blocks: int = 1
) -> list[float]:
    network = ResNet(blocks, 4)
    variables = network.init(jax.random.key(0), x, train=False)
    tx = optax.adam(1e-2)

    @functools.partial(decorate, has_aux=True, static_argnames="train")
    def loss_fn(params: Any, stats: Any, key: jax.Array, x: Any, y: Any, train: bool) -> Any:
        logits, changed = network.apply(
            {"params": params, "batch_stats": stats},
            x,
            train=train,
            mutable=["batch_stats"],
            rngs={"dropout": key},
        )
        return cross_entropy(logits, y), changed["batch_stats"]

    @functools.partial(jax.jit, donate_argnums=0, compiler_options=USERS_KERNELS)
    def step(state: Any, number: Any, x: jax.Array, y: jax.Array) -> Any:
        params, stats, opt_state = state
        key = jax.random.fold_in(jax.random.key(1), number)
        (loss, stats), gradients = jax.value_and_grad(loss_fn, has_aux=True)(
            params, stats, key, x, y, True
        )
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), stats, opt_state), loss

    params, stats = variables["params"], variables["batch_stats"]
    return run(step, (params, stats, tx.init(params)), steps, x, y)


# --- Flax nnx: a transformer whose layers are scanned --------------------------------------


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.second = nnx.LayerNorm(8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.first(x))
        return x + self.down(nnx.gelu(self.up(self.second(x))))


class Transformer(nnx.Module):
    def __init__(self, depth: int, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=depth)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs: nnx.Rngs) -> Layer:
            return Layer(rngs)

        self.layers = make(rngs)
        self.head = nnx.Linear(8, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x: jax.Array, layer: Layer) -> jax.Array:
            return layer(x)

        return self.head(jnp.mean(forward(x, self.layers), axis=1))


def nnx_scanned(
    decorate: Decorate, x: jax.Array, y: jax.Array, steps: int, depth: int = 2
) -> list[float]:
    model = Transformer(depth, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @decorate
    def loss_fn(model: Transformer, x: jax.Array, y: jax.Array) -> jax.Array:
        return cross_entropy(model(x[..., 0]), y)  # the rows of an image are a sequence

    @nnx.jit
    def step(model: Transformer, optimizer: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(loss_fn)(model, x, y)
        optimizer.update(model, gradients)
        return loss

    return [float(step(model, optimizer, x, y)) for _ in range(steps)]


# --- Equinox: functions and numbers among the leaves, a state of its own -------------------


def equinox(
    decorate: Decorate, x: jax.Array, y: jax.Array, steps: int, depth: int = 2
) -> list[float]:
    eqx = pytest.importorskip("equinox")

    class Network(eqx.Module):  # type: ignore[name-defined]
        first: Any
        norm: Any
        dropout: Any

        def __init__(self, key: jax.Array) -> None:
            self.first = eqx.nn.MLP(64, 10, 32, depth, key=key)
            self.norm = eqx.nn.BatchNorm(64, axis_name="batch", mode="batch")
            self.dropout = eqx.nn.Dropout(0.1)

        def __call__(self, x: jax.Array, state: Any, key: jax.Array) -> Any:
            x, state = self.norm(x.reshape(-1), state)
            return self.first(self.dropout(x, key=key)), state

    model, state = eqx.nn.make_with_state(Network)(jax.random.key(0))
    tx = optax.adam(1e-2)

    @functools.partial(decorate, has_aux=True)
    def loss_fn(model: Any, state: Any, keys: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        apply = jax.vmap(model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
        logits, state = apply(x, state, keys)
        return cross_entropy(logits, y), state

    @eqx.filter_jit
    def step(whole: Any, number: Any, x: jax.Array, y: jax.Array) -> Any:
        model, state, opt_state = whole
        keys = jax.random.split(jax.random.fold_in(jax.random.key(1), number), x.shape[0])
        (loss, state), gradients = eqx.filter_value_and_grad(loss_fn, has_aux=True)(
            model, state, keys, x, y
        )
        updates, opt_state = tx.update(gradients, opt_state)
        return (eqx.apply_updates(model, updates), state, opt_state), loss

    def numbered(whole: Any, number: int, x: jax.Array, y: jax.Array) -> Any:
        # Python numbers are static to ``filter_jit``: each would be compiled for.
        return step(whole, jnp.asarray(number), x, y)

    whole = model, state, tx.init(eqx.filter(model, eqx.is_inexact_array))
    return run(numbered, whole, steps, x, y)


def equinox_without_jit(decorate: Decorate, x: jax.Array, y: jax.Array, steps: int) -> list[float]:
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(64, 10, 16, 1, key=jax.random.key(0))

    @decorate
    def loss_fn(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return cross_entropy(jax.vmap(model)(x.reshape(-1, 64)), y)

    def step(model: Any, _: Any, x: jax.Array, y: jax.Array) -> Any:
        loss, gradients = eqx.filter_value_and_grad(loss_fn)(model, x, y)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradients)), loss

    return run(step, model, steps, x, y)


# --- Haiku ---------------------------------------------------------------------------------


def haiku(
    decorate: Decorate, x: jax.Array, y: jax.Array, steps: int, depth: int = 1
) -> list[float]:
    hk = pytest.importorskip("haiku")

    def forward(x: jax.Array, train: bool) -> jax.Array:
        x = hk.Flatten()(x)
        for _ in range(depth):
            x = hk.BatchNorm(True, True, 0.9)(hk.Linear(32)(x), train)
            x = hk.dropout(hk.next_rng_key(), 0.1, jax.nn.relu(x))
        return hk.Linear(10)(x)

    network = hk.transform_with_state(forward)
    params, state = network.init(jax.random.key(0), x, True)
    tx = optax.adam(1e-2)

    @functools.partial(decorate, has_aux=True)
    def loss_fn(params: Any, state: Any, key: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        logits, state = network.apply(params, state, key, x, True)
        return cross_entropy(logits, y), state

    @jax.jit
    def step(whole: Any, number: Any, x: jax.Array, y: jax.Array) -> Any:
        params, state, opt_state = whole
        key = jax.random.fold_in(jax.random.key(1), number)
        (loss, state), gradients = jax.value_and_grad(loss_fn, has_aux=True)(
            params, state, key, x, y
        )
        updates, opt_state = tx.update(gradients, opt_state)
        return (optax.apply_updates(params, updates), state, opt_state), loss

    return run(step, (params, state, tx.init(params)), steps, x, y)


# --- Dataclasses, and an optimizer that takes several steps for one ------------------------


class TrainState(flax.struct.PyTreeNode):
    params: Any
    opt_state: Any
    apply: Callable[..., Any] = flax.struct.field(pytree_node=False)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["w", "b"], meta_fields=["activation"]
)
@dataclasses.dataclass(frozen=True)
class Affine:
    w: jax.Array
    b: jax.Array
    activation: str

    def __call__(self, x: jax.Array) -> jax.Array:
        return getattr(jnp, self.activation)(x @ self.w + self.b)


def dataclass_states(decorate: Decorate, x: jax.Array, y: jax.Array, steps: int) -> list[float]:
    keys = jax.random.split(jax.random.key(0), 2)
    params = [
        Affine(0.1 * jax.random.normal(keys[0], (64, 32)), jnp.zeros(32), "tanh"),
        Affine(0.1 * jax.random.normal(keys[1], (32, 10)), jnp.zeros(10), "positive"),
    ]
    tx = optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2)

    def apply(params: list[Affine], x: jax.Array) -> jax.Array:
        return functools.reduce(lambda x, layer: layer(x), params, x.reshape(-1, 64))

    @decorate
    def loss_fn(params: list[Affine], state: TrainState, x: jax.Array, y: jax.Array) -> jax.Array:
        return cross_entropy(state.apply(params, x), y)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, _: Any, x: jax.Array, y: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(loss_fn)(state.params, state, x, y)
        updates, opt_state = tx.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return state.replace(params=params, opt_state=opt_state), loss

    return run(step, TrainState(params, tx.init(params), apply), steps, x, y)


SMALL: dict[str, Training] = {
    "linen": linen,
    "nnx, scanned": nnx_scanned,
    "Equinox": equinox,
    "Equinox without jit": equinox_without_jit,
    "Haiku": haiku,
    "dataclasses and MultiSteps": dataclass_states,
}


def same_losses(train: Callable[[Decorate], list[float]]) -> list[float]:
    expected, found = train(undecorated), train(ours)
    # Late losses are small, and rounding errors have grown by then.
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-3)
    assert expected[-1] < expected[0]
    return expected


#: Those that compile quickly. For linen and nnx, ``test_frameworks`` has small ones.
QUICK = {"dataclasses and MultiSteps"}
#: Those that each JAX takes beside these.
VERSIONS = {"Equinox without jit", "Haiku"}


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in QUICK
        else pytest.param(
            name, marks=[pytest.mark.slow, *[pytest.mark.versions] * (name in VERSIONS)]
        )
        for name in SMALL
    ],
)
def test_a_few_steps(name: str) -> None:
    x = jax.random.normal(jax.random.key(2), (8, 8, 8, 1))
    y = jnp.arange(8)
    same_losses(lambda decorate: SMALL[name](decorate, x, y, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    "train",
    [
        functools.partial(linen, blocks=3),
        functools.partial(nnx_scanned, depth=4),
        functools.partial(haiku, depth=3),
        functools.partial(equinox, depth=4),
    ],
    ids=["linen ResNet", "nnx transformer with scan", "Haiku MLP", "Equinox MLP"],
)
def test_a_hundred_steps_on_real_images(train: Training) -> None:
    losses = same_losses(lambda decorate: train(decorate, *digits(128), 100))
    assert losses[-1] < 0.5


def digits(count: int) -> tuple[jax.Array, jax.Array]:
    """Images of handwritten digits, (count, 8, 8, 1) in [0, 1], and their labels."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return jnp.asarray(found.images[:count, :, :, None] / 16, jnp.float32), jnp.asarray(
        found.target[:count]
    )


_EIGHT_DEVICES = """
    import warnings
    import jax
    from jax.sharding import NamedSharding, PartitionSpec as P
    from tests.test_loss_curves import digits, equinox, same_losses

    # Under jax.jit JAX does not say how arguments are split.
    warnings.filterwarnings("ignore", message=".* runs on a mesh of 8 devices")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x, y = jax.device_put(digits(128), NamedSharding(mesh, P("data")))
    assert len(x.sharding.device_set) == 8
    losses = same_losses(lambda decorate: equinox(decorate, x, y, 100, depth=4))
    assert losses[-1] < 0.5
"""


@pytest.mark.slow
def test_an_equinox_mlp_on_eight_devices() -> None:
    pytest.importorskip("equinox")
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(_EIGHT_DEVICES)],
        check=True,
        cwd=Path(__file__).parent.parent,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )
