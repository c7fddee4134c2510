"""Vision transformers for ImageNet.

Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021): an image is cut into patches, each a
token; a class token in front of them carries the answer; layer normalisation comes before each
branch. Everything is float32. Dropout is left out, as in torchvision's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks.networks.images import image_network
from benchmarks.networks.record import Network, checkpoint_policy


class EncoderLayer(nn.Module):
    """Self-attention and an MLP of four times the width, each beside a shortcut.

    Attributes:
        heads: Attention heads; must divide the width.
    """

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, tokens, width]` to the same shape."""
        width = x.shape[-1]
        y = nn.LayerNorm(epsilon=1e-6, name="attention_norm")(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=self.heads, name="attention")(y)
        y = nn.LayerNorm(epsilon=1e-6, name="mlp_norm")(x)
        y = nn.Dense(4 * width, name="up")(y)
        return x + nn.Dense(width, name="down")(nn.gelu(y))


class VisionTransformer(nn.Module):
    """Patches, class token and positions; encoder layers; linear classifier of the class token.

    Attributes:
        patch: Height and width of a patch.
        width: Channels of a token.
        layers: Number of layers.
        layer: Makes one layer from `name=`.
        classes: Number of logits.
    """

    patch: int
    width: int
    layers: int
    layer: Callable[..., nn.Module]
    classes: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps images `[batch, height, width, 3]` to logits `[batch, classes]`."""
        patch = (self.patch, self.patch)
        x = nn.Conv(self.width, patch, strides=patch, padding="VALID", name="patches")(images)
        x = x.reshape(x.shape[0], -1, self.width)
        token = self.param("class_token", nn.initializers.zeros, (1, 1, self.width))
        x = jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, self.width)), x], axis=1)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        for index in range(self.layers):
            # Named here: `nn.remat` would rename the layers, and with them the parameters.
            x = self.layer(name=f"layer{index}")(x)
        x = nn.LayerNorm(epsilon=1e-6, name="final_norm")(x)
        return nn.Dense(self.classes, name="head")(x[:, 0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The dimensions of a vision transformer.

    Attributes:
        layers: Number of layers.
        width: Channels of a token.
        heads: Attention heads; must divide `width`.
        patch: Height and width of a patch; must divide `image`.
        image: Height and width of an image.
        classes: Number of classes.
    """

    layers: int
    width: int
    heads: int
    patch: int
    image: int = 224
    classes: int = 1000


SIZES: dict[str, Size] = {"vit_b16": Size(layers=12, width=768, heads=12, patch=16)}


def network(name: str, size: Size, batch: int, block_policy: str | None) -> Network:
    """Builds a vision transformer; see `image_network` for what its loss reads and returns.

    Args:
        name: The network's name.
        size: Its dimensions.
        batch: Images in a batch.
        block_policy: Wraps each layer, and only those, in `nn.remat` with this policy; None wraps
            nothing.
    """
    layer: Any = EncoderLayer
    if block_policy is not None:
        layer = nn.remat(layer, policy=checkpoint_policy(block_policy))

    def make_layer(name: str) -> nn.Module:
        made: nn.Module = layer(heads=size.heads, name=name)
        return made

    return image_network(
        name=name,
        model=VisionTransformer(
            patch=size.patch,
            width=size.width,
            layers=size.layers,
            layer=make_layer,
            classes=size.classes,
        ),
        batch=batch,
        image=(size.image, size.image, 3),
        classes=size.classes,
        batch_norm=False,
    )
