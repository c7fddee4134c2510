"""A diffusion U-Net: it finds the noise that was mixed into an image.

Ho et al., "Denoising Diffusion Probabilistic Models" (2020): residual blocks with group
normalisation and SiLU that read the time, self-attention at low resolutions, features of the way
down concatenated on the way up, dropout. How much noise there is at a time follows a cosine, as in
Nichol & Dhariwal (2021). Images are float32 NHWC; the loss is the mean squared error of the noise.
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
    """The dimensions of a diffusion U-Net.

    Attributes:
        widths: Channels of the levels, from the full resolution down; each level has half the
            height and width of the one before.
        blocks: Residual blocks of a level on the way down; there is one more on the way up.
        attention: Levels whose blocks have self-attention.
        heads: Attention heads; must divide the widths of those levels.
        groups: Groups of channels that are normalised together; must divide every width.
        image: Height and width of an image.
        dropout: Share of the values that dropout sets to zero.
    """

    widths: tuple[int, ...] = (128, 256, 256)
    blocks: int = 1
    attention: tuple[int, ...] = (2,)
    heads: int = 4
    groups: int = 32
    image: int = 64
    dropout: float = 0.1


class SelfAttention(nn.Module):
    """A norm and attention between all pixels, beside a shortcut.

    Attributes:
        size: The U-Net's dimensions.
    """

    size: Size

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, h, w, c]` to the same shape."""
        batch, height, width, channels = x.shape
        y = nn.GroupNorm(self.size.groups)(x).reshape(batch, height * width, channels)
        y = nn.MultiHeadDotProductAttention(num_heads=self.size.heads)(y)
        return x + y.reshape(x.shape)


class Block(nn.Module):
    """Two convolutions beside a shortcut, and self-attention where asked for.

    Attributes:
        size: The U-Net's dimensions.
        width: Channels that it gives.
        attention: Whether self-attention follows.
    """

    size: Size
    width: int
    attention: bool

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        """Maps `[batch, h, w, c]` and times `[batch, features]` to `[batch, h, w, width]`."""
        y = nn.silu(nn.GroupNorm(self.size.groups)(x))
        y = nn.Conv(self.width, (3, 3))(y)
        y = y + nn.Dense(self.width, name="time")(nn.silu(time))[:, None, None]
        y = nn.silu(nn.GroupNorm(self.size.groups)(y))
        y = nn.Dropout(self.size.dropout, deterministic=False)(y)
        y = nn.Conv(self.width, (3, 3))(y)
        if x.shape != y.shape:
            x = nn.Conv(self.width, (1, 1), name="projection")(x)
        x = x + y
        return SelfAttention(self.size)(x) if self.attention else x


def _sinusoids(times: jax.Array, width: int) -> jax.Array:
    """Returns sines and cosines of times from 0 to 1, `[batch, width]`."""
    frequencies = jnp.exp(-math.log(10_000) * jnp.arange(width // 2) / (width // 2))
    angles = 1000 * times[:, None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class DiffusionUNet(nn.Module):
    """Down by strides, up again by repeating pixels, a 3x3 convolution at the end.

    Attributes:
        size: Its dimensions.
        block: Makes one block from `size=`, `width=`, `attention=` and `name=`.
    """

    size: Size
    block: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, images: jax.Array, times: jax.Array) -> jax.Array:
        """Maps images `[batch, h, w, 3]` and times `[batch]` to noise `[batch, h, w, 3]`."""
        size = self.size
        base, last = size.widths[0], len(size.widths) - 1

        def block(level: int, name: str, *, attention: bool) -> nn.Module:
            # Named here: `nn.remat` would rename the blocks, and with them the parameters.
            return self.block(size=size, width=size.widths[level], attention=attention, name=name)

        time = nn.Dense(4 * base, name="time0")(_sinusoids(times, base))
        time = nn.Dense(4 * base, name="time1")(nn.silu(time))
        x = nn.Conv(base, (3, 3), name="stem")(images)
        skips = [x]
        for level, width in enumerate(size.widths):
            for index in range(size.blocks):
                attention = level in size.attention
                x = block(level, f"down{level}_{index}", attention=attention)(x, time)
                skips.append(x)
            if level < last:
                x = nn.Conv(width, (3, 3), strides=(2, 2), name=f"narrow{level}")(x)
                skips.append(x)
        x = block(last, "middle0", attention=True)(x, time)
        x = block(last, "middle1", attention=False)(x, time)
        for level, width in reversed(list(enumerate(size.widths))):
            for index in range(size.blocks + 1):
                x = jnp.concatenate([x, skips.pop()], axis=-1)
                attention = level in size.attention
                x = block(level, f"up{level}_{index}", attention=attention)(x, time)
            if level > 0:
                batch, height, across, channels = x.shape
                x = jax.image.resize(x, (batch, 2 * height, 2 * across, channels), "nearest")
                x = nn.Conv(width, (3, 3), name=f"widen{level}")(x)
        x = nn.silu(nn.GroupNorm(size.groups, name="norm")(x))
        return nn.Conv(images.shape[-1], (3, 3), name="head")(x)


SIZES: dict[str, Size] = {"diffusion_unet": Size()}


def network(name: str, size: Size, batch: int, block_policy: str | None) -> Network:
    """Builds a diffusion U-Net with the mean squared error of the noise that it finds.

    `loss_fn(params, batch)` reads `batch["images"]` and `batch["noise"]`, both float32
    `[batch, image, image, 3]`, `batch["times"]`, float32 `[batch]` from 0 to 1, and
    `batch["dropout_key"]`.

    Args:
        name: The network's name.
        size: Its dimensions.
        batch: Images in a batch.
        block_policy: Wraps each residual block with its attention, and only those, in `nn.remat`
            with this policy; None wraps nothing.
    """
    block: Any = Block
    if block_policy is not None:
        block = nn.remat(block, policy=checkpoint_policy(block_policy))
    model = DiffusionUNet(size=size, block=block)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        angles = (math.pi / 2) * batch["times"][:, None, None, None]
        noisy = jnp.cos(angles) * batch["images"] + jnp.sin(angles) * batch["noise"]
        found: Any = model.apply(
            {"params": params}, noisy, batch["times"], rngs={"dropout": batch["dropout_key"]}
        )
        return jnp.mean(jnp.square(found - batch["noise"]))

    def make_arguments(seed: int) -> tuple[Any, Any]:
        init_key, image_key, noise_key, time_key = jax.random.split(jax.random.key(seed), 4)
        images = jax.random.normal(image_key, (batch, size.image, size.image, 3))
        times = jax.random.uniform(time_key, (batch,))
        variables = model.init(init_key, images[:1], times[:1])
        return variables["params"], {
            "images": images,
            "noise": jax.random.normal(noise_key, images.shape),
            "times": times,
            "dropout_key": jax.random.key(seed + 1),
        }

    return Network(
        name=name,
        loss_fn=loss_fn,
        has_aux=False,
        make_arguments=make_arguments,
    )
