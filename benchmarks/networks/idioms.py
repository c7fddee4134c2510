"""Idioms: small programs, each of one way of writing, on which compiler rules are found.

Compilers decide what to store idiom by idiom: a gated unit, an unrolled cell, a gather and its
scatter. Each program here is four to eight layers of one of them, large enough that only its
activations matter and small enough to compile in seconds. They are a third set, beside `tuned` and
`judged`: an error seen here may be investigated, buffer by buffer, and what is learnt counts if
other networks confirm it.

All are losses of `(params, batch)` with float32 parameters unless said otherwise. They have no
blocks to wrap.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.networks.losses import cross_entropy
from benchmarks.networks.record import Network

#: A loss, and a function that draws its arguments for a key.
Parts = tuple[Callable[[Any, Any], jax.Array], Callable[[jax.Array], tuple[Any, Any]]]


def _is_shape(tree: Any) -> bool:
    return isinstance(tree, tuple) and all(isinstance(size, int) for size in tree)


def _drawn(key: jax.Array, shapes: Any) -> Any:
    """Parameters for a tree of shapes: normal, scaled by the root of the fan-in."""
    leaves, tree = jax.tree.flatten(shapes, is_leaf=_is_shape)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(
        tree,
        [
            jax.random.normal(one, shape) / math.sqrt(math.prod(shape[:-1]))
            if len(shape) > 1
            else jnp.ones(shape)
            for one, shape in zip(keys, leaves, strict=True)
        ],
    )


def _rms_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    """Divides by the root mean square over the last axis, in float32; the dtype stays."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
    return (y * scale).astype(x.dtype)


def _layer_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    """Subtracts the mean over the last axis and divides by the standard deviation."""
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.var(x, axis=-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale


def _convolved(x: jax.Array, kernel: jax.Array, *, groups: int = 1) -> jax.Array:
    """A convolution of `[batch, height, width, channels]` that keeps the size."""
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


# ---------------------------------------------------------------------------- one dimension


def _causal(x: jax.Array, kernel: jax.Array, dilation: int) -> jax.Array:
    """A dilated convolution of `[batch, length, channels]` that sees nothing ahead."""
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (1,),
        [((kernel.shape[0] - 1) * dilation, 0)],
        rhs_dilation=(dilation,),
        dimension_numbers=("NWC", "WIO", "NWC"),
    )


def dilated_gates(batch: int) -> Parts:
    """Dilated causal convolutions with gates, a residual and a sum of skips: one convolution."""
    length, width, skips, layers = 6_000, 48, 96, 8

    def loss(params: Any, given: Any) -> jax.Array:
        x = given["x"] @ params["stem"]
        skipped = jnp.zeros(())
        for number, layer in enumerate(params["layers"]):
            both = _causal(x, layer["kernel"], 2**number) + layer["bias"]
            inside, gate = jnp.split(both, 2, axis=-1)
            z = jnp.tanh(inside) * jax.nn.sigmoid(gate)
            skipped = skipped + z @ layer["skip"]
            x = x + z @ layer["out"]
        y = jax.nn.relu(jax.nn.relu(skipped) @ params["head"])
        return cross_entropy(y @ params["logits"], given["labels"])

    def arguments(key: jax.Array) -> tuple[Any, Any]:
        layer = {
            "kernel": (2, width, 2 * width),
            "bias": (2 * width,),
            "skip": (width, skips),
            "out": (width, width),
        }
        shapes = {
            "stem": (1, width),
            "layers": [layer] * layers,
            "head": (skips, skips),
            "logits": (skips, 128),
        }
        x = jax.random.normal(key, (batch, length, 1))
        return _drawn(key, shapes), {
            "x": x,
            "labels": jax.random.randint(key, (batch, length), 0, 128),
        }

    return loss, arguments


