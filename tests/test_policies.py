"""jax.checkpoint's policies as schedules: what they keep, and that no plan is worse."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from remat_opt import planning, policies, tracing
from remat_opt.device import get_device
from remat_opt.graph import Graph
from remat_opt.linearization import linearize
from remat_opt.materialization import materialize
from remat_opt.program import Program
from remat_opt.schedule import plain
from remat_opt.solvers import portfolio
from remat_opt.solvers.base import Candidate, Overhead, judge
from remat_opt.solvers.catalogue import Portfolio

NAMES = (
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "everything_saveable",
    "nothing_saveable",
)
W = jax.ShapeDtypeStruct((48, 48), "float32")
X = jax.ShapeDtypeStruct((64, 32, 48), "float32")


def test_contract_the_policies_of_jax() -> None:
    # Assumed of JAX: a policy takes any parameters, what makes one does not; and the aliases.
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
    materialization = materialize(program, linearize(program), get_device(device))
    return materialization.roots, materialization.graph


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
    """What recomputation is made for: long chains between products."""
    for _ in range(4):
        for _ in range(5):
            x = jnp.sin(x) * jnp.cos(x)
        x = x @ w
    return jnp.sum(jnp.square(x))


def pooled(w: jax.Array, x: jax.Array) -> jax.Array:
    """Max pooling, for whose gradient XLA for CPU holds more outside of checkpoints."""
    for _ in range(3):
        x = jnp.sin(x @ w)
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 1), (1, 1, 1), "SAME")
    return jnp.sum(jnp.square(x))


def test_what_a_policy_does_alone_may_be_chosen() -> None:
    program = tracing.trace(pooled, W, X)
    found = planning.problem(program, get_device("cpu"), solver=Blind())
    alone = policies.schedules(program, found.materialization.roots, found.materialization.graph)
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
