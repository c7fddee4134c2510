"""A residual network in flax.linen on handwritten digits.

python examples/resnet.py
python examples/resnet.py --width 256 --blocks 50 --size 56 --batch 256 --device h200
"""

import functools

import flax.linen as nn
import jax
import numpy as np
import optax
from screen import flags, screen
from sklearn.datasets import load_digits

import remat_opt


class Block(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x):
        norm = functools.partial(nn.BatchNorm, use_running_average=False, momentum=0.9)
        y = nn.relu(norm()(nn.Conv(self.features, (3, 3), use_bias=False)(x)))
        y = norm(scale_init=nn.initializers.zeros)(
            nn.Conv(self.features, (3, 3), use_bias=False)(y)
        )
        return nn.relu(x + y)


class ResNet(nn.Module):
    features: int
    blocks: int
    block: type = Block

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(self.features, (3, 3))(x)
        for number in range(self.blocks):
            x = self.block(self.features, name=f"Block_{number}")(x)
        return nn.Dense(10)(x.mean((1, 2)))


def main():
    options = flags(__doc__, width=16, blocks=6, size=16, batch=64)
    digits = load_digits()
    shape = (len(digits.images), options.size, options.size, 1)
    images = np.asarray(digits.images[..., None] / 16, np.float32)
    images = np.asarray(jax.image.resize(images, shape, "linear"))
    labels = digits.target.astype(np.int32)
    draws = np.random.default_rng(0).integers(len(images), size=(options.steps, options.batch))
    batches = [(images[draw], labels[draw]) for draw in draws]

    def loss_of(model):
        def loss_fn(params, batch_stats, images, labels):
            logits, updates = model.apply(
                {"params": params, "batch_stats": batch_stats}, images, mutable="batch_stats"
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), updates["batch_stats"]

        return loss_fn

    network = functools.partial(ResNet, options.width, options.blocks)
    # The one line.
    optimal = remat_opt.optimal_remat(has_aux=True, budget=options.budget, device=options.device)
    loss_fn = optimal(loss_of(network()))
    dots = jax.checkpoint_policies.dots_saveable
    by_hand = {
        "nn.remat around every block": loss_of(network(block=nn.remat(Block))),
        "... with dots_saveable": loss_of(network(block=nn.remat(Block, policy=dots))),
    }
    variables = jax.jit(network().init)(jax.random.key(0), images[:1])
    batch = (images[: options.batch], labels[: options.batch])
    example = (variables["params"], variables["batch_stats"], *batch)
    title = f"ResNet of {options.blocks} blocks, {options.batch} digits of {shape[1:3]}"
    screen(title, loss_fn, example, by_hand, batches, options, has_aux=True)


if __name__ == "__main__":
    main()
