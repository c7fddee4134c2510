"""Leaves of arguments and results that are not arrays: they bypass the trace.

``jax.grad`` passes on unchanged what it does not differentiate, so a function may receive texts or
functions besides arrays: the activation of an ``eqx.nn.MLP`` is one of its leaves. Such a leaf
becomes part of its tree's structure. So two calls are alike only if these leaves are equal.

Python numbers are arrays here, as for ``jax.jit``, except in Equinox modules, whose ``filter_jit``
leaves them alone: ``eqx.nn.Dropout`` asks ``if self.inference``. Equinox is not needed: if nobody
has imported it, there are no modules.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import jax
import numpy as np


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A leaf that is not an array, as a tree without leaves.

    Attributes:
      value: the leaf.
    """

    value: Any

    def tree_flatten(self) -> tuple[tuple[()], Held]:
        """For JAX."""
        return (), self

    @classmethod
    def tree_unflatten(cls, held: Held, _: tuple[()]) -> Held:
        """For JAX."""
        return held

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Held):
            return NotImplemented
        mine, its = self.value, other.value
        return mine is its or bool(
            type(mine) is type(its) and _is_hashable(mine) and _is_hashable(its) and mine == its
        )

    def __hash__(self) -> int:
        return hash(self.value) if _is_hashable(self.value) else id(self.value)


def hold(tree: Any) -> Any:
    """The tree with all leaves that are not arrays wrapped."""

    def held(leaf: Any) -> Any:
        if _is_equinox(leaf):
            return jax.tree.map(lambda own: own if _is_array(own) else Held(own), leaf)
        is_number = isinstance(leaf, bool | int | float | complex)
        return leaf if is_number or _is_array(leaf) else Held(leaf)

    return jax.tree.map(held, tree, is_leaf=_is_equinox)


def release(tree: Any) -> Any:
    """The tree with the wrapped leaves put back in place."""
    return jax.tree.map(lambda leaf: leaf.value if _is_held(leaf) else leaf, tree, is_leaf=_is_held)


def any_held(tree: Any) -> bool:
    """Whether the tree has a wrapped leaf."""
    return any(map(_is_held, jax.tree.leaves(tree, is_leaf=_is_held)))


def _is_held(thing: object) -> bool:
    return isinstance(thing, Held)


def _is_array(leaf: Any) -> bool:
    # The last are ``jax.ShapeDtypeStruct``, and other libraries' arrays that JAX can read.
    return isinstance(leaf, jax.Array | np.ndarray | np.generic) or (
        hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    )


def _is_equinox(thing: object) -> bool:
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(thing, equinox.Module)


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
