"""The networks that remat_opt is measured on, by name.

Each is written as an ordinary careful user would write it. `build` gives the loss with the shapes
of its arguments; with a block policy it gives the same loss with every residual block or layer
under one checkpoint, which is what such a user would do by hand against running out of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.networks import gpt, resnet
from benchmarks.networks.record import BLOCK_POLICIES, Network, checkpoint_policy

__all__ = ["BLOCK_POLICIES", "Network", "build", "names"]

# name -> function of (batch, block_policy)
_NETWORKS: dict[str, Callable[[int, str | None], Network]] = {
    **{name: partial(resnet.network, name, size) for name, size in resnet.SIZES.items()},
    **{name: partial(gpt.network, name, size) for name, size in gpt.SIZES.items()},
}


def names() -> tuple[str, ...]:
    """Returns the names that `build` knows."""
    return tuple(_NETWORKS)


def build(name: str, batch: int, *, block_policy: str | None = None) -> Network:
    """Builds a network's loss and the shapes of its arguments; allocates nothing.

    Args:
        name: One of `names()`.
        batch: Examples in a batch: images or sequences.
        block_policy: None for the network as it is, or one of `BLOCK_POLICIES`, the name of a
            policy in `jax.checkpoint_policies`: every residual block or transformer layer is then
            wrapped in a checkpoint with it. Stem and head stay as they are.

    Raises:
        ValueError: If the name or the policy is unknown, or the batch is not positive.
    """
    if name not in _NETWORKS:
        raise ValueError(f"unknown network {name!r}: give one of {', '.join(names())}")
    if batch < 1:
        raise ValueError(f"batch is {batch}: give at least 1 example")
    if block_policy is not None:
        checkpoint_policy(block_policy)
    return _NETWORKS[name](batch, block_policy)
