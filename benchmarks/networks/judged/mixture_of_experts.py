"""A decoder whose MLPs are mixtures of experts, in plain JAX, its layers in a Python loop.

Lepikhin et al., "GShard" (2020): every token goes to its two best experts, each expert takes so
many tokens of a sequence and no more, and products with one-hot arrays carry tokens there and back.
The loss has a term for balance, from the same paper, and one for small router logits, from Zoph et
al., "ST-MoE" (2022). Parameters are float32 and the computation is bfloat16; router, softmax and
cross-entropy are float32.
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
    """The dimensions of a decoder with experts.

    Attributes:
        layers: Number of layers.
        width: Channels of the residual stream.
        heads: Attention heads; must divide `width`.
        experts: Experts of a layer.
        hidden: Channels inside an expert.
        vocabulary: Number of tokens.
        length: Tokens in a sequence.
        spare: How much more an expert can take than its fair share.
    """

    layers: int
    width: int
    heads: int
    experts: int
    hidden: int
    vocabulary: int
    length: int
    spare: float = 1.25

    @property
    def capacity(self) -> int:
        """How many tokens of a sequence an expert takes."""
        return math.ceil(2 * self.length * self.spare / self.experts)


SIZES: dict[str, Size] = {
    "mixture_of_experts": Size(
        layers=6,
        width=768,
        heads=12,
        experts=8,
        hidden=3072,
        vocabulary=32_000,
        length=1024,
    ),
}


def init(key: jax.Array, size: Size) -> dict[str, Any]:
    """Returns freshly drawn parameters, float32."""
    token_key, position_key, *layer_keys = jax.random.split(key, 2 + size.layers)
    width = size.width

    def normal(key: jax.Array, *shape: int) -> jax.Array:
        return 0.02 * jax.random.normal(key, shape)

    def norm() -> dict[str, jax.Array]:
        return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

    def layer(key: jax.Array) -> dict[str, Any]:
        keys = jax.random.split(key, 5)
        return {
            "attention_norm": norm(),
            "qkv": normal(keys[0], width, 3 * width),
            "projection": normal(keys[1], width, width),
            "expert_norm": norm(),
            "router": normal(keys[2], width, size.experts),
            "up": normal(keys[3], size.experts, width, size.hidden),
            "down": normal(keys[4], size.experts, size.hidden, width),
        }

    return {
        "tokens": normal(token_key, size.vocabulary, width),
        "positions": normal(position_key, size.length, width),
        "layers": [layer(layer_key) for layer_key in layer_keys],
        "final_norm": norm(),
    }


def _layer_norm(params: Any, x: jax.Array) -> jax.Array:
    """Normalises `[..., width]` over its last axis in float32; the dtype stays."""
    y = x.astype(jnp.float32)
    y = (y - jnp.mean(y, axis=-1, keepdims=True)) * jax.lax.rsqrt(
        jnp.var(y, axis=-1, keepdims=True) + 1e-5
    )
    z: jax.Array = y * params["scale"] + params["bias"]
    return z.astype(x.dtype)


def _attention(params: Any, x: jax.Array, heads: int) -> jax.Array:
    """Causal self-attention of `[batch, length, width]` with itself."""
    batch, length, width = x.shape
    qkv = x @ params["qkv"].astype(x.dtype)
    query, key, value = (
        part.reshape(batch, length, heads, width // heads) for part in jnp.split(qkv, 3, axis=-1)
    )
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return mixed.reshape(batch, length, width) @ params["projection"].astype(x.dtype)


def _route(probabilities: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Gives every token its two best experts, first come first served.

    Args:
        probabilities: Of the experts for each token, `[batch, length, experts]`.
        capacity: How many tokens of a sequence an expert takes.

    Returns:
        The weights with which tokens come back, `[batch, length, experts, capacity]`: zero where a
        token has no place. And the term for balance, a scalar.
    """
    experts = probabilities.shape[-1]
    weights, chosen = jax.lax.top_k(probabilities, 2)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    first, second = (jax.nn.one_hot(chosen[..., rank], experts) for rank in (0, 1))
    balance = experts * jnp.mean(
        jnp.sum(jnp.mean(first, axis=1) * jnp.mean(probabilities, axis=1), axis=-1)
    )
    # An expert's places go to all first choices before any second choice.
    first_place = jnp.cumsum(first, axis=1) - 1
    second_place = jnp.cumsum(second, axis=1) - 1 + jnp.sum(first, axis=1, keepdims=True)
    combine = jnp.zeros((*probabilities.shape, capacity))
    for rank, (choice, place) in enumerate([(first, first_place), (second, second_place)]):
        taken = jnp.sum(choice * place, axis=-1).astype(jnp.int32)
        # A place beyond the capacity gives a row of zeros.
        slot = jax.nn.one_hot(taken, capacity)
        combine = combine + weights[..., rank, None, None] * choice[..., None] * slot[:, :, None]
    return combine, balance


def _experts(params: Any, x: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Maps `[batch, length, width]` to the same shape, and gives two terms of the loss."""
    logits = x.astype(jnp.float32) @ params["router"]
    combine, balance = _route(jax.nn.softmax(logits, axis=-1), capacity)
    large = jnp.mean(jnp.square(jax.nn.logsumexp(logits, axis=-1)))
    combine = combine.astype(x.dtype)
    dispatch = (combine > 0).astype(x.dtype)
    taken = jnp.einsum("blec,blw->ebcw", dispatch, x)
    hidden = jnp.einsum("ebcw,ewh->ebch", taken, params["up"].astype(x.dtype))
    given = jnp.einsum("ebch,ehw->ebcw", jax.nn.gelu(hidden), params["down"].astype(x.dtype))
    return jnp.einsum("blec,ebcw->blw", combine, given), balance, large


def network(name: str, size: Size, batch: int, block_policy: str | None) -> Network:
    """Builds a decoder with experts, its next-token cross-entropy and the router's two terms.

    `loss_fn(params, batch)` reads `batch["tokens"]` and `batch["targets"]`, both int32
    `[batch, length]`.

    Args:
        name: The network's name.
        size: Its dimensions.
        batch: Sequences in a batch.
        block_policy: Wraps each layer, and only those, in `jax.checkpoint` with this policy; None
            wraps nothing.
    """

    def layer(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        x = x + _attention(params, _layer_norm(params["attention_norm"], x), size.heads)
        y, balance, large = _experts(params, _layer_norm(params["expert_norm"], x), size.capacity)
        return x + y, balance, large

    block = layer
    if block_policy is not None:
        block = jax.checkpoint(layer, policy=checkpoint_policy(block_policy))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = (params["tokens"][batch["tokens"]] + params["positions"]).astype(COMPUTE_DTYPE)
        routing = jnp.zeros(())
        for layer_params in params["layers"]:
            x, balance, large = block(layer_params, x)
            routing = routing + 1e-2 * balance + 1e-3 * large
        x = _layer_norm(params["final_norm"], x)
        logits = (x @ params["tokens"].astype(x.dtype).T).astype(jnp.float32)
        return cross_entropy(logits, batch["targets"]) + routing

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
