"""A stack of LSTMs over a sequence, its time steps in a Python loop, in plain JAX.

The setting of Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), Section 5.3, as
in speech recognition: four layers of 1,024 units, batches of 64, inputs of 50 numbers, a softmax
over 5,000 classes at every step. 64 steps are the shortest sequence of its Figure 6. Everything is
float32.

The cell is that of Hochreiter & Schmidhuber (1997) with a forget gate, its four gates in one matrix
product. The classifier reads the outputs of all steps at once, as the authors' code does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.networks.losses import cross_entropy
from benchmarks.networks.record import Network, checkpoint_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The dimensions of a stack of LSTMs.

    Attributes:
        layers: Number of layers.
        width: Units of a layer.
        inputs: Numbers that come in at a time step.
        classes: Number of classes.
        steps: Time steps.
    """

    layers: int
    width: int
    inputs: int
    classes: int
    steps: int


SIZES: dict[str, Size] = {
    "lstm": Size(layers=4, width=1024, inputs=50, classes=5000, steps=64),
}


def _uniform(key: jax.Array, inputs: int, outputs: int, width: int) -> jax.Array:
    """Draws a matrix as PyTorch does for an LSTM: uniform, within one by the root of the width."""
    limit = 1 / math.sqrt(width)
    return jax.random.uniform(key, (inputs, outputs), minval=-limit, maxval=limit)


def init(key: jax.Array, size: Size) -> dict[str, Any]:
    """Returns freshly drawn parameters, float32."""
    head_key, *layer_keys = jax.random.split(key, 1 + size.layers)
    width = size.width
    layers = []
    for index, layer_key in enumerate(layer_keys):
        input_key, state_key = jax.random.split(layer_key)
        layers.append(
            {
                "input": _uniform(input_key, width if index else size.inputs, 4 * width, width),
                "state": _uniform(state_key, width, 4 * width, width),
                "bias": jnp.zeros(4 * width),
            }
        )
    head = {
        "kernel": _uniform(head_key, width, size.classes, width),
        "bias": jnp.zeros(size.classes),
    }
    return {"layers": layers, "head": head}


def _cell(
    params: Any, state: tuple[jax.Array, jax.Array], x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Takes hidden and cell state, both `[batch, width]`, one step on with `[batch, inputs]`."""
    hidden, cell = state
    gates = x @ params["input"] + hidden @ params["state"] + params["bias"]
    enter, forget, candidate, leave = jnp.split(gates, 4, axis=-1)
    cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(enter) * jnp.tanh(candidate)
    return jax.nn.sigmoid(leave) * jnp.tanh(cell), cell


def network(name: str, size: Size, batch: int, block_policy: str | None) -> Network:
    """Builds a stack of LSTMs with the cross-entropy of every step.

    `loss_fn(params, batch)` reads `batch["inputs"]`, float32 `[batch, steps, inputs]`, and
    `batch["labels"]`, int32 `[batch, steps]`.

    Args:
        name: The network's name.
        size: Its dimensions.
        batch: Sequences in a batch.
        block_policy: Wraps each time step, all layers of it, and only those, in `jax.checkpoint`
            with this policy; None wraps nothing.
    """

    def step(layers: Any, states: Any, x: jax.Array) -> Any:
        after = []
        for params, state in zip(layers, states, strict=True):
            after.append(_cell(params, state, x))
            x = after[-1][0]
        return after

    block = step
    if block_policy is not None:
        block = jax.checkpoint(step, policy=checkpoint_policy(block_policy))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        inputs = batch["inputs"]
        zeros = jnp.zeros((inputs.shape[0], size.width))
        states: Any = [(zeros, zeros)] * size.layers
        tops = []
        for time in range(size.steps):
            states = block(params["layers"], states, inputs[:, time])
            tops.append(states[-1][0])
        logits = jnp.stack(tops, axis=1) @ params["head"]["kernel"] + params["head"]["bias"]
        return cross_entropy(logits, batch["labels"])

    def make_arguments(seed: int) -> tuple[Any, Any]:
        init_key, input_key, label_key = jax.random.split(jax.random.key(seed), 3)
        return init(init_key, size), {
            "inputs": jax.random.normal(input_key, (batch, size.steps, size.inputs)),
            "labels": jax.random.randint(label_key, (batch, size.steps), 0, size.classes),
        }

    return Network(
        name=name,
        loss_fn=loss_fn,
        has_aux=False,
        make_arguments=make_arguments,
    )
