"""Trains a small network twice: as written, and with one line added to its loss.

The line is the decorator on ``loss_fn``. Both runs must learn the same, and the second must stay
within its memory budget, by the compiler's own figures. On two idle cores this takes less than a
minute:

    python examples/quickstart.py
"""

import argparse
import sys

import flax.linen as nn
import jax
import numpy as np
import optax
from screen import screen
from sklearn.datasets import load_digits

import remat_opt

STEPS, BATCH_SIZE = 30, 64


# A residual network with batch normalisation, written without regard to memory. Each block
# starts as the identity (scale zero), so that training is steady from the first step.
class Block(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x):
        y = nn.Conv(self.features, (3, 3), use_bias=False)(x)
        y = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9)(y))
        y = nn.Conv(self.features, (3, 3), use_bias=False)(y)
        zeros = nn.initializers.zeros
        y = nn.BatchNorm(use_running_average=False, momentum=0.9, scale_init=zeros)(y)
        return nn.relu(x + y)


class ResNet(nn.Module):
    features: int = 16
    blocks: int = 4
    block: type = Block  # or the same under nn.remat, to compare with

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(self.features, (3, 3))(x)
        for number in range(self.blocks):
            x = self.block(self.features, name=f"Block_{number}")(x)
        x = nn.avg_pool(x, (4, 4), strides=(4, 4))
        return nn.Dense(10)(x.reshape(len(x), -1))


def loss_of(model):
    def loss_fn(params, batch_stats, images, labels):
        variables = {"params": params, "batch_stats": batch_stats}
        logits, updates = model.apply(variables, images, mutable="batch_stats")
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), updates["batch_stats"]

    return loss_fn


# The one line. has_aux=True, as for jax.grad: the new running averages come with the loss. The
# budget is 45 % of what the gradient is predicted to need without the line, and verify="compile"
# has the compiler check it: plans are compiled until one really is within the budget.
loss_fn = remat_opt.optimal_remat(has_aux=True, budget=0.45, verify="compile")(loss_of(ResNet()))

# What you would write by hand.
DOTS = jax.checkpoint_policies.dots_saveable
BY_HAND = {
    "nn.remat around every block": loss_of(ResNet(block=nn.remat(Block))),
    "... with dots_saveable": loss_of(ResNet(block=nn.remat(Block, policy=DOTS))),
}


def main():
    # GPUs and TPUs round factors of products by default, which would blur the comparison.
    jax.config.update("jax_default_matmul_precision", "float32")
    # 1,797 handwritten digits that come with scikit-learn, enlarged from 8x8 to 16x16.
    digits = load_digits()
    images = np.asarray(digits.images[..., None] / 16, np.float32)
    images = np.asarray(jax.image.resize(images, (len(images), 16, 16, 1), "linear"))
    labels = digits.target.astype(np.int32)
    draws = np.random.default_rng(0).integers(len(images), size=(STEPS, BATCH_SIZE))
    batches = [(images[draw], labels[draw]) for draw in draws]
    variables = jax.jit(ResNet().init)(jax.random.key(0), images[:1])
    example = (variables["params"], variables["batch_stats"], *batches[0])

    options = argparse.Namespace(compare=False, device="attached", steps=STEPS)
    title = f"ResNet of {ResNet.blocks} blocks, {BATCH_SIZE} digits of 16x16"
    screen(title, loss_fn, example, BY_HAND, batches, options, has_aux=True)
    plan = loss_fn.plan(*example)
    if plan.measured.temporary_bytes > plan.budget_bytes:
        sys.exit("\nFAILED: the planned gradient exceeds its budget.")
    print("To see the whole plan, value by value: print(loss_fn.plan(*example))")


if __name__ == "__main__":
    main()
