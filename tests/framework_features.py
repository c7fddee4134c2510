"""More rows for the table of ``tests.features``: meshes and frameworks.

What only one framework needs is imported where it is used, so that the rest runs without it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from remat_opt.rematerialized import Rematerialized
from tests.features import (
    DEPTH,
    ROWS,
    WIDTH,
    array,
    network,
    plain_loss,
    row,
    rows,
    weights,
)

Built = tuple[Callable[..., Any], tuple[Any, ...]]
P = PartitionSpec

# --- Meshes -------------------------------------------------------------------------------


@functools.cache
def _mesh(kind: AxisType = AxisType.Auto) -> Mesh:
    """A mesh of the eight devices that the tests run with."""
    return jax.make_mesh((8,), ("data",), axis_types=(kind,))


def _split(kind: AxisType = AxisType.Auto, *, parameters: bool = False) -> Callable[[], Built]:
    """``plain_loss`` with the batch, and perhaps the parameters, split over the mesh."""

    def build() -> Built:
        params, x = weights(), array(8 * ROWS, WIDTH)
        where = NamedSharding(_mesh(kind), P("data") if parameters else P())
        x = jax.device_put(x, NamedSharding(_mesh(kind), P("data")))
        if parameters:
            return _gathered, (jax.device_put(params, where), x)
        return plain_loss, (jax.device_put(params, where), x)

    return build


def _gathered(params: list[jax.Array], x: jax.Array) -> jax.Array:
    """Each weight is gathered where it is used."""
    everywhere = NamedSharding(_mesh(), P())
    for w in params:
        x = jnp.tanh(x @ jax.lax.with_sharding_constraint(w, everywhere)) + x
    return jnp.mean(x**2)


def _constrained() -> Built:
    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        split = NamedSharding(_mesh(), P("data"))
        for w in params:
            x = jax.lax.with_sharding_constraint(jnp.tanh(x @ w) + x, split)
        return jnp.mean(x**2)

    return loss, _split()()[1]


def _mapped_inside() -> Built:
    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in params:
            layer = jax.shard_map(
                lambda w, x: jnp.tanh(x @ w) + x,
                mesh=_mesh(),
                in_specs=(P(), P("data")),
                out_specs=P("data"),
            )
            x = layer(w, x)
        return jnp.mean(x**2)

    return loss, _split()()[1]


def _mapped_around() -> Built:
    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        return jax.shard_map(
            lambda params, x: jax.lax.pmean(plain_loss(params, x), "data"),
            mesh=_mesh(),
            in_specs=(P(), P("data")),
            out_specs=P(),
        )(params, x)

    return loss, _split()()[1]


def _mapped_in_a_scan(gathers: bool = False) -> Built:
    own = P("data") if gathers else P()

    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        w = jax.lax.all_gather(w, "data", tiled=True) if gathers else w
        return jnp.tanh(x @ w) + x

    def loss(stack: jax.Array, x: jax.Array) -> jax.Array:
        run = jax.shard_map(layer, mesh=_mesh(), in_specs=(own, P("data")), out_specs=P("data"))
        return jnp.mean(jax.lax.scan(lambda x, w: (run(w, x), None), x, stack)[0] ** 2)

    _, (params, x) = _split()()
    stack = jax.device_put(jnp.stack(params), NamedSharding(_mesh(), P(None, *own)))
    return loss, (stack, x)


def _gathered_in_a_map() -> Built:
    def body(params: list[jax.Array], x: jax.Array) -> jax.Array:
        gathered = [jax.lax.all_gather(w, "data", tiled=True) for w in params]
        return jax.lax.pmean(plain_loss(gathered, x), "data")

    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        run = jax.shard_map(body, mesh=_mesh(), in_specs=(P("data"), P("data")), out_specs=P())
        return run(params, x)

    return loss, _split(parameters=True)()[1]


def _gathered_in_a_scan() -> Built:
    def body(stack: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ jax.lax.all_gather(w, "data", tiled=True)) + x, None

        return jax.lax.pmean(jnp.mean(jax.lax.scan(layer, x, stack)[0] ** 2), "data")

    def loss(stack: jax.Array, x: jax.Array) -> jax.Array:
        specs = P(None, "data"), P("data")
        return jax.shard_map(body, mesh=_mesh(), in_specs=specs, out_specs=P())(stack, x)

    _, (params, x) = _split()()
    stack = jax.device_put(jnp.stack(params), NamedSharding(_mesh(), P(None, "data")))
    return loss, (stack, x)


def _mapped_partly() -> Built:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        return jax.shard_map(
            lambda params, x: jax.lax.pmean(plain_loss(params, x), "data"),
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=P(),
            axis_names={"data"},
        )(params, x)

    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    return loss, (jax.device_put(weights(), whole), jax.device_put(array(8 * ROWS, WIDTH), rows))


def _gradient_in_map(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(params: Any, x: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(fn)(params, x)
        return jax.tree.map(lambda one: jax.lax.pmean(one, "data"), (value, gradient))

    return jax.shard_map(
        run, mesh=_mesh(), in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )


def _planned(build: Callable[[], Built]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The gradient, planned first with the arguments: under ``jit`` nothing shows their split."""

    def how(fn: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(fn, Rematerialized):
            fn.plan(*build()[1])
        return jax.value_and_grad(fn)

    return how


row("Meshes", "the batch split", _split(), how=_planned(_split()))
row(
    "Meshes",
    "the parameters split as well",
    _split(parameters=True),
    how=_planned(_split(parameters=True)),
)
row("Meshes", "`with_sharding_constraint`", _constrained)
row("Meshes", "shardings in types (`AxisType.Explicit`)", _split(AxisType.Explicit))
row("Meshes", "`shard_map` around the gradient", _split(), how=_gradient_in_map)
row("Meshes", "`shard_map` around each layer", _mapped_inside)
row("Meshes", "`shard_map` around the whole network", _mapped_around)
row("Meshes", "collectives in a `shard_map`", _gathered_in_a_map)
row("Meshes", "collectives in a `scan` in a `shard_map`", _gathered_in_a_scan)
row("Meshes", "`shard_map` in a `scan`", _mapped_in_a_scan)
row("Meshes", "collectives in a `shard_map` in a `scan`", lambda: _mapped_in_a_scan(gathers=True))
row(
    "Meshes",
    "collectives in a `shard_map`, run again",
    _gathered_in_a_map,
    collectives="recompute",
)
row(
    "Meshes",
    "`shard_map` over some axes of the mesh",
    _mapped_partly,
    note="planned as one piece; decorate the function inside",
)

# --- Flax: linen --------------------------------------------------------------------------


def _linen(make: Callable[[Any], Any]) -> Callable[[], Built]:
    """A linen module made from another, applied to a batch."""

    def build() -> Built:
        from flax import linen

        module = make(linen)
        params = module.init(jax.random.key(0), rows())

        def loss(params: Any, x: jax.Array) -> jax.Array:
            return jnp.mean(module.apply(params, x) ** 2)

        return loss, (params, rows())

    return build


def _layer(linen: Any) -> Any:
    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            found: jax.Array = jnp.tanh(linen.Dense(WIDTH)(x)) + x
            return found

    return Layer


def _looped(linen: Any) -> Any:
    scanned = linen.scan(
        _carried(linen), variable_axes={"params": 0}, split_rngs={"params": True}, length=DEPTH
    )

    class Network(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> Any:
            return scanned()(x, None)[0]

    return Network()


def _carried(linen: Any) -> Any:
    layer = _layer(linen)

    class Step(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return layer()(x), None

    return Step


def _checkpointed_in_a_loop(linen: Any) -> Any:
    scanned = linen.scan(
        linen.remat(_carried(linen), prevent_cse=False),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=DEPTH,
    )

    class Network(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> Any:
            return scanned()(x, None)[0]

    return Network()


def _mutable() -> Built:
    from flax import linen

    class Network(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for _ in range(DEPTH):
                y = linen.BatchNorm(use_running_average=False)(linen.Dense(WIDTH)(x))
                x = linen.Dropout(0.1, deterministic=False)(jnp.tanh(y)) + x
            return x

    module = Network()
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = module.init(keys, rows())

    def loss(params: Any, state: Any, key: jax.Array, x: jax.Array) -> Any:
        found, state = module.apply(
            {"params": params, "batch_stats": state},
            x,
            rngs={"dropout": key},
            mutable=["batch_stats"],
        )
        return jnp.mean(found**2), state

    args = variables["params"], variables["batch_stats"], jax.random.key(2), rows()
    return loss, args


_flax = functools.partial(row, package="flax")
_with_aux = functools.partial(jax.value_and_grad, has_aux=True)

_flax("Flax", "linen", _linen(lambda linen: linen.Sequential([_layer(linen)() for _ in range(6)])))
_flax("Flax", "linen: mutable state, dropout", _mutable, how=_with_aux, has_aux=True)
_flax("Flax", "`nn.scan`", _linen(_looped))
_flax("Flax", "`nn.scan` of `nn.remat`", _linen(_checkpointed_in_a_loop))
_flax(
    "Flax",
    "`nn.scan` of `nn.remat`, replaced",
    _linen(_checkpointed_in_a_loop),
    existing="replace",
)
_flax(
    "Flax",
    "`nn.remat`",
    _linen(lambda linen: linen.Sequential([linen.remat(_layer(linen))() for _ in range(6)])),
)
_flax(
    "Flax",
    "`nn.remat_scan`",
    _linen(lambda linen: linen.remat_scan(_layer(linen), (4, 4))()),
    note="its checkpoints leave nothing to gain",
)
_flax(
    "Flax",
    "`nn.remat_scan`, replaced",
    _linen(lambda linen: linen.remat_scan(_layer(linen), (4, 4))()),
    existing="replace",
    note="with half the recomputation",
)

# --- Flax: nnx ----------------------------------------------------------------------------


def _nnx(make: Callable[[Any], Any]) -> Callable[[], Built]:
    """A loss of a module, whose state is an argument: a module is not a value."""

    def build() -> Built:
        from flax import nnx

        def loss(model: Any, x: jax.Array) -> jax.Array:
            return jnp.mean(model(x) ** 2)

        graph, state = nnx.split(make(nnx))
        # Where the module is rebuilt from its state.
        loss.graph = graph  # type: ignore[attr-defined]
        return loss, (state, rows())

    return build


def _of_a_module(gradient: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The gradient by one of nnx's functions, with the module's final state."""

    def how(fn: Callable[..., Any]) -> Callable[..., Any]:
        from flax import nnx

        graph = getattr(fn, "graph", None) or fn.__wrapped__.graph  # type: ignore[attr-defined]

        def run(state: Any, x: jax.Array) -> Any:
            model = nnx.merge(graph, state)
            found = getattr(nnx, gradient)(fn)(model, x)
            return jax.tree.leaves(found), jax.tree.leaves(nnx.state(model))

        return run

    return how


def _stateful(nnx: Any) -> Any:
    class Network(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.layers = _held(nnx, [nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(DEPTH)])
            self.norms = _held(nnx, [nnx.BatchNorm(WIDTH, rngs=rngs) for _ in range(DEPTH)])
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            for layer, norm in zip(self.layers, self.norms, strict=True):
                x = self.dropout(jnp.tanh(norm(layer(x)))) + x
            return x

    return Network(nnx.Rngs(0))


def _held(nnx: Any, modules: list[Any]) -> Any:
    """A list of modules, as the Flax version wants it."""
    return nnx.List(modules) if hasattr(nnx, "List") else modules


def _scanned_module(nnx: Any, wrap: Callable[[Any], Any] = lambda step: step) -> Any:
    class Layer(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            found: jax.Array = jnp.tanh(self.linear(x)) + x
            return found

    class Network(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            make = nnx.split_rngs(splits=DEPTH)(nnx.vmap(Layer, in_axes=0, out_axes=0))
            self.layers = make(rngs)

        def __call__(self, x: jax.Array) -> Any:
            def step(x: jax.Array, layer: Any) -> jax.Array:
                found: jax.Array = layer(x)
                return found

            return nnx.scan(wrap(step), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)

    return Network(nnx.Rngs(0))


_flax(
    "Flax",
    "`nnx.value_and_grad`: BatchNorm, dropout",
    _nnx(_stateful),
    how=_of_a_module("value_and_grad"),
    note="the module is left in the same state",
)
_flax("Flax", "`nnx.grad`", _nnx(_stateful), how=_of_a_module("grad"))
_flax("Flax", "`nnx.scan`", _nnx(_scanned_module), how=_of_a_module("grad"))
_flax(
    "Flax",
    "`nnx.scan` of `nnx.remat`",
    _nnx(lambda nnx: _scanned_module(nnx, nnx.remat)),
    how=_of_a_module("grad"),
)


# --- Other frameworks ---------------------------------------------------------------------


def _equinox() -> Built:
    import equinox

    model = equinox.nn.MLP(WIDTH, WIDTH, WIDTH, DEPTH, key=jax.random.key(0))

    def loss(model: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.vmap(model)(x) ** 2)

    return loss, (model, rows())


def _filtered(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(model: Any, x: jax.Array) -> Any:
        import equinox

        value, gradient = equinox.filter_jit(equinox.filter_value_and_grad(fn))(model, x)
        return value, jax.tree.leaves(equinox.filter(gradient, equinox.is_array))

    return run


def _haiku() -> Built:
    import haiku

    def forward(x: jax.Array) -> jax.Array:
        for _ in range(DEPTH):
            y = haiku.BatchNorm(True, True, 0.9)(haiku.Linear(WIDTH)(x), True)
            x = haiku.dropout(haiku.next_rng_key(), 0.1, jnp.tanh(y)) + x
        return x

    module = haiku.transform_with_state(forward)
    params, state = module.init(jax.random.key(0), rows())

    def loss(params: Any, state: Any, key: jax.Array, x: jax.Array) -> Any:
        found, state = module.apply(params, state, key, x)
        return jnp.mean(found**2), state

    return loss, (params, state, jax.random.key(1), rows())


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["w", "b"], meta_fields=["activation"]
)
@dataclasses.dataclass(frozen=True)
class _Affine:
    w: jax.Array
    b: jax.Array
    activation: str


def _dataclasses() -> Built:
    def loss(params: list[_Affine], x: jax.Array) -> jax.Array:
        for one in params:
            x = getattr(jnp, one.activation)(x @ one.w + one.b) + x
        return jnp.mean(x**2)

    return loss, ([_Affine(w, array(WIDTH), "tanh") for w in weights()], rows())


def _trained(steps: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Two steps of an Adam that accumulates this many gradients per update."""

    def how(fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(params: Any, x: jax.Array) -> Any:
            import optax

            optimizer = optax.MultiSteps(optax.adam(1e-2), every_k_schedule=steps)
            state = optimizer.init(params)
            for part in (x[: ROWS // 2], x[ROWS // 2 :]):
                updates, state = optimizer.update(jax.grad(fn)(params, part), state, params)
                params = optax.apply_updates(params, updates)
            return params

        return run

    return how


def _flax_struct() -> Built:
    import flax.struct

    class State(flax.struct.PyTreeNode):
        params: Any
        loss: Callable[..., Any] = flax.struct.field(pytree_node=False)

    def loss(state: State, x: jax.Array) -> jax.Array:
        found: jax.Array = state.loss(state.params, x)
        return found

    return loss, (State(params=weights(), loss=plain_loss), rows())


row(
    "Other frameworks",
    "Equinox: `filter_value_and_grad`, `filter_jit`",
    _equinox,
    how=_filtered,
    jit=False,
    package="equinox",
)
row(
    "Other frameworks",
    "Haiku: `transform_with_state`",
    _haiku,
    how=_with_aux,
    has_aux=True,
    package="haiku",
)
row("Other frameworks", "registered dataclasses", _dataclasses)
row("Other frameworks", "`flax.struct`", _flax_struct, package="flax")
row("Other frameworks", "optax: Adam", network, how=_trained(1), tolerance=1e-2, package="optax")
row(
    "Other frameworks",
    "optax: `MultiSteps`",
    network,
    how=_trained(2),
    tolerance=1e-2,
    package="optax",
)
