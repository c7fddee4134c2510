"""What both ways to run an opened loop do with stacks and lists of values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from remat_opt._jax_meshes import explicit_mesh_of


def entry_of(stacked: Any, place: Any) -> Any:
    """One entry of a stack."""
    with explicit_mesh_of(stacked):
        return lax.dynamic_index_in_dim(
            stacked, place, keepdims=False, allow_negative_indices=False
        )


def joined(made: Sequence[Sequence[Any]], *, reverse: bool) -> list[Any]:
    """The stacks that the parts of a loop made, one after the other, each in one."""
    return [
        alike[0] if len(alike) == 1 else jnp.concatenate(alike)
        for alike in zip(*(made[::-1] if reverse else made), strict=True)
    ]


def filled(values: Sequence[Any], places: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """The values, with some replaced."""
    found = list(values)
    for place, value in zip(places, others, strict=True):
        found[place] = value
    return found
