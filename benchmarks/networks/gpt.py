"""A decoder-only transformer in plain JAX, its layers in a Python loop.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), that is GPT-2:
learned positions, layer normalisation before each branch, GELU in a fourfold MLP, biases
everywhere, and the head tied to the token embedding. Dropout is left out, as in most training
today.

Parameters and activations are bfloat16; layer normalisation, the softmax over attention scores, and
the logits with their cross-entropy are float32. Attention is written out, so its scores are arrays
of the program like any other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.networks.losses import cross_entropy
from benchmarks.networks.record import Network, checkpoint_policy

PARAMETER_DTYPE = jnp.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The dimensions of a transformer.

    Attributes:
        layers: Number of layers.
        width: Channels of the residual stream.
        heads: Attention heads; must divide `width`.
        vocabulary: Number of tokens.
        length: Tokens in a sequence.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int


SIZES: dict[str, Size] = {
    "gpt": Size(layers=12, width=1024, heads=16, vocabulary=32_000, length=1024),
}


def _normal(key: jax.Array, shape: tuple[int, ...], scale: float) -> jax.Array:
    return scale * jax.random.normal(key, shape, PARAMETER_DTYPE)


def _init_norm(width: int) -> dict[str, jax.Array]:
    return {"scale": jnp.ones(width, PARAMETER_DTYPE), "bias": jnp.zeros(width, PARAMETER_DTYPE)}


def _init_dense(key: jax.Array, inputs: int, outputs: int, scale: float) -> dict[str, jax.Array]:
    return {
        "kernel": _normal(key, (inputs, outputs), scale),
        "bias": jnp.zeros(outputs, PARAMETER_DTYPE),
    }


def _init_layer(key: jax.Array, size: Size) -> dict[str, Any]:
    qkv_key, projection_key, up_key, down_key = jax.random.split(key, 4)
    width = size.width
    # GPT-2 shrinks the last matrix of each branch, as 2 * layers branches add up in the stream.
    branch_scale = 0.02 / math.sqrt(2 * size.layers)
    return {
        "attention_norm": _init_norm(width),
        "qkv": _init_dense(qkv_key, width, 3 * width, 0.02),
        "projection": _init_dense(projection_key, width, width, branch_scale),
        "mlp_norm": _init_norm(width),
        "up": _init_dense(up_key, width, 4 * width, 0.02),
        "down": _init_dense(down_key, 4 * width, width, branch_scale),
    }


def init(key: jax.Array, size: Size) -> dict[str, Any]:
    """Returns freshly drawn parameters, bfloat16."""
    token_key, position_key, *layer_keys = jax.random.split(key, 2 + size.layers)
    return {
        "tokens": _normal(token_key, (size.vocabulary, size.width), 0.02),
        "positions": _normal(position_key, (size.length, size.width), 0.01),
        "layers": [_init_layer(layer_key, size) for layer_key in layer_keys],
        "final_norm": _init_norm(size.width),
    }


def _layer_norm(params: Any, x: jax.Array) -> jax.Array:
    """Normalises `[..., width]` over its last axis in float32; the dtype stays."""
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + 1e-5)
    z: jax.Array = y * params["scale"] + params["bias"]
    return z.astype(x.dtype)


def _dense(params: Any, x: jax.Array) -> jax.Array:
    """Maps `[..., inputs]` to `[..., outputs]`."""
    y: jax.Array = x @ params["kernel"] + params["bias"]
    return y


def _attention(params: Any, x: jax.Array, heads: int) -> jax.Array:
    """Causal self-attention of `[batch, length, width]` with itself."""
    batch, length, width = x.shape
    qkv = _dense(params["qkv"], x).reshape(batch, length, 3, heads, width // heads)
    query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
    scores = scores / math.sqrt(width // heads)
    causal = jnp.tril(jnp.ones((length, length), dtype=bool))
    scores = jnp.where(causal, scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(batch, length, width)
    return _dense(params["projection"], mixed)


def _mlp(params: Any, x: jax.Array) -> jax.Array:
    """Maps `[batch, length, width]` through four times the width and back."""
    return _dense(params["down"], jax.nn.gelu(_dense(params["up"], x)))


def network(name: str, size: Size, batch: int, block_policy: str | None) -> Network:
    """Builds a transformer with its next-token cross-entropy.

    `loss_fn(params, batch)` reads `batch["tokens"]` and `batch["targets"]`, both int32
    `[batch, length]`.

    Args:
        name: The network's name.
        size: Its dimensions.
        batch: Sequences in a batch.
        block_policy: Wraps each layer, and only those, in `jax.checkpoint` with this policy; None
            wraps nothing.
    """

    def layer(params: Any, x: jax.Array) -> jax.Array:
        x = x + _attention(params, _layer_norm(params["attention_norm"], x), size.heads)
        return x + _mlp(params, _layer_norm(params["mlp_norm"], x))

    block = layer
    if block_policy is not None:
        block = jax.checkpoint(layer, policy=checkpoint_policy(block_policy))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = params["tokens"][batch["tokens"]] + params["positions"]
        for layer_params in params["layers"]:
            x = block(layer_params, x)
        x = _layer_norm(params["final_norm"], x)
        logits = jnp.einsum("blw,vw->blv", x, params["tokens"], preferred_element_type=jnp.float32)
        return cross_entropy(logits, batch["targets"])

    def make_arguments(seed: int) -> tuple[Any, Any]:
        init_key, text_key = jax.random.split(jax.random.key(seed))
        text = jax.random.randint(text_key, (batch, size.length + 1), 0, size.vocabulary)
        return init(init_key, size), {"tokens": text[:, :-1], "targets": text[:, 1:]}

    return Network(
        name=name,
        loss_fn=loss_fn,
        has_aux=False,
        make_arguments=make_arguments,
    )
