"""Leaves that are not arrays."""

from __future__ import annotations

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remat_opt.program.static_leaves import any_held, hold, release


def test_what_is_no_array_becomes_structure() -> None:
    tree = {"w": jnp.ones(2), "f": jnp.sin, "mode": "train", "n": 3, "t": np.float32(1), "no": None}
    held = hold(tree)
    assert set(map(type, jax.tree.leaves(held))) == {type(tree["w"]), int, np.float32}
    assert any_held(held)
    assert release(held) == tree
    assert jax.tree.structure(hold(held)) == jax.tree.structure(held)
    arrays = {"w": jnp.ones(2), "shape": jax.ShapeDtypeStruct((2,), "float32")}
    assert not any_held(hold(arrays))


def test_trees_are_alike_where_their_leaves_are_equal() -> None:
    def structure(*leaves: object) -> object:
        return jax.tree.structure(hold(leaves))

    assert structure("a", jnp.sin) == structure("".join(["a"]), jnp.sin)
    assert hash(structure("a")) == hash(structure("a"))
    assert structure("a") != structure("b")
    # An unhashable object may change, so it equals only itself.
    one, other = types.SimpleNamespace(a=1), types.SimpleNamespace(a=1)
    assert structure(one) == structure(one)
    assert structure(one) != structure(other)
    assert isinstance(hash(structure(one)), int)


def test_numbers_in_modules_of_equinox(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        def __init__(self, *leaves: object) -> None:
            self.leaves = leaves

    jax.tree_util.register_pytree_node(
        Module, lambda module: (module.leaves, None), lambda _, leaves: Module(*leaves)
    )
    monkeypatch.setitem(sys.modules, "equinox", types.SimpleNamespace(Module=Module))
    assert jax.tree.leaves(hold((Module(0.5, True, Module(1)), 0.5))) == [0.5]
    monkeypatch.delitem(sys.modules, "equinox")
    assert jax.tree.leaves(hold((Module(0.5, True, Module(1)), 0.5))) == [0.5, True, 1, 0.5]
