"""DeepLab v3+ for segmentation: a ResNet with dilation, pyramids of dilations, a small decoder.

Chen et al., "Encoder-Decoder with Atrous Separable Convolution for Semantic Image Segmentation"
(2018), on a ResNet-50 whose last stage dilates in place of a stride, so that features are a
sixteenth of the image. Images of 513 px, as in the paper, float32 NHWC; batch normalisation runs in
training mode.
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


class ConvNorm(nn.Module):
    """A convolution without bias, batch normalisation, and a relu where asked for.

    Attributes:
        width: Channels.
        kernel: Height and width of the kernel.
        strides: Stride in both directions.
        dilation: Dilation in both directions.
        relu: Whether a relu follows.
    """

    width: int
    kernel: int = 1
    strides: int = 1
    dilation: int = 1
    relu: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, h, w, c]` to `[batch, h / strides, w / strides, width]`."""
        x = nn.Conv(
            self.width,
            (self.kernel, self.kernel),
            strides=(self.strides, self.strides),
            kernel_dilation=(self.dilation, self.dilation),
            use_bias=False,
        )(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.9, epsilon=1e-5)(x)
        return nn.relu(x) if self.relu else x


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions beside a shortcut.

    Attributes:
        width: Channels of the first two convolutions; the last one has four times as many.
        strides: Stride of the 3x3 convolution.
        dilation: Its dilation.
    """

    width: int
    strides: int = 1
    dilation: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, h, w, c]` to `[batch, h / strides, w / strides, 4 * width]`."""
        y = ConvNorm(self.width)(x)
        y = ConvNorm(self.width, 3, self.strides, self.dilation)(y)
        y = ConvNorm(4 * self.width, relu=False)(y)
        if x.shape != y.shape:
            x = ConvNorm(4 * self.width, strides=self.strides, relu=False, name="projection")(x)
        return nn.relu(x + y)


def _resize(x: jax.Array, like: tuple[int, ...]) -> jax.Array:
    """Scales `[batch, h, w, c]` to another height and width, bilinearly."""
    return jax.image.resize(x, (x.shape[0], *like, x.shape[3]), "bilinear")


class Pyramid(nn.Module):
    """Convolutions with several dilations and the mean of the image, side by side.

    Attributes:
        width: Channels of each, and of what comes out.
        dilations: Of the 3x3 convolutions.
        dropout: Share of what comes out that dropout sets to zero.
    """

    width: int
    dilations: tuple[int, ...]
    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, h, w, c]` to `[batch, h, w, width]`."""
        parts = [ConvNorm(self.width)(x)]
        parts += [ConvNorm(self.width, 3, dilation=dilation)(x) for dilation in self.dilations]
        mean = ConvNorm(self.width, name="image")(jnp.mean(x, axis=(1, 2), keepdims=True))
        parts.append(_resize(mean, x.shape[1:3]))
        x = ConvNorm(self.width, name="join")(jnp.concatenate(parts, axis=-1))
        return nn.Dropout(self.dropout, deterministic=False)(x)


class Decoder(nn.Module):
    """Joins the pyramid with early features of the image.

    Attributes:
        width: Channels.
        early: Channels that the early features are narrowed to.
    """

    width: int
    early: int

    @nn.compact
    def __call__(self, x: jax.Array, early: jax.Array) -> jax.Array:
        """Maps `[batch, h, w, c]` and `[batch, h', w', c']` to `[batch, h', w', width]`."""
        early = ConvNorm(self.early)(early)
        x = jnp.concatenate([_resize(x, early.shape[1:3]), early], axis=-1)
        return ConvNorm(self.width, 3)(ConvNorm(self.width, 3)(x))


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The dimensions of a DeepLab.

    Attributes:
        blocks: Number of blocks of each stage of the ResNet.
        base: Channels of the stem; each stage has twice as many as the one before.
        dilations: Of the pyramid.
        pyramid: Channels of pyramid and decoder.
        early: Channels of the early features in the decoder.
        image: Height and width of an image.
        classes: Number of classes.
    """

    blocks: tuple[int, int, int, int] = (3, 4, 6, 3)
    base: int = 64
    dilations: tuple[int, ...] = (6, 12, 18)
    pyramid: int = 256
    early: int = 48
    image: int = 513
    classes: int = 21


class DeepLab(nn.Module):
    """ResNet, pyramid, decoder, and logits as large as the image.

    Attributes:
        size: Its dimensions.
        wrap: Turns a kind of block into the one to use in its place.
    """

    size: Size
    wrap: Callable[[type[nn.Module]], Any]

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps images `[batch, h, w, 3]` to logits `[batch, h, w, classes]`."""
        size = self.size
        x = ConvNorm(size.base, 7, 2, name="stem")(images)
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        early = x
        for stage, count in enumerate(size.blocks):
            for index in range(count):
                # Named here: `nn.remat` would rename the blocks, and with them the parameters.
                x = self.wrap(Bottleneck)(
                    width=size.base * 2**stage,
                    strides=2 if stage in (1, 2) and index == 0 else 1,
                    dilation=2 if stage == 3 else 1,
                    name=f"stage{stage}_block{index}",
                )(x)
            if stage == 0:
                early = x
        x = self.wrap(Pyramid)(size.pyramid, size.dilations, 0.1, name="pyramid")(x)
        x = self.wrap(Decoder)(size.pyramid, size.early, name="decoder")(x, early)
        x = nn.Conv(size.classes, (1, 1), name="head")(x)
        return _resize(x, images.shape[1:3])


SIZES: dict[str, Size] = {"deeplab": Size()}


def network(name: str, size: Size, batch: int, block_policy: str | None) -> Network:
    """Builds a DeepLab; see `image_network` for what its loss reads and gives.

    Args:
        name: The network's name.
        size: Its dimensions.
        batch: Images in a batch.
        block_policy: Wraps each residual block, the pyramid and the decoder, and only those, in
            `nn.remat` with this policy; None wraps nothing.
    """

    def wrap(module: type[nn.Module]) -> Any:
        if block_policy is None:
            return module
        return nn.remat(module, policy=checkpoint_policy(block_policy))

    return image_network(
        name=name,
        model=DeepLab(size=size, wrap=wrap),
        batch=batch,
        image=(size.image, size.image, 3),
        classes=size.classes,
        labels=(size.image, size.image),
        dropout=True,
    )
