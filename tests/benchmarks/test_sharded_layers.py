"""The benchmark of layers with a map in the body of a loop."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks import sharded_layers
from benchmarks.sharded_layers import AXIS, DEVICES, PROGRAMS, loss_of, ring_attention
from tests.programs import array

pytestmark = pytest.mark.usefixtures("quick_search")

SMALL = ["--device", "cpu", "--layers", "2", "--width", "16", "--batch", "64", "--shares", "1"]


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_plans_take_less_than_the_function(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    command = [*SMALL, "--program", name, "--json", "--rows", str(file)]
    assert sharded_layers.main(command) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["label"] for row in rows] == [
        "plain",
        "nothing_saveable",
        "dots_saveable",
        "at most 1 of a forward pass",
    ]
    plain, *_, ours = rows
    assert ours["temporary_bytes"] < plain["temporary_bytes"]
    assert ours["predicted_bytes"] < plain["predicted_bytes"]


def test_ring_attention_is_attention() -> None:
    q, k, v = (array(f"ring_{name}", 8 * DEVICES, 2, 4, scale=1) for name in "qkv")
    mesh = jax.make_mesh((DEVICES,), (AXIS,), axis_types=(AxisType.Auto,))
    rows = PartitionSpec(AXIS)
    run = jax.shard_map(ring_attention, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows)
    given = jax.device_put((q, k, v), NamedSharding(mesh, rows))
    weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k) / 2, -1)
    expected = jnp.einsum("hqk,khd->qhd", weights, v)
    np.testing.assert_allclose(jax.jit(run)(*given), expected, rtol=1e-4, atol=1e-5)


def test_a_policy_changes_no_value() -> None:
    mesh = jax.make_mesh((DEVICES,), (AXIS,), axis_types=(AxisType.Auto,))
    program = PROGRAMS["experts"]
    w = tuple(
        jax.device_put(
            array(f"experts_{n}", 2, *extents, scale=0.3),
            NamedSharding(mesh, PartitionSpec(None, *spec)),
        )
        for n, (extents, spec) in enumerate(program.weights(16))
    )
    x = jax.device_put(
        array("experts_x", 8 * DEVICES, 16, scale=1), NamedSharding(mesh, PartitionSpec(AXIS))
    )
    expected = jax.jit(loss_of(mesh, program.layer))(w, x)
    found = jax.jit(loss_of(mesh, program.layer, "nothing_saveable"))(w, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