def dilated_pairs(batch: int) -> Parts:
    """The same with separate convolutions for what passes and its gate, summed at the end."""
    length, width, layers = 4_096, 64, 6

    def loss(params: Any, given: Any) -> jax.Array:
        x = _causal(given["x"], params["stem"], 1)
        skips = []
        for number, layer in enumerate(params["layers"]):
            inside = _causal(x, layer["inside"], 3**number) + layer["bias"]
            gate = _causal(x, layer["gate"], 3**number) + layer["gate_bias"]
            z = jnp.tanh(inside) * jax.nn.sigmoid(gate)
            skips.append(z)
            x = x + _causal(z, layer["out"], 1)
        y = jax.nn.relu(sum(skips))
        return jnp.mean(jnp.square(_causal(y, params["head"], 1) - given["y"]))

    def arguments(key: jax.Array) -> tuple[Any, Any]:
        layer = {
            "inside": (3, width, width),
            "gate": (3, width, width),
            "bias": (width,),
            "gate_bias": (width,),
            "out": (1, width, width),
        }
        shapes = {"stem": (1, 4, width), "layers": [layer] * layers, "head": (1, width, 4)}
        x, y = jax.random.normal(key, (2, batch, length, 4))
        return _drawn(key, shapes), {"x": x, "y": y}

    return loss, arguments


# ------------------------------------------------------------------------------- recurrence


def unrolled_gru(batch: int, features: int = 64) -> Parts:
    """A gated recurrent unit in plain JAX, its gates in one product, 24 steps in a loop."""
    width, steps = 512, 24

    def loss(params: Any, given: Any) -> jax.Array:
        state = jnp.zeros((batch, width))
        total = jnp.zeros(())
        for step in range(steps):
            a = given["x"][:, step] @ params["input"] + params["bias"]
            b = state @ params["state"]
            reset = jax.nn.sigmoid(a[:, :width] + b[:, :width])
            update = jax.nn.sigmoid(a[:, width : 2 * width] + b[:, width : 2 * width])
            new = jnp.tanh(a[:, 2 * width :] + reset * b[:, 2 * width :])
            state = (1 - update) * new + update * state
            total = total + jnp.mean(jnp.square(state @ params["out"] - given["y"][:, step]))
        return total

    def arguments(key: jax.Array) -> tuple[Any, Any]:
        shapes = {
            "input": (features, 3 * width),
            "state": (width, 3 * width),
            "bias": (3 * width,),
            "out": (width, 16),
        }
        x = jax.random.normal(key, (batch, steps, features))
        return _drawn(key, shapes), {"x": x, "y": x[..., :16]}

    return loss, arguments


def _unrolled(cell: nn.RNNCellBase, batch: int, width: int, steps: int) -> Parts:
    """A Flax cell over steps in a loop, with a softmax over all their outputs."""
    classes = 512

    def loss(params: Any, given: Any) -> jax.Array:
        state = jax.tree.map(jnp.zeros_like, given["state"])
        outputs = []
        for step in range(steps):
            state, y = cell.apply({"params": params["cell"]}, state, given["x"][:, step])
            outputs.append(y)
        logits = jnp.stack(outputs, axis=1) @ params["head"]
        return cross_entropy(logits, given["labels"])

    def arguments(key: jax.Array) -> tuple[Any, Any]:
        x = jax.random.normal(key, (batch, steps, width))
        state = cell.initialize_carry(key, x[:, 0].shape)
        params = {
            "cell": cell.init(key, state, x[:, 0])["params"],
            "head": _drawn(key, (width, classes)),
        }
        labels = jax.random.randint(key, (batch, steps), 0, classes)
        return params, {"x": x, "state": state, "labels": labels}

    return loss, arguments


def flax_lstm(batch: int) -> Parts:
    """Flax's LSTM cell, which has a weight for each gate, 20 steps."""
    return _unrolled(nn.LSTMCell(features=512), batch, 512, 20)


def flax_minimal(batch: int) -> Parts:
    """Flax's minimal gated unit, 32 steps."""
    return _unrolled(nn.MGUCell(features=512), batch, 512, 32)


def associative_recurrence(batch: int) -> Parts:
    """Layers of a gated linear recurrence by an associative scan."""
    length, width, layers = 1_024, 256, 4

    def combined(one: Any, other: Any) -> Any:
        return one[0] * other[0], one[1] * other[0] + other[1]

    def loss(params: Any, given: Any) -> jax.Array:
        x = given["x"]
        for layer in params:
            y = _rms_norm(layer["scale"], x)
            decay = jax.nn.sigmoid(y @ layer["decay"])
            inside = (1 - decay) * (y @ layer["in"])
            _, states = jax.lax.associative_scan(combined, (decay, inside), axis=1)
            x = x + (states * jax.nn.silu(y @ layer["gate"])) @ layer["out"]
        return jnp.mean(jnp.square(x - given["y"]))

    def arguments(key: jax.Array) -> tuple[Any, Any]:
        square = (width, width)
        layer = {"scale": (width,), "decay": square, "in": square, "gate": square, "out": square}
        x, y = jax.random.normal(key, (2, batch, length, width))
        return _drawn(key, [layer] * layers), {"x": x, "y": y}

    return loss, arguments


