"""Inception v3 for ImageNet.

Szegedy et al., "Rethinking the Inception Architecture for Computer Vision" (2015), with the widths
and paddings of the authors' released model, which torchvision and Keras follow. Images are float32
NHWC, and batch normalisation runs in training mode. Left out are the auxiliary classifier and the
dropout before the last layer, one array of a few hundred kilobytes.
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


class ConvNormRelu(nn.Module):
    """A convolution without bias, batch normalisation, relu.

    Attributes:
        features: Output channels.
        kernel: Height and width of the kernel.
        strides: Stride in both directions.
        padding: "SAME" or "VALID".
    """

    features: int
    kernel: tuple[int, int]
    strides: int = 1
    padding: str = "SAME"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, h, w, c]` to `[batch, h', w', features]`."""
        x = nn.Conv(
            self.features,
            self.kernel,
            strides=(self.strides, self.strides),
            padding=self.padding,
            use_bias=False,
        )(x)
        return nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, epsilon=1e-3)(x))


def _conv(x: jax.Array, features: int, height: int, width: int | None = None) -> jax.Array:
    """A `ConvNormRelu` that leaves height and width of the image as they are."""
    y: jax.Array = ConvNormRelu(features, (height, width or height))(x)
    return y


def _halving_conv(x: jax.Array, features: int) -> jax.Array:
    """A 3x3 `ConvNormRelu` of stride 2 without padding."""
    y: jax.Array = ConvNormRelu(features, (3, 3), strides=2, padding="VALID")(x)
    return y


def _mean_pool(x: jax.Array) -> jax.Array:
    pooled: jax.Array = nn.avg_pool(x, (3, 3), strides=(1, 1), padding="SAME")
    return pooled


def _halving_pool(x: jax.Array) -> jax.Array:
    pooled: jax.Array = nn.max_pool(x, (3, 3), strides=(2, 2))
    return pooled


class ModuleA(nn.Module):
    """Figure 5 of the paper, at 35x35: 1x1, 5x5, twice 3x3, and a pooling.

    Attributes:
        pooled: Channels of the branch that pools.
    """

    pooled: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, h, w, c]` to `[batch, h, w, 224 + pooled]`."""
        return jnp.concatenate(
            [
                _conv(x, 64, 1),
                _conv(_conv(x, 48, 1), 64, 5),
                _conv(_conv(_conv(x, 64, 1), 96, 3), 96, 3),
                _conv(_mean_pool(x), self.pooled, 1),
            ],
            axis=-1,
        )


class ReductionA(nn.Module):
    """From 35x35 to 17x17."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, h, w, c]` to `[batch, (h - 1) / 2, (w - 1) / 2, c + 480]`."""
        return jnp.concatenate(
            [
                _halving_conv(x, 384),
                _halving_conv(_conv(_conv(x, 64, 1), 96, 3), 96),
                _halving_pool(x),
            ],
            axis=-1,
        )


class ModuleB(nn.Module):
    """Figure 6 of the paper, at 17x17: 7x7 convolutions as 1x7 and 7x1.

    Attributes:
        inner: Channels inside the branches.
    """

    inner: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, h, w, c]` to `[batch, h, w, 768]`."""
        single = _conv(_conv(_conv(x, self.inner, 1), self.inner, 1, 7), 192, 7, 1)
        double = _conv(x, self.inner, 1)
        double = _conv(_conv(double, self.inner, 7, 1), self.inner, 1, 7)
        double = _conv(_conv(double, self.inner, 7, 1), 192, 1, 7)
        return jnp.concatenate(
            [_conv(x, 192, 1), single, double, _conv(_mean_pool(x), 192, 1)], axis=-1
        )


class ReductionB(nn.Module):
    """From 17x17 to 8x8."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, h, w, c]` to `[batch, (h - 1) / 2, (w - 1) / 2, c + 512]`."""
        wide = _conv(_conv(_conv(x, 192, 1), 192, 1, 7), 192, 7, 1)
        return jnp.concatenate(
            [_halving_conv(_conv(x, 192, 1), 320), _halving_conv(wide, 192), _halving_pool(x)],
            axis=-1,
        )


class ModuleC(nn.Module):
    """Figure 7 of the paper, at 8x8: branches that split once more."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, h, w, c]` to `[batch, h, w, 2048]`."""
        single = _conv(x, 384, 1)
        double = _conv(_conv(x, 448, 1), 384, 3)
        return jnp.concatenate(
            [
                _conv(x, 320, 1),
                _conv(single, 384, 1, 3),
                _conv(single, 384, 3, 1),
                _conv(double, 384, 1, 3),
                _conv(double, 384, 3, 1),
                _conv(_mean_pool(x), 192, 1),
            ],
            axis=-1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Which modules there are. There are always two reductions between the three kinds.

    Attributes:
        pooled: For each module at 35x35, the channels of the branch that pools.
        inner: For each module at 17x17, the channels inside its branches.
        last: Number of modules at 8x8.
        image: Height and width of an image, 75 or more.
        classes: Number of classes.
    """

    pooled: tuple[int, ...] = (32, 64, 64)
    inner: tuple[int, ...] = (128, 160, 160, 192)
    last: int = 2
    image: int = 299
    classes: int = 1000


class InceptionV3(nn.Module):
    """Stem, inception modules, mean over the image, linear classifier.

    Attributes:
        size: Which modules there are.
        wrap: Turns a kind of module into the one to use in its place.
    """

    size: Size
    wrap: Callable[[type[nn.Module]], Any]

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps images `[batch, height, width, 3]` to logits `[batch, classes]`."""
        x = _halving_conv(images, 32)
        x = ConvNormRelu(32, (3, 3), padding="VALID")(x)
        x = _halving_pool(_conv(x, 64, 3))
        x = _conv(x, 80, 1)
        x = _halving_pool(ConvNormRelu(192, (3, 3), padding="VALID")(x))
        # Named here: `nn.remat` would rename the modules, and with them the parameters.
        for index, pooled in enumerate(self.size.pooled):
            x = self.wrap(ModuleA)(pooled=pooled, name=f"a{index}")(x)
        x = self.wrap(ReductionA)(name="reduction_a")(x)
        for index, inner in enumerate(self.size.inner):
            x = self.wrap(ModuleB)(inner=inner, name=f"b{index}")(x)
        x = self.wrap(ReductionB)(name="reduction_b")(x)
        for index in range(self.size.last):
            x = self.wrap(ModuleC)(name=f"c{index}")(x)
        x = jnp.mean(x, axis=(1, 2))
        return nn.Dense(self.size.classes, name="head")(x)


SIZES: dict[str, Size] = {"inception_v3": Size()}


def network(name: str, size: Size, batch: int, block_policy: str | None) -> Network:
    """Builds an Inception v3; see `image_network` for what its loss reads and returns.

    Args:
        name: The network's name.
        size: Its dimensions.
        batch: Images in a batch.
        block_policy: Wraps each inception module, and only those, in `nn.remat` with this policy;
            None wraps nothing.
    """

    def wrap(module: type[nn.Module]) -> Any:
        if block_policy is None:
            return module
        return nn.remat(module, policy=checkpoint_policy(block_policy))

    return image_network(
        name=name,
        model=InceptionV3(size=size, wrap=wrap),
        batch=batch,
        image=(size.image, size.image, 3),
        classes=size.classes,
    )
