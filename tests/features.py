"""What programs people write, one row each: does it work with the decorator, and does it gain?

``FEATURES`` is one list of small losses. To add a row is to add a line::

    row("Loops", "scan over stacked layers", lambda: (scanned, (weights, x)))

Each row is run and compiled with the decorator and without (``find``): values and derivatives must
be equal, and what is gained is told by the compiler. ``tests.feature_table`` writes what was found
to ``docs/features.md``, and a test holds the two together.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

import remat_opt
from remat_opt.errors import RematError

#: Takes a loss, and gives the function whose results are compared.
How = Callable[[Callable[..., Any]], Callable[..., Any]]

#: JAX 0.10 undoes rematerialisation on CPU, unless told not to.
_OPTIONS = {"xla_disable_hlo_passes": "cse_barrier_expander"} if jax.__version__ < "0.11" else None

#: Less than this share of the temporaries of the undecorated program is a gain.
_GAINED = 0.95


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A row of the table.

    Attributes:
      group: the heading it stands under.
      name: what it is.
      build: gives (loss, its arguments).
      options: of the decorator.
      how: from the loss to the function whose results are compared.
      jit: whether that runs under ``jax.jit``; where it does not, nothing is told of memory.
      reverse: whether there is a backward pass, and so something to gain.
      note: what a reader should know.
      tolerance: relative; float32 is what is compared.
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What became of a row.

    Attributes:
      works: "yes", or "refused" where there is an error that says what to do.
      gains: "yes" or "no" by the compiled bytes; "-" where there is nothing to gain.
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
    **options: Any,
) -> None:
    """Adds a row; see ``Feature``. What else is given by name are options of the decorator."""
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
        )
    )


def find(feature: Feature) -> Found:
    """Runs a row with the decorator and without, and compiles both.

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
row("Transformations", "without `jit`", network, jit=False, note="traced and compiled once")
row("Transformations", "`disable_jit`", network, how=_without_jit, jit=False)


# --- Arguments ----------------------------------------------------------------------------


def _closure(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient through a function without arguments, which closes over all."""
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
    """The gradient for the second argument, the first being a Python value."""
    return lambda _, params, x: jax.value_and_grad(fn, argnums=1)(DEPTH, params, x)


def _empty() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(params: tuple[Any, Any], x: jax.Array) -> jax.Array:
        return plain_loss(params[0], x) + jnp.sum(params[1])

    return loss, ((weights(), jnp.zeros((0, 4))), rows())


def _weak() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(params: tuple[Any, Any], x: jax.Array) -> jax.Array:
        return plain_loss([params[1] * w for w in params[0]], x)

    return loss, ((weights(), 0.5), rows())


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


row("Loops", "`scan`", _scan())
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


row("Operations", "`sort`", layers(lambda x, _: jnp.sort(x)))
row("Operations", "gather", layers(lambda x, _: jnp.sin(x[:, jnp.arange(WIDTH)[::-1]])))
row("Operations", "scatter", layers(_scatter))
row("Operations", "FFT", layers(_fft))
row("Operations", "`linalg.solve`", layers(_solve), tolerance=1e-3)
row("Operations", "`linalg.cholesky`", layers(_cholesky), tolerance=1e-3)
row("Operations", "`linalg.qr`", layers(lambda x, w: x @ jnp.linalg.qr(w)[0]), tolerance=1e-3)
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
