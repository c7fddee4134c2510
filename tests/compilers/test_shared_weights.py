"""Sums of the gradients of weights that several products read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from remat_opt.compilers.shared_weights import SharedWeight, SharedWeights
from remat_opt.schedule import Region, plain, unchanged
from tests.compiler_graphs import W, X, changed, graph_of, names

#: Read at vertices 1, 3, 4 and 6 of 8; with 4 the part of another weight is computed.
WEIGHT = SharedWeight(
    bytes=10, readers=(1, 3, 4, 6), beside=(10, 10, 40, 10), read_bytes=3, group=0
)
PART = [0, 10, 0, 10, 40, 0, 10, 0]


def region(*vertices: int, inside: tuple[Region, ...] = (), checkpointed: bool = True) -> Region:
    return Region(vertices=vertices, inside=inside, checkpointed=checkpointed)


def all_of(*weights: SharedWeight) -> SharedWeights:
    return SharedWeights(weights=weights, spared_bytes=0, parts_wait=True, put_off=False)


def summed(*regions: Region) -> list[int]:
    """The sums, without the parts, as multiples of the weight."""
    found = all_of(WEIGHT).sums(regions, 8).tolist()
    return [(size - part) // 10 for size, part in zip(found, PART, strict=True)]


def test_outermost_sums_are_computed_where_gradients_are_put_out() -> None:
    assert summed(region(*range(8), checkpointed=False)) == [0] * 8
    first, second = region(0, 1, 2, 3, checkpointed=False), region(4, 5, 6, 7, checkpointed=False)
    assert summed(first, second) == [0] * 8


def test_a_checkpointed_region_has_a_sum_of_its_own() -> None:
    # Backward from the last vertex: nothing is summed until a part is computed in the region.
    assert summed(region(*range(8))) == [1, 1, 1, 1, 1, 1, 0, 0]
    halves = region(0, 1, 2, 3), region(4, 5, 6, 7)
    assert summed(*halves) == [1, 1, 1, 0, 1, 1, 0, 0]
    # Whatever the order in which vertices are numbered.
    assert summed(region(0, 2, 4, 6), region(1, 3, 5, 7)) == [1, 1, 1, 0, 1, 0, 0, 0]


def test_regions_inside_have_more() -> None:
    inside = region(0, 1), region(2, 3), region(4, 5, 6, 7)
    # During an inner region's turn, the sum of the later ones waits beside its own.
    assert summed(region(*range(8), inside=inside)) == [2, 1, 2, 1, 1, 1, 0, 0]
    inside = region(0, 1, 2, 3), region(4, 5, 6, 7, checkpointed=False)
    assert summed(region(*range(8), inside=inside)) == [2, 2, 2, 1, 1, 1, 0, 0]


def test_what_is_expected_of_any_schedule() -> None:
    between = [0, 10, 10, 10, 10, 10, 10, 0]
    expected = [a + b for a, b in zip(between, PART, strict=True)]
    assert all_of(WEIGHT).expected_sums(8).tolist() == expected
    assert all_of(WEIGHT, WEIGHT).expected_sums(8).tolist() == [2 * size for size in expected]


def test_where_a_part_is_there_all_along_only_what_is_inside_matters() -> None:
    weight = dataclasses.replace(WEIGHT, beside=())
    twice = [0, 20, 20, 20, 20, 20, 20, 0]
    assert all_of(weight).expected_sums(8).tolist() == twice
    assert all_of(weight).sums([region(*range(8))], 8).tolist() == twice
    inside = region(0, 1), region(2, 3), region(4, 5, 6, 7)
    more = [10 + size if vertex in (0, 2) else size for vertex, size in enumerate(twice)]
    assert all_of(weight).sums([region(*range(8), inside=inside)], 8).tolist() == more
    both = [a + b for a, b in zip(twice, PART, strict=True)]
    assert all_of(weight, WEIGHT).sums([region(*range(8), checkpointed=False)], 8).tolist() == both


def test_unchanged_all_parts_wait() -> None:
    assert all_of(WEIGHT).parts(8).tolist() == [40, 40, 30, 30, 20, 10, 10, 0]
    assert WEIGHT.parts_bytes == 40


def test_unchanged_parts_are_put_off_where_what_they_read_is_smaller() -> None:
    late = dataclasses.replace(all_of(WEIGHT), put_off=True)
    # All parts once the first vertex that has one comes; before that, what they are computed from.
    assert late.parts(8).tolist() == [12 + 40, 12 + 40, 9, 9, 6, 3, 3, 0]
    assert late.parts_bytes == 40
    large = dataclasses.replace(WEIGHT, read_bytes=10)
    early = dataclasses.replace(all_of(large), put_off=True)
    assert early.parts(8).tolist() == all_of(WEIGHT).parts(8).tolist()
    assert early.parts_bytes == 40


def test_unchanged_one_group_at_a_time_has_its_parts() -> None:
    other = dataclasses.replace(WEIGHT, readers=(2, 5))
    apart = dataclasses.replace(other, group=1)
    early = dataclasses.replace(apart, read_bytes=10)
    for weights, together in (((WEIGHT, other), 60), ((WEIGHT, apart), 40), ((WEIGHT, early), 60)):
        found = dataclasses.replace(all_of(*weights), put_off=True)
        assert found.parts_bytes == together
        waiting = sum(len(one.readers) * min(one.read_bytes, one.bytes) for one in weights)
        at_a_time = 60 if other in weights else 40
        assert found.parts(8)[0] == waiting + at_a_time


def test_what_vector_memory_takes_is_spared() -> None:
    weight = dataclasses.replace(WEIGHT, beside=(0, 0, 0, 0))
    inside = region(0, 1), region(2, 3), region(4, 5, 6, 7)
    regions = [region(*range(8), inside=inside)]
    unspared = dataclasses.replace(all_of(weight), parts_wait=False)
    assert unspared.sums(regions, 8).tolist() == [20, 10, 20, 10, 10, 10, 0, 0]
    spared = dataclasses.replace(unspared, spared_bytes=12)
    assert spared.sums(regions, 8).tolist() == [8, 0, 8, 0, 0, 0, 0, 0]
    assert spared.expected_sums(8).tolist() == [0] * 8
    assert spared.parts(8).tolist() == [0] * 8
    assert spared.parts_bytes == 0
    assert dataclasses.replace(spared, parts_wait=True).parts_bytes == 40


def shared_weights(fn: Callable[..., Any], *args: Any, device: str = "h200") -> SharedWeights:
    """The shared weights of a function."""
    _, found, _ = graph_of(fn, *args, device=device)
    (weights,) = (effect for effect in found.effects if isinstance(effect, SharedWeights))
    return weights


@pytest.mark.parametrize(("device", "spared"), [("h200", False), ("v5e", True), ("cpu", False)])
def test_weights_of_a_program(device: str, spared: bool) -> None:
    def unrolled(weight: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = jnp.tanh(x @ weight)
        return x.sum()

    arguments = (
        jax.ShapeDtypeStruct((256, 256), jnp.float32),
        jax.ShapeDtypeStruct((64, 256), jnp.float32),
    )
    found = shared_weights(unrolled, *arguments, device=device)
    assert [(one.bytes, len(one.readers)) for one in found.weights] == [(256 * 256 * 4, 3)]
    assert (found.spared_bytes > 0) == spared
    assert found.parts_wait != spared
    assert found.put_off == (device == "h200")
    # What a part is computed from: an input of the product, and the cotangent of its output.
    assert [one.read_bytes for one in found.weights] == [2 * 64 * 256 * 4]


def test_weights_with_common_factors_are_one_group() -> None:
    """The loss of a stack of cells: the state of one layer is the input of the next."""

    def stack(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        states = [x] * 3
        for step in range(4):
            y = jnp.sin(x + step)
            for layer in range(3):
                own, given = weights[2 * layer : 2 * layer + 2]
                y = states[layer] = jnp.tanh(states[layer] @ own + y @ given)
        return y.sum()

    weight = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    found = shared_weights(stack, [weight] * 6, weight)
    groups = [one.group for one in found.weights]
    # A layer multiplies its state by what the next one multiplies its input by.
    assert len(groups) == 6
    assert groups[0] == groups[3]
    assert groups[2] == groups[5]
    assert len(set(groups)) == 4


def test_parts_of_a_weights_gradient_wait_for_the_last() -> None:
    def recurrent(weights, x):
        state = x
        for _ in range(5):
            state = jnp.tanh(state @ weights[0])
        return jnp.sum(jnp.sin(state @ weights[1] + state))

    size = W.nbytes
    for device, summed, of_plan, all_parts in (
        # In a checkpointed region, the sum and the part being computed; without a checkpoint, the
        # sum is where the gradient is returned.
        ("h200", 2 * size, size, 5 * size),
        ("cpu", 2 * size, 2 * size, 5 * size),
        ("v5e", 0, 0, 0),
    ):
        _, found, graph = graph_of(recurrent, [W, W], X, device=device)
        products = [v for v, one in enumerate(names(graph)) if one == "dot_general"]
        before = (v for v in range(len(graph)) if v < products[0])
        after = range(products[4] + 1, len(graph))
        assert {graph.workspace_bytes[v] for v in products[:5]} == {summed}
        planned = found.graph_of(plain(graph)).workspace_bytes
        assert {planned[v] for v in products[:5]} == {of_plan}
        assert not any(graph.workspace_bytes[v] for v in (*before, *after))
        # Unchanged, parts come one after the other, and none is freed.
        parts = changed(found, unchanged(graph)).workspace_bytes
        assert not any(parts[v] for v in after)
        for number, vertex in enumerate(products[:5]):
            assert parts[vertex] == (5 - number) * all_parts // 5
