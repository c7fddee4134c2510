"""One device's part of programs on a mesh; no device is needed for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import remat_opt
from remat_opt.program import bodies, propagation, tracing
from remat_opt.program.record import Program

P = PartitionSpec
AUTO = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
EXPLICIT = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


def shape(shape: tuple[int, ...], spec: PartitionSpec | None = None, mesh: Any = AUTO) -> Any:
    sharding = None if spec is None else NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def local(fn: Callable[..., Any], *args: Any) -> Program:
    return propagation.per_device(tracing.trace(fn, *args))


def shapes_by_primitive(program: Program) -> dict[str, set[tuple[int, ...]]]:
    found: dict[str, set[tuple[int, ...]]] = {}
    for one in program.equations:
        found.setdefault(one.operation.primitive, set()).update(
            kind.shape for kind in one.operation.outputs
        )
    return found


def mlp(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jnp.where(x > 0, jnp.tanh(x @ weight), 0.0)
    return jnp.mean(x**2)


def test_arrays_are_cut_down_to_what_one_device_has() -> None:
    weights, x = [shape((64, 64), P(None, "model"))] * 2, shape((128, 64), P("data", None))
    found = local(mlp, weights, x)
    assert [found.types[value].shape for value in found.arguments] == [(64, 32)] * 2 + [(32, 64)]
    assert shapes_by_primitive(found)["dot_general"] == {(32, 32)}
    assert shapes_by_primitive(found)["tanh"] == {(32, 32)}
    whole = tracing.trace(mlp, weights, x)
    assert whole.types != found.types
    assert {whole.types[value].shape for value in whole.arguments} == {(64, 64), (128, 64)}


def test_without_a_mesh_a_program_is_its_own() -> None:
    program = tracing.trace(mlp, [shape((8, 8))], shape((4, 8)))
    assert program.placement is None
    assert propagation.per_device(program) is program


def test_a_constraint_tells_what_arguments_do_not() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        h = jax.lax.with_sharding_constraint(x @ w, NamedSharding(AUTO, P("data", "model")))
        return jnp.mean(jnp.tanh(h))

    found = local(loss, shape((64, 64)), shape((128, 64)))
    assert shapes_by_primitive(found)["tanh"] == {(32, 32)}
    # Backward too: the compiler splits the weight like the product that reads it.
    assert found.types[found.arguments[0]].shape == (64, 32)


def test_types_with_explicit_sharding_are_read_from_tracers() -> None:
    weights, x = shape((64, 64), P(None, "model"), EXPLICIT), shape((128, 64), P("data"), EXPLICIT)
    seen: list[Program] = []

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        seen.append(local(lambda w, x: jnp.mean(jnp.tanh(x @ w)), w, x))
        return jnp.sum(w)

    with jax.sharding.use_abstract_mesh(EXPLICIT):
        jax.jit(loss).trace(weights, x)
    assert shapes_by_primitive(seen[0])["tanh"] == {(32, 32)}


def test_the_body_of_a_scan_and_other_inner_programs_are_cut_down_too() -> None:
    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
            x = jax.nn.relu(x @ weight)
            return jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), x[:, 0]

        x, columns = jax.lax.scan(body, x, weights)
        return jnp.mean(x) + jnp.sum(columns)

    args = shape((6, 64, 64), P(None, None, "model")), shape((128, 64), P(("data", "model")))
    found = local(loss, *args)
    (scan,) = (one for one in found.equations if one.operation.primitive == "scan")
    assert [kind.shape for kind in scan.operation.outputs] == [(16, 64), (6, 16)]
    inside = {
        kind.shape
        for one in scan.operation.bodies[0].operations
        for kind in one.outputs
        if len(kind.shape) == 2
    }
    # The first element of the first row is cut out on its own.
    assert inside - {(1, 1)} == {(16, 64), (16, 1)}
    (branch, _) = next(
        one.bodies for one in scan.operation.bodies[0].operations if one.primitive == "cond"
    )
    assert branch.operations[0].outputs[0].shape == (16, 64)
    body = bodies.body_of(scan, bodies.varying(found))
    assert shapes_by_primitive(body)["dot_general"] == {(16, 64)}
    assert [body.types[value].shape for value in body.arguments] == [(16, 64), (64, 32)]


def test_a_shard_map_is_what_its_types_say() -> None:
    def inside(x: jax.Array) -> jax.Array:
        return jax.lax.psum(jnp.sum(jnp.tanh(x), axis=0), "data")

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        mapped = jax.shard_map(inside, mesh=AUTO, in_specs=P("data"), out_specs=P())
        return jnp.sum(mapped(x @ w))

    found = local(loss, shape((64, 64)), shape((128, 64)))
    (mapped,) = (one for one in found.equations if one.operation.primitive == "shard_map")
    assert mapped.operation.inputs[0].shape == (32, 64)
    assert mapped.operation.outputs[0].shape == (64,)
    assert mapped.operation.bodies[0].operations[0].outputs[0].shape == (32, 64)


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT])
def test_fingerprints_are_those_without_a_mesh(mesh: Any) -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        h = jnp.where(x > 0, jnp.tanh(x @ w), 0.0) + jnp.zeros((64,))
        h, _ = jax.lax.scan(
            lambda h, _: (jnp.where(h > 0, h, jnp.zeros_like(h)), None), h, length=2
        )
        return jnp.sum(jax.nn.relu(h))

    plain = tracing.trace(loss, shape((64, 64)), shape((128, 64)))
    sharded = tracing.trace(
        loss, shape((64, 64), P(), mesh=mesh), shape((128, 64), P("data"), mesh=mesh)
    )
    assert sharded.placement is not None
    assert sharded.fingerprint() == plain.fingerprint()


def test_what_the_user_writes_about_a_mesh_is_in_the_fingerprint() -> None:
    def of(*axes: Any, mesh: Any = AUTO) -> str:
        def loss(x: jax.Array) -> jax.Array:
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))
            return jnp.sum(x)

        return tracing.trace(loss, shape((8, 8))).fingerprint()

    assert of("data") != of("model") != of(None, "data")
    # But not the number of devices.
    other = AbstractMesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    assert of("data", mesh=other) == of("data")


def test_a_budget_for_one_device_is_accepted() -> None:
    weights, x = [shape((64, 64), P())] * 8, shape((4096, 64), P(("data", "model")))
    whole = remat_opt.make_plan(mlp, [shape((64, 64))] * 8, shape((4096, 64)), device="h200")
    plain_bytes = whole.predicted.plain_temporary_bytes
    plan = remat_opt.make_plan(mlp, weights, x, budget=plain_bytes // 16, device="h200")
    assert plan.predicted.temporary_bytes <= plain_bytes // 16
    assert plan.predicted.plain_temporary_bytes == pytest.approx(plain_bytes / 8, rel=0.05)
    assert plan.predicted.forward_flops == pytest.approx(
        whole.predicted.forward_flops / 8, rel=0.01
    )
    with pytest.raises(remat_opt.BudgetError):
        remat_opt.make_plan(
            mlp, [shape((64, 64))] * 8, shape((4096, 64)), budget=plain_bytes // 16, device="h200"
        )


def gathered(w: jax.Array, x: jax.Array) -> jax.Array:
    whole = jax.lax.with_sharding_constraint(w.astype(jnp.bfloat16), NamedSharding(AUTO, P()))
    return jnp.mean(jnp.tanh(x.astype(jnp.bfloat16) @ whole))


def looped(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])


def one_product(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(x @ w))


def transposed(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(x @ jnp.exp(w).T))


def looked_up(table: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(table[rows]))


@pytest.mark.parametrize(
    ("fn", "of_weight", "of_batch", "expected"),
    [
        (one_product, P(), P("data"), "itself"),
        (one_product, P(None, "model"), P("data"), "itself"),
        # Each device has the whole gradient of its own part.
        (one_product, P(None, "model"), P(), ""),
        (one_product, P(), P(), ""),
        (gathered, P("data"), P("data"), "what it is gathered to"),
        (transposed, P(), P("data"), "what it is turned into"),
        # Within an iteration.
        (looped, P(), P("data"), ""),
    ],
)
def test_which_gradients_devices_add_up(
    fn: Callable[..., Any], of_weight: P, of_batch: P, expected: str
) -> None:
    weight = (3, 64, 64) if fn is looped else (64, 64)
    found = local(fn, shape(weight, of_weight), shape((128, 64), of_batch))
    (w,) = found.differentiated
    if not expected:
        assert found.added_up == {}
        return
    read = found.added_up[w]
    assert (read == w) is (expected == "itself")
    if fn is gathered:
        assert found.types[w].shape == (16, 64)
        assert found.types[read].shape == (64, 64)
        assert found.types[read].dtype == "bfloat16"


def test_devices_add_up_gradients_of_rows_and_of_what_maps_hand_to_all() -> None:
    rows = jax.ShapeDtypeStruct((32,), jnp.int32, sharding=NamedSharding(AUTO, P("data")))
    found = local(looked_up, shape((128, 64), P()), rows)
    assert found.added_up == {found.arguments[0]: found.arguments[0]}
    for own, there in ((P(), True), (P("data"), False)):

        def body(w: jax.Array, x: jax.Array) -> jax.Array:
            return jax.lax.pmean(jnp.mean(x[:, :16] @ w[:16]), ("data", "model"))

        specs = (P(own[0] if own else None, "model"), P("data"))
        mapped = jax.shard_map(body, mesh=AUTO, in_specs=specs, out_specs=P())

        found = local(mapped, shape((64, 64)), shape((128, 64)))
        assert (found.differentiated[0] in found.added_up) is there
        (one,) = (one for one in found.equations if one.operation.primitive == "shard_map")
        inside = bodies.mapped_of(one, bodies.varying(found))
        assert (inside.arguments[0] in inside.added_up) is there
