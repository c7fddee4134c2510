"""Lifetimes, cotangents, crossings and positions, each against its definition written out."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from remat_opt.graph import Graph
from remat_opt.schedule import plain
from remat_opt.simulator import simulate
from remat_opt.solvers.lifetimes import (
    cotangent_profile,
    crossing_bytes,
    lifetimes,
    positions,
)
from tests.graphs import chain_edges, graphs, kept_sets


@st.composite
def run_again(draw: st.DrawFn) -> tuple[Graph, frozenset[int]]:
    graph = draw(graphs())
    return graph, frozenset(draw(kept_sets(graph)))


def backward_readers(graph: Graph, vertex: int) -> list[int]:
    return [step for step in range(len(graph)) if vertex in graph.needs[step]]


@hypothesis.given(run_again())
def test_lifetimes_are_the_first_and_last_readers(drawn: tuple[Graph, frozenset[int]]) -> None:
    graph, again = drawn
    never = len(graph)
    last_reader, last_need, end_use = lifetimes(graph, again)
    for vertex in range(len(graph)):
        steps = backward_readers(graph, vertex)
        runs = [reader for reader in again if vertex in graph.predecessors[reader]]
        assert last_need[vertex] == min(steps, default=never)
        assert last_reader[vertex] == min(steps + runs, default=never)
        assert end_use[vertex] == max(steps + runs, default=-1)


def test_lifetimes_by_hand() -> None:
    # Each step reads its input and its output; the third value runs again and reads the second.
    graph = dataclasses.replace(
        Graph.from_edges([4] * 4, chain_edges(4)), needs=((0,), (0,), (), (2, 3))
    )
    last_reader, last_need, end_use = lifetimes(graph, frozenset({2}))
    assert last_reader.tolist() == [0, 2, 3, 3]
    assert last_need.tolist() == [0, 4, 3, 3]
    assert end_use.tolist() == [1, 2, 3, 3]


def cotangents_by_replay(graph: Graph) -> list[int]:
    """By the referee, on a graph in which only cotangents take memory.

    -1 if a vertex has none: its step is not among the referee's moments.
    """
    none = (0,) * len(graph)
    bare = dataclasses.replace(graph, bytes=none, internal_bytes=none)
    alive = {
        moment.vertex: moment.live_bytes
        for moment in simulate(bare, plain(bare)).moments
        if moment.phase == "backward"
    }
    return [alive.get(vertex, -1) for vertex in range(len(graph))]


@hypothesis.given(graphs())
@hypothesis.settings(max_examples=50)
def test_cotangents_are_those_of_the_referee(graph: Graph) -> None:
    profile = cotangent_profile(graph)
    assert len(profile) == len(graph)
    for vertex, replayed in enumerate(cotangents_by_replay(graph)):
        if graph.cotangent_bytes[vertex]:
            assert profile[vertex] == replayed
        else:
            waiting = {
                earlier
                for later in range(vertex + 1, len(graph))
                for earlier in graph.predecessors[later]
                if earlier < vertex and graph.cotangent_bytes[later]
            }
            assert profile[vertex] == sum(graph.cotangent_bytes[earlier] for earlier in waiting)


def test_cotangents_by_hand() -> None:
    graph = dataclasses.replace(
        Graph.from_edges([1, 2, 4, 8], chain_edges(4)), in_place=(False, False, True, False)
    )
    # The third step writes the cotangent of the second value over its own.
    assert cotangent_profile(graph).tolist() == [1, 3, 2, 12]


@hypothesis.given(run_again(), st.data())
def test_crossing_bytes_are_those_of_the_values_read_later(
    drawn: tuple[Graph, frozenset[int]], data: st.DataObject
) -> None:
    graph, again = drawn
    end_use = lifetimes(graph, again)[2]
    kept = set(data.draw(kept_sets(graph)))
    mask = np.array([vertex in kept for vertex in range(len(graph))])

    def crossing(position: int, left_out: set[int]) -> int:
        return sum(
            graph.bytes[vertex]
            for vertex in range(position)
            if end_use[vertex] >= position and vertex not in left_out
        )

    everywhere = range(len(graph) + 1)
    assert crossing_bytes(graph, end_use).tolist() == [crossing(p, set()) for p in everywhere]
    assert crossing_bytes(graph, end_use, mask).tolist() == [crossing(p, kept) for p in everywhere]


def stretches(weights: list[int], most: int) -> list[list[int]]:
    """The inner positions of each stretch; heavy weights count as at most one stretch."""
    # So few of the heaviest count as a stretch each that the others share the rest.
    heaviest = sorted(weights, reverse=True)
    limit = next(
        rest
        for heavy in range(most)
        if heaviest[heavy] <= (rest := Fraction(sum(heaviest[heavy:]), most - heavy))
    )
    found: list[list[int]] = [[] for _ in range(most)]
    for position in range(1, len(weights)):
        before = sum(min(Fraction(weight), limit) for weight in weights[:position])
        found[math.floor(before / limit)].append(position)
    return found


@hypothesis.given(st.data(), st.integers(1, 12))
def test_positions_are_the_cheapest_of_stretches_of_equal_weight(
    data: st.DataObject, most: int
) -> None:
    weights = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=40))
    last = len(weights)
    crossing = data.draw(st.lists(st.integers(0, 5), min_size=last + 1, max_size=last + 1))
    chosen = positions(np.asarray(crossing, dtype=float), np.asarray(weights), most).tolist()
    if last - 1 <= most:
        assert chosen == list(range(last + 1)), "all of them where there are few"
        return
    found = stretches(weights, most)
    # The first stretch may hold only the beginning of the program.
    assert all(found[1:])
    cheapest = [
        min(one, key=lambda position: (crossing[position], position)) for one in found if one
    ]
    assert chosen == [0, *cheapest, last]


@pytest.mark.parametrize(
    ("crossing", "most", "expected"),
    [([0, 0], 3, [0, 1]), ([0, 9, 0], 3, [0, 1, 2]), ([0, 5, 3, 4, 1, 1, 0], 2, [0, 2, 4, 6])],
)
def test_positions_by_hand(crossing: list[int], most: int, expected: list[int]) -> None:
    weights = np.ones(len(crossing) - 1)
    assert positions(np.asarray(crossing, dtype=float), weights, most).tolist() == expected


def test_positions_lie_densest_where_weights_are_large() -> None:
    weights = np.array([9, 9, 9, 9, *[1] * 36])
    assert positions(np.zeros(41), weights, 8).tolist() == [0, 1, 2, 3, 4, 13, 22, 31, 40]
