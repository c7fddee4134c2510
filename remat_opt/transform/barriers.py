"""Barriers: force a value to be an array, or to be computed only after something else.

To XLA an optimization barrier is a function of all its inputs: nothing behind it exists before all
of them do.
"""

from __future__ import annotations

from typing import Any

import jax

from remat_opt import _jax_internals as internals


@jax.custom_jvp
def stored(*given: Any) -> tuple[Any, ...]:
    """The values as separate arrays; their cotangents are unchanged."""
    return tuple(internals.barrier(*given))


def _stored_rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    return stored(*primals), tangents


stored.defjvp(_stored_rule, symbolic_zeros=True)


@jax.custom_jvp
def behind_barrier(*given: Any) -> tuple[Any, ...]:
    """The values, none available before all are computed; likewise their cotangents.

    What has no tangent gets none here, unlike with JAX's own barrier: frozen arguments are known
    only when a derivative is taken, and something without a derivative may read what comes after.
    """
    return tuple(internals.barrier(*given))


def _behind_barrier_rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    return behind_barrier(*primals), internals.tie_cotangents(tangents)


behind_barrier.defjvp(_behind_barrier_rule, symbolic_zeros=True)


def cotangents_together(*values: Any) -> tuple[Any, ...]:
    """The values; none of their cotangents goes on before all are computed.

    So a weight's gradient is computed in its turn. The operand it needs may have been recomputed
    just for it, as a concatenation is. XLA for NVIDIA would rather hold the cotangent, and what the
    operand is made of, to the end of the backward pass. The forward pass is unchanged: a barrier
    there would keep elementwise operations out of the product.
    """
    results: tuple[Any, ...] = _same(*values)
    return results


@jax.custom_vjp
def with_cotangents(*values: Any) -> tuple[Any, ...]:
    """The values, each with a cotangent: of zeros, if nothing with a gradient reads it.

    The gradient rule of a ``custom_vjp`` may return something for its arguments even then: Flax
    hands new scaling factors on as the gradients of the old ones. JAX asks it even if no result has
    a cotangent, but not if a checkpoint around it has none.
    """
    return values


def _with_cotangents(*values: Any) -> tuple[tuple[Any, ...], None]:
    return values, None


def _given_cotangents(_: None, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    return cotangents


with_cotangents.defvjp(_with_cotangents, _given_cotangents)


@jax.custom_jvp
def _same(*given: Any) -> tuple[Any, ...]:
    return given


def _same_rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    return primals, internals.tie_cotangents(tangents)


_same.defjvp(_same_rule, symbolic_zeros=True)
