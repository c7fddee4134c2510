"""Moving elements costs no FLOPs and fuses; a barrier does not let anything through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from remat_opt.costs import Fusion, cost

ARRAY = jax.ShapeDtypeStruct((8, 12, 10), jnp.float32)
BYTES = 960 * 4

CASES: dict[str, Callable[[jax.Array], Any]] = {
    "broadcast": lambda x: lax.broadcast_in_dim(x, (8, 12, 10, 3), (0, 1, 2)),
    "concatenate": lambda x: lax.concatenate([x, x], 1),
    "expand_dims": lambda x: lax.expand_dims(x, (1,)),
    "iota": lambda x: lax.iota(jnp.float32, 100),
    "name": lambda x: checkpoint_name(x, "x"),
    "pad": lambda x: lax.pad(x, 0.0, ((1, 1, 0), (0, 0, 2), (-1, 0, 0))),
    "reshape": lambda x: lax.reshape(x, (96, 10)),
    "rev": lambda x: lax.rev(x, (0, 2)),
    "slice": lambda x: lax.slice(x, (0, 1, 2), (8, 5, 10), (2, 1, 3)),
    "split": lambda x: lax.split(x, (3, 5)),
    "squeeze": lambda x: lax.squeeze(lax.slice(x, (0, 0, 0), (1, 12, 10)), (0,)),
    "stop_gradient": lax.stop_gradient,
    "transpose": lambda x: lax.transpose(x, (2, 0, 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_no_flops_and_fusible(name: str, operations: Any, ours: Any, compiled: Any) -> None:
    fn = CASES[name]
    assert ours(fn, ARRAY) == compiled(fn, ARRAY)
    assert ours(fn, ARRAY).flops == 0
    for operation in operations(fn, ARRAY):
        assert cost(operation).fusion is Fusion.FUSIBLE
        assert not cost(operation).estimated


@pytest.mark.parametrize(
    ("name", "bytes_read", "bytes_written"),
    [
        ("transpose", BYTES, BYTES),
        ("broadcast", BYTES, 3 * BYTES),
        ("slice", 4 * 4 * 3 * 4, 4 * 4 * 3 * 4),
        ("iota", 0, 400),
        ("reshape", 0, 0),
        ("name", 0, 0),
    ],
)
def test_bytes(name: str, bytes_read: int, bytes_written: int, only: Any) -> None:
    answer = cost(only(CASES[name], ARRAY))
    assert (answer.bytes_read, answer.bytes_written) == (bytes_read, bytes_written)


def test_a_barrier_materialises_and_moves_nothing(only: Any) -> None:
    answer = cost(only(lax.optimization_barrier, ARRAY))
    assert answer.fusion is Fusion.OPAQUE
    assert (answer.flops, answer.bytes_read, answer.bytes_written) == (0, 0, 0)
