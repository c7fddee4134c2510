"""ResNets for ImageNet, as the usual flax example writes them.

He et al., "Deep Residual Learning for Image Recognition" (2015). The bottleneck block is the
variant called v1.5: the stride sits in the 3x3 convolution, not in the first 1x1. Images are
float32 NHWC; batch normalisation runs in training mode, so its running averages are an auxiliary
output.
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


def _conv(features: int, kernel: int, strides: int = 1, name: str | None = None) -> nn.Conv:
    """A convolution without bias, as a normalisation follows it; "SAME" padding."""
    return nn.Conv(
        features, (kernel, kernel), strides=(strides, strides), use_bias=False, name=name
    )


def _norm(name: str | None = None, *, zero_scale: bool = False) -> nn.BatchNorm:
    """Batch normalisation over batch, height and width, with the batch's own statistics."""
    scale_init = nn.initializers.zeros if zero_scale else nn.initializers.ones
    return nn.BatchNorm(
        use_running_average=False, momentum=0.9, epsilon=1e-5, scale_init=scale_init, name=name
    )


def _max_pool(x: jax.Array) -> jax.Array:
    """Halves `[batch, h, w, c]`: the maximum of 3x3 windows, every other one."""
    # The padding matters to what is measured here: XLA for NVIDIA needs 350 MiB less at batch 64
    # with one row on each side than with "SAME", which puts one at the end only.
    pooled: jax.Array = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
    return pooled


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut: the block of ResNet-18 and -34.

    Attributes:
        width: Channels of both convolutions.
        strides: Stride of the first one.
    """

    width: int
    strides: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, h, w, c]` to `[batch, h / strides, w / strides, width]`."""
        shortcut = x
        y = nn.relu(_norm()(_conv(self.width, 3, self.strides)(x)))
        y = _norm(zero_scale=True)(_conv(self.width, 3)(y))
        if shortcut.shape != y.shape:
            shortcut = _conv(self.width, 1, self.strides, name="projection")(shortcut)
            shortcut = _norm(name="projection_norm")(shortcut)
        return nn.relu(shortcut + y)


class BottleneckBlock(nn.Module):
    """1x1, 3x3, 1x1 convolutions beside a shortcut: the block of ResNet-50 and deeper.

    Attributes:
        width: Channels of the first two convolutions; the last one has four times as many.
        strides: Stride of the 3x3 convolution.
    """

    width: int
    strides: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, h, w, c]` to `[batch, h / strides, w / strides, 4 * width]`."""
        shortcut = x
        y = nn.relu(_norm()(_conv(self.width, 1)(x)))
        y = nn.relu(_norm()(_conv(self.width, 3, self.strides)(y)))
        # A zero scale makes every block start as the identity, as in Goyal et al. (2017).
        y = _norm(zero_scale=True)(_conv(4 * self.width, 1)(y))
        if shortcut.shape != y.shape:
            shortcut = _conv(4 * self.width, 1, self.strides, name="projection")(shortcut)
            shortcut = _norm(name="projection_norm")(shortcut)
        return nn.relu(shortcut + y)


class ResNet(nn.Module):
    """Stem, four stages of blocks, mean over the image, linear classifier.

    Attributes:
        blocks: Number of blocks of each stage; every stage but the first halves the image.
        block: Makes one block from `width=`, `strides=` and `name=`.
        classes: Number of logits.
    """

    blocks: tuple[int, ...]
    block: Callable[..., nn.Module]
    classes: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps images `[batch, height, width, 3]` to logits `[batch, classes]`."""
        # Three rows and columns on each side, as in the paper; "SAME" would give two and three.
        x = nn.Conv(64, (7, 7), strides=(2, 2), padding=3, use_bias=False, name="stem")(images)
        x = nn.relu(_norm(name="stem_norm")(x))
        x = _max_pool(x)
        for stage, count in enumerate(self.blocks):
            for index in range(count):
                block = self.block(
                    width=64 * 2**stage,
                    strides=2 if stage > 0 and index == 0 else 1,
                    # Named here: `nn.remat` would rename the blocks, and with them the parameters.
                    name=f"stage{stage}_block{index}",
                )
                x = block(x)
        x = jnp.mean(x, axis=(1, 2))
        return nn.Dense(self.classes, name="head")(x)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What distinguishes one ResNet from another.

    Attributes:
        blocks: Number of blocks of each stage.
        block: The kind of block.
        image: Height and width of an image.
        classes: Number of classes.
    """

    blocks: tuple[int, ...]
    block: type[nn.Module]
    image: int = 224
    classes: int = 1000


SIZES: dict[str, Size] = {
    "resnet18": Size(blocks=(2, 2, 2, 2), block=BasicBlock),
    "resnet34": Size(blocks=(3, 4, 6, 3), block=BasicBlock),
    "resnet50": Size(blocks=(3, 4, 6, 3), block=BottleneckBlock),
    "resnet101": Size(blocks=(3, 4, 23, 3), block=BottleneckBlock),
    "resnet152": Size(blocks=(3, 8, 36, 3), block=BottleneckBlock),
}


def network(name: str, size: Size, batch: int, block_policy: str | None) -> Network:
    """Builds a ResNet; see `image_network` for what its loss reads and returns.

    Args:
        name: The network's name.
        size: Its dimensions.
        batch: Images in a batch.
        block_policy: Wraps each residual block, and only those, in `nn.remat` with this policy;
            None wraps nothing.
    """
    block: Any = size.block
    if block_policy is not None:
        block = nn.remat(block, policy=checkpoint_policy(block_policy))
    return image_network(
        name=name,
        model=ResNet(blocks=size.blocks, block=block, classes=size.classes),
        batch=batch,
        image=(size.image, size.image, 3),
        classes=size.classes,
    )
