"""Example losses of every kind that a user may decorate, small enough to compile quickly.

``EXAMPLES`` maps a name to a function that builds the example. They are built on request, not on
import, so that a test chooses the precision (float64 where it compares tightly).
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A loss with arguments.

    Attributes:
      fn: the loss.
      args: its positional arguments.
      kwargs: its keyword arguments.
      options: those of ``optimal_remat``: argnums, has_aux, static_argnums, static_argnames.
      forward_mode: whether JAX can take its ``jvp`` (not with a custom_vjp or a callback).
      twice: whether JAX can differentiate it twice.
      batched: whether JAX can ``vmap`` it over its differentiated arguments.
      tolerance: relative, if rounding in float64 is not what limits the comparison.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    forward_mode: bool = True
    twice: bool = True
    batched: bool = True
    tolerance: float = 1e-12

    @property
    def argnums(self) -> int | tuple[int, ...]:
        return self.options.get("argnums", 0)

    @property
    def has_aux(self) -> bool:
        return self.options.get("has_aux", False)


EXAMPLES: dict[str, Callable[[], Example]] = {}
#: Those that take long to compile.
DEAR = {
    *("attention", "bfloat16", "cnn_batch_norm", "dense_blocks", "dropout_raw_key"),
    *("dropout_typed_key", "embedding_lookup", "flax_batch_norm", "flax_nnx"),
    *("gather_scatter_sort", "inner_derivatives", "linear_algebra", "many_elementwise"),
    *("recurrent_unrolled", "residual_blocks", "scanned_layers", "static_arguments"),
}


def example(build: Callable[[], Example]) -> Callable[[], Example]:
    EXAMPLES[build.__name__] = build
    return build


def array(name: str, *shape: int, scale: float = 0.5) -> jax.Array:
    """Normal numbers that depend only on the name and the shape; made without a compile."""
    seed = zlib.crc32(f"{name}{shape}".encode())
    numbers = np.random.default_rng(seed).normal(size=shape) * scale
    return jax.device_put(numbers)


def ones(*shape: int, dtype: Any = "float32") -> jax.Array:
    """Like ``jnp.ones``, of which JAX compiles one for each shape."""
    return jax.device_put(np.ones(shape, dtype))


# --- Networks -----------------------------------------------------------------------------


def lstm(params, sequence, *, reverse=False):
    """A loss of an LSTM in a scan, with stacked outputs; takes (steps, batch, features)."""

    def cell(state, x):
        hidden, memory = state
        gates = x @ params["input"] + hidden @ params["state"] + params["bias"]
        enter, forget, candidate, leave = jnp.split(gates, 4, axis=-1)
        memory = jax.nn.sigmoid(forget) * memory + jax.nn.sigmoid(enter) * jnp.tanh(candidate)
        hidden = jax.nn.sigmoid(leave) * jnp.tanh(memory)
        return (hidden, memory), hidden

    zeros = jnp.zeros((sequence.shape[1], params["state"].shape[0]))
    return jnp.mean(jax.lax.scan(cell, (zeros, zeros), sequence, reverse=reverse)[1] ** 2)


@example
def mlp() -> Example:
    def loss(params, x, y):
        for weight, bias in params:
            x = jnp.tanh(x @ weight + bias)
        return jnp.mean((x - y) ** 2)

    params = [(array(f"w{i}", 6, 6), array(f"b{i}", 6)) for i in range(4)]
    return Example(fn=loss, args=(params, array("x", 3, 6), array("y", 3, 6)))


def convolved(
    x: jax.Array, kernel: jax.Array, stride: int = 1, *, dilation: int = 1, groups: int = 1
) -> jax.Array:
    """Images convolved with a kernel, as large as before but for the stride."""
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        "SAME",
        rhs_dilation=(dilation, dilation),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def _batch_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> tuple[jax.Array, Any]:
    mean, variance = jnp.mean(x, (0, 1, 2)), jnp.var(x, (0, 1, 2))
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + bias, (mean, variance)


@example
def cnn_batch_norm() -> Example:
    def loss(params, image, label):
        statistics = {}
        x = image
        for name, (kernel, scale, bias) in params["convs"].items():
            x, statistics[name] = _batch_norm(convolved(x, kernel), scale, bias)
            x = jax.nn.relu(x)
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        logits = jnp.mean(x, (1, 2)) @ params["head"]
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), label[:, None], axis=1)
        return -jnp.mean(picked), statistics

    params = {
        "convs": {
            f"conv{i}": (array(f"k{i}", 3, 3, 2 if i == 0 else 3, 3), jnp.ones(3), jnp.zeros(3))
            for i in range(2)
        },
        "head": array("head", 3, 4),
    }
    image, label = array("image", 2, 6, 6, 2), jnp.array([1, 3])
    return Example(fn=loss, args=(params, image, label), options={"has_aux": True})


@example
def flax_batch_norm() -> Example:
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                x = nn.Conv(3, (3, 3), param_dtype=x.dtype)(x)
                x = nn.BatchNorm(use_running_average=False, param_dtype=x.dtype)(x)
                x = nn.relu(x)
            return nn.Dense(2, param_dtype=x.dtype)(jnp.mean(x, (1, 2)))

    network = Network()
    image = array("image", 2, 5, 5, 1)
    variables = network.init(jax.random.key(0), image)

    def loss(params, batch_stats, image):
        logits, updated = network.apply(
            {"params": params, "batch_stats": batch_stats}, image, mutable=["batch_stats"]
        )
        return jnp.sum(logits**2), updated["batch_stats"]

    args = (variables["params"], variables["batch_stats"], image)
    return Example(fn=loss, args=args, options={"has_aux": True})


@example
def flax_nnx() -> Example:
    class Network(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(3, 5, rngs=rngs)
            self.norm = nnx.LayerNorm(5, rngs=rngs)
            self.second = nnx.Linear(5, 1, rngs=rngs)

        def __call__(self, x):
            return self.second(nnx.gelu(self.norm(self.first(x))))

    definition, state = nnx.split(Network(nnx.Rngs(0)))

    def loss(state, x):
        return jnp.mean(nnx.merge(definition, state)(x) ** 2)

    return Example(fn=loss, args=(state, array("x", 4, 3)), tolerance=2e-5)  # float32 parameters


@example
def residual_blocks() -> Example:
    def loss(params, x):
        for kernel, weight in params:
            y, _ = _batch_norm(convolved(x, kernel), weight, weight)
            x = jax.nn.relu(y + x)
        return jnp.sum(jnp.mean(x, (1, 2)) ** 2)

    params = [(array(f"k{i}", 3, 3, 2, 2), array(f"s{i}", 2)) for i in range(3)]
    return Example(fn=loss, args=(params, array("image", 2, 4, 4, 2)))


@example
def dense_blocks() -> Example:
    def loss(params, x):
        features = [x]
        for weight in params:
            features.append(jax.nn.relu(jnp.concatenate(features, axis=-1) @ weight))
        return jnp.sum(jnp.sin(jnp.concatenate(features, axis=-1)))

    params = [array(f"w{i}", 3 * (i + 1), 3) for i in range(4)]
    return Example(fn=loss, args=(params, array("x", 4, 3)))


def _layer_norm(x: jax.Array) -> jax.Array:
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-6)


@example
def attention() -> Example:
    def loss(params, x, mask):
        for layer in params:
            y = _layer_norm(x)
            q, k, v = (jnp.einsum("btd,dhk->bhtk", y, layer[name]) for name in "qkv")
            scores = jnp.einsum("bhtk,bhsk->bhts", q, k) / np.sqrt(q.shape[-1])
            scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
            mixed = jnp.einsum("bhts,bhsk->bthk", jax.nn.softmax(scores), v)
            x = x + jnp.einsum("bthk,hkd->btd", mixed, layer["o"])
            x = x + jax.nn.gelu(_layer_norm(x) @ layer["up"]) @ layer["down"]
        return -jnp.mean(jax.nn.log_softmax(x)[..., 0])

    params = [
        {name: array(f"{name}{i}", 4, 2, 2) for name in "qkv"}
        | {"o": array(f"o{i}", 2, 2, 4), "up": array(f"u{i}", 4, 6), "down": array(f"d{i}", 6, 4)}
        for i in range(2)
    ]
    mask = jnp.tril(jnp.ones((3, 3), bool))
    return Example(fn=loss, args=(params, array("x", 2, 3, 4), mask))


@example
def embedding_lookup() -> Example:
    def loss(params, tokens):
        x = params["table"][tokens]
        logits = jnp.tanh(x @ params["mix"]) @ params["table"].T
        return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[..., 0])

    params = {"table": array("table", 7, 3), "mix": array("mix", 3, 3)}
    return Example(fn=loss, args=(params, jnp.array([[0, 1, 6], [2, 2, 5]])))


@example
def recurrent_unrolled() -> Example:
    def loss(params, sequence):
        state = jnp.zeros(params["h"].shape[0])
        for step in range(sequence.shape[0]):
            state = jnp.tanh(sequence[step] @ params["x"] + state @ params["h"])
        return jnp.sum(state**2)

    params = {"x": array("x", 2, 3), "h": array("h", 3, 3)}
    return Example(fn=loss, args=(params, array("sequence", 5, 2)))


@example
def recurrent_scan() -> Example:
    def loss(params, sequence):
        def step(state, x):
            state = jnp.tanh(x @ params["x"] + state @ params["h"])
            return state, state

        state, states = lax.scan(step, jnp.zeros(3), sequence)
        return jnp.sum(state**2) + jnp.sum(jnp.sin(states)), states

    params = {"x": array("x", 2, 3), "h": array("h", 3, 3)}
    return Example(fn=loss, args=(params, array("sequence", 5, 2)), options={"has_aux": True})


@example
def scanned_layers() -> Example:
    def loss(params, x):
        def layer(x, weight):
            return x + jnp.tanh(x @ weight), None

        x = jnp.sin(x)
        x, _ = lax.scan(jax.checkpoint(layer), x, params["early"])
        x, _ = lax.scan(layer, jnp.cos(x), params["late"], unroll=2)
        return jnp.sum(x * x)

    params = {"early": array("early", 3, 4, 4), "late": array("late", 4, 4, 4)}
    return Example(fn=loss, args=(params, array("x", 2, 4)))


# --- Control flow -------------------------------------------------------------------------


@example
def branches() -> Example:
    def loss(x, flag, which):
        y = lax.cond(flag, lambda a: jnp.sin(a) * a, lambda a: a**3, x)
        y = lax.switch(which, [jnp.tanh, jnp.exp, lambda a: a * 2.0], y)
        return jnp.sum(lax.select(y > 0, y, y * y))

    return Example(fn=loss, args=(array("x", 5), jnp.array(True), jnp.array(2)))


@example
def data_dependent_branch() -> Example:
    def loss(x):
        y = jnp.sin(x)
        return lax.cond(jnp.sum(y) > 0, lambda a: jnp.sum(a**2), lambda a: jnp.sum(a**3), y)

    return Example(fn=loss, args=(array("x", 5),))


@example
def counted_loop() -> Example:
    def loss(x):
        return jnp.sum(lax.fori_loop(0, 4, lambda i, a: jnp.sin(a) + i * a, jnp.cos(x)) ** 2)

    return Example(fn=loss, args=(array("x", 3),))


@example
def loop_over_integers() -> Example:
    def loss(x):
        _, power = lax.while_loop(lambda s: s[0] < 9, lambda s: (s[0] * 2, s[1] + 1), (1, 0))
        return jnp.sum(jnp.tanh(x) ** power)

    return Example(fn=loss, args=(array("x", 3),))


@example
def loop_differentiated_forward() -> Example:
    # A while loop has no reverse derivative; only jvp reaches through it.
    def loss(x):
        y = lax.while_loop(lambda a: jnp.sum(a) < 50.0, lambda a: a * 1.5 + 1.0, jnp.exp(x))
        return jnp.sum(jnp.sin(y))

    return Example(fn=loss, args=(array("x", 3),), twice=False)


# --- Derivative rules of the user ---------------------------------------------------------


@example
def custom_jvp() -> Example:
    @jax.custom_jvp
    def clipped(x, limit):
        return jnp.clip(x, -limit, limit)

    @clipped.defjvp
    def _(primals, tangents):
        x, limit = primals
        return clipped(x, limit), tangents[0] * jnp.exp(-(x**2))

    def loss(w, x):
        return jnp.sum(jax.nn.relu(clipped(jnp.sin(x * w), 0.7)) + jax.nn.silu(x @ w)[:, None])

    return Example(fn=loss, args=(array("w", 3), array("x", 2, 3)))


@example
def custom_vjp() -> Example:
    @functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
    def scaled(x, y, factor):
        return factor * x * y

    scaled.defvjp(
        lambda x, y, factor: (factor * x * y, (x, y)),
        lambda factor, saved, g: (factor * g * saved[1] + 0.25 * g, jnp.zeros_like(g)),
    )

    def loss(w, x):
        y = jnp.tanh(x)
        for _ in range(3):
            y = scaled(jnp.sin(y), w, 1.5)
        return jnp.sum(y)

    return Example(fn=loss, args=(array("w", 4), array("x", 4)), forward_mode=False)


@example
def custom_vjp_symbolic_zeros() -> Example:
    @jax.custom_vjp
    def both(x, y):
        return x * y, jnp.sin(x)

    def forward(x, y):
        assert isinstance(x.perturbed, bool)
        return (x.value * y.value, jnp.sin(x.value)), (x.value, y.value)

    def backward(saved, g):
        x, y = saved
        first, second = (
            0.0 if isinstance(part, jax.custom_derivatives.SymbolicZero) else part for part in g
        )
        return first * y + second * jnp.cos(x), first * x

    both.defvjp(forward, backward, symbolic_zeros=True)

    def loss(w, x):
        product, _ = both(jnp.tanh(w), x)
        _, sine = both(product, x)
        return jnp.sum(sine)

    # Under jit (and so here) JAX passes real zeros in place of symbolic ones.
    return Example(fn=loss, args=(array("w", 4), array("x", 4)), forward_mode=False, twice=False)


@example
def inner_checkpoint() -> Example:
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def block(x, w):
        return jnp.tanh(jnp.sin(x @ w)) + x

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("mine"))
    def named(x, w):
        return jnp.cos(checkpoint_name(x @ w, "mine"))

    def loss(params, x):
        for w in params:
            x = named(block(x, w), w)
        return jnp.sum(checkpoint_name(x, "end") ** 2)

    return Example(fn=loss, args=([array(f"w{i}", 3, 3) for i in range(3)], array("x", 2, 3)))


@example
def stopped_gradient() -> Example:
    def loss(w, x):
        target = lax.stop_gradient(jnp.tanh(w @ x))
        steps = jnp.floor(w * 4.0) + jnp.sign(w) + jnp.round(w)
        return jnp.sum((jnp.sin(w @ x) - target) ** 2) + jnp.sum(steps * w)

    return Example(fn=loss, args=(array("w", 3, 3), array("x", 3)))


# --- Randomness ---------------------------------------------------------------------------


def _dropout(key: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x / 0.7, 0.0)


def _dropout_loss(params, x, key):
    for w in params:
        key, used = jax.random.split(key)
        x = _dropout(used, jnp.tanh(x @ w))
    return jnp.sum(x**2) + jnp.sum(jax.random.normal(key, x.shape) * x), key


@example
def dropout_typed_key() -> Example:
    args = ([array(f"w{i}", 3, 3) for i in range(3)], array("x", 2, 3), jax.random.key(3))
    return Example(fn=_dropout_loss, args=args, options={"has_aux": True})


@example
def dropout_raw_key() -> Example:
    args = ([array(f"w{i}", 3, 3) for i in range(3)], array("x", 2, 3), jax.random.PRNGKey(3))
    return Example(fn=_dropout_loss, args=args, options={"has_aux": True})


# --- Arguments and results ----------------------------------------------------------------


@example
def integer_and_boolean_outputs() -> Example:
    def loss(w, x):
        y = jnp.tanh(x @ w)
        return jnp.sum(y), (jnp.argmax(y, -1), y > 0, jnp.sum(y > 0), x.astype(jnp.int8))

    args = (array("w", 3, 3), array("x", 2, 3))
    return Example(fn=loss, args=args, options={"has_aux": True})


@example
def odd_aux_tree() -> Example:
    def loss(w):
        y = jnp.exp(w)
        aux = {"none": None, "int": 3, "float": 0.5, "empty": (), "pair": [y, y], "w": w}
        return jnp.sum(y), aux

    return Example(fn=loss, args=(array("w", 3),), options={"has_aux": True})


@example
def outputs_that_are_arguments_constants_reshapes() -> Example:
    table = np.arange(6.0)

    def loss(w, x):
        y = jnp.sin(w) * x
        flat = y.reshape(-1)
        aux = (w, x, table, jnp.asarray(table), flat, flat, y.T, jnp.sum(y), jnp.zeros(2))
        return jnp.sum(flat**2), aux

    args = (array("w", 2, 3), array("x", 2, 3))
    return Example(fn=loss, args=args, options={"has_aux": True})


@example
def closure_constants() -> Example:
    weights = np.random.default_rng(1).normal(size=(4, 4))
    scale, offset = jnp.asarray(2.5), np.float64(0.5)

    def loss(w):
        return jnp.sum(jnp.tanh(weights @ jnp.sin(weights @ w)) * scale + offset)

    return Example(fn=loss, args=(array("w", 4),))


@example
def nested_jit_with_constants() -> Example:
    table = np.random.default_rng(2).normal(size=(4,))

    @jax.jit
    def inner(x):
        return jnp.sin(x * table)

    @functools.partial(jax.jit, static_argnames="power")
    def outer(x, power):
        return inner(x) ** power + inner(x + 1.0)

    def loss(w):
        return jnp.sum(outer(outer(w, power=2), power=3))

    return Example(fn=loss, args=(array("w", 4),))


@example
def static_arguments() -> Example:
    def loss(w, activation, x, depth, *, reduce="sum", scale=1.0):
        for _ in range(depth):
            x = activation(x @ w) * scale
        return {"sum": jnp.sum, "mean": jnp.mean}[reduce](x)

    return Example(
        fn=loss,
        args=(array("w", 3, 3), jnp.tanh, array("x", 2, 3), 3),
        kwargs={"reduce": "mean", "scale": 1.5},
        options={"static_argnums": (1, 3), "static_argnames": "reduce"},
    )


@example
def several_argnums() -> Example:
    def loss(x, w, b):
        return jnp.sum(jnp.tanh(x @ w["kernel"] + b) ** 2)

    args = (array("x", 2, 3), {"kernel": array("w", 3, 3)}, array("b", 3))
    return Example(fn=loss, args=args, options={"argnums": (1, 2)})


@example
def negative_argnum() -> Example:
    def loss(x, w):
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    args = (array("x", 2, 3), array("w", 3, 3))
    return Example(fn=loss, args=args, options={"argnums": -1})


@example
def keyword_arguments() -> Example:
    def loss(w, *, batch, temperature):
        return jnp.sum(jnp.tanh(batch["x"] @ w / temperature) * batch["y"])

    batch = {"x": array("x", 2, 3), "y": array("y", 2, 3)}
    return Example(fn=loss, args=(array("w", 3, 3),), kwargs={"batch": batch, "temperature": 2})


@example
def python_scalars() -> Example:
    def loss(x, factor, offset):
        return jnp.sin(x) * factor * factor + offset

    return Example(fn=loss, args=(0.7, 2.0, 3), options={"argnums": (0, 1)})


@example
def weak_types() -> Example:
    def loss(x, scale):
        aux = (jnp.exp(scale), jnp.asarray(2) * scale, lax.full((2,), 1.0))
        return jnp.sum(jnp.tanh(x) * scale), aux

    return Example(fn=loss, args=(array("x", 3), 2.0), options={"has_aux": True})


@example
def unused_argument() -> Example:
    def loss(params, x, _):
        return jnp.sum(jnp.tanh(params["used"] * x))

    params = {"used": array("w", 3), "unused": array("u", 2), "none": None}
    return Example(fn=loss, args=(params, array("x", 3), array("y", 4)))


@example
def mixed_arguments() -> Example:
    def loss(params, x):
        return jnp.sum(jnp.sin(params["w"] * x)) + params["step"], params["step"] + 1

    params = {"w": array("w", 3), "step": jnp.array(2.0)}
    return Example(fn=loss, args=(params, array("x", 3)), options={"has_aux": True})


@example
def dead_code() -> Example:
    def loss(w):
        jnp.linalg.norm(jnp.exp(w))
        return jnp.sum(jnp.sin(w))

    return Example(fn=loss, args=(array("w", 3),))


@example
def identity() -> Example:
    return Example(fn=lambda w: w, args=(array("w"),))


@example
def linear_in_its_argument() -> Example:
    return Example(fn=lambda w: jnp.sum(w), args=(array("w", 3),))


@example
def reshape_alone() -> Example:
    return Example(fn=lambda w: w.reshape(()), args=(array("w", 1),))


@example
def constant_loss() -> Example:
    return Example(fn=lambda w: jnp.asarray(3.0, w.dtype), args=(array("w", 3),))


@example
def zero_size() -> Example:
    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w)) + jnp.sum(jnp.concatenate([x[:0], x]) ** 2 @ w)

    return Example(fn=loss, args=(array("w", 3, 0), array("x", 2, 3)))


# --- Kinds of numbers ---------------------------------------------------------------------


@example
def bfloat16() -> Example:
    def loss(params, x):
        for w in params:
            x = jax.nn.gelu(x @ w.astype(jnp.bfloat16))
        return jnp.sum(x.astype(jnp.float32) ** 2)

    args = ([array(f"w{i}", 4, 4) for i in range(3)], array("x", 2, 4).astype(jnp.bfloat16))
    # Fusions keep more digits than bfloat16 between operations, and ours differ from XLA's.
    return Example(fn=loss, args=args, tolerance=5e-2)


@example
def complex_numbers() -> Example:
    def loss(w, x):
        z = jnp.exp(1j * w) * x
        return jnp.sum(jnp.abs(z + z**2) ** 2) + jnp.real(jnp.sum(jnp.conj(z) * w))

    return Example(fn=loss, args=(array("w", 3), array("x", 3) + 1j))


@example
def fourier() -> Example:
    def loss(w, x):
        spectrum = jnp.fft.rfft(jnp.tanh(w) * x)
        return jnp.sum(jnp.abs(spectrum * spectrum.conj())) + jnp.sum(jnp.fft.irfft(spectrum) ** 3)

    return Example(fn=loss, args=(array("w", 8), array("x", 8)))


@example
def linear_algebra() -> Example:
    def loss(w, b):
        matrix = w @ w.T + 3.0 * jnp.eye(w.shape[0])
        factor = jnp.linalg.cholesky(matrix)
        values, vectors = jnp.linalg.eigh(matrix)
        solved = jnp.linalg.solve(matrix, b)
        q, r = jnp.linalg.qr(matrix)
        return (
            jnp.sum(factor)
            + jnp.sum(jnp.log(values))
            + jnp.sum(vectors[:, 0] ** 4)
            + jnp.sum(solved**2)
            + jnp.linalg.slogdet(matrix)[1]
            + jnp.sum(jnp.abs(q @ r))
            + jnp.linalg.norm(jnp.linalg.inv(matrix))
        )

    return Example(fn=loss, args=(array("w", 3, 3), array("b", 3)), tolerance=1e-10)


# --- Gathering, sorting and other data movement -------------------------------------------


@example
def gather_scatter_sort() -> Example:
    def loss(x, index):
        y = jnp.sin(x)
        scattered = jnp.zeros(8).at[index].add(y).at[0].set(y[1]).at[1].multiply(y[2])
        maxed = jnp.zeros(8).at[index].max(y)
        best, where = lax.top_k(y, 2)
        summed = jax.ops.segment_sum(y * y, index, num_segments=8)
        moved = jnp.roll(jnp.flip(jnp.pad(y, 1)), 2)
        parts = (scattered**2, maxed, best * where, jnp.cumsum(y) ** 2, jnp.sort(y) ** 3, summed)
        picked = lax.dynamic_slice(moved, (index[0],), (3,)) * jnp.take(y, index[:3])
        cumulative = jnp.cumprod(y + 2.0) + lax.cummax(y) + lax.cumlogsumexp(y)
        return sum(jnp.sum(jnp.tanh(p)) for p in parts) + jnp.sum(picked) + jnp.sum(cumulative)

    return Example(fn=loss, args=(array("x", 6), jnp.array([3, 1, 3, 0, 7, 2])))


@example
def many_elementwise() -> Example:
    def loss(x):
        y = jnp.logaddexp(x, 2 * x) + jnp.maximum(x, 0.3) * jnp.minimum(x, 0.1)
        y = y + jax.scipy.special.erf(y) + jnp.sqrt(y**2 + 1.0) + jnp.arctan2(x, y)
        y = jnp.where(y > 1.0, jnp.log(y + 1.0), jax.nn.softplus(y)) / (1.0 + jnp.cosh(x))
        return jnp.prod(jnp.max(y.reshape(2, -1), axis=0)) + jnp.std(y) + jnp.median(x)

    return Example(fn=loss, args=(array("x", 8),))


@example
def callback_without_effect() -> Example:
    def loss(x):
        y = jnp.tanh(x)
        host = jax.pure_callback(
            lambda a: np.asarray(a) * 2.0,
            jax.ShapeDtypeStruct(y.shape, y.dtype),
            lax.stop_gradient(y),
            vmap_method="sequential",
        )
        return jnp.sum(jnp.sin(y) * host)

    return Example(fn=loss, args=(array("x", 3),))


@example
def named_scopes_and_vmap() -> Example:
    def loss(w, x):
        @functools.partial(jax.vmap, in_axes=(None, 0))
        def row(w, x):
            with jax.named_scope("row"):
                return jnp.tanh(w @ x)

        with jax.named_scope("body"), jax.default_matmul_precision("highest"):
            return jnp.sum(row(w, x) ** 2)

    return Example(fn=loss, args=(array("w", 3, 3), array("x", 2, 3)))


@example
def inner_derivatives() -> Example:
    def loss(w, x):
        def energy(x):
            return jnp.sum(jnp.tanh(w @ x) ** 2)

        force = jax.grad(energy)(x)
        _, along = jax.jvp(energy, (x,), (force,))
        return jnp.sum(force**2) + along

    return Example(fn=loss, args=(array("w", 3, 3), array("x", 3)))
