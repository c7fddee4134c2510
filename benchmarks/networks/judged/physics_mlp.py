"""An MLP that solves Burgers' equation, in plain JAX: its loss holds second derivatives.

Raissi et al., "Physics-informed neural networks" (2019), Burgers' equation with a small viscosity:
u_t + u u_x = v u_xx for t from 0 to 1 and x from -1 to 1, u(0, x) = -sin(pi x), u(t, -1) =
u(t, 1) = 0. The derivatives at a point are those of the MLP, forward mode in forward mode; `vmap`
takes all points at once. Everything is float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.networks.record import Network, checkpoint_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The dimensions of a physics-informed MLP.

    Attributes:
        layers: Hidden layers.
        width: Channels of each.
        border: Points at the start, and as many at the two ends.
        viscosity: How much u spreads.
    """

    layers: int
    width: int
    border: int
    viscosity: float = 0.01 / math.pi


SIZES: dict[str, Size] = {"physics_mlp": Size(layers=8, width=256, border=4096)}


def init(key: jax.Array, size: Size) -> list[dict[str, jax.Array]]:
    """Returns freshly drawn parameters, float32, one record for each layer and the last."""
    widths = (2, *[size.width] * size.layers, 1)
    layers = []
    for layer_key, inputs, outputs in zip(
        jax.random.split(key, size.layers + 1), widths[:-1], widths[1:], strict=True
    ):
        scale = math.sqrt(2 / (inputs + outputs))
        kernel = scale * jax.random.normal(layer_key, (inputs, outputs))
        layers.append({"kernel": kernel, "bias": jnp.zeros(outputs)})
    return layers


def network(name: str, size: Size, batch: int, block_policy: str | None) -> Network:
    """Builds an MLP with the mean squares of what it misses: the equation, the start, the ends.

    `loss_fn(params, batch)` reads `batch["inside"]`, float32 `[batch, 2]`, `batch["start"]` and
    `batch["ends"]`, both float32 `[border, 2]`: points (t, x).

    Args:
        name: The network's name.
        size: Its dimensions.
        batch: Points inside, at which the equation is to hold.
        block_policy: Wraps each hidden layer, and only those, in `jax.checkpoint` with this policy;
            None wraps nothing.
    """

    def layer(params: Any, h: jax.Array) -> jax.Array:
        return jnp.tanh(h @ params["kernel"] + params["bias"])

    block = layer
    if block_policy is not None:
        block = jax.checkpoint(layer, policy=checkpoint_policy(block_policy))

    def solution(params: Any, t: jax.Array, x: jax.Array) -> jax.Array:
        *hidden, last = params
        h = jnp.stack([t, x])
        for layer_params in hidden:
            h = block(layer_params, h)
        u: jax.Array = h @ last["kernel"] + last["bias"]
        return u[0]

    def residual(params: Any, t: jax.Array, x: jax.Array) -> jax.Array:
        one = jnp.ones(())

        def slope(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jax.jvp(lambda x: solution(params, t, x), (x,), (one,))

        _, u_t = jax.jvp(lambda t: solution(params, t, x), (t,), (one,))
        (u, u_x), (_, u_xx) = jax.jvp(slope, (x,), (one,))
        return u_t + u * u_x - size.viscosity * u_xx

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        def every(function: Any, points: jax.Array) -> jax.Array:
            values: jax.Array = jax.vmap(function, (None, 0, 0))(params, points[:, 0], points[:, 1])
            return values

        start = every(solution, batch["start"]) + jnp.sin(math.pi * batch["start"][:, 1])
        missed = (every(residual, batch["inside"]), start, every(solution, batch["ends"]))
        return sum((jnp.mean(jnp.square(part)) for part in missed), jnp.zeros(()))

    def make_arguments(seed: int) -> tuple[Any, Any]:
        init_key, inside_key, start_key, end_key = jax.random.split(jax.random.key(seed), 4)
        inside = jax.random.uniform(inside_key, (2, batch))
        along = jax.random.uniform(start_key, (size.border,), minval=-1.0)
        times = jax.random.uniform(end_key, (size.border,))
        sides = jnp.where(jnp.arange(size.border) % 2 == 0, -1.0, 1.0)
        return init(init_key, size), {
            "inside": jnp.stack([inside[0], 2 * inside[1] - 1], axis=-1),
            "start": jnp.stack([jnp.zeros(size.border), along], axis=-1),
            "ends": jnp.stack([times, sides], axis=-1),
        }

    return Network(
        name=name,
        loss_fn=loss_fn,
        has_aux=False,
        make_arguments=make_arguments,
    )
