"""Graphs: how they are made, what is refused and in what words, and to networkx and back."""

from __future__ import annotations

import dataclasses
import math
import re

import hypothesis
import networkx
import pytest

from remat_opt.errors import GraphError
from remat_opt.graph import Graph
from tests.graphs import INSTANCES, graphs

DIAMOND = Graph.from_edges([1, 2, 3, 4], [(0, 2), (0, 1), (2, 3), (1, 3)], names="abcd")


def refuses(message: str) -> pytest.RaisesExc[GraphError]:
    """The whole message, not a part of it."""
    return pytest.raises(GraphError, match=f"^{re.escape(message)}$")


def test_from_edges_gives_the_graph_of_the_papers() -> None:
    assert DIAMOND.predecessors == ((), (0,), (0,), (1, 2))
    assert DIAMOND.needs == ((0,), (0, 1), (0, 2), (1, 2, 3))
    assert DIAMOND.cotangent_bytes == DIAMOND.bytes == (1, 2, 3, 4)
    assert DIAMOND.seconds == (1.0,) * 4
    assert DIAMOND.flops == DIAMOND.internal_bytes == (0,) * 4
    assert DIAMOND.in_place == DIAMOND.pinned == (False,) * 4
    assert DIAMOND.names == ("a", "b", "c", "d")


def test_from_edges_takes_names_seconds_and_flops() -> None:
    given = Graph.from_edges([1, 1], [(0, 1)], seconds=[0.5, 0.25], flops=[3, 4], names=["x", "y"])
    assert (given.forward_seconds, given.forward_flops) == (0.75, 7)
    assert given.names == ("x", "y")
    assert Graph.from_edges([1, 1], []).names == ("0", "1")


def test_successors_mirror_predecessors() -> None:
    assert DIAMOND.successors() == ((1, 2), (3,), (3,), ())


def test_length_counts_vertices() -> None:
    assert len(DIAMOND) == 4


def test_with_bytes_changes_these_figures_and_nothing_else() -> None:
    changed = DIAMOND.with_bytes(bytes=(5, 6, 7, 8), workspace_bytes=(0, 0, -1, 0))
    assert changed == dataclasses.replace(
        DIAMOND, bytes=(5, 6, 7, 8), workspace_bytes=(0, 0, -1, 0)
    )
    assert DIAMOND.bytes == (1, 2, 3, 4)


def test_with_bytes_refuses_what_a_graph_refuses() -> None:
    with refuses("Vertex 'b' has bytes = -1; it must be a finite number, 0 or more."):
        DIAMOND.with_bytes(bytes=(1, -1, 3, 4))
    with refuses("bytes has 3 entries for 4 vertices."):
        DIAMOND.with_bytes(bytes=(1, 2, 3))
    with refuses(
        "Vertex 'd' has forward_workspace_bytes = 9 and is not pinned: only what runs exactly once "
        "may take memory just while it runs forward."
    ):
        DIAMOND.with_bytes(forward_workspace_bytes=(0, 0, 0, 9))


@pytest.mark.parametrize("given", INSTANCES.values(), ids=INSTANCES)
def test_instances_survive_networkx(given: Graph) -> None:
    assert Graph.from_networkx(given.to_networkx()) == given


@hypothesis.given(graphs())
def test_every_graph_survives_networkx(given: Graph) -> None:
    assert Graph.from_networkx(given.to_networkx()) == given


def test_to_networkx_names_the_fields() -> None:
    assert DIAMOND.to_networkx().nodes["d"] == {
        "bytes": 4,
        "seconds": 1.0,
        "flops": 0,
        "needs": ("b", "c", "d"),
        "cotangent_bytes": 4,
        "internal_bytes": 0,
        "workspace_bytes": 0,
        "forward_workspace_bytes": 0,
        "in_place": False,
        "pinned": False,
    }


def test_from_networkx_fills_in_what_is_not_given() -> None:
    given = networkx.DiGraph()
    given.add_node("a", bytes=5)
    given.add_node("b", bytes=7)
    given.add_edge("a", "b")
    assert Graph.from_networkx(given) == Graph.from_edges([5, 7], [(0, 1)], names=["a", "b"])


def test_from_networkx_orders_ties_by_insertion() -> None:
    given = networkx.DiGraph()
    for name in ("last", "second", "first"):
        given.add_node(name, bytes=1)
    given.add_edges_from([("first", "last"), ("second", "last")])
    assert Graph.from_networkx(given).names == ("second", "first", "last")


def test_needs_of_nothing_are_not_filled_in() -> None:
    given = networkx.DiGraph()
    given.add_node("a", bytes=5, needs=())
    assert Graph.from_networkx(given).needs == ((),)


def networkx_of(*edges: tuple[str, str], **attributes: object) -> networkx.DiGraph:
    given = networkx.DiGraph()
    for node in sorted({end for edge in edges for end in edge}):
        given.add_node(node, **({"bytes": 1} | attributes))
    given.add_edges_from(edges)
    return given


def test_cycle_is_refused_with_its_vertices() -> None:
    with refuses("The graph has a cycle, so it has no order of execution: b -> c -> b."):
        Graph.from_networkx(networkx_of(("a", "b"), ("b", "c"), ("c", "b")))


def test_loop_is_refused() -> None:
    with refuses("The graph has a cycle, so it has no order of execution: a -> a."):
        Graph.from_networkx(networkx_of(("a", "a")))


