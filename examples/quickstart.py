"""Train a small network twice: as it is written, and with one line added to its loss.

The line is the decorator on ``loss_fn``. Both runs must learn the same, and the second must
need less memory: no more than the budget, by the compiler's own figures. On a CPU this takes a
minute or two:

    python examples/quickstart.py
"""

import sys

import flax.linen as nn
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import remat_opt
from remat_opt.measurement.compilation import attached_device, compiler_options
from remat_opt.units import format_bytes

STEPS, BATCH_SIZE = 40, 64
ZEROS = nn.initializers.zeros


# A residual network with batch normalisation, written with no thought of memory. Each block
# starts as the identity (scale zero), so that training is steady from the first step.
class Block(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x, train):
        y = nn.Conv(self.features, (3, 3), use_bias=False)(x)
        y = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(y))
        y = nn.Conv(self.features, (3, 3), use_bias=False)(y)
        y = nn.BatchNorm(use_running_average=not train, momentum=0.9, scale_init=ZEROS)(y)
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


# The one line. has_aux=True, as for jax.grad: the new running averages come with the loss. The
# budget is 40 % of what the gradient is predicted to need without the line, and verify="compile"
# has the compiler check it: plans are compiled until one is within the budget in fact.
@remat_opt.optimal_remat(has_aux=True, budget=0.4, verify="compile")
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


def compiled_gradient(loss_fn, example):
    """The gradient as training runs it, compiled; for a batch of the example's shapes."""
    # jax.jit(jax.value_and_grad(loss_fn, has_aux=True)) is all it takes, but for one thing: on
    # a CPU, JAX before 0.11 undoes rematerialisation unless an option forbids it.
    options = compiler_options(attached_device())
    gradient = jax.jit(jax.value_and_grad(loss_fn, has_aux=True), compiler_options=options)
    return gradient.lower(*example).compile()


def train(gradient, variables, batches):
    """The loss at every step, and the variables that were learnt."""
    params, batch_stats = variables["params"], variables["batch_stats"]
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, len(batches)))
    state = optimizer.init(params)
    losses = []
    for batch in batches:
        (loss, batch_stats), grads = gradient(params, batch_stats, *batch)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return np.array(losses), {"params": params, "batch_stats": batch_stats}


def accuracy(variables, images, labels):
    logits = jax.jit(model.apply, static_argnames="train")(variables, images, train=False)
    return np.mean(np.argmax(logits, axis=1) == labels)


def difference(plain, planned):
    """The largest difference between two trees of arrays, relative to their largest number."""
    differences = jax.tree.map(lambda a, b: np.max(np.abs(a - b)), plain, planned)
    sizes = jax.tree.map(lambda a: np.max(np.abs(a)), plain)
    return max(jax.tree.leaves(differences)) / max(jax.tree.leaves(sizes))


def main():
    # GPUs and TPUs round factors of products by default, which would blur the comparison below.
    jax.config.update("jax_default_matmul_precision", "float32")
    (images, labels), test_set = read_digits()
    draws = np.random.default_rng(0).integers(len(images), size=(STEPS, BATCH_SIZE))
    batches = [(images[draw], labels[draw]) for draw in draws]
    variables = model.init(jax.random.key(0), images[:1], train=False)
    example = (variables["params"], variables["batch_stats"], *batches[0])

    print("1. The plan: what is kept for the backward pass, and what is computed again\n")
    plan = loss_fn.plan(*example)
    print(plan)
    compiled_bytes = plan.measured.temporary_bytes
    print(
        f"\nCompiled temporaries: {format_bytes(compiled_bytes)}, within the budget of "
        f"{format_bytes(plan.budget_bytes)}"
    )

    print("\n\n2. Beside jax.checkpoint: the gradient of each, compiled\n")
    print(remat_opt.compare(loss_fn, *example, has_aux=True))

    print(f"\n\n3. Training for {STEPS} steps, without the line and with it\n")
    plain_gradient = compiled_gradient(plain_loss_fn, example)
    planned_gradient = compiled_gradient(loss_fn, example)
    plain_losses, plain = train(plain_gradient, variables, batches)
    planned_losses, planned = train(planned_gradient, variables, batches)
    print("step  plain loss  planned loss")
    for step in (0, *range(9, STEPS, 10)):
        print(f"{step + 1:4}  {plain_losses[step]:10.5f}  {planned_losses[step]:12.5f}")

    # The same sums in another order may round differently, and training carries that along.
    # So the curves agree closely, and gradients taken at one and the same place more so.
    here = (plain["params"], plain["batch_stats"], *batches[0])
    gradients_differ = difference(plain_gradient(*here), planned_gradient(*here))
    curves_differ = difference(plain_losses, planned_losses)
    plain_bytes = plain_gradient.memory_analysis().temp_size_in_bytes
    planned_bytes = planned_gradient.memory_analysis().temp_size_in_bytes
    print(f"\nlargest difference of the loss curves: {curves_differ:.1e}")
    print(f"largest difference of the gradients:   {gradients_differ:.1e}")
    print(f"test accuracy: {accuracy(plain, *test_set):.1%} and {accuracy(planned, *test_set):.1%}")
    print(f"temporary memory: {format_bytes(plain_bytes)} and {format_bytes(planned_bytes)}")

    if curves_differ > 1e-2 or gradients_differ > 1e-4:
        sys.exit("\nFAILED: the two runs do not agree.")
    if compiled_bytes > plan.budget_bytes:
        sys.exit("\nFAILED: the planned gradient exceeds its budget.")
    if planned_bytes >= plain_bytes:
        sys.exit("\nFAILED: the planned gradient needs no less memory.")
    print(f"\nThe same curve in {planned_bytes / plain_bytes:.0%} of the memory.")


if __name__ == "__main__":
    main()
