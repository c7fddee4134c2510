"""What programs people write, one row each: does it work with the decorator, and does it gain?

``FEATURES`` is one list of small losses. To add a row is to add a line::

    row("Loops", "scan over stacked layers", lambda: (scanned, (weights, x)))

Each row is run and compiled with and without the decorator (``find``): values and derivatives must
be equal, and the compiler says what is gained. ``tests.feature_table`` writes what was found to
``docs/features.md``, and a test keeps the two in step.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify, io_callback, pallas

import remat_opt
from remat_opt.errors import RematError
from tests.kernels import USERS_KERNELS

#: Takes a loss, and returns the function whose results are compared.
How = Callable[[Callable[..., Any]], Callable[..., Any]]

#: JAX 0.10 undoes rematerialisation on CPU, unless told not to.
_OPTIONS = USERS_KERNELS | (
    {"xla_disable_hlo_passes": "cse_barrier_expander"} if jax.__version__ < "0.11" else {}
)

#: Less than this share of the temporaries of the undecorated program is a gain.
_GAINED = 0.95


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A row of the table.

    Attributes:
      group: its heading.
      name: what it is.
      build: returns (loss, its arguments).
      options: those of the decorator.
      how: takes the loss to the function whose results are compared.
      jit: whether that runs under ``jax.jit``; if not, memory is not compared.
      reverse: whether there is a backward pass, and so something to gain.
      note: what a reader should know.
      tolerance: relative; float32 is what is compared.
      package: what must be installed.
    """

    group: str
    name: str
    build: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    options: Mapping[str, Any]
    how: How
    jit: bool
    reverse: bool
    note: str
    tolerance: float
    package: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The outcome of a row.

    Attributes:
      works: "yes", or "refused" if an error says what to do.
      gains: "yes" or "no" by the compiled bytes; "-" if there is nothing to gain.
      detail: the temporaries with and without the decorator, or the error.
    """

    works: str
    gains: str
    detail: str


FEATURES: list[Feature] = []


def row(
    group: str,
    name: str,
    build: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]],
    *,
    how: How = jax.value_and_grad,
    jit: bool = True,
    reverse: bool = True,
    note: str = "",
    tolerance: float = 2e-4,
    package: str = "jax",
    **options: Any,
) -> None:
    """Adds a row; see ``Feature``. Other keyword arguments are options of the decorator."""
    FEATURES.append(
        Feature(
            group=group,
            name=name,
            build=build,
            options=options,
            how=how,
            jit=jit,
            reverse=reverse,
            note=note,
            tolerance=tolerance,
            package=package,
        )
    )


def find(feature: Feature) -> Found:
    """Runs a row with and without the decorator, and compiles both.

    Raises:
      AssertionError: the results differ.
    """
    fn, args = feature.build()
    decorated = remat_opt.optimal_remat(
        fn, device="cpu", gradients="results", errors="raise", **feature.options
    )
    plain = feature.how(fn)
    if not feature.jit:
        expected = plain(*args)
        try:
            assert_equal(expected, feature.how(decorated)(*args), feature.tolerance)
        except RematError as error:
            return Found(works="refused", gains="-", detail=_first_sentence(error))
        return Found(works="yes", gains="-", detail="")
    expected, plain_bytes = _compiled(plain, args)
    try:
        found, our_bytes = _compiled(feature.how(decorated), args)
    except RematError as error:
        return Found(works="refused", gains="-", detail=_first_sentence(error))
    assert_equal(expected, found, feature.tolerance)
    gains = "-" if not feature.reverse else "yes" if our_bytes < _GAINED * plain_bytes else "no"
    return Found(works="yes", gains=gains, detail=f"{our_bytes} of {plain_bytes} bytes")


def _compiled(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, int]:
    """The results of a function under ``jax.jit``, and its temporaries in bytes."""
    compiled = jax.jit(fn, compiler_options=_OPTIONS).lower(*args).compile()
    return compiled(*args), compiled.memory_analysis().temp_size_in_bytes


def _first_sentence(error: Exception) -> str:
    return re.split(r"(?<=\.)\s", str(error), maxsplit=1)[0]


def assert_equal(expected: Any, found: Any, tolerance: float) -> None:
    """Same tree, types and, to rounding, numbers."""
    leaves, tree = jax.tree.flatten(expected)
    others, other_tree = jax.tree.flatten(found)
    assert other_tree == tree
    for one, other in zip(leaves, others, strict=True):
        assert (other.shape, other.dtype) == (one.shape, one.dtype)
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        if one.dtype == jax.dtypes.float0:
            continue
        limit = tolerance * float(np.abs(np.asarray(one)).max(initial=0.0))
        np.testing.assert_allclose(other, one, rtol=tolerance, atol=limit)


# --- What rows are made of ----------------------------------------------------------------

DEPTH, WIDTH, ROWS = 6, 32, 256


def array(*shape: int, seed: int = 0) -> jax.Array:
    """Numbers of a size that keeps a deep network tame."""
    scale = 1 / np.sqrt(shape[-1])
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, jnp.float32)


def weights() -> list[jax.Array]:
    """Of ``DEPTH`` layers, each (``WIDTH``, ``WIDTH``)."""
    return [array(WIDTH, WIDTH, seed=n) for n in range(DEPTH)]


def rows() -> jax.Array:
    """A batch, (``ROWS``, ``WIDTH``)."""
    return array(ROWS, WIDTH, seed=99)


Layer = Callable[[jax.Array, jax.Array], jax.Array]


def layers(layer: Layer) -> Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Builds a network whose layers are ``layer(x @ w, w)``, with a ``tanh`` before each."""

    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in params:
            x = layer(jnp.tanh(x) @ w, w) + x
        return jnp.mean(x**2)

    return lambda: (loss, (weights(), rows()))


