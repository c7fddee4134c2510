"""Training steps as people usually write them, for measuring when you have none at hand.

The optimizer is anything with ``init`` and ``update`` as Optax has them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp

from remat_opt.errors import RematError


class Optimizer(Protocol):
    """What an optimizer must have, as ``optax.GradientTransformation`` does."""

    @property
    def init(self) -> Callable[[Any], Any]:
        """From parameters to the optimizer's state."""
        ...

    @property
    def update(self) -> Callable[..., tuple[Any, Any]]:
        """From (gradients, state, parameters) to (updates, state)."""
        ...


def training_step(
    loss: Callable[..., Any],
    optimizer: Optimizer,
    *,
    has_aux: bool = False,
    clip_norm: float | None = None,
    microbatches: int = 1,
    loop: Literal["python", "scan"] = "python",
) -> Callable[..., Any]:
    """A step that updates parameters and the optimizer's state: donate both.

    Args:
      loss: takes parameters and a batch, whose arrays have the examples on their first axis;
        decorated or not. It is the mean over the examples, or gradients of microbatches are not
        those of the batch.
      optimizer: as Optax has them.
      has_aux: whether the loss returns (loss, auxiliary); the auxiliary is left out.
      clip_norm: scales the gradients down to this norm of them all; as they are if None. With it,
        all gradients exist at once; without, each can be used up as soon as it exists.
      microbatches: adds up the gradients of this many parts of the batch.
      loop: how: a ``python`` loop, or ``jax.lax.scan``.

    Returns:
      ``step(params, state, batch) -> (params, state, loss)``.

    Raises:
      RematError: from the step, if a batch does not divide into this many parts.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import remat_opt
      >>> from remat_opt.training import training_step
      >>> loss = remat_opt.optimal_remat(lambda w, x: jnp.mean(jnp.sin(x @ w)), device="cpu")
      >>> step = training_step(loss, optax.adam(1e-3))
      >>> w, x = jnp.ones((4, 4)), jnp.ones((8, 4))
      >>> _, _, value = step(w, optax.adam(1e-3).init(w), x)
      >>> f"{value:.3f}"
      '-0.757'
    """

    def value_and_gradient(params: Any, batch: Any) -> tuple[Any, Any]:
        found, gradients = jax.value_and_grad(loss, has_aux=has_aux)(params, batch)
        return (found[0] if has_aux else found), gradients

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        if microbatches == 1:
            value, gradients = value_and_gradient(params, batch)
        else:
            value, gradients = _accumulated(value_and_gradient, params, batch, microbatches, loop)
        if clip_norm is not None:
            gradients = _clipped(gradients, clip_norm)
        updates, state = optimizer.update(gradients, state, params)
        params = jax.tree.map(lambda p, u: jnp.asarray(p + u, p.dtype), params, updates)
        return params, state, value

    return step


def _accumulated(
    value_and_gradient: Callable[[Any, Any], tuple[Any, Any]],
    params: Any,
    batch: Any,
    count: int,
    loop: Literal["python", "scan"],
) -> tuple[Any, Any]:
    """The mean of values and gradients over the parts of a batch."""
    parts = jax.tree.map(functools.partial(_parted, count), batch)

    def part(number: int) -> Any:
        return jax.tree.map(lambda leaf: leaf[number], parts)

    def add(left: Any, right: Any) -> Any:
        return jax.tree.map(jnp.add, left, right)

    if loop == "scan":
        shapes = jax.eval_shape(value_and_gradient, params, part(0))
        zeros = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes)
        total, _ = jax.lax.scan(
            lambda sums, one: (add(sums, value_and_gradient(params, one)), None), zeros, parts
        )
    else:
        total = value_and_gradient(params, part(0))
        for number in range(1, count):
            total = add(total, value_and_gradient(params, part(number)))
    value, gradients = jax.tree.map(lambda leaf: leaf / count, total)
    return value, gradients


def _parted(count: int, leaf: Any) -> Any:
    if leaf.shape[0] % count:
        raise RematError(
            f"A batch of {leaf.shape[0]} does not divide into {count} parts: give a number of "
            "microbatches that divides the batch."
        )
    return leaf.reshape(count, leaf.shape[0] // count, *leaf.shape[1:])


def _clipped(gradients: Any, norm: float) -> Any:
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(gradients)]
    scale = jnp.minimum(1.0, norm / (jnp.sqrt(sum(squares)) + 1e-6))
    return jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), gradients)
