"""EfficientNets for ImageNet: inverted bottlenecks with depthwise convolutions.

Tan & Le, "EfficientNet" (2019): squeeze and excitation inside the blocks, swish everywhere, and
stochastic depth. Images are float32 NHWC, and batch normalisation runs in training mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks.networks.images import image_network
from benchmarks.networks.record import Network, checkpoint_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Blocks of one kind.

    Attributes:
        blocks: How many.
        width: Channels that each gives.
        expand: How many times wider a block is inside.
        kernel: Height and width of the depthwise kernel.
        strides: Stride of the first block.
    """

    blocks: int
    width: int
    expand: int
    kernel: int
    strides: int


def _norm() -> nn.BatchNorm:
    """Batch normalisation over batch, height and width, with the batch's own statistics."""
    return nn.BatchNorm(use_running_average=False, momentum=0.99, epsilon=1e-3)


class InvertedBottleneck(nn.Module):
    """Widen, convolve each channel by itself, weigh the channels, narrow again.

    Attributes:
        stage: What kind of block.
        strides: Stride of the depthwise convolution.
        drop: How often the block is left out, for each image by itself.
    """

    stage: Stage
    strides: int
    drop: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, h, w, c]` to `[batch, h / strides, w / strides, stage.width]`."""
        stage, narrow = self.stage, x.shape[-1]
        wide = stage.expand * narrow
        y = x
        if stage.expand > 1:
            y = nn.swish(_norm()(nn.Conv(wide, (1, 1), use_bias=False)(y)))
        y = nn.Conv(
            wide,
            (stage.kernel, stage.kernel),
            strides=(self.strides, self.strides),
            feature_group_count=wide,
            use_bias=False,
        )(y)
        y = nn.swish(_norm()(y))
        squeezed = jnp.mean(y, axis=(1, 2), keepdims=True)
        squeezed = nn.swish(nn.Conv(max(1, narrow // 4), (1, 1), name="squeeze")(squeezed))
        y = y * nn.sigmoid(nn.Conv(wide, (1, 1), name="excite")(squeezed))
        y = _norm()(nn.Conv(stage.width, (1, 1), use_bias=False)(y))
        if x.shape == y.shape:
            y = x + nn.Dropout(self.drop, broadcast_dims=(1, 2, 3), deterministic=False)(y)
        return y


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What tells one EfficientNet from another.

    Attributes:
        stages: Kinds of blocks, in their order.
        stem: Channels of the first convolution.
        head: Channels of the last convolution.
        image: Height and width of an image.
        classes: Number of classes.
        dropout: Share of the last features that dropout sets to zero.
        drop: How often the last block is left out; those before it less, in proportion.
    """

    stages: tuple[Stage, ...] = (
        Stage(blocks=1, width=16, expand=1, kernel=3, strides=1),
        Stage(blocks=2, width=24, expand=6, kernel=3, strides=2),
        Stage(blocks=2, width=40, expand=6, kernel=5, strides=2),
        Stage(blocks=3, width=80, expand=6, kernel=3, strides=2),
        Stage(blocks=3, width=112, expand=6, kernel=5, strides=1),
        Stage(blocks=4, width=192, expand=6, kernel=5, strides=2),
        Stage(blocks=1, width=320, expand=6, kernel=3, strides=1),
    )
    stem: int = 32
    head: int = 1280
    image: int = 224
    classes: int = 1000
    dropout: float = 0.2
    drop: float = 0.2


class EfficientNet(nn.Module):
    """Stem, blocks, a last convolution, mean over the image, linear classifier.

    Attributes:
        size: Its dimensions.
        block: Makes one block from `stage=`, `strides=`, `drop=` and `name=`.
    """

    size: Size
    block: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps images `[batch, height, width, 3]` to logits `[batch, classes]`."""
        size = self.size
        x = nn.Conv(size.stem, (3, 3), strides=(2, 2), use_bias=False, name="stem")(images)
        x = nn.swish(_norm()(x))
        total = math.fsum(stage.blocks for stage in size.stages)
        done = 0
        for stage in size.stages:
            for index in range(stage.blocks):
                # Named here: `nn.remat` would rename the blocks, and with them the parameters.
                x = self.block(
                    stage=stage,
                    strides=stage.strides if index == 0 else 1,
                    drop=size.drop * done / total,
                    name=f"block{done}",
                )(x)
                done += 1
        x = nn.swish(_norm()(nn.Conv(size.head, (1, 1), use_bias=False, name="last")(x)))
        x = jnp.mean(x, axis=(1, 2))
        x = nn.Dropout(size.dropout, deterministic=False)(x)
        return nn.Dense(size.classes, name="head")(x)


SIZES: dict[str, Size] = {"efficientnet_b0": Size()}


def network(name: str, size: Size, batch: int, block_policy: str | None) -> Network:
    """Builds an EfficientNet; see `image_network` for what its loss reads and gives.

    Args:
        name: The network's name.
        size: Its dimensions.
        batch: Images in a batch.
        block_policy: Wraps each inverted bottleneck, and only those, in `nn.remat` with this
            policy; None wraps nothing.
    """
    block: Any = InvertedBottleneck
    if block_policy is not None:
        block = nn.remat(block, policy=checkpoint_policy(block_policy))
    return image_network(
        name=name,
        model=EfficientNet(size=size, block=block),
        batch=batch,
        image=(size.image, size.image, 3),
        classes=size.classes,
        dropout=True,
    )