def short_convolutions(batch: int) -> Parts:
    """Gated layers with a convolution over time of four taps, as a sum of shifted rows."""
    length, width, layers, taps = 2_048, 512, 4, 4

    def mixed(weights: jax.Array, x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0)))
        shifted = (padded[:, i : i + length] * tap for i, tap in enumerate(weights))
        return jax.nn.silu(functools.reduce(jnp.add, shifted))

    def loss(params: Any, given: Any) -> jax.Array:
        x = given["x"]
        for layer in params:
            y = _rms_norm(layer["scale"], x)
            gate = jax.nn.gelu(y @ layer["gate"])
            x = x + (mixed(layer["taps"], y @ layer["in"]) * gate) @ layer["out"]
        return jnp.mean(jnp.square(x - given["y"]))

    def arguments(key: jax.Array) -> tuple[Any, Any]:
        square = (width, width)
        layer = {
            "scale": (width,),
            "taps": (taps, width),
            "gate": square,
            "in": square,
            "out": square,
        }
        x, y = jax.random.normal(key, (2, batch, length, width))
        return _drawn(key, [layer] * layers), {"x": x, "y": y}

    return loss, arguments


# ------------------------------------------------------------------------ gathers and sums


def embedding_bags(batch: int) -> Parts:
    """Bags of ids, embedded, summed, multiplied with one another, and an MLP."""
    bags, ids, rows, width = 8, 6, 5_000, 64

    def loss(params: Any, given: Any) -> jax.Array:
        dense = jax.nn.relu(given["x"] @ params["dense"])
        found = [
            jnp.sum(table[given["ids"][:, number]], axis=1)
            for number, table in enumerate(params["tables"])
        ]
        all_of = jnp.stack([dense, *found], axis=1)
        products = jnp.einsum("bif,bjf->bij", all_of, all_of)
        first, second = jnp.triu_indices(bags + 1, k=1)
        y = jnp.concatenate([dense, products[:, first, second]], axis=-1)
        for weight, bias in params["top"]:
            y = jax.nn.relu(y @ weight + bias)
        logit = (y @ params["last"])[:, 0]
        return jnp.mean(jnp.logaddexp(0.0, logit) - given["clicked"] * logit)

    def arguments(key: jax.Array) -> tuple[Any, Any]:
        pairs = bags * (bags + 1) // 2
        widths = [width + pairs, 256, 256, 128]
        shapes = {
            "dense": (13, width),
            "tables": [(rows, width)] * bags,
            "top": [((a, b), (b,)) for a, b in itertools.pairwise(widths)],
            "last": (128, 1),
        }
        params = _drawn(key, shapes)
        return params, {
            "x": jax.random.normal(key, (batch, 13)),
            "ids": jax.random.randint(key, (batch, bags, ids), 0, rows),
            "clicked": jax.random.bernoulli(key, shape=(batch,)).astype(jnp.float32),
        }

    return loss, arguments


def segment_messages(batch: int) -> Parts:
    """Messages along edges, summed at nodes, each node's state updated with a residual."""
    nodes, edges, width, rounds = batch, 8 * batch, 64, 5

    def loss(params: Any, given: Any) -> jax.Array:
        x = given["x"] @ params["stem"]
        for layer in params["layers"]:
            ends = jnp.concatenate([x[given["from"]], x[given["to"]]], axis=-1)
            message = jax.nn.silu(ends @ layer["up"] + layer["bias"]) @ layer["down"]
            came = jax.ops.segment_sum(message, given["to"], num_segments=nodes)
            x = x + jnp.tanh(jnp.concatenate([x, came], axis=-1) @ layer["update"])
        return jnp.mean(jnp.square(x @ params["head"] - given["y"]))

    def arguments(key: jax.Array) -> tuple[Any, Any]:
        layer = {
            "up": (2 * width, width),
            "bias": (width,),
            "down": (width, width),
            "update": (2 * width, width),
        }
        shapes = {"stem": (16, width), "layers": [layer] * rounds, "head": (width, 1)}
        ends = jax.random.randint(key, (2, edges), 0, nodes)
        return _drawn(key, shapes), {
            "x": jax.random.normal(key, (nodes, 16)),
            "y": jax.random.normal(key, (nodes, 1)),
            "from": ends[0],
            "to": ends[1],
        }

    return loss, arguments


