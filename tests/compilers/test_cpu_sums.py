"""What XLA for CPU stores where others fuse, and in what form its products read operands."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from remat_opt.compilers.cpu_sums import Transposed
from remat_opt.compilers.effects import Held
from remat_opt.gradients import Gradients
from remat_opt.graph import Graph
from remat_opt.program import tracing
from remat_opt.schedule import Region, Schedule, plain, unchanged
from remat_opt.simulator import simulate
from tests.compiler_graphs import (
    W,
    X,
    graph_of,
    held_bytes,
    model_of,
    names,
    whole,
    wide_zeros,
)


def test_a_cpu_stores_what_its_sums_multiply() -> None:
    def normalised(w, x):
        y = x @ w
        centred = y - jnp.mean(y, 0)
        y = centred * lax.rsqrt(jnp.mean(centred**2, 0)) * 3.0
        return jnp.sum(jnp.sin(y @ w))

    # The gradient of the reciprocal deviation sums cotangents times what it scales.
    for device, extra in (("h200", False), ("cpu", True)):
        _, _, graph = graph_of(normalised, W, X, device=device)
        held = [v for v in simulate(graph, plain(graph)).stored if graph.bytes[v] == X.nbytes]
        assert ("sub" in [names(graph)[v] for v in held]) == extra


def test_a_cpu_stores_the_divisors_of_attention() -> None:
    def attention(w, x, batched):
        scores = jnp.exp(x @ w)
        shares = scores / jnp.sum(scores, -1, keepdims=True)
        return jnp.sum(jnp.sin(jnp.einsum("bij,bjk->bik", shares, x) if batched else shares @ w))

    images, square = jnp.ones((4, 8, 8)), jnp.ones((8, 8))
    for batched, copies in ((True, 2), (False, 1)):
        _, _, graph = graph_of(
            lambda w, x, batched=batched: attention(w, x, batched), square, images, device="cpu"
        )
        exponential = names(graph).index("exp")
        assert graph.bytes[exponential] == copies * images.nbytes


def test_a_cpu_stores_bfloat16_as_float32() -> None:
    narrow = [array.astype(jnp.bfloat16) for array in (W, X)]
    sizes = {}
    for device in ("h200", "cpu"):
        _, _, graph = graph_of(lambda w, x: jnp.sum(jnp.sin(x @ w) @ w), *narrow, device=device)
        sizes[device] = graph.bytes[0], graph.cotangent_bytes[0]
    assert sizes["cpu"] == tuple(2 * size for size in sizes["h200"])


def test_a_cpu_transposes_cotangents_for_the_gradients_of_weights() -> None:
    def loss(weights, x):
        hidden = jnp.tanh(x @ weights[0])
        scores = jnp.einsum("...ij,...kj->...ik", hidden, hidden)
        return jnp.sum(jnp.sin(scores))

    for device, shape, transposed, twice in (
        # It transposes if it sums over examples and tokens. The cotangent of a value multiplied
        # with itself is two arrays, which a GPU adds as it writes the second.
        ("cpu", (2, 16, 8), 2 * 16 * 4 * 4, 2 * 16 * 4 * 4),
        ("cpu", (16, 8), 0, 16 * 4 * 4),
        ("h200", (2, 16, 8), 0, 0),
        # A TPU does if there is no batch axis. Here it lays 16 tokens out along 128 lanes.
        ("v5e", (2, 16, 8), 0, 2 * 4 * 128 * 4),
        ("v5e", (16, 8), 0, 0),
    ):
        _, _, graph = graph_of(loss, [jnp.ones((8, 4))], jnp.ones(shape), device=device)
        products = [v for v, name in enumerate(names(graph)) if name == "dot_general"]
        # The second has no weight.
        assert [graph.workspace_bytes[v] for v in products] == [transposed, twice]


def all_kept(graph: Graph) -> Schedule:
    """Everything under one checkpoint that keeps it all by name."""
    every = tuple(range(len(graph)))
    return Schedule(regions=(Region(vertices=every, kept=every),))


def test_on_a_cpu_what_a_checkpoint_keeps_is_bfloat16() -> None:
    def loss(weights, x):
        for w in weights:
            x = jnp.sin(x @ w)
        return jnp.sum(x).astype(jnp.float32)

    weights, x = [jnp.ones((8, 8), jnp.bfloat16)] * 4, jnp.ones((16, 8), jnp.bfloat16)
    _, found, graph = graph_of(loss, weights, x, device="h200")
    assert found.graph_of(all_kept(graph)) == graph
    _, found, graph = graph_of(loss, weights, x, device="cpu")
    assert found.graph_of(whole(graph)) == found.graph_of(plain(graph)) == graph
    assert max(graph.bytes) == 4 * 16 * 8
    assert max(found.graph_of(all_kept(graph)).bytes) == 2 * 16 * 8


def test_a_cpu_widens_what_a_checkpoint_keeps_when_its_turn_comes() -> None:
    def loss(weights, x):
        for w in weights:
            x = jnp.sin(x @ w)
        return jnp.sum(x).astype(jnp.float32)

    weights, x = [jnp.ones((8, 8), jnp.bfloat16)] * 4, jnp.ones((16, 8), jnp.bfloat16)
    for device, more in (("cpu", 2 * 16 * 8), ("h200", 0)):
        _, found, graph = graph_of(loss, weights, x, device=device)
        none = found.held_bytes(whole(graph))
        every = tuple(range(len(graph)))
        products = [v for v in every if names(graph)[v] == "dot_general"]
        read = tuple(v for v in every if any(v in graph.needs[w] and v != w for w in products))
        half = [every[: products[2]], every[products[2] :]]
        one = [Region(vertices=every, kept=read)]
        two = [Region(vertices=part, kept=tuple(set(part) & set(read))) for part in half]
        assert len(read) == 3
        assert found.held_bytes(Schedule(regions=tuple(one))) - none == 3 * more
        # Of two checkpoints, one after the other.
        assert found.held_bytes(Schedule(regions=tuple(two))) - none == 2 * more


def test_a_cpu_widens_weights_that_are_bfloat16() -> None:
    def loss(weights, tokens):
        rows = weights["rows"][tokens]
        return jnp.sum(jnp.sin(rows @ weights["product"])).astype(jnp.float32)

    for dtype, device, widened in (
        (jnp.bfloat16, "cpu", 4),
        (jnp.float32, "cpu", 0),
    ):
        weights = {"rows": jnp.ones((32, 8), dtype), "product": jnp.ones((8, 4), dtype)}
        _, found, graph = graph_of(loss, weights, jnp.arange(16), device=device)
        product = widened * 8 * 4
        for schedule in (unchanged(graph), plain(graph)):
            assert held_bytes(found, schedule, Held) == product
        # A checkpoint widens its inputs again.
        assert held_bytes(found, whole(graph), Held) == 0
        # Its gradient is float32 while the product's step runs.
        rows = wide_zeros(widened * 32 * 8)
        assert graph.workspace_bytes[names(graph).index("dot_general")] == rows + product


def test_a_cpu_widens_a_weight_once_for_all_that_read_it() -> None:
    def loss(weights, tokens):
        x = weights["rows"][tokens][0]
        for _ in range(5):
            x = jnp.sin(x @ weights["product"])
        return jnp.sum(x).astype(jnp.float32)

    weights = {"rows": jnp.ones((32, 8), jnp.bfloat16), "product": jnp.ones((8, 8), jnp.bfloat16)}
    _, found, graph = graph_of(loss, weights, jnp.arange(16)[None], device="cpu")
    assert held_bytes(found, plain(graph), Held) == 4 * 8 * 8
    assert held_bytes(found, whole(graph), Held) == 0


def test_the_wide_gradient_of_a_rounded_weight_is_that_of_the_weight() -> None:
    def loss(w, x):
        return jnp.sum(jnp.sin(x @ w.astype(jnp.bfloat16))).astype(jnp.float32)

    program = tracing.trace(loss, W, X.astype(jnp.bfloat16))
    for device, separate in (("cpu", 0), ("h200", W.nbytes)):
        found = model_of(program, device, gradients=Gradients.CONSUMED)
        rounded = names(found.graph).index("convert_element_type")
        assert found.gradient_bytes[rounded] == separate
        assert (found.graph.cotangent_bytes[rounded] == W.nbytes) is (device == "cpu")


def test_a_cpu_transposes_what_convolutions_read() -> None:
    def loss(kernels, x):
        for kernel in kernels[:2]:
            x = jnp.sin(lax.conv_general_dilated(x, kernel, (1, 1), "SAME"))
        both = (lax.conv_general_dilated(x, kernel, (1, 1), "SAME") for kernel in kernels[2:])
        return jnp.sum(sum(map(jnp.sin, both)))

    args = [jnp.ones((4, 4, 3, 3))] * 4, jnp.ones((2, 4, 8, 8))
    size = args[1].nbytes
    for device, pairs in (("cpu", [(2, 1), (4, 3), (5, 3)]), ("h200", [])):
        _, found, graph = graph_of(loss, *args, device=device)
        products = [v for v, name in enumerate(names(graph)) if name == "conv_general_dilated"]
        assert products == [0, 2, 4, 5]
        effects = [one for one in found.effects if isinstance(one, Transposed)]
        assert [pair for one in effects for pair in one.pairs] == pairs
        # The cotangent of the reader exists during the step of what it reads.
        workspaces = [graph.workspace_bytes[vertex] for vertex in (1, 3)]
        assert all((size <= one) == bool(pairs) for one in workspaces)
        every = tuple(range(len(graph)))
        for regions, twice in (
            ([Region(vertices=every)], 0),
            ([Region(vertices=every, checkpointed=False)], 0),
            # Transposed for what is outside the checkpoint, unchanged for what is inside.
            ([Region(vertices=every[:5], checkpointed=False), Region(vertices=every[5:])], size),
            ([Region(vertices=every[:4], checkpointed=False), Region(vertices=every[4:])], 0),
        ):
            expected = twice if pairs else 0
            assert held_bytes(found, Schedule(regions=tuple(regions)), Transposed) == expected
