"""jax.checkpoint's policies as schedules: what they keep, and that no plan is worse."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remat_opt import planning, policies
from remat_opt.device import get_device
from remat_opt.graph import Graph
from remat_opt.measurement import compilation
from remat_opt.program import flop_count, tracing
from remat_opt.program.blocks import blocks
from remat_opt.program.record import Program
from remat_opt.schedule import plain
from remat_opt.solvers import portfolio
from remat_opt.solvers.base import Candidate, Overhead, judge
from remat_opt.solvers.catalogue import Portfolio
from tests.compiler_graphs import model_of

pytestmark = pytest.mark.usefixtures("quick_search")

SLOW = [pytest.mark.slow, pytest.mark.versions]
NAMES = (
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "everything_saveable",
    "nothing_saveable",
)
W = jax.ShapeDtypeStruct((48, 48), "float32")
X = jax.ShapeDtypeStruct((64, 32, 48), "float32")


def test_contract_the_policies_of_jax() -> None:
    # Assumed about JAX: a policy takes any parameters, a maker of one does not; and the aliases.
    assert tuple(policies.default_policies()) == NAMES
    for alias, name in policies.ALIASES.items():
        assert getattr(jax.checkpoint_policies, alias) is getattr(jax.checkpoint_policies, name)
        assert policies.policy_of(name) is getattr(jax.checkpoint_policies, name)
    assert policies.policy_of("save_only_these_names") is None
    assert policies.policy_of("no such name") is None


def attention(w: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(3):
        scores = jnp.einsum("bqd,bkd->bqk", x @ w, x)
        x = jnp.sin(jnp.einsum("bqk,bkd->bqd", jnp.exp(scores), x)) + x
    return jnp.sum(jnp.square(x))


def talking(w: jax.Array, x: jax.Array) -> jax.Array:
    x = jnp.sin(x @ w)
    jax.debug.print("{}", x[0, 0, 0])
    return jnp.sum(jnp.sin(x @ w))


def graph_of(program: Program, device: str = "h200") -> tuple[tuple[int, ...], Graph]:
    found = model_of(program, device)
    return found.roots, found.graph


def test_what_each_policy_keeps() -> None:
    program = tracing.trace(attention, W, X)
    roots, graph = graph_of(program)
    found = dict(zip(NAMES, policies.schedules(program, roots, graph), strict=True))
    for schedule in found.values():
        schedule.check(graph)
        assert [region.checkpointed for region in schedule.regions] == [True]
    equations = [program.equations[root] for root in roots]
    products = [v for v, one in enumerate(equations) if one.operation.primitive == "dot_general"]
    batched = [
        v for v in products if equations[v].operation.params["dimension_numbers"][1] != ((), ())
    ]
    assert (len(products), len(batched)) == (9, 6)
    kept = {name: list(schedule.regions[0].kept) for name, schedule in found.items()}
    assert kept == {
        "dots_saveable": products,
        "dots_with_no_batch_dims_saveable": sorted(set(products) - set(batched)),
        "everything_saveable": list(range(len(graph))),
        "nothing_saveable": [],
    }


def test_what_must_run_once_is_under_no_checkpoint() -> None:
    program = tracing.trace(talking, W, X)
    roots, graph = graph_of(program)
    assert any(graph.pinned)
    for schedule in policies.schedules(program, roots, graph):
        schedule.check(graph)
        assert any(region.checkpointed for region in schedule.regions)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Blind(Portfolio):
    """Finds nothing."""

    def candidates(self, graph: Graph, measure: Overhead = Overhead.SECONDS) -> list[Candidate]:
        return [judge(graph, plain(graph))]


def wide(w: jax.Array, x: jax.Array) -> jax.Array:
    """The ideal case for recomputation: long chains between products."""
    for _ in range(4):
        for _ in range(5):
            x = jnp.sin(x) * jnp.cos(x)
        x = x @ w
    return jnp.sum(jnp.square(x))


def pooled(w: jax.Array, x: jax.Array) -> jax.Array:
    """Max pooling, for whose gradient XLA for CPU holds more outside checkpoints."""
    for _ in range(3):
        x = jnp.sin(x @ w)
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 1), (1, 1, 1), "SAME")
    return jnp.sum(jnp.square(x))


def test_what_a_policy_does_alone_may_be_chosen() -> None:
    program = tracing.trace(pooled, W, X)
    found = planning.problem(program, get_device("cpu"), solver=Blind())
    roots, graph = found.model.roots, found.model.graph
    alone = [
        *policies.schedules(program, roots, graph),
        *policies.schedules_per_block(program, roots, graph, blocks(program)),
    ]
    chosen = {one.schedule for one in found.candidates if one.schedule.has_checkpoints}
    assert chosen
    assert chosen <= set(alone)
    assert min(one.peak_bytes for one in found.candidates) < found.unchanged.peak_bytes


@pytest.mark.parametrize("device", ["h200", "cpu"])
@pytest.mark.parametrize("fn", [attention, wide, pooled])
def test_the_search_finds_better(fn: Callable[..., jax.Array], device: str) -> None:
    program = tracing.trace(fn, W, X)
    roots, graph = graph_of(program, device)
    found = portfolio.frontier(graph)
    for schedule in policies.schedules(program, roots, graph):
        alone = judge(graph, schedule)
        assert any(
            one.peak_bytes <= alone.peak_bytes and one.overhead_seconds <= alone.overhead_seconds
            for one in found
        )


def twice(w: jax.Array, x: jax.Array) -> jax.Array:
    """Four blocks of two products each, and something before and after."""
    x = jnp.cos(x)
    for _ in range(4):
        x = x + jnp.sin(jnp.tanh(x @ w) @ w)
    return jnp.sum(jnp.square(x))


def checkpointed_by_hand(name: str) -> Callable[..., jax.Array]:
    @functools.partial(jax.checkpoint, policy=policies.policy_of(name))
    def block(w: jax.Array, x: jax.Array) -> jax.Array:
        return x + jnp.sin(jnp.tanh(x @ w) @ w)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        x = jnp.cos(x)
        for _ in range(4):
            x = block(w, x)
        return jnp.sum(jnp.square(x))

    return loss


def run_per_block(fn: Callable[..., Any], name: str, *args: Any) -> Callable[..., Any]:
    program = tracing.trace(fn, *args)
    run = policies.per_block(program, blocks(program), policies.policy_of(name))
    return lambda *given: run(program.constant_values, given)[0]


@pytest.mark.parametrize(
    "name",
    [name if name == "dots_saveable" else pytest.param(name, marks=SLOW) for name in NAMES],
)
def test_per_block_is_what_one_writes_by_hand(name: str) -> None:
    ours, by_hand = run_per_block(twice, name, W, X), checkpointed_by_hand(name)
    w, x = jnp.full(W.shape, 0.01), jnp.linspace(0.0, 1.0, X.size).reshape(X.shape)
    for fn in (jax.value_and_grad, lambda fn: jax.jit(jax.value_and_grad(fn))):
        for left, right in zip(fn(ours)(w, x), fn(twice)(w, x), strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-5)
    counted = [flop_count.gradient_flops(fn, W, X) for fn in (ours, by_hand)]
    assert counted[0] == counted[1]
    found = [compilation.measure(jax.grad(fn), W, X, device="cpu") for fn in (ours, by_hand)]
    assert found[0].temporary_bytes == found[1].temporary_bytes


def test_per_block_leaves_side_effects_alone() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = jnp.sin(x @ w)
            jax.debug.callback(lambda value: seen.append(float(value)), x[0, 0, 0])
        return jnp.sum(x)

    seen: list[float] = []
    run = run_per_block(loss, "nothing_saveable", W, X)
    jax.block_until_ready(jax.grad(run)(jnp.ones(W.shape), jnp.ones(X.shape)))
    jax.effects_barrier()
    assert len(seen) == 4


@pytest.mark.parametrize("fn", [twice, attention])
def test_schedules_per_block(fn: Callable[..., jax.Array]) -> None:
    program = tracing.trace(fn, W, X)
    roots, graph = graph_of(program)
    runs = blocks(program)
    found = list(policies.schedules_per_block(program, roots, graph, runs))
    assert len(found) == len(NAMES)
    for schedule in found:
        schedule.check(graph)
        checkpointed = [region for region in schedule.regions if region.checkpointed]
        assert len(checkpointed) == len(runs)
        for region, run in zip(checkpointed, runs, strict=True):
            assert all(roots[vertex] in run for vertex in region.vertices)
    kept = [sum(len(region.kept) for region in schedule.regions) for schedule in found]
    assert kept[NAMES.index("nothing_saveable")] == 0 < kept[NAMES.index("dots_saveable")]
    whole = [judge(graph, one) for one in policies.schedules(program, roots, graph)]
    alone = [judge(graph, one) for one in found]
    assert min(one.peak_bytes for one in alone) < min(one.peak_bytes for one in whole)


def test_no_schedules_per_block_without_blocks() -> None:
    program = tracing.trace(twice, W, X)
    roots, graph = graph_of(program)
    assert list(policies.schedules_per_block(program, roots, graph, ())) == []


def test_what_must_run_once_parts_the_checkpoint_of_its_block() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = jnp.sin(x @ w)
            jax.debug.print("{}", x[0, 0, 0])
            x = jnp.sin(x @ w) + x
        return jnp.sum(x)

    program = tracing.trace(loss, W, X)
    roots, graph = graph_of(program)
    assert any(graph.pinned)
    for schedule in policies.schedules_per_block(program, roots, graph, blocks(program)):
        schedule.check(graph)
        assert any(region.checkpointed for region in schedule.regions)
