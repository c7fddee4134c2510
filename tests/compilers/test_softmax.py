"""Softmax in mixed precision: which ones are found, what a TPU stores, what plans keep."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remat_opt import _jax_internals as internals
from remat_opt import planning
from remat_opt.compilers import softmax
from remat_opt.compilers.compiler import Rules
from remat_opt.device import get_device
from remat_opt.operation import ArrayType
from remat_opt.program import tracing
from remat_opt.program.linearization import linearize
from remat_opt.program.record import Program
from remat_opt.program.tracing import Signature
from remat_opt.schedule import Region, Schedule, Stage, plain
from remat_opt.transform.rewriting import rewrite
from tests.compiler_graphs import InStep, model_of
from tests.devices import needs_libtpu

BATCH, TOKENS, HEADS, DEPTH = 2, 8, 3, 4
NVIDIA = Rules(platform="cuda")
SQUARE = (BATCH, HEADS, TOKENS, TOKENS)
X = jnp.zeros((BATCH, TOKENS, HEADS * DEPTH), jnp.bfloat16)
W = jnp.zeros((HEADS * DEPTH, 3 * HEADS * DEPTH), jnp.bfloat16)


def attention(w, x, *, dtype=jnp.bfloat16, mask=True, shifted=True):
    query, key, value = jnp.split((x @ w).reshape(BATCH, TOKENS, HEADS, 3 * DEPTH), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
    if mask:
        scores = jnp.where(jnp.tril(jnp.ones((TOKENS, TOKENS), bool)), scores, -jnp.inf)
    unnormalized = jnp.exp(scores)
    weights = unnormalized / jnp.sum(unnormalized, axis=-1, keepdims=True)
    if shifted:
        weights = jax.nn.softmax(scores, axis=-1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(dtype), value.astype(dtype))
    return mixed.reshape(x.shape)


def loss(w, x, **options):
    return jnp.sum(attention(w, x, **options).astype(jnp.float32))


def traced(fn, *args, **options) -> Program:
    return tracing.trace(lambda *given: fn(*given, **options), *args)


def graph(fn, *args, device, **options):
    return model_of(traced(fn, *args, **options), device)


@pytest.mark.parametrize("mask", [True, False])
def test_the_exponentials_and_what_the_product_reads_are_found(mask: bool) -> None:
    program = traced(loss, W, X, mask=mask)
    (found,) = softmax.rounded(program, Rules(platform="tpu"))
    maker = program.makers()
    for value, primitive in (
        (found.maxima, "reduce_max"),
        (found.sums, "reduce_sum"),
        (found.exponentials, "exp"),
    ):
        assert program.equations[maker[value]].operation.primitive == primitive
    assert program.types[found.maxima].shape == SQUARE[:-1]
    kinds = [program.types[value] for value in (found.exponentials, found.weights)]
    assert [kind.dtype for kind in kinds] == ["float32", "bfloat16"]
    assert {kind.shape for kind in kinds} == {SQUARE}
    assert any(
        found.weights in equation.value_inputs
        for equation in program.equations
        if equation.operation.primitive == "dot_general"
    )
    assert not list(softmax.rounded(program, Rules(platform="cuda")))


def widened_loss(w, x, *, way):
    query, key, value = jnp.split((x @ w).reshape(BATCH, TOKENS, HEADS, 3 * DEPTH), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    mask = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
    if way == "capped narrow":
        scores = 50 * jnp.tanh(scores / 50)
    scores = scores.astype(jnp.float32)
    if way == "capped":
        scores = jnp.where(mask, 50 * jnp.tanh(scores / 50), -1e9)
    weights = jax.nn.softmax(scores, where=mask if way == "masked" else None)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(jnp.bfloat16), value)
    return jnp.sum(mixed.astype(jnp.float32))


@pytest.mark.parametrize(
    ("way", "waits"),
    [("plain", "exp"), ("masked", "exp"), ("capped", "tanh"), ("capped narrow", "exp")],
)
def test_a_gpu_stores_exponentials_or_the_function_that_caps_scores(way: str, waits: str) -> None:
    program = traced(widened_loss, W, X, way=way)
    (found,) = softmax.rounded(program, NVIDIA)
    maker = program.makers()
    for value, primitive in (
        (found.exponentials, "exp"),
        (found.waiting, waits),
        (found.maxima, "reduce_max"),
        (found.sums, "reduce_sum"),
    ):
        assert program.equations[maker[value]].operation.primitive == primitive
    of = model_of(program, "h200").graph
    (vertex,) = (v for v, name in enumerate(of.names) if name.endswith(waits) and of.bytes[v] > 999)
    # The cotangent is as narrow as the weights.
    assert of.cotangent_bytes[vertex] * 2 == of.bytes[vertex] == 4 * np.prod(SQUARE)
    assert sum(size == of.bytes[vertex] for size in of.bytes) == 1


def test_a_tpu_stores_scores_that_a_product_writes_narrower_than_exponentials() -> None:
    program = traced(widened_loss, W, X, way="plain")
    assert not list(softmax.rounded(program, Rules(platform="tpu")))
    found = model_of(program, "v5e")
    assert found.as_it_is is None
    kinds = [label for label in found.labels if "[2,3,8,8]" in label]
    assert kinds == ["dot_general bf16[2,3,8,8]"]


def test_a_tpu_stores_exponentials_if_scores_are_masked_after_they_are_widened() -> None:
    program = traced(widened_loss, W, X, way="masked")
    (found,) = softmax.rounded(program, Rules(platform="tpu"))
    maker = program.makers()
    assert program.equations[maker[found.waiting]].operation.primitive == "exp"
    # In plans the maxima are stored instead.
    assert model_of(program, "v5e").as_it_is is not None


@pytest.mark.slow
@pytest.mark.tpu
@needs_libtpu
def test_attention_with_masked_float32_scores_compiles_to_what_is_predicted() -> None:
    batch, length, heads, depth = 32, 512, 8, 64

    def layers(weights, x):
        for own, out in weights:
            split = jnp.split((x @ own).reshape(batch, length, heads, 3 * depth), 3, axis=-1)
            scores = jnp.einsum("bqhd,bkhd->bhqk", *split[:2]).astype(jnp.float32)
            scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
            mixed = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
            mixed = jnp.einsum("bhqk,bkhd->bqhd", mixed, split[2])
            x = x + mixed.reshape(x.shape) @ out
        return jnp.mean(x.astype(jnp.float32) ** 2)

    shape = functools.partial(jax.ShapeDtypeStruct, dtype="bfloat16")
    width = heads * depth
    weights = [(shape((width, 3 * width)), shape((width, width)))] * 3
    step = InStep(layers, weights, shape((batch, length, width)), device="v5e")
    assert step.problem.unchanged.peak_bytes == pytest.approx(step.unplanned_bytes(), rel=0.2)
    plan = step.plan()
    compiled = step.compiled_bytes(plan)
    assert plan.predicted.temporary_bytes == pytest.approx(compiled, rel=0.2)
    # One array of scores and one of their cotangents, in bfloat16.
    assert compiled < 3.5 * 2 * batch * heads * length**2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tpu_stores_wide_logits_of_a_log_softmax_minus_their_maximum(dtype: str) -> None:
    def smoothed(w: jax.Array, x: jax.Array) -> jax.Array:
        logits = (x @ w).astype(dtype).astype(jnp.float32)
        return jnp.sum(jnp.sin(x) @ jnp.sin(w) * jax.nn.log_softmax(logits))

    def plain(w: jax.Array, x: jax.Array) -> jax.Array:
        logits = (x @ w).astype(dtype).astype(jnp.float32)
        return jnp.sum(jax.nn.logsumexp(logits, axis=-1))

    w, x = jnp.ones((128, 256)), jnp.ones((256, 128))
    for fn, stored in ((smoothed, dtype == "float32"), (plain, False)):
        assert ("sub f32[256,256]" in graph(fn, w, x, device="v5e").labels) is stored, fn


def test_what_becomes_of_other_scores_than_the_maxima_are_of_is_not_found() -> None:
    def fn(w, x):
        scores = (x @ w).astype(jnp.float32)
        maxima = jnp.max(jnp.where(scores > 0, jnp.sin(scores), scores), -1, keepdims=True)
        weights = jnp.exp(scores - maxima)
        weights = (weights / jnp.sum(weights, -1, keepdims=True)).astype(jnp.bfloat16)
        return jnp.sum((weights @ w.T).astype(jnp.float32))

    assert not list(softmax.rounded(traced(fn, W, X), NVIDIA))


@pytest.mark.parametrize("options", [{"dtype": jnp.float32}, {"shifted": False}])
def test_weights_as_wide_as_the_exponentials_and_other_sums_are_not(options: Any) -> None:
    assert not list(softmax.rounded(traced(loss, W, X, **options), Rules(platform="tpu")))


def test_a_log_softmax_that_no_product_reads_is_not() -> None:
    program = traced(lambda x: jnp.sum(jax.nn.log_softmax(x)), X.astype(jnp.float32))
    assert not list(softmax.rounded(program, Rules(platform="tpu")))


def squares(found) -> list[str]:
    return [label for label in found.labels if label.endswith(f"[{','.join(map(str, SQUARE))}]")]


def shifted(program, rules) -> list[tuple[int, int]]:
    return list(softmax.shifted(program, rules, linearize(program).active_values))


def picked_loss(x, w):
    logits = (x @ w).astype(jnp.float32)
    labels = jnp.zeros((*logits.shape[:-1], 1), int)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels, axis=-1))


@pytest.mark.parametrize(("classes", "stored"), [(64, True), (16384, True), (16386, False)])
def test_labels_are_gathered_from_stored_logits_minus_their_maximum(classes, stored) -> None:
    w = jax.ShapeDtypeStruct((HEADS * DEPTH, classes), "bfloat16")
    program = tracing.trace(picked_loss, X, w)
    found = dict(shifted(program, NVIDIA))
    assert bool(found) is stored
    rows = BATCH * TOKENS * classes
    for value, logits in found.items():
        assert (program.types[value].dtype, program.types[logits].dtype) == ("float32", "bfloat16")
        of = model_of(program, "h200").graph
        vertex = of.names.index(next(name for name in of.names if name.endswith("sub")))
        # One kernel computes the cotangent, and writes that of the logits, which is narrow.
        assert (of.bytes[vertex], of.cotangent_bytes[vertex]) == (4 * rows, 1)
        before = [v for v in of.predecessors[vertex] if of.bytes[v] == 2 * rows]
        assert [of.cotangent_bytes[v] for v in before] == [2 * rows]


@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, labels: jax.nn.logsumexp(logits) - jnp.sum(logits[labels]),
        lambda logits, labels: -jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, 8)),
    ],
)
def test_other_losses_store_no_such_logits(loss) -> None:
    logits, labels = jnp.zeros((4, 8)), jnp.zeros(4, int)
    assert not shifted(tracing.trace(loss, logits, labels), NVIDIA)


def test_a_log_softmax_that_no_gradient_reaches_is_stored() -> None:
    def divergence(student, teacher):
        target = jax.nn.log_softmax(teacher)
        return jnp.mean(jnp.exp(target) * (target - jax.nn.log_softmax(student)))

    logits = jnp.zeros((4, 8))
    ((_, found),) = shifted(program := tracing.trace(divergence, logits, logits), NVIDIA)
    assert found == program.arguments[1]
    both = Signature(argnums=(0, 1))
    assert not shifted(tracing.trace(divergence, logits, logits, signature=both), NVIDIA)


@pytest.mark.parametrize(("classes", "stored"), [(8192, True), (8194, False)])
def test_on_a_tpu_logits_minus_their_maximum_are_stored_of_short_rows(classes, stored) -> None:
    def loss(x, w):
        return -jnp.mean(jax.nn.log_softmax(x @ w))

    arguments = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((16, 8), (8, classes)))
    program = tracing.trace(loss, *arguments)
    assert bool(shifted(program, Rules(platform="tpu"))) is stored


def test_a_tpu_stores_scores_and_exponentials_of_the_function_as_it_is() -> None:
    found = graph(loss, W, X, device="v5e").as_it_is
    scores, exponentials = (found.labels.index(text) for text in squares(found))
    assert found.labels[exponentials].startswith("exp f32")
    assert found.graph.predecessors[exponentials].count(scores) == 1
    # A TPU's padding hides the widths: one array is compared in two of them.
    assert found.graph.cotangent_bytes[scores] == 1
    assert 0 < found.graph.cotangent_bytes[exponentials] <= found.graph.bytes[exponentials]
    # Backward, the exponentials are read, and the scores no longer.
    read = {needed for needs in found.graph.needs for needed in needs}
    assert exponentials in read
    assert scores not in read


def test_a_tpu_stores_the_scores_of_a_plan_and_the_gradient_of_the_weights() -> None:
    found = graph(loss, W, X, device="v5e")
    (scores,) = (found.labels.index(text) for text in squares(found))
    assert [found.labels[vertex].split()[0] for vertex in sorted(found.never_named)] == [
        "reduce_max",
        "reduce_sum",
    ]
    assert 0 < found.graph.cotangent_bytes[scores] <= found.graph.bytes[scores]
    # The gradients of queries and keys are products that read the scores again.
    assert scores in found.graph.needs[scores]
    assert len(found.as_it_is.graph) == len(found.graph) + 1
    assert found.unchanged_peak_bytes() == found.as_it_is.unchanged_peak_bytes()


def test_row_statistics_are_kept_under_no_checkpoint() -> None:
    found = graph(loss, W, X, device="v5e")
    maxima, sums = sorted(found.never_named)
    everything = tuple(range(len(found.graph)))
    inside = (
        Region(vertices=everything[: maxima + 1], kept=(maxima - 1, maxima)),
        Region(vertices=everything[maxima + 1 :], kept=(sums,)),
    )
    nested = Schedule(regions=(Region(vertices=everything, kept=(maxima,), inside=inside),))
    (outer,) = found.admitted(nested).regions
    assert outer.kept == ()
    assert [one.kept for one in outer.inside] == [(maxima - 1,), ()]
    uncut = plain(found.graph)
    assert found.admitted(uncut) == uncut


def test_no_plan_for_a_tpu_keeps_row_statistics_by_name() -> None:
    def layers(w, x):
        for _ in range(3):
            x = x + jnp.tanh(attention(w, x))
        return jnp.sum(x.astype(jnp.float32))

    of = planning.problem(tracing.trace(layers, W, X), get_device("v5e"))
    statistics = of.model.never_named
    assert len(statistics) == 6
    under = [
        region
        for one in of.candidates
        for region in one.schedule.regions
        if region.checkpointed and not statistics.isdisjoint(region.vertices)
    ]
    assert under
    assert all(statistics.isdisjoint(region.kept) for region in under)


def test_for_nvidia_the_scores_stay_and_the_exponentials_are_no_array() -> None:
    found = graph(loss, W, X, device="h200")
    scores, weights = (found.labels.index(text) for text in squares(found))
    assert found.labels[scores].startswith("dot_general f32")
    assert found.labels[weights].startswith("convert_element_type bf16")
    assert scores in found.graph.needs[weights]


def barriers(jaxpr: Any) -> Iterator[Any]:
    """The barriers, including those in regions."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "optimization_barrier":
            yield equation
        for _, inner in internals.inner_jaxprs(equation.params):
            yield from barriers(getattr(inner, "jaxpr", inner))