def plain_loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
    """A network with nothing special in it."""
    for w in params:
        x = jnp.tanh(x @ w) + x
    return jnp.mean(x**2)


def network() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """``plain_loss`` with its arguments."""
    return plain_loss, (weights(), rows())


# --- Transformations ----------------------------------------------------------------------


def _jvp(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, x: jax.jvp(lambda w: fn(w, x), (w,), (w,))


def _hvp(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, x: jax.jvp(jax.grad(lambda w: fn(w, x)), (w,), (w,))[1]


def _linearized(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(w: Any, x: Any) -> Any:
        value, tangent = jax.linearize(lambda w: fn(w, x), w)
        return value, tangent(w)

    return run


def _narrow() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(DEPTH):
            x = jnp.tanh(x @ w) + x
        return jnp.mean(x**2)

    return loss, (array(4, 4), array(ROWS, 4))


def _without_jit(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with jax.disable_jit():
            return jax.value_and_grad(fn)(*args)

    return run


row("Transformations", "`value_and_grad`", network)
row("Transformations", "`grad(f, argnums=1)`", network, how=lambda f: jax.grad(f, argnums=1))
row(
    "Transformations",
    "`vmap` of gradients",
    lambda: (plain_loss, (weights(), jnp.stack([rows(), rows()[::-1]]))),
    how=lambda f: jax.vmap(jax.grad(f), (None, 0)),
)
row("Transformations", "`jvp`", network, how=_jvp, reverse=False)
row("Transformations", "`jvp` of a gradient (Hessian-vector product)", network, how=_hvp)
row(
    "Transformations",
    "gradient of a `jit`",
    network,
    how=lambda f: jax.value_and_grad(jax.jit(f)),
    note="the plan is for `argnums=`",
)
row("Transformations", "`linearize`", network, how=_linearized, jit=False)
row("Transformations", "`hessian`", _narrow, how=jax.hessian, note="of a small network")


def _with_a_size() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(params: list[jax.Array], x: jax.Array, *, train: bool = False) -> jax.Array:
        return plain_loss(params, jnp.sin(x) if train else x)

    return loss, (weights(), rows())


class _Model:
    """Has a loss as a method, decorated in the class."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        self.loss = loss

    def total(self, params: list[jax.Array], x: jax.Array) -> jax.Array:
        return 0.5 * self.loss(params, x)


def _in_turn(fn: Callable[..., Any]) -> Callable[..., Any]:
    gradient = jax.value_and_grad(fn)
    return lambda w, x: [gradient(w, part) for part in (x, x[:100], x, x[:, None, :])]


def _micro_batches(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(w: Any, x: jax.Array) -> Any:
        def step(total: Any, part: jax.Array) -> tuple[Any, jax.Array]:
            value, gradient = jax.value_and_grad(fn)(w, part)
            return jax.tree.map(jnp.add, total, gradient), value

        return jax.lax.scan(step, jax.tree.map(jnp.zeros_like, w), x.reshape(2, -1, WIDTH))

    return run


row(
    "Transformations",
    "a loss that is under `jit` already",
    lambda: (jax.jit(plain_loss), (weights(), rows())),
)
row("Transformations", "a method", lambda: (_Model(plain_loss).total, (weights(), rows())))
row(
    "Transformations",
    "a `functools.partial`",
    lambda: (functools.partial(_with_a_size()[0], train=True), (weights(), rows())),
)
row("Transformations", "several shapes in turn", network, how=_in_turn)
row("Transformations", "gradients in a `scan`, as over micro-batches", network, how=_micro_batches)
row("Transformations", "`jacrev`", _narrow, how=jax.jacrev)
row("Transformations", "without `jit`", network, jit=False, note="traced and compiled once")
row("Transformations", "`disable_jit`", network, how=_without_jit, jit=False)


# --- Arguments ----------------------------------------------------------------------------


def _closure(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient through a function without arguments, which closes over everything."""
    decorate = getattr(fn, "around", lambda fn: fn)
    return jax.value_and_grad(lambda params, x: decorate(lambda: plain_loss(params, x))())


def _frozen() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(params: list[jax.Array], options: Mapping[str, Any], x: jax.Array) -> jax.Array:
        for w in params:
            x = options["activation"](x @ w) + x
        return getattr(jnp, options["reduce"])(x**2)

    return loss, (weights(), {"activation": jnp.tanh, "reduce": "mean"}, rows())


def _with_options(fn: Callable[..., Any]) -> Callable[..., Any]:
    options = _frozen()[1][1]
    return lambda params, x: jax.value_and_grad(fn)(params, options, x)


def _dropped() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(params: list[jax.Array], x: jax.Array, key: jax.Array) -> jax.Array:
        for own, w in zip(jax.random.split(key, len(params)), params, strict=True):
            x = jnp.where(jax.random.bernoulli(own, 0.9, x.shape), jnp.tanh(x @ w), 0.0) + x
        return jnp.mean(x**2)

    return loss, (weights(), rows(), jax.random.key(0))


def _labelled() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(params: list[jax.Array], x: jax.Array, labels: jax.Array) -> jax.Array:
        for w in params:
            x = jnp.tanh(x @ w) + x
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], axis=1))

    return loss, (weights(), rows(), jnp.arange(ROWS) % WIDTH)


def _complex() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in params:
            x = jnp.sin(x @ w) * 0.5 + x
        return jnp.mean(jnp.abs(x) ** 2)

    return loss, ([w * (0.5 + 0.3j) for w in weights()], rows() + 0j)


def _with_integers() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(params: dict[str, Any], x: jax.Array) -> jax.Array:
        return plain_loss(params["weights"], x) * params["count"]

    return loss, ({"weights": weights(), "count": jnp.asarray(3)}, rows())


def _static() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(depth: int, params: list[jax.Array], x: jax.Array) -> jax.Array:
        return plain_loss(params[:depth], x)

    return loss, (DEPTH, weights(), rows())


def _fixed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient for the second argument; the first is a Python value."""
    return lambda _, params, x: jax.value_and_grad(fn, argnums=1)(DEPTH, params, x)


def _empty() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(params: tuple[Any, Any], x: jax.Array) -> jax.Array:
        return plain_loss(params[0], x) + jnp.sum(params[1])

    return loss, ((weights(), jnp.zeros((0, 4))), rows())


def _weak() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(params: tuple[Any, Any], x: jax.Array) -> jax.Array:
        return plain_loss([params[1] * w for w in params[0]], x)

    return loss, ((weights(), 0.5), rows())


def _mixed() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in params:
            y = jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))
            x = y.astype(jnp.float32) + x
        return jnp.mean(x**2)

    return loss, (weights(), rows())


def _auxiliary() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(params: list[jax.Array], x: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
        value = plain_loss(params, x)
        return value, {"value": value, "rows": x.shape[0], "mean": jnp.mean(x)}

    return loss, (weights(), rows())


row("Arguments", "parameters that are closed over", network, how=_closure)
row("Arguments", "typed keys", _dropped)
row(
    "Arguments",
    "raw keys",
    lambda: (_dropped()[0], (weights(), rows(), jax.random.PRNGKey(0))),
)
row("Arguments", "integers", _labelled)
row(
    "Arguments",
    "integers among the parameters (`allow_int=True`, `float0`)",
    _with_integers,
    how=lambda f: jax.grad(f, allow_int=True),
)
row("Arguments", "complex numbers", _complex)
row("Arguments", "weak types", _weak)
row("Arguments", "arrays of size zero", _empty)
row(
    "Arguments",
    "`static_argnames`",
    _with_a_size,
    how=lambda f: lambda w, x: jax.value_and_grad(f)(w, x, train=True),
    static_argnames="train",
)
row("Arguments", "bfloat16 and float32 in one program", _mixed, tolerance=2e-2)
row("Arguments", "`static_argnums=0`", _static, how=_fixed, static_argnums=0)
row(
    "Arguments",
    "functions and texts among the arguments",
    lambda: (_frozen()[0], (weights(), rows())),
    how=_with_options,
    note="they are static",
)
row(
    "Arguments",
    "`has_aux=True`",
    _auxiliary,
    how=lambda f: jax.value_and_grad(f, has_aux=True),
    has_aux=True,
)

# --- Loops --------------------------------------------------------------------------------


def _scan(**options: Any) -> Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]:
    def loss(stacked: jax.Array, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(h @ w) + h, None

        return jnp.mean(jax.lax.scan(layer, x, stacked, **options)[0] ** 2)

    return lambda: (loss, (jnp.stack(weights()), rows()))


def _scan_without_inputs() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def step(h: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            h = jnp.tanh(h @ w) + h
            return h, jnp.mean(h)

        h, means = jax.lax.scan(step, x, None, length=DEPTH)
        return jnp.mean(h**2) + jnp.sum(means)

    return loss, (weights()[0], rows())


def _scan_in_scan() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(stacked: jax.Array, x: jax.Array) -> jax.Array:
        def outer(h: jax.Array, ws: jax.Array) -> tuple[jax.Array, None]:
            return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w) + h, None), h, ws)[0], None

        return jnp.mean(jax.lax.scan(outer, x, stacked)[0] ** 2)

    stacked = jnp.stack(2 * weights()).reshape(4, DEPTH // 2, WIDTH, WIDTH)
    return loss, (stacked, rows())


def _counted() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.fori_loop(0, DEPTH, lambda _, h: jnp.tanh(h @ w) + h, x) ** 2)

    return loss, (weights()[0], rows())


def _mapped() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.map(lambda part: plain_loss(params, part), x.reshape(4, -1, WIDTH)))

    return loss, (weights(), rows())


def _associative(x: jax.Array, _: jax.Array) -> jax.Array:
    return jax.lax.associative_scan(jnp.multiply, 1 + 0.01 * x)


def _scan_with_a_state() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(stacked: jax.Array, x: jax.Array, key: jax.Array) -> jax.Array:
        def layer(state: dict[str, Any], w: jax.Array) -> tuple[dict[str, Any], jax.Array]:
            key, own = jax.random.split(state["key"])
            kept = jax.random.bernoulli(own, 0.9, state["h"].shape)
            h = jnp.where(kept, jnp.tanh(state["h"] @ w), 0.0) + state["h"]
            return {"h": h, "key": key, "count": state["count"] + 1}, state["count"]

        state = {"h": x, "key": key, "count": jnp.int32(0)}
        state, counts = jax.lax.scan(layer, state, stacked)
        return jnp.mean(state["h"] ** 2) * state["count"] + jnp.sum(counts)

    return loss, (jnp.stack(weights()), rows(), jax.random.key(0))


def _scan_of(layer: Layer) -> Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]:
    """A prime number of layers, with a shared weight."""

    def loss(params: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        stacked, shared = params

        def step(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return layer(jnp.tanh(h @ w), shared) + h, None

        return jnp.mean(jax.lax.scan(step, x, stacked)[0] ** 2)

    return lambda: (loss, ((jnp.stack([*weights(), weights()[0]]), weights()[1]), rows()))


def _recurrent() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(params: tuple[jax.Array, jax.Array], inputs: jax.Array) -> jax.Array:
        def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            h, c = state
            i, f, g, o = jnp.split(h @ params[0] + x @ params[1], 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        state = (jnp.zeros((8, WIDTH)), jnp.zeros((8, WIDTH)))
        return jnp.mean(jax.lax.scan(step, state, inputs)[1] ** 2)

    both = array(WIDTH, 4 * WIDTH), array(WIDTH, 4 * WIDTH, seed=1)
    return loss, (both, array(40, 8, WIDTH))


def _scan_over_while(x: jax.Array, w: jax.Array) -> jax.Array:
    turns = jax.lax.while_loop(lambda n: n < 3 + w[0, 0], lambda n: n + 1, 0.0)
    return jnp.sin(x) * turns


row("Loops", "`scan`", _scan())
row("Loops", "`scan` whose carry has integers and keys", _scan_with_a_state)
row("Loops", "`scan` of seven layers with weights they share", _scan_of(lambda x, w: x @ w))
row("Loops", "`scan` over an LSTM", _recurrent)
row("Loops", "`cond` in `scan`", _scan_of(lambda x, w: _cond(x, w)))
row("Loops", "`while_loop` in `scan`", _scan_of(_scan_over_while))
row("Loops", "`jax.checkpoint` in `scan`", _scan_of(jax.checkpoint(lambda x, w: jnp.sin(x @ w))))
row(
    "Loops",
    "`jax.checkpoint` in `scan`, replaced",
    _scan_of(jax.checkpoint(lambda x, w: jnp.sin(x @ w))),
    existing="replace",
)
row("Loops", "`scan(reverse=True)`", _scan(reverse=True))
row("Loops", "`scan(unroll=2)`", _scan(unroll=2))
row("Loops", "`scan` with `xs=None` and stacked outputs", _scan_without_inputs)
row("Loops", "`scan` in `scan`", _scan_in_scan)
row("Loops", "`fori_loop` with static bounds", _counted)
row("Loops", "`lax.map`", _mapped)
row("Loops", "`associative_scan`", layers(_associative), tolerance=1e-3)

# --- Control flow -------------------------------------------------------------------------


def _cond(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.cond(w[0, 0] > 0, lambda x: jnp.sin(x) * x, lambda x: jnp.cos(x), x)


def _switch(x: jax.Array, w: jax.Array) -> jax.Array:
    which = jnp.clip(jnp.int32(10 * w[0, 0]), 0, 2)
    return jax.lax.switch(which, [jnp.sin, lambda x: jnp.cos(x) * x, jnp.tanh], x)


def _while_before() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        x = jax.lax.while_loop(lambda x: jnp.max(x) > 0.5, lambda x: 0.9 * x, x)
        return plain_loss(params, x)

    return loss, (weights(), rows())


def _cond_with_layers(x: jax.Array, w: jax.Array) -> jax.Array:
    def block(x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = x + jnp.tanh(x @ w)
        return x

    return jax.lax.cond(w[0, 0] > 0, block, lambda x: jnp.sin(block(x)), x)


def _one_cond() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        def first(x: jax.Array) -> jax.Array:
            for w in params:
                x = x + jnp.tanh(x @ w)
            return x

        return jnp.mean(jax.lax.cond(x[0, 0] > 0, first, lambda x: jnp.sin(first(x)), x) ** 2)

    return loss, (weights(), rows())


row("Control flow", "`cond`", layers(_cond))
row("Control flow", "`cond` with layers in its branches", layers(_cond_with_layers))
row("Control flow", "`cond` around the whole network", _one_cond)
row("Control flow", "`switch`", layers(_switch))
row("Control flow", "`while_loop` where nothing is differentiated", _while_before)

# --- Operations ---------------------------------------------------------------------------


def _fft(x: jax.Array, _: jax.Array) -> jax.Array:
    return jnp.fft.ifft(jnp.fft.fft(x) * jnp.exp(-jnp.arange(WIDTH))).real


def _solve(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.linalg.solve(w @ w.T + 2 * jnp.eye(WIDTH), x.T).T


def _cholesky(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ jnp.linalg.cholesky(w @ w.T + 2 * jnp.eye(WIDTH))


def _scatter(x: jax.Array, _: jax.Array) -> jax.Array:
    return x.at[:, ::2].add(jnp.sin(x[:, 1::2]))


def _attention() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in params:
            q, k, v = (y.reshape(2, 128, 4, 8) for y in (x @ w, x @ w.T, jnp.tanh(x)))
            y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            x = jnp.tanh(y.reshape(ROWS, WIDTH) @ w) + x
        return jnp.mean(x**2)

    return loss, (weights(), rows())


def _eigh(x: jax.Array, w: jax.Array) -> jax.Array:
    values, vectors = jnp.linalg.eigh(w @ w.T + jnp.diag(jnp.arange(WIDTH)))
    return (x @ vectors) * jnp.tanh(values)


def _svd(x: jax.Array, w: jax.Array) -> jax.Array:
    return x * jnp.linalg.svd(w + jnp.diag(jnp.arange(WIDTH)), compute_uv=False) / WIDTH


def _inverse(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ jnp.linalg.inv(w + 4 * jnp.eye(WIDTH))


def _triangular(x: jax.Array, w: jax.Array) -> jax.Array:
    lower = jnp.tril(w) + 4 * jnp.eye(WIDTH)
    return jax.scipy.linalg.solve_triangular(lower, x.T, lower=True).T


def _logarithm_of_determinant(x: jax.Array, w: jax.Array) -> jax.Array:
    return x * jnp.linalg.slogdet(w @ w.T + jnp.eye(WIDTH))[1] / WIDTH


def _images(layer: Layer) -> Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]:
    """A network of convolutions, with ``layer`` after each."""

    def loss(kernels: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in kernels:
            y = jax.lax.conv_general_dilated(
                x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = layer(jax.nn.relu(y), w) + x
        return jnp.mean(x**2)

    return lambda: (loss, ([array(3, 3, 8, 8, seed=n) for n in range(DEPTH)], array(4, 16, 16, 8)))


def _pooled(start: float, operation: Callable[..., jax.Array]) -> Layer:
    return lambda x, _: jnp.tanh(
        jax.lax.reduce_window(x, start, operation, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
    )


def _windowed(x: jax.Array, w: jax.Array) -> jax.Array:
    start = jnp.int32(w[0, 0] > 0)
    part = jnp.sin(jax.lax.dynamic_slice_in_dim(x, start, WIDTH // 2, axis=1))
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, axis=1)


def _best(x: jax.Array, _: jax.Array) -> jax.Array:
    values, places = jax.lax.top_k(x, 4)
    return jnp.sum(values * jnp.sin(places), axis=-1, keepdims=True) * x / WIDTH


def _segments(x: jax.Array, _: jax.Array) -> jax.Array:
    which = jnp.arange(ROWS) % 16
    return jnp.tanh(jax.ops.segment_sum(x, which, 16))[which]


def _ragged(x: jax.Array, w: jax.Array) -> jax.Array:
    sizes = jnp.array([ROWS // 4, ROWS - ROWS // 4], jnp.int32)
    return jax.lax.ragged_dot(x, jnp.stack([w, w.T]), sizes)


def _bits(x: jax.Array, _: jax.Array) -> jax.Array:
    is_negative = jax.lax.bitcast_convert_type(x, jnp.int32) < 0
    return jnp.sin(x) * jnp.where(is_negative, 1.0, 0.9)


def _special(x: jax.Array, _: jax.Array) -> jax.Array:
    return jax.scipy.special.gammaln(1.5 + jnp.abs(x)) + jax.scipy.special.erf(x)


def _series(x: jax.Array, _: jax.Array) -> jax.Array:
    return jnp.log(jax.scipy.special.gammainc(2.0, 1.0 + jnp.abs(x)))


def _straight_through(x: jax.Array, _: jax.Array) -> jax.Array:
    return jnp.sin(x) + jax.lax.stop_gradient(jnp.round(4 * x) / 4 - x)


def _behind_a_barrier(x: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier(jnp.sin(x)) * x


row("Operations", "convolution", _images(lambda x, _: jnp.sin(x)))
row("Operations", "pooling, the largest", _images(_pooled(-jnp.inf, jax.lax.max)))
row("Operations", "pooling, the mean", _images(_pooled(0.0, jax.lax.add)))
row("Operations", "`cumsum`", layers(lambda x, _: jnp.sin(jnp.cumsum(x, axis=0) / ROWS) * x))
row("Operations", "`cumprod`", layers(lambda x, _: jnp.cumprod(1 + 0.01 * x, axis=1)))
row("Operations", "`top_k`", layers(_best))
row("Operations", "`argmax`", layers(lambda x, _: x * jax.nn.one_hot(jnp.argmax(x, 1), WIDTH)))
row("Operations", "`dynamic_slice`, `dynamic_update_slice`", layers(_windowed))
row("Operations", "`segment_sum`", layers(_segments))
row("Operations", "`ragged_dot`", layers(_ragged))
row("Operations", "`bitcast_convert_type`", layers(_bits))
row("Operations", "`gammaln`, `erf`", layers(_special))
row(
    "Operations",
    "`gammainc`",
    layers(_series),
    note='the compiler\'s loop takes memory that is not foreseen; `verify="compile"` sees it',
)
row("Operations", "`stop_gradient`", layers(_straight_through))
row("Operations", "`optimization_barrier`", layers(lambda x, _: _behind_a_barrier(x)))
row("Operations", "`sort`", layers(lambda x, _: jnp.sort(x)))
row("Operations", "gather", layers(lambda x, _: jnp.sin(x[:, jnp.arange(WIDTH)[::-1]])))
row("Operations", "scatter", layers(_scatter))
row("Operations", "FFT", layers(_fft))
row("Operations", "`linalg.solve`", layers(_solve), tolerance=1e-3)
row("Operations", "`linalg.cholesky`", layers(_cholesky), tolerance=1e-3)
row("Operations", "`linalg.qr`", layers(lambda x, w: x @ jnp.linalg.qr(w)[0]), tolerance=1e-3)
row("Operations", "`linalg.eigh`", layers(_eigh), tolerance=1e-3)
row("Operations", "`linalg.svd`", layers(_svd), tolerance=1e-3)
row("Operations", "`linalg.slogdet`, by LU", layers(_logarithm_of_determinant), tolerance=1e-3)
row("Operations", "`solve_triangular`", layers(_triangular), tolerance=1e-3)
row("Operations", "`linalg.inv`", layers(_inverse), tolerance=1e-3)
row("Operations", "`dot_product_attention`", _attention)

# --- Functions with rules of their own ----------------------------------------------------


@jax.custom_jvp
def _own_jvp(x: jax.Array) -> jax.Array:
    return jnp.sin(x) * x


@_own_jvp.defjvp
def _(primals: tuple[Any], tangents: tuple[Any]) -> tuple[jax.Array, jax.Array]:
    return _own_jvp(*primals), tangents[0] * jnp.cos(primals[0])


@jax.custom_vjp
def _own_vjp(x: jax.Array) -> jax.Array:
    return jnp.sin(x) * x


_own_vjp.defvjp(
    lambda x: (jnp.sin(x) * x, (jnp.sin(x), jnp.cos(x))),
    lambda saved, g: (g * (saved[0] + saved[1]),),
)


def _closure_converted() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in params:
            # `w` is closed over: made an argument of the converted function.
            layer, closed_over = jax.closure_convert(lambda x, w=w: jnp.tanh(x @ w) + x, x)
            x = layer(x, *closed_over)
        return jnp.mean(x**2)

    return loss, (weights(), rows())


def _callback(x: jax.Array, _: jax.Array) -> jax.Array:
    kind = jax.ShapeDtypeStruct((WIDTH,), x.dtype)
    scale = jax.pure_callback(lambda: np.full(WIDTH, 0.5, np.float32), kind)
    return jnp.sin(x) * scale


def _telling(x: jax.Array, _: jax.Array) -> jax.Array:
    io_callback(lambda: None, None, ordered=True)
    return jnp.sin(x) * x


def _printing(x: jax.Array, _: jax.Array) -> jax.Array:
    jax.debug.callback(lambda: None)
    return jnp.sin(x) * x


def _talking(x: jax.Array, _: jax.Array) -> jax.Array:
    jax.debug.print("", ordered=True)
    return jnp.sin(x) * x


def _telling_in_any_order(x: jax.Array, _: jax.Array) -> jax.Array:
    io_callback(lambda: None, None)
    return jnp.sin(x) * x


def _counting(x: jax.Array, _: jax.Array) -> jax.Array:
    begun, empty = jax.new_ref(jnp.sin(x)), jax.new_ref(jnp.zeros_like(x))
    begun[...] += x
    empty[...] = jnp.cos(x)
    return begun[...] * x + empty[...]


def _scan_with_a_ref(x: jax.Array, w: jax.Array) -> jax.Array:
    total = jax.new_ref(jnp.zeros_like(x))

    def step(h: jax.Array, _: None) -> tuple[jax.Array, None]:
        total[...] += h
        return jnp.tanh(h @ w), None

    h, _ = jax.lax.scan(step, x, None, length=2)
    return h + total[...]


def _checked(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(w: Any, x: jax.Array) -> Any:
        error, found = checkify.checkify(jax.value_and_grad(fn))(w, x)
        return found, jnp.asarray(error.get() is None)

    return run


def _checking(x: jax.Array, _: jax.Array) -> jax.Array:
    checkify.check(jnp.all(jnp.isfinite(x)), "not finite")
    return jnp.sin(x) * x


def _kernel(x: jax.Array) -> jax.Array:
    def body(x_ref: Any, y_ref: Any) -> None:
        y_ref[...] = jnp.sin(x_ref[...]) * x_ref[...]

    kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
    found: jax.Array = pallas.pallas_call(body, out_shape=kind, interpret=True)(x)
    return found


_own_kernel = jax.custom_vjp(_kernel)
_own_kernel.defvjp(
    lambda x: (_kernel(x), x),
    lambda x, g: (g * (jnp.sin(x) + x * jnp.cos(x)),),
)


@jax.custom_batching.custom_vmap
def _own_batching(x: jax.Array) -> jax.Array:
    return jnp.sin(x) * x


@_own_batching.def_vmap
def _(axis_size: int, in_batched: Any, x: jax.Array) -> tuple[jax.Array, bool]:
    return jnp.sin(x) * x, in_batched[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _own_vjp_of(fn: Callable[[jax.Array], jax.Array], x: dict[str, jax.Array]) -> jax.Array:
    return fn(x["x"]) * x["by"]


_own_vjp_of.defvjp(
    lambda fn, x: (fn(x["x"]) * x["by"], (x, fn(x["x"]))),
    lambda fn, saved, g: (
        {"x": g * jax.jvp(fn, (saved[0]["x"],), (saved[0]["by"],))[1], "by": g * saved[1]},
    ),
)


def _with_nondiff(x: jax.Array, _: jax.Array) -> jax.Array:
    return _own_vjp_of(jnp.sin, {"x": x, "by": x})


def _root(x: jax.Array, _: jax.Array) -> jax.Array:
    """Solves y**3 + y = x by Newton's method."""

    def solve(f: Callable[[jax.Array], jax.Array], y: jax.Array) -> jax.Array:
        def step(y: jax.Array) -> jax.Array:
            return y - f(y) / (3 * y**2 + 1)

        return jax.lax.fori_loop(0, 20, lambda _, y: step(y), y)

    def tangent(g: Callable[[jax.Array], jax.Array], y: jax.Array) -> jax.Array:
        return y / g(jnp.ones_like(y))

    return jax.lax.custom_root(lambda y: y**3 + y - x, jnp.zeros_like(x), solve, tangent)


def _conjugate_gradients(x: jax.Array, w: jax.Array) -> jax.Array:
    matrix = w @ w.T + 4 * jnp.eye(WIDTH)
    return jax.scipy.sparse.linalg.cg(lambda y: matrix @ y, x.T, maxiter=40)[0].T


row("Calls", "`jit`", layers(lambda x, w: jax.jit(lambda x, w: jnp.sin(x @ w) * x)(x, w)))
row("Calls", "`custom_vjp` with `nondiff_argnums` and trees", layers(_with_nondiff))
row("Calls", "`pallas_call` under a `custom_vjp`", layers(lambda x, _: _own_kernel(x)))
row(
    "Calls",
    "`custom_batching.custom_vmap` under `vmap`",
    layers(lambda x, _: jax.vmap(_own_batching)(x)),
    note="without `vmap` JAX has no gradient of it",
)
row("Calls", "`custom_root`", layers(_root), tolerance=1e-3)
row("Calls", "`custom_linear_solve`, as in `cg`", layers(_conjugate_gradients), tolerance=1e-3)
row("Calls", "`checkpoint_name`", layers(lambda x, _: checkpoint_name(jnp.sin(x) * x, "wave")))
row("Calls", "`debug.print(ordered=True)`", layers(_talking))
row("Calls", "`io_callback`", layers(_telling_in_any_order))
row("Calls", "`new_ref`: mutable arrays", layers(_counting), note="what passes through is kept")
row("Calls", "`new_ref` in a `scan`", layers(_scan_with_a_ref))
row("Calls", "`checkify` around the gradient", layers(_checking), how=_checked, jit=False)
row("Calls", "`custom_jvp`", layers(lambda x, _: _own_jvp(x)))
row("Calls", "`custom_vjp`", layers(lambda x, _: _own_vjp(x)))
row("Calls", "inner `jax.checkpoint`", layers(lambda x, _: jax.checkpoint(_own_jvp)(x)))
row(
    "Calls",
    "inner `jax.checkpoint`, replaced",
    layers(lambda x, _: jax.checkpoint(_own_jvp)(x)),
    existing="replace",
)
row("Calls", "`closure_convert`", _closure_converted)
row("Calls", "`named_call`", layers(lambda x, _: jax.named_call(jnp.sin, name="sine")(x) * x))
row("Calls", "`pure_callback`", layers(_callback))
row("Calls", "`debug.callback`, as in `debug.print`", layers(_printing))
row("Calls", "`io_callback(ordered=True)`", layers(_telling))
row("Calls", "`debug.print(ordered=True)` in `scan`", _scan_of(lambda x, w: _talking(x @ w, w)))
row("Calls", "`pure_callback` in `scan`", _scan_of(lambda x, w: _callback(x @ w, w)))
row(
    "Calls",
    "`io_callback` in a branch",
    layers(
        lambda x, w: jax.lax.cond(x[0, 0] < 9, lambda x: _telling_in_any_order(x, w), jnp.sin, x)
    ),
)