# --------------------------------------------------------------------------------- experts


def _squared_error(layer: Callable[[Any, jax.Array], jax.Array]) -> Callable[[Any, Any], jax.Array]:
    """The loss of a sequence of layers."""

    def loss(params: Any, given: Any) -> jax.Array:
        x = given["x"]
        for one in params:
            x = layer(one, x)
        return jnp.mean(jnp.square(x - given["y"]))

    return loss


def _expert_shapes(width: int, experts: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        "scale": (width,),
        "router": (width, experts),
        "up": (experts, width, hidden),
        "down": (experts, hidden, width),
    }


def routed_by_products(batch: int) -> Parts:
    """Experts, tokens sent to the best two and back by products with one-hot arrays."""
    length, width, experts, hidden, layers, capacity = 256, 256, 4, 512, 3, 144

    def layer(params: Any, x: jax.Array) -> jax.Array:
        y = _rms_norm(params["scale"], x)
        odds = jax.nn.softmax(y @ params["router"])
        best, which = jax.lax.top_k(odds, 2)
        best = best / jnp.sum(best, axis=-1, keepdims=True)
        chosen = jax.nn.one_hot(which, experts)
        # Places go first to all first choices, then to all second ones.
        ahead = jnp.moveaxis(chosen, 2, 1).reshape(len(x), 2 * length, experts)
        place = jnp.cumsum(ahead, axis=1) - ahead
        place = jnp.moveaxis(place.reshape(len(x), 2, length, experts), 1, 2)
        slot = jax.nn.one_hot(jnp.sum(place * chosen, axis=-1).astype(jnp.int32), capacity)
        send = jnp.einsum("blke,blkc->blec", chosen, slot)
        back = jnp.einsum("blk,blke,blkc->blec", best, chosen, slot)
        inside = jnp.einsum("blec,blw->becw", send, y)
        inside = jax.nn.gelu(jnp.einsum("becw,ewh->bech", inside, params["up"]))
        inside = jnp.einsum("bech,ehw->becw", inside, params["down"])
        return x + jnp.einsum("blec,becw->blw", back, inside)

    def arguments(key: jax.Array) -> tuple[Any, Any]:
        x, y = jax.random.normal(key, (2, batch, length, width))
        return _drawn(key, [_expert_shapes(width, experts, hidden)] * layers), {"x": x, "y": y}

    return _squared_error(layer), arguments


