"""Barriers: what is to be an array, and what is not to be computed before something else is.

XLA takes an optimization barrier for a function of all that goes in: nothing behind it is there
before all of that is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from remat_opt import _jax_internals as internals


@jax.custom_jvp
def stored(*given: Any) -> tuple[Any, ...]:
    """The values as arrays of their own; their cotangents are as they were."""
    return tuple(jax.lax.optimization_barrier(given))


def _stored_rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    return stored(*primals), tangents


stored.defjvp(_stored_rule, symbolic_zeros=True)


@jax.custom_jvp
def behind_barrier(*given: Any) -> tuple[Any, ...]:
    """The values, none before all are computed; and their cotangents likewise.

    What has no tangent gets none here, unlike from JAX's own barrier: frozen arguments are known
    only when a derivative is taken, and what has no derivative may read what is behind.
    """
    return tuple(jax.lax.optimization_barrier(given))


def _behind_barrier_rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    return behind_barrier(*primals), internals.tie_cotangents(tangents)


behind_barrier.defjvp(_behind_barrier_rule, symbolic_zeros=True)


def cotangents_together(values: Iterable[Any]) -> tuple[Any, ...]:
    """The values; of their cotangents none goes on before all are computed.

    So the gradient for a weight is taken in its turn. What it is multiplied by may have been
    recomputed for it alone, as a concatenation is: XLA for NVIDIA would rather hold the cotangent
    and what the operand is made of, to the end of the backward pass. Forward nothing changes: a
    barrier there would keep elementwise operations out of the product.
    """
    results: tuple[Any, ...] = _same(*values)
    return results


@jax.custom_jvp
def _same(*given: Any) -> tuple[Any, ...]:
    return given


def _same_rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    return primals, internals.tie_cotangents(tangents)


_same.defjvp(_same_rule, symbolic_zeros=True)