def rewritten(fn, platform, *args):
    """The function as one region that is under a checkpoint and keeps nothing."""
    program = tracing.trace(fn, *args)
    roots = tuple(index for index, _ in enumerate(program.equations))
    run = rewrite(program, [Stage(roots=roots, kept=(), checkpointed=True)], platform)
    return lambda *given: run([], jax.tree.leaves(given))[0]


def stored_shapes(platform: str) -> list[tuple[int, ...]]:
    """The shapes of what passes a barrier in a rewritten attention."""
    jaxpr = jax.make_jaxpr(rewritten(loss, platform, W, X))(W, X).jaxpr
    return [atom.aval.shape for equation in barriers(jaxpr) for atom in equation.invars]


def test_maxima_that_no_checkpoint_keeps_are_stored() -> None:
    assert stored_shapes("tpu") == [SQUARE[:-1]]
    assert SQUARE[:-1] not in stored_shapes("cuda")


@pytest.mark.slow
@pytest.mark.versions
def test_storing_the_maxima_changes_no_gradient() -> None:
    keys = jax.random.split(jax.random.key(0))
    w, x = (
        jax.random.normal(key, like.shape, like.dtype)
        for key, like in zip(keys, (W, X), strict=True)
    )
    expected = np.asarray(jax.grad(loss)(w, x), "float32")
    found = np.asarray(jax.grad(rewritten(loss, "tpu", w, x))(w, x), "float32")
    # A CPU rounds to bfloat16 where it fuses, and fuses differently under a checkpoint.
    np.testing.assert_allclose(found, expected, atol=0.01 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("device", "rows", "length", "again"),
    [
        # Seen: the fewest rows of 1,024 that an H200 computes again are 66 x 1,024.
        ("h200", 65 * 1024, 1024, False),
        ("h200", 66 * 1024, 1024, True),
        ("h200", 1 << 18, 1536, False),
        ("a100", 1 << 10, 768, True),
        ("h100", 1 << 10, 1024, True),
        ("b200", 1 << 18, 1024, False),
        ("v5e", 1 << 18, 1024, False),
        ("cpu", 1 << 18, 1024, False),
    ],
)
def test_exponentials_are_computed_again_where_memory_is_slow(
    device: str, rows: int, length: int, again: bool
) -> None:
    kind = ArrayType(shape=(rows, length), dtype="float32")
    assert softmax.is_computed_again(kind, get_device(device)) is again
