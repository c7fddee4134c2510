"""Train a small network twice: as it is written, and with one line added to its loss.

The line is the decorator on ``loss_fn``. Both runs must learn the same, and the second must
need less memory. On a CPU this takes about a minute:

    python examples/quickstart.py
"""

import sys

import flax.linen as nn
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import remat_opt
from remat_opt.measurement import attached_device, compiler_options
from remat_opt.units import format_bytes

STEPS, BATCH_SIZE = 40, 64


# A residual network with batch normalisation, as anyone would write it.
class Block(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x, train):
        y = nn.Conv(self.features, (3, 3), use_bias=False)(x)
        y = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(y))
        y = nn.Conv(self.features, (3, 3), use_bias=False)(y)
        y = nn.BatchNorm(use_running_average=not train, momentum=0.9)(y)
        return nn.relu(x + y)


class ResNet(nn.Module):
    features: int = 16
    blocks: int = 8

    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(self.features, (3, 3))(x)
        for _ in range(self.blocks):
            x = Block(self.features)(x, train)
        x = nn.avg_pool(x, (4, 4), strides=(4, 4))
        return nn.Dense(10)(x.reshape(len(x), -1))


model = ResNet()


# The one line. The second result, Flax's running averages, is what has_aux stands for.
@remat_opt.optimal_remat(has_aux=True)
def loss_fn(params, batch_stats, images, labels):
    logits, updates = model.apply(
        {"params": params, "batch_stats": batch_stats}, images, train=True, mutable="batch_stats"
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), updates["batch_stats"]


plain_loss_fn = loss_fn.__wrapped__  # without the line, to compare with


def read_digits():
    """1,797 handwritten digits that come with scikit-learn, enlarged from 8x8 to 16x16."""
    digits = load_digits()
    images = np.asarray(digits.images[..., None] / 16, np.float32)
    images = np.asarray(jax.image.resize(images, (len(images), 16, 16, 1), "linear"))
    labels = digits.target.astype(np.int32)
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def train(loss_fn, variables, batches):
    """Trains; gives the losses, the first gradient, what was learnt and the bytes it took."""
    params, batch_stats = variables["params"], variables["batch_stats"]
    optimizer = optax.sgd(0.05, momentum=0.9)
    state = optimizer.init(params)

    # jax.jit(jax.value_and_grad(loss_fn, has_aux=True)) is all it takes, but for one thing: on
    # a CPU, JAX before 0.11 undoes rematerialisation unless an option forbids it.
    options = compiler_options(attached_device())
    gradient = jax.jit(jax.value_and_grad(loss_fn, has_aux=True), compiler_options=options)
    # Compiled ahead, to ask the very program that trains for its memory.
    gradient = gradient.lower(params, batch_stats, *batches[0]).compile()

    losses, first_gradient = [], None
    for batch in batches:
        (loss, batch_stats), grads = gradient(params, batch_stats, *batch)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
        first_gradient = grads if first_gradient is None else first_gradient
    learnt = {"params": params, "batch_stats": batch_stats}
    return losses, first_gradient, learnt, gradient.memory_analysis().temp_size_in_bytes


def accuracy(variables, images, labels):
    logits = jax.jit(model.apply, static_argnames="train")(variables, images, train=False)
    return np.mean(np.argmax(logits, axis=1) == labels)


def largest_difference(plain, ours):
    """The largest difference between two trees of arrays, relative to each plain array."""
    differences = jax.tree.map(lambda a, b: np.max(np.abs(a - b)) / np.max(np.abs(a)), plain, ours)
    return max(jax.tree.leaves(differences))


def main():
    (images, labels), test_set = read_digits()
    draws = np.random.default_rng(0).integers(len(images), size=(STEPS, BATCH_SIZE))
    batches = [(images[draw], labels[draw]) for draw in draws]
    variables = jax.jit(model.init, static_argnames="train")(
        jax.random.key(0), images[:1], train=False
    )
    example = (variables["params"], variables["batch_stats"], *batches[0])

    print("1. The plan: what is kept for the backward pass, and what is computed again\n")
    print(loss_fn.plan(*example))

    print("\n2. The gradient compiled: as written, under jax.checkpoint's policies, and planned\n")
    budgets = (0.8, 0.6, 0.4)  # shares of what the plain function needs
    print(remat_opt.compare(plain_loss_fn, *example, budgets=budgets, has_aux=True))

    print(f"\n3. Training for {STEPS} steps, without the line and with it\n")
    losses, gradient, learnt, needed_bytes = train(plain_loss_fn, variables, batches)
    our_losses, our_gradient, our_learnt, our_bytes = train(loss_fn, variables, batches)
    print("step      plain    planned")
    for step in (0, *range(9, STEPS, 10)):
        print(f"{step + 1:4}  {losses[step]:9.5f}  {our_losses[step]:9.5f}")

    # The two gradients add up in another order, so they are equal to rounding, and every
    # step of training carries the rounding of those before it along.
    gradients_differ = largest_difference(gradient, our_gradient)
    curves_differ = largest_difference(np.array(losses), np.array(our_losses))
    print(f"\nfirst gradient: differs by {gradients_differ:.0e} of its size")
    print(f"loss curves:    differ by {curves_differ:.0e} of the first loss")
    print(f"test accuracy:  {accuracy(learnt, *test_set):.1%} plain, ", end="")
    print(f"{accuracy(our_learnt, *test_set):.1%} planned")
    print(f"temporaries:    {format_bytes(needed_bytes)} plain, ", end="")
    print(f"{format_bytes(our_bytes)} planned")

    if gradients_differ > 1e-4 or curves_differ > 1e-2:
        sys.exit("The two runs do not agree.")
    if our_bytes >= needed_bytes:
        sys.exit("The planned gradient does not need less memory.")
    print(f"\nThe same curve in {our_bytes / needed_bytes:.0%} of the memory.")


if __name__ == "__main__":
    main()