@pytest.mark.parametrize("kind", [networkx.Graph, networkx.MultiDiGraph])
def test_other_kinds_of_networkx_graphs_are_refused(kind: type) -> None:
    with refuses("Give a networkx.DiGraph: directed, without parallel edges."):
        Graph.from_networkx(kind())


def test_missing_bytes_are_refused() -> None:
    given = networkx.DiGraph()
    given.add_node("a")
    with refuses("Vertex 'a' has no attribute 'bytes'."):
        Graph.from_networkx(given)


def test_needs_of_an_unknown_vertex_are_refused() -> None:
    with refuses("Vertex 'a' needs 'z', which is not a vertex."):
        Graph.from_networkx(networkx_of(("a", "b"), needs=("z",)))


def test_needs_of_a_later_vertex_are_refused_from_networkx() -> None:
    with refuses("The backward step of 'a' reads vertex 1, which is not computed by then."):
        Graph.from_networkx(networkx_of(("a", "b"), needs=("b",)))


def test_nodes_that_print_alike_are_refused() -> None:
    given = networkx.DiGraph()
    given.add_node(1, bytes=1)
    given.add_node("1", bytes=1)
    with refuses("Two vertices are called '1'; names must be unique."):
        Graph.from_networkx(given)


def test_attribute_that_is_no_number_is_refused() -> None:
    with refuses("Vertex 'a' has bytes = '12 MiB'; it must be a finite number, 0 or more."):
        Graph.from_networkx(networkx_of(("a", "b"), bytes="12 MiB"))


def test_empty_graph_is_refused() -> None:
    for make in (
        lambda: Graph.from_edges([], []),
        lambda: Graph.from_networkx(networkx.DiGraph()),
    ):
        with refuses("The graph is empty: there is nothing to plan."):
            make()


@pytest.mark.parametrize("edge", [(0, 2), (2, 0), (-1, 1), (0, -1)])
def test_dangling_edge_is_refused(edge: tuple[int, int]) -> None:
    stray = next(end for end in edge if not 0 <= end < 2)
    with refuses(
        f"Edge {edge} leads to vertex {stray}, but there are only 2 vertices, numbered from 0."
    ):
        Graph.from_edges([1, 1], [edge])


@pytest.mark.parametrize("edge", [(1, 0), (1, 1)])
def test_edge_that_does_not_lead_forward_is_refused(edge: tuple[int, int]) -> None:
    with refuses(
        f"Edge {edge} does not lead forward. Number the vertices in an order of execution "
        "(Graph.from_networkx does); a cycle cannot be executed."
    ):
        Graph.from_edges([1, 1], [edge])


def test_duplicate_edge_is_refused() -> None:
    with refuses("Edge (0, 1) is given twice."):
        Graph.from_edges([1, 1], [(0, 1), (0, 1)])


def test_duplicate_name_is_refused() -> None:
    with refuses("Two vertices are called 'a'; names must be unique."):
        Graph.from_edges([1, 1, 1], [], names=["b", "a", "a"])


@pytest.mark.parametrize("number", [-1, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "field", ["bytes", "seconds", "flops", "cotangent_bytes", "internal_bytes"]
)
def test_numbers_that_are_not_amounts_are_refused(field: str, number: float) -> None:
    wrong = (*getattr(DIAMOND, field)[:2], number, getattr(DIAMOND, field)[3])
    with refuses(f"Vertex 'c' has {field} = {number}; it must be a finite number, 0 or more."):
        dataclasses.replace(DIAMOND, **{field: wrong})


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Graph)][1:])
def test_wrong_length_is_refused(field: str) -> None:
    with refuses(f"{field} has 3 entries for 4 vertices."):
        dataclasses.replace(DIAMOND, **{field: getattr(DIAMOND, field)[:3]})


def test_wrong_number_of_names_is_refused() -> None:
    with refuses("bytes has 2 entries for 1 vertices."):
        Graph.from_edges([1, 1], [], names=["a"])


@pytest.mark.parametrize("reads", [(3,), (2,), (-1,)])
def test_reading_a_vertex_that_does_not_come_before_is_refused(reads: tuple[int, ...]) -> None:
    with refuses(
        f"Vertex 'c' reads vertex {reads[0]}, which does not come before it; a graph must be "
        "given in an order of execution."
    ):
        dataclasses.replace(DIAMOND, predecessors=((), (0,), reads, (1, 2)))


@pytest.mark.parametrize("reads", [(2, 1), (1, 1)])
def test_unordered_predecessors_are_refused(reads: tuple[int, ...]) -> None:
    with refuses("The predecessors of 'd' are not ascending and distinct."):
        dataclasses.replace(DIAMOND, predecessors=((), (0,), (0,), reads))


@pytest.mark.parametrize("needed", [3, 4, -1])
def test_needs_of_a_later_vertex_are_refused(needed: int) -> None:
    with refuses(f"The backward step of 'c' reads vertex {needed}, which is not computed by then."):
        dataclasses.replace(DIAMOND, needs=((), (), (needed,), ()))


@pytest.mark.parametrize("needs", [(2, 1), (1, 1)])
def test_unordered_needs_are_refused(needs: tuple[int, ...]) -> None:
    with refuses("What the backward step of 'd' reads is not given ascending and distinct."):
        dataclasses.replace(DIAMOND, needs=((), (), (), needs))
