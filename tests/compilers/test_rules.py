"""The rules by name: each is used in the file that its row names, and changes something."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from remat_opt import compilers, loops
from remat_opt.compilers.compiler import Compiler, Rules
from remat_opt.compilers.rules import RULES
from remat_opt.device import get_device
from remat_opt.errors import RematError
from remat_opt.gradients import Gradients
from remat_opt.inner import model
from remat_opt.operation import ArrayType
from remat_opt.program import tracing
from remat_opt.program.linearization import linearize
from remat_opt.program.propagation import per_device
from remat_opt.program.record import Linearization, Program
from remat_opt.schedule import Region, Schedule, plain
from remat_opt.solvers.base import Overhead
from remat_opt.transform import rewriting
from tests.compiler_graphs import compiler_of, cross_entropy, model_of, two_layers
from tests.programs import convolved, ones

ROOM = Path(compilers.__file__).parent
KINDS = {"stored", "cotangents", "beside", "heap", "time", "rewrite"}
DEVICES = {"h200": "cuda", "v5e": "tpu", "cpu": "cpu"}


def asked_for(file: Path) -> set[str]:
    """The rules that a file asks for by name."""
    return set(re.findall(r"\bhas\(\s*\"(\w+)\"", file.read_text(encoding="utf-8")))


def test_every_rule_says_what_it_is() -> None:
    for name, rule in RULES.items():
        assert rule.platforms, name
        assert rule.platforms <= set(DEVICES.values()), name
        assert rule.kind in KINDS, name
        assert rule.says.endswith("."), name


def test_every_rule_is_asked_for_by_its_file_or_by_one_that_uses_it() -> None:
    texts = {file.stem: file.read_text(encoding="utf-8") for file in ROOM.glob("*.py")}
    asked = {file.stem: asked_for(file) for file in ROOM.glob("*.py")}
    assert set().union(*asked.values()) == RULES.keys()
    for name, rule in RULES.items():
        assert rule.file in texts, name
        asking = [place for place in texts if name in asked[place]]
        using = [place for place in asking if re.search(rf"\b{rule.file}\b", texts[place])]
        assert rule.file in asking or using, (name, rule.file)


def test_nothing_else_asks_for_a_rule() -> None:
    """``transform`` and the rest know nothing about compilers."""
    inside = {*ROOM.glob("*.py")}
    others = [file for file in ROOM.parent.rglob("*.py") if file not in inside]
    assert others
    assert not [file for file in others if asked_for(file)]


@pytest.mark.parametrize("make", [Rules, Compiler])
def test_a_rule_that_there_is_not(make: Callable[..., Any]) -> None:
    def has(*off: str) -> bool:
        if make is Rules:
            return Rules(platform="tpu", off=frozenset(off)).has("tiles")
        return compiler_of("v5e", off).has("tiles")

    for name, message in (
        ("tile", r"There is no rule 'tile' about compilers\. Did you mean 'tiles'\?"),
        ("quantum", r"There is no rule 'quantum' about compilers\.$"),
    ):
        with pytest.raises(RematError, match=message):
            has(name)
        with pytest.raises(RematError, match=message):
            has("softmax", name)


def test_a_rule_holds_for_its_compilers_until_it_is_switched_off() -> None:
    for name, rule in RULES.items():
        for device, platform in DEVICES.items():
            compiler = compiler_of(device)
            assert compiler.rules == Rules(platform=platform)
            holds = platform in rule.platforms and not rule.told
            assert compiler.has(name) is compiler.rules.has(name) is holds
            assert not compiler_of(device, [name]).has(name)
    assert compiler_of("v5e", ["softmax"]).has("tiles")


def test_arrays_are_padded_to_tiles_where_that_is_a_rule() -> None:
    kind = ArrayType(shape=(9, 100), dtype="float32")
    assert compiler_of("v5e").buffer_bytes(kind) == 16 * 128 * 4
    assert compiler_of("v5e", ["tiles"]).buffer_bytes(kind) == kind.bytes == 9 * 100 * 4
    # Elements of 16 bits are in tiles of as many rows, those of 8 in larger ones.
    for size, dtype, rows in ((21, "bfloat16", 24), (3, "bfloat16", 4), (21, "int8", 32)):
        kind = ArrayType(shape=(size, 96), dtype=dtype)
        found = compiler_of("v5e").buffer_bytes(kind, lanes=[1])
        assert found == rows * 128 * kind.bytes // kind.size
    # Arrays with one dimension, or no entries, are not.
    for shape in ((9,), (), (0, 3)):
        assert compiler_of("v5e").buffer_bytes(ArrayType(shape=shape, dtype="float32")) == (
            4 * jnp.zeros(shape).size
        )
    assert get_device("v5e").platform == "tpu"


# ------------------------------------------------------------------------- a program for each

W, X = ones(8, 8), ones(16, 8)
SQUARE, ROWS = ones(128, 128), ones(256, 128)
IMAGES, KERNEL = ones(2, 8, 8, 4), ones(3, 3, 4, 4)


def pooled_rows(weights, x):
    pooled = lax.reduce_window(x, -jnp.inf, lax.max, (2, 1), (2, 1), "VALID")
    return jnp.sum(jnp.sin(pooled @ weights[0]))


def biased_queries(weights, x):
    query = (x @ weights[0] + weights[1][0]) / 8
    return jnp.sum(jnp.sin(query @ (x @ weights[1]).T))


def joined_twice(w, x):
    joined = jnp.concatenate([x, x @ w], axis=1)
    joined = joined - jnp.mean(joined)
    return jnp.sum(jnp.tanh(joined @ jnp.concatenate([w, w])))


def dilated(kernels, x):
    for kernel in kernels:
        x = jnp.tanh(convolved(x, kernel, dilation=2))
    return jnp.sum(x)


def widened(kernel, x):
    wide = lax.conv_transpose(jnp.sin(convolved(x, kernel)), kernel, (2, 2), "SAME")
    return jnp.sum(jnp.sin(convolved(wide, kernel, 2)))


def joined_skips(weights, x):
    first = x = jnp.tanh(x @ weights[0])
    for w in weights[1:]:
        x = jnp.tanh(jnp.concatenate([first, jnp.sin(x)], axis=1) @ w)
    return jnp.sum(x)


def heads(w, x):
    scores = jnp.einsum("bqd,bkd->bqk", x @ w, jnp.sin(x))
    return jnp.sum(jnp.sin(jnp.einsum("bqk,bkd->bqd", jnp.exp(scores), x)))


def picked_rows(table, places):
    return jnp.sum(jnp.sin(jnp.sin(table[places]) @ W))


def summed_bags(table, places):
    return jnp.sum(jnp.sin(jnp.sum(table[places], 1)))


def outer_products(w, x):
    return jnp.sum(jnp.sin(jnp.einsum("td,te->tde", x @ w, jnp.sin(x @ w))))


def rounded_logits(w, x):
    return cross_entropy_of((x @ w).astype(jnp.bfloat16).astype(jnp.float32))


def cross_entropy_of(logits):
    labels = jnp.zeros((*logits.shape[:-1], 1), int)
    return jnp.mean(jax.nn.logsumexp(logits, -1)) - jnp.mean(
        jnp.take_along_axis(logits, labels, axis=-1)
    )


def log_softmax_loss(w, x):
    scores = jax.nn.log_softmax(x @ w)
    return -jnp.mean(jnp.take_along_axis(scores, jnp.zeros((*scores.shape[:-1], 1), int), axis=-1))


def attention(w, x):
    scores = jnp.einsum("bqd,bkd->bqk", x @ w, x, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores, axis=-1).astype(jnp.bfloat16)
    return jnp.sum(jnp.einsum("bqk,bkd->bqd", weights, x).astype(jnp.float32))


def handed_on(w, x):
    """Half of the vertices end with the scores."""
    scores = jnp.einsum("bqd,bkd->bqk", x @ w, x)
    return jnp.sum(jax.nn.softmax(scores, axis=-1) @ x)


def widened_attention(w, x):
    scores = jnp.einsum("bqd,bkd->bqk", x @ w, x).astype(jnp.float32)
    weights = jax.nn.softmax(scores, axis=-1).astype(jnp.bfloat16)
    return jnp.sum(jnp.einsum("bqk,bkd->bqd", weights, x).astype(jnp.float32))


def grouped(w, x):
    queries = (x @ w).reshape(2, 64, 2, 2, 32)
    scores = jnp.einsum("bqghd,bkgd->bgqhk", queries, queries[:, :, :, 0])
    return jnp.sum(jnp.sin(scores))


def grouped_weights(w, x):
    queries = (x @ w).reshape(2, 64, 2, 2, 32)
    scores = jnp.einsum("bqghd,bkgd->bghqk", queries, queries[:, :, :, 0])
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.sum(jnp.sin(jnp.einsum("bghqk,bkgd->bqghd", weights, queries[:, :, :, 1])))


def by_algorithm(w, x):
    precision = jax.lax.DotAlgorithmPreset.BF16_BF16_F32
    return jnp.sum(jnp.sin(jnp.dot(x, w, precision=precision)))


def dropout(w, x):
    y = x @ w
    kept = jax.random.bernoulli(jax.random.key(0), 0.9, y.shape)
    return jnp.sum(jnp.sin(jnp.where(kept, y / 0.9, 0) @ w))


def gated(w, x):
    y = x @ w
    return jnp.sum(jnp.sin((y * jnp.tanh(y * y)) @ w))


def waves(w, x):
    y = x @ w
    return jnp.sum(jnp.tanh((y * jnp.sin(y)) @ w))


def exact_gelus(weights, x):
    return jnp.sum(jax.nn.gelu(x @ weights[0], approximate=False) @ weights[1])


def gates(weights, x):
    one, other = jnp.split(x @ weights, 2, axis=1)
    mixed = jax.nn.relu(one) * other
    return jnp.sum(jnp.sin(mixed)) + jnp.sum(mixed**2)


def sums_of_sums(weights, x):
    added = weights[0] + weights[1] + x
    return jnp.sum(jnp.sin(added)) + jnp.sum(added**2)


def normalised(w, x):
    y = x @ w
    centred = y - jnp.mean(y, 0)
    y = centred * lax.rsqrt(jnp.mean(centred**2, 0)) * 3.0
    return jnp.sum(jnp.sin(y @ w))


def divided(w, x):
    scores = jnp.exp(x @ w)
    shares = scores / jnp.sum(scores, -1, keepdims=True)
    return jnp.sum(jnp.sin(jnp.einsum("bij,bjk->bik", shares, x)))


def activated(weights, x):
    return jnp.sum(jnp.sin(jax.nn.relu(x @ weights[0]) @ weights[1]))


def activated_twice(weights, x):
    for w in weights:
        y = x @ w
        x = y * jnp.tanh(y)
    return jnp.sum(x @ weights[0])


def biased(parameters, x):
    w, b = parameters
    return jnp.sum(jnp.sin(jnp.tanh(x @ w + b) @ w))


def step_by_step(w, x):
    y = jnp.zeros_like(x[:, 0])
    for step in range(x.shape[1]):
        y = jnp.tanh(x[:, step] @ w + y @ w)
    return jnp.sum(y)


def recurrent(w, x):
    for _ in range(5):
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


def pooling(kernel, x, *, strides):
    y = jax.nn.relu(convolved(x, kernel))
    return jnp.sum(jnp.sin(lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), strides, "VALID")))


def convolutions(kernel, x):
    for _ in range(3):
        x = jnp.sin(convolved(x, kernel))
    return jnp.sum(x)


def strided(kernel, x):
    return jnp.sum(jnp.sin(convolved(jnp.tanh(convolved(x, kernel)), kernel, 2)))


def summed_products(w, x):
    for _ in range(3):
        y = jnp.sin(x)
        x = jnp.tanh(x @ w[0] + y @ w[1])
    return jnp.sum(x)


def towers(weights, x):
    y = jnp.sin(jnp.sin(jnp.sin(x @ weights[0]) @ weights[1]) @ weights[2])
    return jnp.sum(y) * jnp.sum(jnp.sin(x @ weights[3]))


def gated_products(weights, x):
    y = jnp.sin(x)
    return jnp.sum(jnp.sin((jnp.exp(y @ weights[0]) * (y @ weights[1])) @ weights[2]))


def similar(w, x):
    features = x @ w
    return jnp.sum(jnp.sin(features.T @ features))


def bags(weights, tables, ids):
    """Summed rows of tables, added in one layer after the other."""
    x = jnp.ones((ids.shape[1], weights[0].shape[0]))
    for w, table, rows in zip(weights, tables, ids, strict=True):
        x = jnp.sin(x @ w + jnp.sum(table[rows], axis=1))
    return jnp.sum(x)


def skips(weights, x):
    added = jnp.cos(x)
    for w in weights:
        x = jnp.sin(x @ w)
        added = added + x @ w
    return jnp.sum(jnp.sin(jnp.tanh(added) @ weights[0]))


def crossed(weights, x):
    """Two branches that begin at one value and end in the loss."""
    x = jnp.sin(x @ weights[0])
    cross = jnp.sin(x * (x @ weights[1]))
    return jnp.sum(jnp.sin(jnp.sin(x @ weights[2]) @ weights[2])) + jnp.sum(cross)


def halves_multiplied(w, x):
    z = jax.nn.sigmoid((x @ w)[:, None] * jnp.arange(1.0, 17.0)[:, None])
    return jnp.sum(z[:8] * z[8:])


def pairs_turned(w, x):
    y = x @ w
    return jnp.sum(jnp.concatenate([y[:, ::2] * y[:, 1::2], y[:, ::2]], 1) @ w)


def shifted(weights, x):
    """A short convolution over rows as a sum of shifted ones, between two products."""
    w, taps = weights
    y = jnp.pad(x @ w, ((4, 0), (0, 0)))
    rows = len(x)
    return jnp.sum(jax.nn.silu(sum(y[i : i + rows] * tap for i, tap in enumerate(taps))) @ w)


def filtered(w, x):
    return jnp.sum(jnp.abs(jnp.fft.rfft(x @ w)))


def stacked_layers(weights, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0]


def stacked(weights, x):
    return jnp.sum(stacked_layers(weights, x))


def stacked_gates(weights, x):
    return jnp.sum(
        lax.scan(lambda h, w: (h + (jnp.sin(h @ w) * (h @ w.T)) @ w, None), x, weights)[0]
    )


def stacked_branches(weights, x):
    def layer(h, w):
        return sum(jnp.tanh(jnp.tanh(h @ (w + n)) @ w) for n in range(3)), None

    return jnp.sum(lax.scan(layer, x, weights)[0])


def stack_and_head(weights, x):
    layers, head = weights
    return jnp.sum(jnp.sin(stacked_layers(layers, x) @ head))


def narrow_and_wide(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


def looked_up(weights, tokens):
    table, product = weights
    return jnp.sum(jnp.sin(jnp.sin(table[tokens] @ product) @ product))


def looked_up_twice(table, tokens):
    table = table @ SQUARE
    return jnp.sum(jnp.sin(table[tokens] * table[tokens + 1]))


def reordered(a):
    places = jnp.argsort(a, axis=-1)
    return jnp.sum(jnp.sin(jnp.take_along_axis(jnp.sin(a @ SQUARE), places, axis=-1)) @ SQUARE)


def converted_table(table, tokens):
    return jnp.sum(jnp.sin(jnp.sin(table.astype(jnp.bfloat16)[tokens]) @ SQUARE))


overlapping = functools.partial(pooling, strides=(1, 1, 1, 1))
apart = functools.partial(pooling, strides=(1, 2, 2, 1))
narrow = functools.partial(jax.tree.map, lambda one: one.astype(jnp.bfloat16))
wide = jax.ShapeDtypeStruct((2048, 2048), "float32")
rows = jax.ShapeDtypeStruct((512, 64), "float32")
tall = jax.ShapeDtypeStruct((2**17, 64), "float32")
huge = jax.ShapeDtypeStruct((8192, 8192), "float32")
stack = jax.ShapeDtypeStruct((6, 256, 256), "float32")
many_rows = jax.ShapeDtypeStruct((2**15, 256), "float32")
widths = [64, 96, 64, 640, 32, 256, 640]
changing = [jax.ShapeDtypeStruct(shape, "float32") for shape in itertools.pairwise(widths)]


def gated_by_means(w: jax.Array, x: jax.Array) -> jax.Array:
    h = jax.nn.relu(x @ w).reshape(2, -1, w.shape[1])
    return jnp.sum((h * jax.nn.sigmoid(h.mean(1, keepdims=True))) @ w)


def similarities_first(weights, x):
    """A large product that nothing is differentiated through, and weights for what comes after."""
    x = (x @ x.T).sum(0, keepdims=True)[:, : x.shape[1]]
    for w in weights:
        x = jnp.tanh(x @ w.astype(x.dtype))
    return jnp.sum(x.astype("float32"))


def by_hand(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    layer = jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x) @ w))
    for w in weights:
        x = layer(x, w)
    return jnp.sum(x**2)


def split(*extents: int, by: Any = ("data",)) -> jax.ShapeDtypeStruct:
    """The shape of an array on a mesh of four devices, split by rows."""
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec(*by))
    return jax.ShapeDtypeStruct(extents, "float32", sharding=sharding)


def whole(*extents: int) -> jax.ShapeDtypeStruct:
    """The shape of an array that all of these devices have."""
    return split(*extents, by=())


#: For each rule, devices and a program with arguments.
PROGRAMS: dict[str, tuple[str, Callable[..., Any], tuple[Any, ...]]] = {
    "operands_fused": ("v5e", two_layers, ([SQUARE] * 2, ROWS)),
    "operands_rounded": ("v5e", pooled_rows, ([SQUARE], ROWS)),
    "forms_completed": ("v5e", biased_queries, ([SQUARE] * 2, ROWS)),
    "concatenations": ("v5e", joined_twice, (ones(1024, 1024), ones(256, 1024))),
    "pieces_stored": ("v5e", joined_skips, ([SQUARE] + [ones(256, 128)] * 2, ROWS)),
    "tiles": ("v5e", two_layers, ([W, W], X)),
    "matrix_axes": ("v5e", heads, (W, ones(128, 24, 8))),
    "lanes": ("v5e", picked_rows, (X, jnp.arange(512) % 16)),
    "vector_products": ("v5e", outer_products, (W, X)),
    "rows_grouped": ("v5e", summed_bags, (X, jnp.arange(510).reshape(51, 10) % 16)),
    "softmax": ("v5e", attention, narrow((SQUARE, ones(2, 256, 128)))),
    "scores_widened": ("h200", widened_attention, narrow((SQUARE, ones(2, 256, 128)))),
    "operands_again": ("h200", grouped_weights, narrow((SQUARE, ones(2, 64, 128)))),
    "transcendental": ("h200 v5e cpu", waves, (SQUARE, ROWS)),
    "flat_operands": ("h200", exact_gelus, narrow(([W] * 2, ones(4, 16, 8)))),
    "sums_split": ("h200", gated_by_means, (W, ones(4096, 8))),
    "draws_stored": ("h200", dropout, (W, X)),
    "words_stored": ("cpu", dropout, (W, X)),
    "rows_computed": ("cpu", converted_table, (ROWS, jnp.arange(16))),
    "rows_fused": ("h200", converted_table, (ROWS, jnp.arange(16))),
    "slices_read_parts": ("h200 v5e", gates, (ones(128, 256), ROWS)),
    "readers_recounted": ("h200 v5e", sums_of_sums, ([SQUARE] * 2, SQUARE)),
    "product_sums": ("h200", summed_products, ([W, W], X)),
    "sums_in_products": ("v5e", summed_products, ([SQUARE] * 2, ROWS)),
    "sums_wait": ("h200 v5e cpu", two_layers, ([whole(8, 8)] * 2, split(4096, 8))),
    "stored_for_sums": ("cpu", normalised, (W, X)),
    "divisors": ("cpu", divided, (W, ones(4, 8, 8))),
    "widened": ("cpu", recurrent, narrow((W, X))),
    "cotangents_fused": ("v5e", cross_entropy, (SQUARE, ROWS)),
    "cotangents_rounded": ("v5e", activated, ([SQUARE] * 2, ROWS)),
    "factors_share": ("v5e", gated_products, ([SQUARE] * 3, ROWS)),
    "products_stay": ("h200", activated, ([W, W], X)),
    "orders": ("h200", grouped, (SQUARE, ones(2, 64, 128))),
    "algorithms": ("h200", by_algorithm, (W, X)),
    "logits_shifted": ("h200 v5e", log_softmax_loss, (W, X)),
    "operands_stored": ("v5e", exact_gelus, ([SQUARE] * 2, ROWS)),
    "cotangents_pass": ("h200 v5e", waves, (SQUARE, ROWS)),
    "zeros_shared": ("h200", looked_up_twice, (ROWS, jnp.arange(16))),
    "tables_first": ("h200", looked_up, ((ROWS[:64], SQUARE), jnp.arange(256) % 64)),
    "zeros_first": ("cpu", looked_up, ((ROWS, SQUARE), jnp.arange(16))),
    "entries_rounded": ("v5e", stacked, (ones(6, 128, 128), ROWS)),
    "sums_share": ("h200 v5e cpu", skips, ([SQUARE] * 3, ROWS)),
    "squares": ("v5e cpu", similar, (W, X)),
    "whole_cotangents": ("v5e", joined_skips, ([SQUARE] + [ones(256, 128)] * 2, ROWS)),
    "broadcast_cotangents": ("cpu", cross_entropy, (W, X)),
    "pooling_zeros": ("h200", overlapping, (KERNEL, IMAGES)),
    "pooling_search": ("cpu", apart, (KERNEL, IMAGES)),
    "weights_copied": ("h200", convolutions, (KERNEL, IMAGES)),
    "operands_transposed": ("h200", dilated, ([KERNEL] * 2, IMAGES)),
    "operands_spread": ("h200", widened, (KERNEL, ones(64, 8, 8, 4))),
    "operands_padded": ("h200", strided, (KERNEL, IMAGES)),
    "operands_first": ("h200", two_layers, ([W, W], X)),
    "shared_weights": ("h200 v5e cpu", recurrent, (huge, huge)),
    "transposed_operands": ("cpu", convolutions, (KERNEL, IMAGES)),
    "transposed_cotangents": ("cpu", recurrent, (W, ones(2, 16, 8))),
    "entries_sliced": ("h200", stacked, (ones(6, 128, 128), ROWS)),
    "entries_taken": ("h200", stacked, (ones(6, 128, 128), ROWS)),
    "runs_when_read": ("h200", stacked_branches, (stack, many_rows)),
    "entries_reordered": ("v5e", step_by_step, (SQUARE, ones(256, 8, 128))),
    "entries_turned": ("v5e", step_by_step, (SQUARE, ones(256, 8, 128))),
    "entries_in_place": ("v5e", stacked_gates, (stack, many_rows)),
    "scores_copied": ("v5e", handed_on, narrow((SQUARE, ones(2, 256, 128)))),
    "copies": ("v5e", recurrent, (wide, wide)),
    "heap_in_order": ("v5e", narrow_and_wide, (changing, tall)),
    "vector_memory": ("v5e", recurrent, (wide, wide)),
    "heap_by_size": ("h200 cpu", narrow_and_wide, (changing, rows)),
    "conversions_first": ("h200", similarities_first, ([SQUARE] * 4, narrow(ROWS))),
    "logits_apart": ("cpu", log_softmax_loss, (ones(8, 64), ones(2, 16, 8))),
    "starts_first": ("cpu", bags, ([SQUARE] * 2, [ones(64, 128)] * 2, ones(2, 256, 4, dtype=int))),
    "operands_gathered": ("h200 v5e cpu", two_layers, ([split(8, 8)] * 2, split(4096, 8))),
    "spectra_whole": ("v5e", filtered, (SQUARE, ROWS)),
    "places_stored": ("v5e", halves_multiplied, (W, X)),
    "places_apart": ("h200", halves_multiplied, (W, X)),
    "strides_stored": ("v5e", pairs_turned, (SQUARE, ROWS)),
    "strides_spread": ("v5e", pairs_turned, (SQUARE, ROWS)),
    "reread_backward": ("h200 v5e", shifted, ((SQUARE, ones(5, 128)), ROWS)),
    "places_spread": ("v5e", shifted, ((SQUARE, ones(5, 128)), ROWS)),
    "branches_in_turn": ("h200 v5e", crossed, ([SQUARE] * 3, ROWS)),
    "gathered_in_loops": ("h200 cpu", stacked, (split(6, 8, 8, by=(None, "data")), split(4096, 8))),
    "sums_put_off": ("h200", by_hand, ([whole(8, 8)] * 3, split(4096, 8))),
    "scattered_put_off": ("v5e", by_hand, ([split(8, 8)] * 3, split(4096, 8))),
    "updates_fused": ("v5e", two_layers, ([SQUARE] * 2, ROWS)),
    "updates_wait": ("h200", two_layers, ([SQUARE] * 4, ROWS[:8])),
    "results_lend": ("h200 cpu", two_layers, ([SQUARE] * 2, SQUARE)),
    "convolution_time": ("h200", convolutions, (KERNEL, IMAGES)),
    "zeros_apart": ("h200", overlapping, (KERNEL, IMAGES)),
    "searches_wait": ("h200", apart, (KERNEL, IMAGES)),
    "rows_scattered": ("h200", functools.partial(cross_entropy, dtype="float32"), narrow((W, X))),
    "rows_picked": ("h200", cross_entropy, (W, X)),
    "indices_listed": ("h200", reordered, (ROWS,)),
    "entries_flat": ("h200", reordered, (ROWS,)),
    "picks_summed": ("v5e", rounded_logits, (W, X)),
    "pieces_apart": ("v5e", joined_skips, ([SQUARE] + [ones(256, 128)] * 2, ROWS)),
    "picked_stored": ("v5e", rounded_logits, (W, X)),
    "parts_added": ("h200 v5e cpu", recurrent, (W, X)),
    "calls_in_turn": ("h200 v5e", by_hand, ([W, W], X)),
    "gradients_in_turn": ("h200", biased, ((W, W[0]), X)),
    "products_apart": ("h200", gated_products, ([SQUARE] * 3, ROWS)),
    "starts_wait": ("h200 v5e cpu", towers, ([SQUARE] * 4, ROWS)),
    "starts_in_turn": ("cpu", towers, ([SQUARE] * 4, ROWS)),
    "logits_together": ("cpu", cross_entropy, (W, X)),
    "draws_in_turn": ("cpu", dropout, (W, X)),
    "squares_apart": ("h200", similar, (W, X)),
    "squares_once": ("v5e cpu", similar, (W, X)),
    "loops_in_turn": ("v5e", stack_and_head, ((ones(6, 128, 128), SQUARE), ROWS)),
    "functions_again": ("h200", activated_twice, ([W, W], X)),
    "partners_wait": ("h200", summed_products, ([W, W], X)),
    "maxima_stored": ("v5e", attention, narrow((SQUARE, ones(2, 256, 128)))),
    "boundaries_stored": ("cpu", two_layers, ([W, W], X)),
    "outputs_together": ("v5e", skips, ([SQUARE] * 3, ROWS)),
    "parts_in_turn": ("cpu", recurrent, (W, X)),
}


@functools.cache
def traced(rule: str) -> Program:
    """The program that shows a rule."""
    _, fn, args = PROGRAMS[rule]
    return per_device(tracing.trace(fn, *args))


@functools.cache
def linearized(rule: str) -> Linearization:
    """What the derivatives of its equations read."""
    return linearize(traced(rule))


def in_parts(count: int, regions: int = 2) -> Schedule:
    """Regions of about equal size, all but the last under a checkpoint that keeps nothing."""
    size = (count + regions - 1) // regions
    parts = [tuple(range(start, min(start + size, count))) for start in range(0, count, size)]
    return Schedule(
        regions=tuple(
            Region(vertices=part, checkpointed=number == 0 or number < regions - 1)
            for number, part in enumerate(parts)
        )
    )


def figures(rule: str, device: str, off: Collection[str] = ()) -> tuple[Any, ...]:
    """What the program that shows a rule is expected to take on a device."""
    program, linearization = traced(rule), linearized(rule)
    compiler = Compiler(device=get_device(device).told(RULES[rule].told), off=frozenset(off))
    found = model(program, linearization, compiler, gradients=Gradients.RESULTS)
    in_step = model(program, linearization, compiler, gradients=Gradients.CONSUMED)
    schedules = plain(found.graph), in_parts(len(found.graph))
    ways = loops.ways(program, linearization, found, Overhead.SECONDS)
    inside = [(way.stacked_bytes, way.workspace_bytes) for of_loop in ways for way in of_loop]
    peaks = *map(found.peak_bytes, schedules), found.unchanged_peak_bytes()
    return found.graph, inside, in_step.gradient_bytes, *peaks


def gradient(program: Program, device: str, off: Collection[str] = ()) -> str:
    """The jaxprs of the gradient of a program in two regions and in three."""
    return "".join(_gradient(program, device, frozenset(off), regions) for regions in (2, 3))


def _gradient(program: Program, device: str, off: frozenset[str], regions: int) -> str:
    found = model_of(program, device)
    stages = found.stages(in_parts(len(found.graph), regions))
    run = rewriting.rewrite(program, stages, get_device(device).platform, off)
    arguments = [
        jax.ShapeDtypeStruct(program.types[value].shape, program.types[value].dtype)
        for value in program.arguments
    ]
    of_arguments = jax.grad(lambda given: run(program.constant_values, given)[0])
    jaxpr = jax.make_jaxpr(of_arguments)(arguments)
    return re.sub(r"0x[0-9a-f]+", "", str(jaxpr))


def test_a_rule_may_depend_on_what_a_compiler_is_told() -> None:
    device = get_device("v5e")
    told = dict(RULES["updates_fused"].told)
    for options, holds in (({}, False), (told, True), ({**told, "other": True}, True)):
        assert Compiler(device=device.told(options)).has("updates_fused") is holds
    assert not Compiler(device=device.told(told), off=frozenset({"updates_fused"})).has(
        "updates_fused"
    )


def test_there_is_a_program_for_every_rule_and_device() -> None:
    assert PROGRAMS.keys() == RULES.keys()
    for rule, (devices, *_) in PROGRAMS.items():
        assert {DEVICES[device] for device in devices.split()} == RULES[rule].platforms, rule


@pytest.mark.parametrize(
    ("rule", "device"),
    [
        (rule, device)
        for rule, (devices, *_) in PROGRAMS.items()
        for device in devices.split()
        if RULES[rule].kind != "rewrite"
    ],
)
def test_switching_a_rule_off_changes_figures(rule: str, device: str) -> None:
    found = figures(rule, device)
    assert figures(rule, device) == found
    assert figures(rule, device, [rule]) != found


#: Rewrites that JAX before 0.11 does not take.
NEW = frozenset({"loops_in_turn"})


@pytest.mark.parametrize(
    "rule",
    [
        rule
        for rule in RULES
        if RULES[rule].kind == "rewrite" and (rule not in NEW or jax.__version_info__ >= (0, 11))
    ],
)
def test_switching_a_rule_off_changes_what_is_written(rule: str) -> None:
    program, device = traced(rule), PROGRAMS[rule][0].split()[0]
    found = gradient(program, device)
    assert gradient(program, device) == found
    assert gradient(program, device, [rule]) != found


@pytest.mark.parametrize("rule", RULES)
def test_rules_about_other_compilers_change_nothing(rule: str) -> None:
    for device, platform in DEVICES.items():
        if platform not in RULES[rule].platforms:
            assert figures(rule, device, [rule]) == figures(rule, device)
