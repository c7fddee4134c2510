"""Flax's GRU cells as a language model, their time steps in a Python loop.

Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder" (2014) for the cell, as
`flax.linen.GRUCell` has it: each gate with matrices of its own. Two layers, an embedding below, and
a softmax over the vocabulary that reads all steps at once. Everything is float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks.networks.losses import cross_entropy
from benchmarks.networks.record import Network, checkpoint_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The dimensions of a stack of GRUs.

    Attributes:
        layers: Number of layers.
        width: Units of a layer, and channels of the embedding.
        vocabulary: Number of tokens.
        steps: Time steps.
    """

    layers: int
    width: int
    vocabulary: int
    steps: int


SIZES: dict[str, Size] = {
    "flax_gru": Size(layers=2, width=1024, vocabulary=10_000, steps=40),
}


class Step(nn.Module):
    """All layers, one time step.

    Attributes:
        size: The stack's dimensions.
    """

    size: Size

    @nn.compact
    def __call__(self, states: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        """Takes the layers' states, each `[batch, width]`, one step on with `[batch, width]`."""
        after = []
        for state in states:
            state, x = nn.GRUCell(self.size.width)(state, x)
            after.append(state)
        return after


class LanguageModel(nn.Module):
    """Embedding, time steps, logits.

    Attributes:
        size: Its dimensions.
        step: Makes what is called at every step from `size=` and `name=`.
    """

    size: Size
    step: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps tokens `[batch, steps]` to logits `[batch, steps, vocabulary]`."""
        size = self.size
        embedded = nn.Embed(size.vocabulary, size.width)(tokens)
        # Named here: `nn.remat` would rename the step, and with it the parameters.
        step: Any = self.step(size=size, name="step")
        states = [jnp.zeros((tokens.shape[0], size.width))] * size.layers
        tops = []
        for time in range(size.steps):
            states = step(states, embedded[:, time])
            tops.append(states[-1])
        return nn.Dense(size.vocabulary, name="head")(jnp.stack(tops, axis=1))


def network(name: str, size: Size, batch: int, block_policy: str | None) -> Network:
    """Builds a stack of GRUs with its next-token cross-entropy.

    `loss_fn(params, batch)` reads `batch["tokens"]` and `batch["targets"]`, both int32
    `[batch, steps]`.

    Args:
        name: The network's name.
        size: Its dimensions.
        batch: Sequences in a batch.
        block_policy: Wraps each time step, all layers of it, and only those, in `nn.remat` with
            this policy; None wraps nothing.
    """
    step: Any = Step
    if block_policy is not None:
        step = nn.remat(step, policy=checkpoint_policy(block_policy))
    model = LanguageModel(size=size, step=step)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits: Any = model.apply({"params": params}, batch["tokens"])
        return cross_entropy(logits, batch["targets"])

    def make_arguments(seed: int) -> tuple[Any, Any]:
        init_key, text_key = jax.random.split(jax.random.key(seed))
        text = jax.random.randint(text_key, (batch, size.steps + 1), 0, size.vocabulary)
        variables = model.init(init_key, text[:1, :-1])
        return variables["params"], {"tokens": text[:, :-1], "targets": text[:, 1:]}

    return Network(
        name=name,
        loss_fn=loss_fn,
        has_aux=False,
        make_arguments=make_arguments,
    )
