"""Collectives count no FLOPs and are opaque."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat_opt.costs import Fusion, cost

CASES: dict[str, Callable[[jax.Array], Any]] = {
    "all_gather": lambda x: lax.all_gather(x, "devices"),
    "all_to_all": lambda x: lax.all_to_all(x, "devices", 0, 0, tiled=True),
    "pmax": lambda x: lax.pmax(x, "devices"),
    "ppermute": lambda x: lax.ppermute(x, "devices", [(0, 0)]),
    "psum": lambda x: lax.psum(x, "devices"),
    "psum_scatter": lambda x: lax.psum_scatter(x, "devices", tiled=True),
}


@pytest.mark.parametrize("name", CASES)
def test_no_flops_and_opaque(name: str, only: Any) -> None:
    mesh = jax.make_mesh((1,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("devices")
    mapped = jax.shard_map(CASES[name], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    operation = only(mapped, jax.ShapeDtypeStruct((6, 4), jnp.float32))
    assert operation.primitive == "shard_map"
    (collective,) = operation.bodies[0].operations
    answer = cost(collective)
    assert answer.flops == 0
    assert answer.fusion is Fusion.OPAQUE
    assert answer.estimated
    assert (answer.bytes_read, answer.bytes_written, answer.bytes_sent) == (96, 96, 96)
    assert cost(operation).fusion is Fusion.OPAQUE


def test_device_put_without_a_target_does_nothing(only: Any) -> None:
    array = jax.ShapeDtypeStruct((6, 4), jnp.float32)
    answer = cost(only(jax.device_put, array))
    assert answer.fusion is Fusion.FUSIBLE
    assert answer.bytes_read == 0


def test_device_put_with_a_target_moves_its_array(only: Any) -> None:
    array = jax.ShapeDtypeStruct((6, 4), jnp.float32)
    target = jax.devices()[0]
    answer = cost(only(lambda x: jax.device_put(x, target), array))
    assert answer.fusion is Fusion.OPAQUE
    assert answer.bytes_read == 96
