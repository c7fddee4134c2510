"""A transformer for translation: an encoder, and a decoder that attends to it.

Vaswani et al., "Attention Is All You Need" (2017), the base model, with normalisation before each
branch as is usual since. Sinusoidal positions, dropout, one embedding for both sides and the head,
label smoothing. Everything is float32. Token 0 is padding: nothing attends to it and it has no
loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks.networks.record import Network, checkpoint_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The dimensions of a transformer for translation.

    Attributes:
        layers: Number of layers of the encoder, and of the decoder.
        width: Channels of the residual stream.
        heads: Attention heads; must divide `width`.
        hidden: Channels inside an MLP.
        vocabulary: Number of tokens, padding among them.
        length: Tokens of the longest sentence.
        dropout: Share of the values that dropout sets to zero.
        smoothing: Share of the target that is spread over all tokens.
    """

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    length: int
    dropout: float = 0.1
    smoothing: float = 0.1


SIZES: dict[str, Size] = {
    "encoder_decoder": Size(
        layers=6, width=512, heads=8, hidden=2048, vocabulary=32_000, length=256
    ),
}


class Attention(nn.Module):
    """A norm, attention and dropout, beside a shortcut.

    Attributes:
        size: The transformer's dimensions.
    """

    size: Size

    @nn.compact
    def __call__(self, x: jax.Array, read: jax.Array | None, mask: jax.Array) -> jax.Array:
        """Maps `[batch, length, width]` to the same shape; attends to itself if `read` is None."""
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(
            num_heads=self.size.heads, dropout_rate=self.size.dropout, deterministic=False
        )(y, y if read is None else read, mask=mask)
        return x + nn.Dropout(self.size.dropout, deterministic=False)(y)


class Mlp(nn.Module):
    """A norm, an MLP and dropout, beside a shortcut.

    Attributes:
        size: The transformer's dimensions.
    """

    size: Size

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, length, width]` to the same shape."""
        y = nn.relu(nn.Dense(self.size.hidden)(nn.LayerNorm()(x)))
        y = nn.Dropout(self.size.dropout, deterministic=False)(y)
        y = nn.Dense(self.size.width)(y)
        return x + nn.Dropout(self.size.dropout, deterministic=False)(y)


class EncoderLayer(nn.Module):
    """Self-attention and an MLP.

    Attributes:
        size: The transformer's dimensions.
    """

    size: Size

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Maps `[batch, length, width]` to the same shape."""
        x = Attention(self.size, name="itself")(x, None, mask)
        return Mlp(self.size, name="mlp")(x)


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the encoder, and an MLP.

    Attributes:
        size: The transformer's dimensions.
    """

    size: Size

    @nn.compact
    def __call__(
        self, x: jax.Array, encoded: jax.Array, mask: jax.Array, source_mask: jax.Array
    ) -> jax.Array:
        """Maps `[batch, length, width]` to the same shape."""
        x = Attention(self.size, name="itself")(x, None, mask)
        x = Attention(self.size, name="encoder")(x, encoded, source_mask)
        return Mlp(self.size, name="mlp")(x)


def _positions(length: int, width: int) -> jax.Array:
    """Returns sines and cosines of positions, `[length, width]`."""
    frequencies = jnp.exp(-math.log(10_000) * jnp.arange(0, width, 2) / width)
    angles = jnp.arange(length)[:, None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class Translator(nn.Module):
    """Encoder, decoder, and logits from the embedding.

    Attributes:
        size: Its dimensions.
        wrap: Turns a kind of layer into the one to use in its place.
    """

    size: Size
    wrap: Callable[[type[nn.Module]], Any]

    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        """Maps tokens `[batch, length]` of both sides to logits `[batch, length, vocabulary]`."""
        size = self.size
        embedding = nn.Embed(
            size.vocabulary, size.width, embedding_init=nn.initializers.normal(size.width**-0.5)
        )

        def embed(tokens: jax.Array) -> jax.Array:
            x = math.sqrt(size.width) * embedding(tokens)
            x = x + _positions(tokens.shape[1], size.width)
            return nn.Dropout(size.dropout, deterministic=False)(x)

        there, here = source > 0, target > 0
        source_mask = nn.make_attention_mask(there, there)
        target_mask = nn.combine_masks(
            nn.make_attention_mask(here, here), nn.make_causal_mask(target)
        )
        across_mask = nn.make_attention_mask(here, there)
        x = embed(source)
        # Named here: `nn.remat` would rename the layers, and with them the parameters.
        for index in range(size.layers):
            x = self.wrap(EncoderLayer)(size, name=f"encoder{index}")(x, source_mask)
        encoded = nn.LayerNorm(name="encoder_norm")(x)
        y = embed(target)
        for index in range(size.layers):
            y = self.wrap(DecoderLayer)(size, name=f"decoder{index}")(
                y, encoded, target_mask, across_mask
            )
        return embedding.attend(nn.LayerNorm(name="decoder_norm")(y))


def _smoothed_loss(logits: jax.Array, labels: jax.Array, smoothing: float) -> jax.Array:
    """Returns the mean cross-entropy with smoothed labels over what is not padding."""
    log_likelihoods = jax.nn.log_softmax(logits)
    right = jnp.take_along_axis(log_likelihoods, labels[..., None], axis=-1)[..., 0]
    every = jnp.mean(log_likelihoods, axis=-1)
    losses = -(1 - smoothing) * right - smoothing * every
    weights = (labels > 0).astype(losses.dtype)
    return jnp.sum(losses * weights) / jnp.sum(weights)


def network(name: str, size: Size, batch: int, block_policy: str | None) -> Network:
    """Builds a transformer for translation with its smoothed cross-entropy.

    `loss_fn(params, batch)` reads `batch["source"]`, `batch["target"]` and `batch["labels"]`, all
    int32 `[batch, length]`, and `batch["dropout_key"]`.

    Args:
        name: The network's name.
        size: Its dimensions.
        batch: Pairs of sentences in a batch.
        block_policy: Wraps each layer of encoder and decoder, and only those, in `nn.remat` with
            this policy; None wraps nothing.
    """

    def wrap(module: type[nn.Module]) -> Any:
        if block_policy is None:
            return module
        return nn.remat(module, policy=checkpoint_policy(block_policy))

    model = Translator(size=size, wrap=wrap)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits: Any = model.apply(
            {"params": params},
            batch["source"],
            batch["target"],
            rngs={"dropout": batch["dropout_key"]},
        )
        return _smoothed_loss(logits, batch["labels"], size.smoothing)

    def make_arguments(seed: int) -> tuple[Any, Any]:
        keys = jax.random.split(jax.random.key(seed), 5)

        def sentences(key: jax.Array, length: int) -> jax.Array:
            token_key, length_key = jax.random.split(key)
            tokens = jax.random.randint(token_key, (batch, length), 1, size.vocabulary)
            lengths = jax.random.randint(length_key, (batch, 1), length // 2, length + 1)
            return jnp.where(jnp.arange(length) < lengths, tokens, 0)

        source, text = sentences(keys[0], size.length), sentences(keys[1], size.length + 1)
        variables = model.init({"params": keys[2], "dropout": keys[3]}, source[:1], text[:1, :-1])
        return variables["params"], {
            "source": source,
            "target": text[:, :-1],
            "labels": text[:, 1:],
            "dropout_key": keys[4],
        }

    return Network(
        name=name,
        loss_fn=loss_fn,
        has_aux=False,
        make_arguments=make_arguments,
    )
