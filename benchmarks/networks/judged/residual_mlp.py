"""A residual MLP in plain JAX: h = h + gelu(rmsnorm(h) @ w1) @ w2, its layers in a Python loop.

The feed-forward half of a transformer by itself, as in many tutorials on memory. Everything is
float32; the loss is the mean of squares of what the last layer gives.
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
    """The dimensions of a residual MLP.

    Attributes:
        layers: Number of layers.
        width: Channels of the residual stream.
        hidden: Channels inside a layer.
    """

    layers: int
    width: int
    hidden: int


SIZES: dict[str, Size] = {"residual_mlp": Size(layers=12, width=1024, hidden=4096)}


def init(key: jax.Array, size: Size) -> list[dict[str, jax.Array]]:
    """Returns freshly drawn parameters, float32, one record for each layer."""
    layers = []
    for layer_key in jax.random.split(key, size.layers):
        up_key, down_key = jax.random.split(layer_key)
        up = jax.random.normal(up_key, (size.width, size.hidden)) / math.sqrt(size.width)
        down = jax.random.normal(down_key, (size.hidden, size.width)) / math.sqrt(size.hidden)
        layers.append({"w1": up, "w2": down})
    return layers


def _rms_norm(x: jax.Array) -> jax.Array:
    """Divides `[..., width]` by the root of the mean of its squares."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def network(name: str, size: Size, batch: int, block_policy: str | None) -> Network:
    """Builds a residual MLP with the mean of squares of its output.

    `loss_fn(params, batch)` reads `batch["inputs"]`, float32 `[batch, width]`.

    Args:
        name: The network's name.
        size: Its dimensions.
        batch: Rows in a batch.
        block_policy: Wraps each layer, and only those, in `jax.checkpoint` with this policy; None
            wraps nothing.
    """

    def layer(params: Any, h: jax.Array) -> jax.Array:
        return h + jax.nn.gelu(_rms_norm(h) @ params["w1"]) @ params["w2"]

    block = layer
    if block_policy is not None:
        block = jax.checkpoint(layer, policy=checkpoint_policy(block_policy))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        h = batch["inputs"]
        for layer_params in params:
            h = block(layer_params, h)
        return jnp.mean(jnp.square(h))

    def make_arguments(seed: int) -> tuple[Any, Any]:
        init_key, input_key = jax.random.split(jax.random.key(seed))
        inputs = jax.random.normal(input_key, (batch, size.width))
        return init(init_key, size), {"inputs": inputs}

    return Network(
        name=name,
        loss_fn=loss_fn,
        has_aux=False,
        make_arguments=make_arguments,
    )
