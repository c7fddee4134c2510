"""Images and texts that find each other: two transformers in plain JAX with one loss.

Radford et al., "Learning Transferable Visual Models From Natural Language Supervision" (2021), that
is CLIP: a vision transformer for images, a causal transformer for texts, and among the pairs of a
batch a softmax over the texts for each image and over the images for each text. An image's features
are the mean over its patches. Parameters are float32 and the computation is bfloat16;
normalisations, softmaxes and the loss are float32.
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
class Tower:
    """The dimensions of one transformer.

    Attributes:
        layers: Number of layers.
        width: Channels of the residual stream.
        heads: Attention heads; must divide `width`.
    """

    layers: int
    width: int
    heads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The dimensions of both sides.

    Attributes:
        vision: The transformer for images.
        text: The transformer for texts.
        image: Height and width of an image.
        patch: Height and width of a patch; must divide `image`.
        vocabulary: Number of tokens; the last one ends a text.
        length: Tokens of the longest text.
        features: Channels in which images and texts are compared.
    """

    vision: Tower
    text: Tower
    image: int
    patch: int
    vocabulary: int
    length: int
    features: int


SIZES: dict[str, Size] = {
    "two_tower": Size(
        vision=Tower(layers=6, width=512, heads=8),
        text=Tower(layers=6, width=512, heads=8),
        image=256,
        patch=16,
        vocabulary=32_000,
        length=64,
        features=512,
    ),
}


def _normal(key: jax.Array, *shape: int) -> jax.Array:
    return 0.02 * jax.random.normal(key, shape)


def _init_norm(width: int) -> dict[str, jax.Array]:
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


def _init_tower(key: jax.Array, tower: Tower, tokens: int, features: int) -> dict[str, Any]:
    position_key, head_key, *layer_keys = jax.random.split(key, 2 + tower.layers)
    width = tower.width

    def layer(key: jax.Array) -> dict[str, Any]:
        keys = jax.random.split(key, 4)
        return {
            "attention_norm": _init_norm(width),
            "qkv": _normal(keys[0], width, 3 * width),
            "projection": _normal(keys[1], width, width),
            "mlp_norm": _init_norm(width),
            "up": _normal(keys[2], width, 4 * width),
            "up_bias": jnp.zeros(4 * width),
            "down": _normal(keys[3], 4 * width, width),
            "down_bias": jnp.zeros(width),
        }

    return {
        "positions": _normal(position_key, tokens, width),
        "layers": [layer(layer_key) for layer_key in layer_keys],
        "final_norm": _init_norm(width),
        "head": _normal(head_key, width, features),
    }


def init(key: jax.Array, size: Size) -> dict[str, Any]:
    """Returns freshly drawn parameters, float32."""
    vision_key, text_key, patch_key, token_key = jax.random.split(key, 4)
    patches = (size.image // size.patch) ** 2
    return {
        "patches": _normal(patch_key, 3 * size.patch**2, size.vision.width),
        "tokens": _normal(token_key, size.vocabulary, size.text.width),
        "vision": _init_tower(vision_key, size.vision, patches, size.features),
        "text": _init_tower(text_key, size.text, size.length, size.features),
        "log_scale": jnp.asarray(math.log(1 / 0.07)),
    }


def _layer_norm(params: Any, x: jax.Array) -> jax.Array:
    """Normalises `[..., width]` over its last axis in float32; the dtype stays."""
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + 1e-5)
    z: jax.Array = y * params["scale"] + params["bias"]
    return z.astype(x.dtype)


def _attention(params: Any, x: jax.Array, heads: int, causal: bool) -> jax.Array:
    """Self-attention of `[batch, length, width]`."""
    batch, length, width = x.shape
    qkv = x @ params["qkv"].astype(x.dtype)
    query, key, value = (
        part.reshape(batch, length, heads, width // heads) for part in jnp.split(qkv, 3, axis=-1)
    )
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=causal)
    return mixed.reshape(batch, length, width) @ params["projection"].astype(x.dtype)


