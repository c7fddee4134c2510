"""A decoder in the manner of Llama, in plain JAX, its layers in a Python loop.

Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023), with the grouped
queries of Llama 2: root-mean-square normalisation before each branch, rotary positions, SwiGLU, no
biases, a head of its own. Parameters are float32 and the computation is bfloat16; normalisations,
the softmax over attention scores and the cross-entropy are float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.networks.losses import cross_entropy
from benchmarks.networks.record import Network, checkpoint_policy

COMPUTE_DTYPE = jnp.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The dimensions of a decoder.

    Attributes:
        layers: Number of layers.
        width: Channels of the residual stream.
        heads: Attention heads of the queries; must divide `width`.
        groups: Attention heads of keys and values; must divide `heads`.
        hidden: Channels inside the MLP.
        vocabulary: Number of tokens.
        length: Tokens in a sequence.
    """

    layers: int
    width: int
    heads: int
    groups: int
    hidden: int
    vocabulary: int
    length: int


SIZES: dict[str, Size] = {
    "llama": Size(
        layers=8, width=1024, heads=16, groups=4, hidden=2816, vocabulary=32_000, length=2048
    ),
}


def init(key: jax.Array, size: Size) -> dict[str, Any]:
    """Returns freshly drawn parameters, float32."""
    token_key, head_key, *layer_keys = jax.random.split(key, 2 + size.layers)
    width, shared = size.width, size.groups * size.width // size.heads

    def matrix(key: jax.Array, inputs: int, outputs: int) -> jax.Array:
        return 0.02 * jax.random.normal(key, (inputs, outputs))

    def layer(key: jax.Array) -> dict[str, jax.Array]:
        keys = jax.random.split(key, 7)
        return {
            "attention_norm": jnp.ones(width),
            "query": matrix(keys[0], width, width),
            "key": matrix(keys[1], width, shared),
            "value": matrix(keys[2], width, shared),
            "output": matrix(keys[3], width, width),
            "mlp_norm": jnp.ones(width),
            "gate": matrix(keys[4], width, size.hidden),
            "up": matrix(keys[5], width, size.hidden),
            "down": matrix(keys[6], size.hidden, width),
        }

    return {
        "tokens": matrix(token_key, size.vocabulary, width),
        "layers": [layer(layer_key) for layer_key in layer_keys],
        "final_norm": jnp.ones(width),
        "head": matrix(head_key, width, size.vocabulary),
    }


def _rms_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    """Normalises `[..., width]` over its last axis in float32; the dtype stays."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + 1e-5)
    return (y * scale).astype(x.dtype)


def _dense(kernel: jax.Array, x: jax.Array) -> jax.Array:
    """Maps `[..., inputs]` to `[..., outputs]` in the inputs' dtype."""
    return x @ kernel.astype(x.dtype)


def _rotate(x: jax.Array) -> jax.Array:
    """Turns pairs of channels of `[batch, length, heads, channels]` by their positions."""
    length, half = x.shape[1], x.shape[3] // 2
    frequencies = 10_000.0 ** (-jnp.arange(half) / half)
    angles = jnp.arange(length)[:, None] * frequencies
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def _attention(params: Any, x: jax.Array, size: Size) -> jax.Array:
    """Causal self-attention of `[batch, length, width]`, several queries for each key."""
    batch, length, width = x.shape
    channels = width // size.heads
    each = size.heads // size.groups
    query = _rotate(_dense(params["query"], x).reshape(batch, length, size.heads, channels))
    query = query.reshape(batch, length, size.groups, each, channels)
    key = _rotate(_dense(params["key"], x).reshape(batch, length, size.groups, channels))
    value = _dense(params["value"], x).reshape(batch, length, size.groups, channels)
    scores = jnp.einsum("bqghc,bkgc->bghqk", query, key, preferred_element_type=jnp.float32)
    causal = jnp.tril(jnp.ones((length, length), dtype=bool))
    scores = jnp.where(causal, scores / math.sqrt(channels), -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    mixed = jnp.einsum("bghqk,bkgc->bqghc", weights, value).reshape(batch, length, width)
    return _dense(params["output"], mixed)


def _mlp(params: Any, x: jax.Array) -> jax.Array:
    """Maps `[batch, length, width]` to the same shape."""
    gate = jax.nn.silu(_dense(params["gate"], x))
    return _dense(params["down"], gate * _dense(params["up"], x))


def network(name: str, size: Size, batch: int, block_policy: str | None) -> Network:
    """Builds a decoder with its next-token cross-entropy.

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
        x = x + _attention(params, _rms_norm(params["attention_norm"], x), size)
        return x + _mlp(params, _rms_norm(params["mlp_norm"], x))

    block = layer
    if block_policy is not None:
        block = jax.checkpoint(layer, policy=checkpoint_policy(block_policy))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = params["tokens"].astype(COMPUTE_DTYPE)[batch["tokens"]]
        for layer_params in params["layers"]:
            x = block(layer_params, x)
        x = _rms_norm(params["final_norm"], x)
        logits = _dense(params["head"], x).astype(jnp.float32)
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