def routed_by_gathers(batch: int) -> Parts:
    """Experts, tokens sorted by where they go, gathered, and added up where they came from."""
    width, experts, hidden, layers = 256, 4, 512, 3
    capacity = batch // 2

    def layer(params: Any, x: jax.Array) -> jax.Array:
        y = _rms_norm(params["scale"], x)
        odds = jax.nn.softmax(y @ params["router"])
        best, which = jax.lax.top_k(odds, 2)
        goes = which.reshape(-1)
        order = jnp.argsort(goes, stable=True)
        starts = jnp.searchsorted(goes[order], jnp.arange(experts))
        taken = starts[:, None] + jnp.arange(capacity)
        pair = order[taken % len(goes)]
        there = (taken < len(goes)) & (goes[pair] == jnp.arange(experts)[:, None])
        inside = jnp.where(there[..., None], y[pair // 2], 0)
        inside = jax.nn.gelu(jnp.einsum("ecw,ewh->ech", inside, params["up"]))
        inside = jnp.einsum("ech,ehw->ecw", inside, params["down"])
        weights = jnp.where(there, best.reshape(-1)[pair], 0)
        return x.at[(pair // 2).reshape(-1)].add((inside * weights[..., None]).reshape(-1, width))

    def arguments(key: jax.Array) -> tuple[Any, Any]:
        x, y = jax.random.normal(key, (2, batch, width))
        return _drawn(key, [_expert_shapes(width, experts, hidden)] * layers), {"x": x, "y": y}

    return _squared_error(layer), arguments


def routed_by_scatters(batch: int) -> Parts:
    """Experts, tokens repeated for the best two, scattered to places there, and gathered back."""
    width, experts, hidden, layers = 512, 8, 1024, 2
    capacity = batch * 2 * 5 // (4 * experts)

    def layer(params: Any, x: jax.Array) -> jax.Array:
        y = _rms_norm(params["scale"], x)
        best, which = jax.lax.top_k(jax.nn.softmax(y @ params["router"]), 2)
        chosen = jax.nn.one_hot(which, experts).reshape(-1, experts)
        place = jnp.sum((jnp.cumsum(chosen, axis=0) - 1) * chosen, axis=-1).astype(jnp.int32)
        there = place < capacity
        goes = which.reshape(-1), jnp.where(there, place, 0)
        sent = jnp.repeat(y, 2, axis=0) * there[:, None]
        inside = jnp.zeros((experts, capacity, width)).at[goes].add(sent)
        inside = jax.nn.gelu(jnp.einsum("ecw,ewh->ech", inside, params["up"]))
        inside = jnp.einsum("ech,ehw->ecw", inside, params["down"])
        back = inside[goes] * (best.reshape(-1) * there)[:, None]
        return x + jnp.sum(back.reshape(-1, 2, width), axis=1)

    def arguments(key: jax.Array) -> tuple[Any, Any]:
        x, y = jax.random.normal(key, (2, batch, width))
        return _drawn(key, [_expert_shapes(width, experts, hidden)] * layers), {"x": x, "y": y}

    return _squared_error(layer), arguments


# ------------------------------------------------------------------------------- attention


def _attention(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None
) -> jax.Array:
    """Attention of `[batch, length, heads, width]`, its weights in float32."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(query.shape[-1])
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(query.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def cross_attention(batch: int) -> Parts:
    """Layers of self-attention, attention to a padded memory, and an MLP, with dropout."""
    length, memory, width, heads, layers = 128, 192, 256, 4, 2

    def heads_of(weight: jax.Array, x: jax.Array) -> jax.Array:
        return (x @ weight).reshape(*x.shape[:-1], heads, width // heads)

    def loss(params: Any, given: Any) -> jax.Array:
        keys = iter(jax.random.split(given["key"], 3 * layers))

        def dropped(x: jax.Array) -> jax.Array:
            return jnp.where(jax.random.bernoulli(next(keys), 0.9, x.shape), x / 0.9, 0)

        ahead = jnp.tril(jnp.ones((length, length), bool))
        there = (jnp.arange(memory) < given["lengths"][:, None])[:, None, None]
        x, seen = given["x"], given["memory"] @ params["memory"]
        for layer in params["layers"]:
            y = _layer_norm(layer["scales"][0], x)
            q, k, v = (heads_of(weight, y) for weight in layer["own"])
            mixed = _attention(q, k, v, ahead).reshape(x.shape)
            x = x + dropped(mixed @ layer["outs"][0])
            y = _layer_norm(layer["scales"][1], x)
            q = heads_of(layer["across"][0], y)
            k, v = (heads_of(weight, seen) for weight in layer["across"][1:])
            mixed = _attention(q, k, v, there).reshape(x.shape)
            x = x + dropped(mixed @ layer["outs"][1])
            y = _layer_norm(layer["scales"][2], x)
            x = x + dropped(jax.nn.relu(y @ layer["up"] + layer["bias"]) @ layer["down"])
        logits = _layer_norm(params["scale"], x) @ params["logits"]
        return cross_entropy(logits, given["labels"])

    def arguments(key: jax.Array) -> tuple[Any, Any]:
        square = (width, width)
        layer = {
            "scales": [(width,)] * 3,
            "own": [square] * 3,
            "across": [square] * 3,
            "outs": [square] * 2,
            "up": (width, 4 * width),
            "bias": (4 * width,),
            "down": (4 * width, width),
        }
        shapes = {
            "memory": square,
            "layers": [layer] * layers,
            "scale": (width,),
            "logits": (width, 1_000),
        }
        return _drawn(key, shapes), {
            "key": key,
            "x": jax.random.normal(key, (batch, length, width)),
            "memory": jax.random.normal(key, (batch, memory, width)),
            "lengths": jax.random.randint(key, (batch,), 1, memory),
            "labels": jax.random.randint(key, (batch, length), 0, 1_000),
        }

    return loss, arguments


def _rotated(x: jax.Array) -> jax.Array:
    """Turns pairs of channels of `[batch, length, heads, width]` by their position, in float32."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 10_000 ** (jnp.arange(half) / half)
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    one, other = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], -1).astype(x.dtype)


def rotary_groups(batch: int) -> Parts:
    """Rotary positions, grouped queries and SwiGLU: float32 weights, bfloat16 arithmetic."""
    length, width, heads, groups, hidden, layers = 512, 512, 8, 2, 1_408, 4

    def dense(weight: jax.Array, x: jax.Array) -> jax.Array:
        return x @ weight.astype(jnp.bfloat16)

    def loss(params: Any, given: Any) -> jax.Array:
        x = params["tokens"].astype(jnp.bfloat16)[given["tokens"]]
        ahead = jnp.tril(jnp.ones((length, length), bool))
        for layer in params["layers"]:
            y = _rms_norm(layer["scales"][0], x)
            q = _rotated(dense(layer["q"], y).reshape(batch, length, heads, -1))
            k = _rotated(dense(layer["k"], y).reshape(batch, length, groups, -1))
            v = dense(layer["v"], y).reshape(batch, length, groups, -1)
            k, v = (jnp.repeat(one, heads // groups, axis=2) for one in (k, v))
            x = x + dense(layer["out"], _attention(q, k, v, ahead).reshape(x.shape))
            y = _rms_norm(layer["scales"][1], x)
            inside = jax.nn.silu(dense(layer["gate"], y)) * dense(layer["up"], y)
            x = x + dense(layer["down"], inside)
        logits = dense(params["logits"], _rms_norm(params["scale"], x)).astype(jnp.float32)
        return cross_entropy(logits, given["labels"])

    def arguments(key: jax.Array) -> tuple[Any, Any]:
        layer = {
            "scales": [(width,)] * 2,
            "q": (width, width),
            "k": (width, width * groups // heads),
            "v": (width, width * groups // heads),
            "out": (width, width),
            "gate": (width, hidden),
            "up": (width, hidden),
            "down": (hidden, width),
        }
        shapes = {
            "tokens": (2_000, width),
            "layers": [layer] * layers,
            "scale": (width,),
            "logits": (width, 2_000),
        }
        text = jax.random.randint(key, (2, batch, length), 0, 2_000)
        return _drawn(key, shapes), {"tokens": text[0], "labels": text[1]}

    return loss, arguments


# ------------------------------------------------------------------------- second derivatives


def _field(params: Any, point: jax.Array) -> jax.Array:
    """An MLP with `tanh`, from `[..., 2]` to `[...]`."""
    x = point
    for weight, bias in params[:-1]:
        x = jnp.tanh(x @ weight + bias)
    weight, bias = params[-1]
    return (x @ weight + bias)[..., 0]


def _field_arguments(batch: int, width: int, layers: int) -> Callable[..., tuple[Any, Any]]:
    def arguments(key: jax.Array) -> tuple[Any, Any]:
        widths = [2, *[width] * layers, 1]
        shapes = [((a, b), (b,)) for a, b in itertools.pairwise(widths)]
        return _drawn(key, shapes), {"points": jax.random.uniform(key, (batch, 2))}

    return arguments


def second_forward(batch: int) -> Parts:
    """Burgers' equation, its derivatives by forward mode over forward mode."""

    def loss(params: Any, given: Any) -> jax.Array:
        points = given["points"]
        along, across = (jnp.broadcast_to(axis, points.shape) for axis in jnp.eye(2))

        def value(at: jax.Array) -> jax.Array:
            return _field(params, at)

        def slope(at: jax.Array) -> jax.Array:
            return jax.jvp(value, (at,), (across,))[1]

        u, u_t = jax.jvp(value, (points,), (along,))
        u_x, u_xx = jax.jvp(slope, (points,), (across,))
        return jnp.mean(jnp.square(u_t + u * u_x - 0.01 * u_xx))

    return loss, _field_arguments(batch, 128, 5)


def second_reverse(batch: int) -> Parts:
    """A wave equation, its derivatives by reverse mode over reverse mode, point by point."""

    def loss(params: Any, given: Any) -> jax.Array:
        def second(point: jax.Array) -> jax.Array:
            return jnp.diagonal(jax.hessian(lambda at: _field(params, at))(point))

        u_tt, u_xx = jax.vmap(second)(given["points"]).T
        return jnp.mean(jnp.square(u_tt - u_xx))

    return loss, _field_arguments(batch, 96, 4)


# -------------------------------------------------------------------------------- two dimensions


def group_norms(batch: int) -> Parts:
    """Residual blocks of GroupNorm, SiLU and a convolution, with a shift for each channel."""
    size, width, groups, blocks = 32, 64, 8, 4

    def norm(scale: jax.Array, x: jax.Array) -> jax.Array:
        y = x.reshape(batch, size, size, groups, -1)
        mean = jnp.mean(y, axis=(1, 2, 4), keepdims=True)
        variance = jnp.var(y, axis=(1, 2, 4), keepdims=True)
        return ((y - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape) * scale

    def loss(params: Any, given: Any) -> jax.Array:
        x = _convolved(given["x"], params["stem"])
        for block in params["blocks"]:
            y = _convolved(jax.nn.silu(norm(block["scales"][0], x)), block["kernels"][0])
            y = y + (jax.nn.silu(given["time"]) @ block["time"])[:, None, None]
            y = _convolved(jax.nn.silu(norm(block["scales"][1], y)), block["kernels"][1])
            x = x + y
        return jnp.mean(jnp.square(_convolved(x, params["head"]) - given["x"]))

    def arguments(key: jax.Array) -> tuple[Any, Any]:
        block = {
            "scales": [(width,)] * 2,
            "kernels": [(3, 3, width, width)] * 2,
            "time": (32, width),
        }
        shapes = {
            "stem": (3, 3, 4, width),
            "blocks": [block] * blocks,
            "head": (3, 3, width, 4),
        }
        return _drawn(key, shapes), {
            "x": jax.random.normal(key, (batch, size, size, 4)),
            "time": jax.random.normal(key, (batch, 32)),
        }

    return loss, arguments


def second_order(batch: int) -> Parts:
    """Convolutions, their channels multiplied with one another, and a softmax over classes."""
    size, width, layers, classes = 64, 64, 4, 100

    def loss(params: Any, given: Any) -> jax.Array:
        x = given["x"]
        logits = jnp.zeros(())
        for layer in params:
            x = jax.nn.silu(_convolved(x, layer["kernel"]))
            features = x.reshape(batch, size * size, width)
            products = jnp.einsum("bnc,bnd->bcd", features, features) / size**2
            rooted = jnp.arcsinh(products).reshape(batch, width * width)
            logits = logits + rooted @ layer["head"]
        return cross_entropy(logits, given["labels"])

    def arguments(key: jax.Array) -> tuple[Any, Any]:
        shapes = [
            {"kernel": (3, 3, width if layer else 4, width), "head": (width * width, classes)}
            for layer in range(layers)
        ]
        return _drawn(key, shapes), {
            "x": jax.random.normal(key, (batch, size, size, 4)),
            "labels": jax.random.randint(key, (batch,), 0, classes),
        }

    return loss, arguments


def depthwise(batch: int) -> Parts:
    """Inverted bottlenecks with depthwise convolutions, batch norms and squeeze-excite."""
    size, width, hidden, blocks = 28, 32, 128, 4

    def norm(scale: jax.Array, x: jax.Array) -> jax.Array:
        mean = jnp.mean(x, axis=(0, 1, 2))
        variance = jnp.mean(jnp.square(x), axis=(0, 1, 2)) - jnp.square(mean)
        return (x - mean) * (scale * jax.lax.rsqrt(variance + 1e-5))

    def loss(params: Any, given: Any) -> jax.Array:
        x = jax.nn.silu(norm(params["scale"], _convolved(given["x"], params["stem"])))
        for block in params["blocks"]:
            y = jax.nn.silu(norm(block["scales"][0], _convolved(x, block["up"])))
            y = _convolved(y, block["depthwise"], groups=hidden)
            y = jax.nn.silu(norm(block["scales"][1], y))
            pooled = jax.nn.silu(jnp.mean(y, axis=(1, 2)) @ block["squeeze"])
            y = y * jax.nn.sigmoid(pooled @ block["excite"])[:, None, None]
            x = x + norm(block["scales"][2], _convolved(y, block["down"]))
        return cross_entropy(jnp.mean(x, axis=(1, 2)) @ params["head"], given["labels"])

    def arguments(key: jax.Array) -> tuple[Any, Any]:
        block = {
            "up": (1, 1, width, hidden),
            "depthwise": (3, 3, 1, hidden),
            "squeeze": (hidden, 8),
            "excite": (8, hidden),
            "down": (1, 1, hidden, width),
            "scales": [(hidden,), (hidden,), (width,)],
        }
        shapes = {
            "stem": (3, 3, 3, width),
            "scale": (width,),
            "blocks": [block] * blocks,
            "head": (width, 100),
        }
        return _drawn(key, shapes), {
            "x": jax.random.normal(key, (batch, size, size, 3)),
            "labels": jax.random.randint(key, (batch,), 0, 100),
        }

    return loss, arguments


def log_softmax_loss(batch: int, layers: int = 4, width: int = 512, tokens: int = 256) -> Parts:
    """Layers of an MLP before logits with a bias, and a loss of their log-softmax: labels' ones."""
    return _with_logits(
        lambda logits, labels: (
            -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1))
        ),
        batch,
        layers,
        width,
        tokens,
    )


def smoothed_loss(batch: int, layers: int = 4, width: int = 512, tokens: int = 256) -> Parts:
    """The same with smoothed labels, written out."""

    def loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
        target = 0.9 * jax.nn.one_hot(labels, logits.shape[-1]) + 0.1 / logits.shape[-1]
        return -jnp.mean(jnp.sum(target * jax.nn.log_softmax(logits), axis=-1))

    return _with_logits(loss, batch, layers, width, tokens)


def _with_logits(
    loss_of: Callable[[jax.Array, jax.Array], jax.Array],
    batch: int,
    layers: int,
    width: int,
    tokens: int,
    vocabulary: int = 8192,
) -> Parts:
    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["embedding"][batch["tokens"]]
        for layer in params["layers"]:
            x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
        return loss_of(x @ params["head"] + params["bias"], batch["labels"])

    def arguments(key: jax.Array) -> tuple[Any, Any]:
        layer = {"up": (width, 4 * width), "down": (4 * width, width)}
        shapes = {
            "embedding": (vocabulary, width),
            "layers": [layer] * layers,
            "head": (width, vocabulary),
            "bias": (vocabulary,),
        }
        drawn = jax.random.randint(key, (2, batch, tokens), 0, vocabulary)
        return _drawn(key, shapes), {"tokens": drawn[0], "labels": drawn[1]}

    return loss, arguments


#: Each with the batch size that it is measured with.
IDIOMS: dict[str, tuple[Callable[[int], Parts], int]] = {
    "dilated_gates": (dilated_gates, 16),
    "dilated_pairs": (dilated_pairs, 32),
    "unrolled_gru": (unrolled_gru, 512),
    "wide_gru": (functools.partial(unrolled_gru, features=512), 8_192),
    "flax_lstm": (flax_lstm, 256),
    "flax_minimal": (flax_minimal, 256),
    "associative_recurrence": (associative_recurrence, 16),
    "short_convolutions": (short_convolutions, 32),
    "embedding_bags": (embedding_bags, 32_768),
    "segment_messages": (segment_messages, 32_768),
    "routed_by_products": (routed_by_products, 32),
    "routed_by_gathers": (routed_by_gathers, 16_384),
    "routed_by_scatters": (routed_by_scatters, 8_192),
    "cross_attention": (cross_attention, 64),
    "rotary_groups": (rotary_groups, 16),
    "second_forward": (second_forward, 65_536),
    "second_reverse": (second_reverse, 65_536),
    "group_norms": (group_norms, 128),
    "second_order": (second_order, 32),
    "depthwise": (depthwise, 128),
    "log_softmax_loss": (log_softmax_loss, 32),
    "smoothed_loss": (smoothed_loss, 32),
}


def network(name: str, batch: int) -> Network:
    """Builds an idiom's loss and its arguments.

    Args:
        name: One of `IDIOMS`.
        batch: Examples in a batch: sequences, rows, points, nodes or images.
    """
    loss_fn, arguments = IDIOMS[name][0](batch)

    def make_arguments(seed: int) -> tuple[Any, Any]:
        return arguments(jax.random.key(seed))

    return Network(
        name=name,
        loss_fn=loss_fn,
        has_aux=False,
        make_arguments=make_arguments,
    )
