"""U-Net for segmentation.

Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image Segmentation" (2015), as in
its Figure 1: convolutions without padding, so that an image of 572x572 has labels for 388x388, and
no normalisation. The features of the way down are cropped and concatenated on the way up. Images
are float32 NHWC. Dropout at the bottom and the weighting of the loss by pixel are left out.
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


class DoubleConvolution(nn.Module):
    """Two 3x3 convolutions without padding, each with a relu.

    Attributes:
        width: Channels of both.
    """

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, h, w, c]` to `[batch, h - 4, w - 4, width]`."""
        for _ in range(2):
            x = nn.relu(nn.Conv(self.width, (3, 3), padding="VALID")(x))
        return x


def _crop(x: jax.Array, height: int, width: int) -> jax.Array:
    """Returns the middle `[batch, height, width, c]` of `[batch, h, w, c]`."""
    top, left = (x.shape[1] - height) // 2, (x.shape[2] - width) // 2
    return x[:, top : top + height, left : left + width]


class UNet(nn.Module):
    """Down by poolings, up again by transposed convolutions, a 1x1 convolution at the end.

    Attributes:
        widths: Channels of the stages on the way down; the last one is the bottom.
        stage: Makes the two convolutions of a stage from `width=` and `name=`.
        classes: Number of logits of a pixel.
    """

    widths: tuple[int, ...]
    stage: Callable[..., nn.Module]
    classes: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps images `[batch, h, w, c]` to logits `[batch, h', w', classes]`."""
        *above, bottom = self.widths
        skips = []
        x = images
        # Named here: `nn.remat` would rename the stages, and with them the parameters.
        for level, width in enumerate(above):
            x = self.stage(width=width, name=f"down{level}")(x)
            skips.append(x)
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = self.stage(width=bottom, name="bottom")(x)
        for level, width in reversed(list(enumerate(above))):
            x = nn.ConvTranspose(width, (2, 2), strides=(2, 2), name=f"widen{level}")(x)
            skip = _crop(skips[level], x.shape[1], x.shape[2])
            x = jnp.concatenate([skip, x], axis=-1)
            x = self.stage(width=width, name=f"up{level}")(x)
        return nn.Conv(self.classes, (1, 1), name="head")(x)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The dimensions of a U-Net.

    Attributes:
        widths: Channels of the stages on the way down; the last one is the bottom.
        image: Height and width of an image. After each stage on the way down they must be even.
        channels: Channels of an image.
        classes: Number of classes.
    """

    widths: tuple[int, ...] = (64, 128, 256, 512, 1024)
    image: int = 572
    channels: int = 1
    classes: int = 2

    @property
    def labelled(self) -> int:
        """Height and width of the part of an image that has labels."""
        side = self.image
        for _ in self.widths[1:]:
            side = (side - 4) // 2
        side -= 4
        for _ in self.widths[1:]:
            side = 2 * side - 4
        return side


SIZES: dict[str, Size] = {"unet": Size()}


def network(name: str, size: Size, batch: int, block_policy: str | None) -> Network:
    """Builds a U-Net; see `image_network` for what its loss reads and returns.

    Args:
        name: The network's name.
        size: Its dimensions.
        batch: Images in a batch.
        block_policy: Wraps the two convolutions of each stage, and only those, in `nn.remat` with
            this policy; None wraps nothing.
    """
    stage: Any = DoubleConvolution
    if block_policy is not None:
        stage = nn.remat(stage, policy=checkpoint_policy(block_policy))
    return image_network(
        name=name,
        model=UNet(widths=size.widths, stage=stage, classes=size.classes),
        batch=batch,
        image=(size.image, size.image, size.channels),
        classes=size.classes,
        labels=(size.labelled, size.labelled),
        batch_norm=False,
    )
