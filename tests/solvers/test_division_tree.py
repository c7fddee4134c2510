"""Independent segments and the division tree: invariants on drawn graphs, and the papers' own."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat_opt.graph import Graph
from remat_opt.simulator import simulate
from remat_opt.solvers import division_tree
from remat_opt.solvers.division_tree import Checkpoints, Dependent, Kind
from tests.graphs import graphs, layered
from tests.solvers import kept_oracle as oracle


def node_edges(graph, node):
    """The edges of a segment, collected from its leaves."""
    return sorted((one.source, one.target) for one in node.walk() if one.kind is Kind.LEAF)


def reaches(edges, start, stop):
    found = {start}
    for tail, head in sorted(edges):
        if tail in found:
            found.add(head)
    return stop in found


def is_splitting(node, edges, vertex):
    """No path from source to target avoids the vertex, by the definition."""
    left = [edge for edge in edges if vertex not in edge]
    return not reaches(left, node.source, node.target)


def check_tree(graph):
    tree = division_tree.division_tree(graph)
    source, target = division_tree.ends(graph)
    assert (tree.source, tree.target) == (source, target)
    assert set(tree.inside) == set(range(len(graph))) - {source, target}
    # Every edge is in exactly one leaf, including those to ends that stand for several.
    reads, readers = oracle.neighbours(graph)
    expected = [
        (-1 if tail == oracle.FIRST else tail, head)
        for head, found in enumerate(reads)
        for tail in found
    ]
    expected += [(v, len(graph)) for v, found in enumerate(readers) if oracle.LAST in found]
    if len(graph) > 1:
        assert node_edges(graph, tree) == sorted(expected)
    for node in tree.walk():
        assert node.inside_bytes == sum(graph.bytes[v] for v in node.inside)
        edges = node_edges(graph, node)
        splitting = [v for v in node.inside if is_splitting(node, edges, v)]
        if node.inside:
            # Independent: all edges of the vertices inside are edges of the segment.
            inside = set(node.inside)
            assert {e for e in expected if inside & set(e)} <= set(edges)
        if node.kind is Kind.LEAF:
            assert not node.inside
            assert not node.children
            continue
        children = node.children
        assert len(children) > 1
        if node.kind is Kind.LINEAR:
            assert [child.target for child in children[:-1]] == splitting != []
            assert [child.source for child in children[1:]] == splitting
        else:
            assert not splitting
        if node.kind is Kind.BRANCH:
            assert {(child.source, child.target) for child in children} == {
                (node.source, node.target)
            }
            assert all(child.kind is not Kind.BRANCH for child in children)
            assert sum(len(child.inside) for child in children) == len(node.inside)
        if node.kind is Kind.COMPLICATE:
            ends = [{child.source, child.target} for child in children]
            assert {node.source, node.target} not in ends
            # Lemma 5: where members meet, at least three do; else two of them were one.
            for vertex in set().union(*ends) - {node.source, node.target}:
                assert sum(vertex in pair for pair in ends) >= 3


def check_assess(graph, kept):
    reads, readers = oracle.neighbours(graph)
    chosen = set(kept) | oracle.always_kept(graph)
    expected = oracle.total(graph, chosen, reads, readers)
    found = division_tree.assess(graph, kept)
    if expected is None:
        assert isinstance(found, Dependent)
        assert len(found.sources) != 1 or len(found.targets) != 1
        return
    assert isinstance(found, Checkpoints)
    assert found.total_bytes == expected == found.kept_bytes + found.largest_segment_bytes
    assert set(found.kept) == chosen
    ends = [end for end in set(division_tree.ends(graph)) if 0 <= end < len(graph)]
    assert found.total_without_ends_bytes == expected - sum(graph.bytes[v] for v in ends)
    assert sorted([*found.kept, *(v for one in found.segments for v in one.inside)]) == list(
        range(len(graph))
    )
    schedule = division_tree.schedule_of(graph, found)
    schedule.check(graph)
    last = set(schedule.regions[-1].vertices)
    again = set(simulate(graph, schedule).recomputed)
    assert again == set(range(len(graph))) - chosen - last


@given(oracle.any_graphs())
@settings(max_examples=50)
def test_tree(graph):
    check_tree(graph)


@given(st.data())
@settings(max_examples=50)
def test_assess(data):
    graph = data.draw(oracle.any_graphs())
    check_assess(graph, data.draw(st.sets(st.integers(0, len(graph) - 1))))


@pytest.mark.slow
@given(st.data())
@settings(max_examples=300)
def test_tree_and_assess_on_many(data):
    graph = data.draw(oracle.any_graphs())
    check_tree(graph)
    check_assess(graph, data.draw(st.sets(st.integers(0, len(graph) - 1))))


@given(st.data())
@settings(max_examples=20)
def test_schedules_are_legal_on_any_graph(data):
    graph = data.draw(graphs(max_vertices=8))
    kept = data.draw(st.sets(st.integers(0, len(graph) - 1)))
    found = division_tree.assess(graph, kept)
    if isinstance(found, Checkpoints):
        division_tree.schedule_of(graph, found).check(graph)


def test_kinds_of_figure_4():
    linear = division_tree.division_tree(Graph.from_edges([1] * 3, [(0, 1), (1, 2)]))
    assert linear.kind is Kind.LINEAR
    assert [(child.source, child.target) for child in linear.children] == [(0, 1), (1, 2)]
    branched = division_tree.division_tree(
        Graph.from_edges([1] * 4, [(0, 1), (1, 3), (0, 2), (2, 3), (0, 3)])
    )
    assert branched.kind is Kind.BRANCH
    assert [child.inside for child in branched.children] == [(), (1,), (2,)]
    # Fig. 4 (c): the division is {[s12], [s13], [s23], [s24], [s34]}.
    complicate = division_tree.division_tree(
        Graph.from_edges([1] * 4, [(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)])
    )
    assert complicate.kind is Kind.COMPLICATE
    assert [(child.source, child.target) for child in complicate.children] == [
        (0, 1),
        (0, 2),
        (1, 2),
        (1, 3),
        (2, 3),
    ]


def test_largest_part_of_what_lies_between():
    # Correction 5: of what lies between 1 and 4, vertex 3 has an edge to 5 and is dropped; vertex
    # 2 and the direct edge stay.
    graph = Graph.from_edges(
        [1] * 7,
        [(0, 1), (0, 5), (1, 2), (1, 3), (1, 4), (2, 4), (3, 4), (3, 5), (4, 6), (5, 6), (4, 5)],
    )
    tree = division_tree.division_tree(graph)
    assert tree.kind is Kind.COMPLICATE
    (member,) = [child for child in tree.children if (child.source, child.target) == (1, 4)]
    assert member.kind is Kind.BRANCH
    assert member.inside == (2,)
    assert [child.kind for child in member.children] == [Kind.LEAF, Kind.LINEAR]


def test_a_part_that_is_entered_elsewhere_is_dropped():
    # By dominance, 3 and 4 lie between 1 and 6, but 4 feeds 5, which 2 also feeds.
    edges = [(0, 1), (0, 2), (1, 3), (1, 4), (2, 5), (2, 7), (3, 6), (4, 5), (5, 6), (6, 7)]
    graph = Graph.from_edges([1] * 8, edges)
    tree = division_tree.division_tree(graph)
    (member,) = [child for child in tree.children if (child.source, child.target) == (1, 6)]
    assert (member.kind, member.inside) == (Kind.LINEAR, (3,))


def test_text():
    tree = division_tree.division_tree(layered("sinks", 3))
    assert tree.text(layered("sinks", 3)) == "\n".join(
        [
            "branch 0 -> (): 2 inside, 8 bytes",
            "  linear 0 -> (): 1 inside, 4 bytes",
            "    leaf 0 -> 1: 0 inside, 0 bytes",
            "    leaf 1 -> (): 0 inside, 0 bytes",
            "  linear 0 -> (): 1 inside, 4 bytes",
            "    leaf 0 -> 2: 0 inside, 0 bytes",
            "    leaf 2 -> (): 0 inside, 0 bytes",
        ]
    )


def test_a_dependent_part_is_named():
    # Fig. 3 of OGC: with 2 kept, 1 feeds both 2 and 3.
    graph = Graph.from_edges([1] * 5, [(0, 1), (1, 2), (1, 3), (2, 3), (3, 4)])
    assert division_tree.assess(graph, [2]) == Dependent(
        inside=(1, 3), sources=(0, 2), targets=(2, 4)
    )
