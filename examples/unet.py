"""A U-Net in flax.linen that denoises handwritten digits.

python examples/unet.py
python examples/unet.py --width 64 --depth 4 --size 256 --batch 64 --device h200
"""

import functools

import flax.linen as nn
import jax
import numpy as np
from screen import flags, screen
from sklearn.datasets import load_digits

import remat_opt


class Stage(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.silu(nn.GroupNorm(4)(nn.Conv(self.features, (3, 3))(x)))
        return x


class UNet(nn.Module):
    width: int
    depth: int
    stage: type = Stage

    @nn.compact
    def __call__(self, x):
        across = []
        for level in range(self.depth):
            x = self.stage(self.width * 2**level, name=f"Stage_{level}")(x)
            across.append(x)
            x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        x = self.stage(self.width * 2**self.depth, name=f"Stage_{self.depth}")(x)
        for level in reversed(range(self.depth)):
            x = nn.ConvTranspose(self.width * 2**level, (2, 2), strides=(2, 2))(x)
            x = jax.numpy.concatenate([x, across[level]], axis=-1)
            x = self.stage(self.width * 2**level, name=f"Stage_{2 * self.depth - level}")(x)
        return nn.Conv(1, (1, 1))(x)


def main():
    options = flags(__doc__, width=8, depth=2, size=16, batch=32)
    digits = load_digits()
    shape = (len(digits.images), options.size, options.size, 1)
    images = np.asarray(digits.images[..., None] / 16, np.float32)
    images = np.asarray(jax.image.resize(images, shape, "linear"))
    random = np.random.default_rng(0)
    noise = random.normal(size=(options.steps, options.batch, *shape[1:])).astype(np.float32) / 2
    draws = random.integers(len(images), size=(options.steps, options.batch))
    batches = [(images[draw] + one, images[draw]) for draw, one in zip(draws, noise, strict=True)]

    def loss_of(model):
        def loss_fn(params, noisy, images):
            return ((model.apply(params, noisy) - images) ** 2).mean()

        return loss_fn

    network = functools.partial(UNet, options.width, options.depth)
    # The one line.
    optimal = remat_opt.optimal_remat(budget=options.budget, device=options.device)
    loss_fn = optimal(loss_of(network()))
    dots = jax.checkpoint_policies.dots_saveable
    by_hand = {
        "nn.remat around every stage": loss_of(network(stage=nn.remat(Stage))),
        "... with dots_saveable": loss_of(network(stage=nn.remat(Stage, policy=dots))),
    }
    batch = images[np.arange(options.batch) % len(images)]
    params = jax.jit(network().init)(jax.random.key(0), images[:1])
    title = f"U-Net {options.depth} levels deep, {options.batch} digits of {shape[1:3]}"
    screen(title, loss_fn, (params, batch, batch), by_hand, batches, options)


if __name__ == "__main__":
    main()
