"""What a benchmark network is, and which block policies it may be wrapped with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

#: What is in a batch: for each part its shape, and for integers what they are below.
Contents = Mapping[str, tuple[tuple[int, ...], int | None]]

# An explicit table, because `jax.checkpoint_policies` mixes policies with functions that make one
# (`save_only_these_names(*names)`), and passing a maker in place of a policy is a silent no-op.
BLOCK_POLICIES: tuple[str, ...] = (
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots",
    "checkpoint_dots_with_no_batch_dims",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A loss to differentiate, with the shapes of its arguments.

    Attributes:
        name: As listed by `benchmarks.networks.names`.
        loss_fn: `loss_fn(params, batch)` gives a float32 scalar `[]`, or the pair of that scalar
            and the auxiliary output where `has_aux` is set. Differentiate it in `params`.
        has_aux: What to pass on to `jax.grad`, `jax.value_and_grad` and the like.
        make_arguments: Gives actual arrays for an integer seed, `(params, batch)`: freshly
            initialised parameters and random data.
        arguments: The shapes of these, two trees of `jax.ShapeDtypeStruct`. Nothing is allocated.
    """

    name: str
    loss_fn: Callable[[Any, Any], Any]
    has_aux: bool
    make_arguments: Callable[[int], tuple[Any, Any]]
    arguments: tuple[Any, Any] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", jax.eval_shape(lambda: self.make_arguments(0)))


def random_batch(key: jax.Array, contents: Contents) -> dict[str, jax.Array]:
    """Returns random arrays: integers below a limit where there is one, else normal numbers."""
    return {
        part: jax.random.normal(key, shape)
        if most is None
        else jax.random.randint(key, shape, 0, most)
        for part, (shape, most) in contents.items()
    }


def checkpoint_policy(name: str) -> Callable[..., Any]:
    """Returns the policy `jax.checkpoint_policies.<name>`.

    Args:
        name: One of `BLOCK_POLICIES`.

    Raises:
        ValueError: If `name` is not one of them.
    """
    if name not in BLOCK_POLICIES:
        raise ValueError(
            f"unknown block policy {name!r}: give one of {', '.join(BLOCK_POLICIES)}, "
            "or None for the network as it is"
        )
    policy: Callable[..., Any] = getattr(jax.checkpoint_policies, name)
    return policy
