"""DenseNets for ImageNet: every layer reads the features of all layers before it in its block.

Huang et al., "Densely Connected Convolutional Networks" (2017), the variant with bottlenecks and
compression (DenseNet-BC). Images are float32 NHWC, and batch normalisation runs in training mode.

A layer takes the features of its block one by one and concatenates them itself. Under a checkpoint
the long concatenations, whose bytes grow with the square of a block's length, are then made again
rather than kept: Pleiss et al., "Memory-Efficient Implementation of DenseNets" (2017).
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


def _conv(features: int, kernel: int) -> nn.Conv:
    """A convolution without bias; "SAME" padding."""
    return nn.Conv(features, (kernel, kernel), use_bias=False)


def _norm(name: str | None = None) -> nn.BatchNorm:
    """Batch normalisation over batch, height and width, with the batch's own statistics."""
    return nn.BatchNorm(use_running_average=False, momentum=0.9, epsilon=1e-5, name=name)


class DenseLayer(nn.Module):
    """Normalise and convolve 1x1, normalise and convolve 3x3.

    Attributes:
        growth: Channels that the layer adds; the 1x1 convolution has four times as many.
    """

    growth: int

    @nn.compact
    def __call__(self, features: list[jax.Array]) -> jax.Array:
        """Maps arrays `[batch, h, w, any]` to one `[batch, h, w, growth]`."""
        x = jnp.concatenate(features, axis=-1)
        x = _conv(4 * self.growth, 1)(nn.relu(_norm()(x)))
        y: jax.Array = _conv(self.growth, 3)(nn.relu(_norm()(x)))
        return y


class Transition(nn.Module):
    """Halves channels, height and width between two blocks."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, h, w, c]` to `[batch, h / 2, w / 2, c / 2]`."""
        x = _conv(x.shape[-1] // 2, 1)(nn.relu(_norm()(x)))
        pooled: jax.Array = nn.avg_pool(x, (2, 2), strides=(2, 2))
        return pooled


class DenseNet(nn.Module):
    """Stem, blocks of dense layers with transitions between them, mean, linear classifier.

    Attributes:
        layers: Number of layers of each block.
        growth: Channels that every layer adds.
        layer: Makes one layer from `growth=` and `name=`.
        classes: Number of logits.
    """

    layers: tuple[int, ...]
    growth: int
    layer: Callable[..., nn.Module]
    classes: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps images `[batch, height, width, 3]` to logits `[batch, classes]`."""
        x = nn.Conv(
            2 * self.growth, (7, 7), strides=(2, 2), padding=3, use_bias=False, name="stem"
        )(images)
        x = nn.relu(_norm(name="stem_norm")(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for block, count in enumerate(self.layers):
            if block > 0:
                x = Transition(name=f"transition{block}")(x)
            features = [x]
            for index in range(count):
                # Named here: `nn.remat` would rename the layers, and with them the parameters.
                layer = self.layer(growth=self.growth, name=f"block{block}_layer{index}")
                features.append(layer(features))
            x = jnp.concatenate(features, axis=-1)
        x = jnp.mean(nn.relu(_norm(name="final_norm")(x)), axis=(1, 2))
        return nn.Dense(self.classes, name="head")(x)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What distinguishes one DenseNet from another.

    Attributes:
        layers: Number of layers of each block.
        growth: Channels that every layer adds; the stem has twice as many.
        image: Height and width of an image.
        classes: Number of classes.
    """

    layers: tuple[int, ...]
    growth: int = 32
    image: int = 224
    classes: int = 1000


SIZES: dict[str, Size] = {"densenet121": Size(layers=(6, 12, 24, 16))}


def network(name: str, size: Size, batch: int, block_policy: str | None) -> Network:
    """Builds a DenseNet; see `image_network` for what its loss reads and returns.

    Args:
        name: The network's name.
        size: Its dimensions.
        batch: Images in a batch.
        block_policy: Wraps each dense layer, and only those, in `nn.remat` with this policy; None
            wraps nothing.
    """
    layer: Any = DenseLayer
    if block_policy is not None:
        layer = nn.remat(layer, policy=checkpoint_policy(block_policy))
    return image_network(
        name=name,
        model=DenseNet(layers=size.layers, growth=size.growth, layer=layer, classes=size.classes),
        batch=batch,
        image=(size.image, size.image, 3),
        classes=size.classes,
    )
