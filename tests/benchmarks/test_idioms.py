"""The idioms are sound programs: a scalar loss, on which every parameter bears."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest

from benchmarks import networks

#: Batches small enough to run.
SMALL = {"routed_by_gathers": 64, "segment_messages": 32}

#: Those that take longest to trace.
DEAR = {"associative_recurrence", "flax_lstm", "flax_minimal"}


def test_they_are_a_set_of_their_own() -> None:
    names = set(networks.IDIOMS)
    assert names.isdisjoint(networks.names())
    assert {networks.set_of(name) for name in names} == {"idioms"}
    assert {networks.set_of(name) for name in networks.TUNED} == {"tuned"}
    assert {networks.set_of(name) for name in networks.JUDGED} == {"judged"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in DEAR else name
        for name in networks.IDIOMS
    ],
)
def test_loss_is_a_float32_scalar_that_every_parameter_bears_on(name: str) -> None:
    network = networks.build(name, networks.default_batch(name))
    loss, gradient = jax.eval_shape(jax.value_and_grad(network.loss_fn), *network.arguments)
    assert (loss.shape, loss.dtype) == ((), jnp.float32)
    shapes = jax.tree.map(lambda one: one.shape, (gradient, network.arguments[0]))
    assert shapes[0] == shapes[1]
    # Large enough that activations matter.
    assert sum(math.prod(one.shape) for one in jax.tree.leaves(network.arguments[0])) < 20_000_000


def test_they_have_no_blocks() -> None:
    with pytest.raises(ValueError, match="'flax_lstm' has no blocks: leave block_policy out"):
        networks.build("flax_lstm", 2, block_policy="dots_saveable")