def _mlp(params: Any, x: jax.Array) -> jax.Array:
    """Maps `[batch, length, width]` through four times the width and back."""
    y = jax.nn.gelu(x @ params["up"].astype(x.dtype) + params["up_bias"].astype(x.dtype))
    z: jax.Array = y @ params["down"].astype(x.dtype) + params["down_bias"].astype(x.dtype)
    return z


def _patches(images: jax.Array, patch: int) -> jax.Array:
    """Cuts images `[batch, h, w, 3]` into `[batch, patches, 3 * patch**2]`."""
    batch, height, width, channels = images.shape
    down, across = height // patch, width // patch
    x = images.reshape(batch, down, patch, across, patch, channels).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(batch, down * across, patch * patch * channels)


def _unit(x: jax.Array) -> jax.Array:
    """Divides `[batch, features]` by the length of each row."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-12)


def network(name: str, size: Size, batch: int, block_policy: str | None) -> Network:
    """Builds both towers with the cross-entropy of finding the other one of each pair.

    `loss_fn(params, batch)` reads `batch["images"]`, float32 `[batch, image, image, 3]`, and
    `batch["texts"]`, int32 `[batch, length]`, where the last token of the vocabulary ends a text.

    Args:
        name: The network's name.
        size: Its dimensions.
        batch: Pairs in a batch.
        block_policy: Wraps each layer of both towers, and only those, in `jax.checkpoint` with
            this policy; None wraps nothing.
    """

    def layer(params: Any, x: jax.Array, heads: int, causal: bool) -> jax.Array:
        x = x + _attention(params, _layer_norm(params["attention_norm"], x), heads, causal)
        return x + _mlp(params, _layer_norm(params["mlp_norm"], x))

    block = layer
    if block_policy is not None:
        block = jax.checkpoint(layer, policy=checkpoint_policy(block_policy), static_argnums=(2, 3))

    def encode(params: Any, x: jax.Array, heads: int, causal: bool) -> jax.Array:
        x = x + params["positions"].astype(x.dtype)
        for layer_params in params["layers"]:
            x = block(layer_params, x, heads, causal)
        return _layer_norm(params["final_norm"], x)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        patches = _patches(batch["images"].astype(COMPUTE_DTYPE), size.patch)
        x = patches @ params["patches"].astype(COMPUTE_DTYPE)
        x = encode(params["vision"], x, size.vision.heads, False)
        seen = jnp.mean(x.astype(jnp.float32), axis=1) @ params["vision"]["head"]

        texts = batch["texts"]
        y = params["tokens"].astype(COMPUTE_DTYPE)[texts]
        y = encode(params["text"], y, size.text.heads, True)
        ends = jnp.argmax(texts, axis=-1)
        last = jnp.take_along_axis(y, ends[:, None, None], axis=1)[:, 0]
        read = last.astype(jnp.float32) @ params["text"]["head"]

        logits = jnp.exp(params["log_scale"]) * _unit(seen) @ _unit(read).T
        pairs = jnp.arange(texts.shape[0])
        return (cross_entropy(logits, pairs) + cross_entropy(logits.T, pairs)) / 2

    def make_arguments(seed: int) -> tuple[Any, Any]:
        keys = jax.random.split(jax.random.key(seed), 4)
        end = size.vocabulary - 1
        texts = jax.random.randint(keys[2], (batch, size.length), 1, end)
        ends = jax.random.randint(keys[3], (batch, 1), size.length // 2, size.length)
        positions = jnp.arange(size.length)
        texts = jnp.where(positions < ends, texts, jnp.where(positions == ends, end, 0))
        return init(keys[0], size), {
            "images": jax.random.normal(keys[1], (batch, size.image, size.image, 3)),
            "texts": texts,
        }

    return Network(
        name=name,
        loss_fn=loss_fn,
        has_aux=False,
        make_arguments=make_arguments,
    )
