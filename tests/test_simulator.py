"""The referee: by hand on small cases, and against a slow replay written another way.

The package counts readers down and frees at zero. The replay here does not count readers: it lists
all steps, finds for every array the first and the last step that touch it, and adds up, at every
step, the arrays whose span covers it.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import hypothesis
import pytest

from remat_opt import simulator
from remat_opt.errors import GraphError
from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule, plain
from remat_opt.simulator import Live, evaluate, simulate
from tests.graphs import INSTANCES, chain_edges, graphs, nested_graphs, scheduled_graphs

# ------------------------------------------------------------------------------ the slow replay


@dataclasses.dataclass(frozen=True)
class Array:
    owner: int
    role: str
    bytes: int
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class Replay:
    steps: list[tuple[str, int, int]]
    arrays: list[Array]
    shown: list[int]
    stored: set[int]
    again: list[set[int]]

    def alive(self, step: int) -> list[Array]:
        return [array for array in self.arrays if array.first <= step <= array.last]

    def live_bytes(self, step: int) -> int:
        return sum(array.bytes for array in self.alive(step))

    @property
    def peak_bytes(self) -> int:
        return max(self.live_bytes(step) for step in self.shown)


def reads_of(graph: Graph, region: Region) -> tuple[set[int], set[int]]:
    """What a region's backward pass reads from memory, and what it runs again."""

    def in_memory(vertex: int) -> bool:
        return not region.checkpointed or vertex in region.kept or vertex not in region.vertices

    again = {
        vertex for vertex in region.vertices if region.checkpointed and graph.internal_bytes[vertex]
    }
    read = {needed for vertex in region.vertices for needed in graph.needs[vertex]}
    while True:
        grown = again | {vertex for vertex in read if not in_memory(vertex)}
        more = read | {p for vertex in grown for p in graph.predecessors[vertex]}
        if (grown, more) == (again, read):
            return {vertex for vertex in read if in_memory(vertex)}, again
        again, read = grown, more


def replay(graph: Graph, schedule: Schedule) -> Replay:
    regions = schedule.regions
    both = [reads_of(graph, region) for region in regions]
    stored = set().union(*(memory for memory, _ in both))
    again = [run for _, run in both]

    steps = [("forward", n, v) for n, region in enumerate(regions) for v in region.vertices]
    for number in reversed(range(len(regions))):
        steps += [("recompute", number, v) for v in sorted(again[number])]
        steps += [("backward", number, v) for v in reversed(regions[number].vertices)]
    at = {step: position for position, step in enumerate(steps)}

    def touches(vertex: int, number: int) -> list[int]:
        """The backward and recompute steps of a region that read a vertex."""
        region = regions[number]
        found = [at["backward", number, v] for v in region.vertices if vertex in graph.needs[v]]
        found += [
            at["recompute", number, v] for v in again[number] if vertex in graph.predecessors[v]
        ]
        return found

    arrays: list[Array] = []
    home = schedule.region_of()
    readers = graph.successors()
    for vertex in range(len(graph)):
        number = home[vertex]
        made = at["forward", number, vertex]
        done = at["backward", number, vertex]
        local = vertex in again[number] and vertex not in regions[number].kept

        uses = [at["forward", home[reader], reader] for reader in readers[vertex]]
        if vertex in stored:
            for other in range(len(regions)):
                if other != number or not local:
                    uses += touches(vertex, other)
        if graph.forward_workspace_bytes[vertex]:
            size = graph.forward_workspace_bytes[vertex]
            arrays.append(Array(vertex, "workspace", size, made, made))
        role = "kept" if vertex in stored else "forward"
        arrays.append(Array(vertex, role, graph.bytes[vertex], made, max([made, *uses])))

        if vertex in again[number]:
            rerun = at["recompute", number, vertex]
            uses = touches(vertex, number) if local else []
            arrays.append(
                Array(vertex, "recomputed", graph.bytes[vertex], rerun, max([rerun, *uses]))
            )
            arrays.append(Array(vertex, "internal", graph.internal_bytes[vertex], rerun, done))
        elif not regions[number].checkpointed:
            arrays.append(Array(vertex, "internal", graph.internal_bytes[vertex], made, done))

        size = graph.cotangent_bytes[vertex]
        if size:
            arrays.append(Array(vertex, "workspace", graph.workspace_bytes[vertex], done, done))
            smaller = [
                graph.cotangent_bytes[p]
                for p in graph.predecessors[vertex]
                if 0 < graph.cotangent_bytes[p] <= size
            ]
            last = done - 1 if graph.in_place[vertex] and smaller else done
            written = [
                at["backward", home[reader], reader]
                for reader in readers[vertex]
                if graph.cotangent_bytes[reader]
            ]
            # Written in place and by no reader, it never exists: first > last.
            arrays.append(Array(vertex, "cotangent", size, min([done, *written]), last))
    shown = [
        position
        for position, (phase, _, vertex) in enumerate(steps)
        if phase != "backward" or graph.cotangent_bytes[vertex]
    ]
    return Replay(steps=steps, arrays=arrays, shown=shown, stored=stored, again=again)


def agree(graph: Graph, schedule: Schedule) -> None:
    ours, slow = simulate(graph, schedule), replay(graph, schedule)
    assert [(m.phase, m.region, m.vertex, m.live_bytes) for m in ours.moments] == [
        (*slow.steps[position], slow.live_bytes(position)) for position in slow.shown
    ]
    assert ours.peak_bytes == slow.peak_bytes
    assert ours.stored == tuple(sorted(slow.stored))
    assert ours.stored_bytes == sum(graph.bytes[vertex] for vertex in slow.stored)
    run = sorted(vertex for region in slow.again for vertex in region)
    assert list(ours.recomputed) == run
    assert ours.overhead_seconds == math.fsum(graph.seconds[vertex] for vertex in run)
    assert ours.recomputed_flops == sum(graph.flops[vertex] for vertex in run)
    assert {(one.vertex, one.role, one.bytes) for one in ours.alive} == {
        (array.owner, array.role, array.bytes)
        for array in slow.alive(slow.shown[ours.peak])
        if array.bytes
    }


@hypothesis.given(scheduled_graphs())
@hypothesis.settings(max_examples=50)
def test_agrees_with_the_slow_replay(drawn: tuple[Graph, Schedule]) -> None:
    agree(*drawn)


@pytest.mark.slow
@hypothesis.given(scheduled_graphs(max_vertices=14))
@hypothesis.settings(max_examples=300)
def test_agrees_with_the_slow_replay_on_many_graphs(drawn: tuple[Graph, Schedule]) -> None:
    agree(*drawn)


# ---------------------------------------------------------------------------------- properties


@hypothesis.given(scheduled_graphs())
def test_story_and_figures_agree(drawn: tuple[Graph, Schedule]) -> None:
    graph, schedule = drawn
    story, figures = simulate(graph, schedule), evaluate(graph, schedule)
    assert (story.peak_bytes, story.overhead_seconds, story.recomputed_flops) == (
        figures.peak_bytes,
        figures.overhead_seconds,
        figures.recomputed_flops,
    )
    live = [moment.live_bytes for moment in story.moments]
    assert min(live) >= 0
    assert story.peak_bytes == max(live)
    assert story.peak == live.index(max(live)), "the first of the moments that reach the peak"
    assert sum(one.bytes for one in story.alive) == story.peak_bytes
    told = [0] * len(live)
    for life in story.lives:
        for moment in range(life.first, life.last + 1):
            told[moment] += life.bytes
    assert told == live, "the lives of arrays are the whole of what is alive"
    assert [one.bytes for one in story.alive] == sorted(
        (one.bytes for one in story.alive), reverse=True
    )


def left_over(graph: Graph, schedule: Schedule) -> dict[tuple[str, int, int], int]:
    run = simulator._Replay(graph, lambda *_: None, lambda *_: None)
    run.whole(schedule, simulator.demand(graph, schedule))
    return run.live


@hypothesis.given(scheduled_graphs())
def test_everything_is_freed_at_the_end(drawn: tuple[Graph, Schedule]) -> None:
    graph, schedule = drawn
    assert left_over(graph, schedule) == {}


@hypothesis.given(graphs())
def test_the_unchanged_function_recomputes_nothing(graph: Graph) -> None:
    result = simulate(graph, plain(graph))
    assert (result.recomputed, result.overhead_seconds, result.recomputed_flops) == ((), 0.0, 0)
    assert set(result.stored) == {needed for needs in graph.needs for needed in needs}


@hypothesis.given(scheduled_graphs())
def test_no_vertex_runs_more_than_twice(drawn: tuple[Graph, Schedule]) -> None:
    recomputed = simulate(*drawn).recomputed
    assert len(set(recomputed)) == len(recomputed)


@pytest.mark.parametrize("graph", INSTANCES.values(), ids=INSTANCES)
def test_keeping_all_recomputes_nothing(graph: Graph) -> None:
    everything = tuple(range(len(graph)))
    kept = Schedule(regions=(Region(vertices=everything, kept=everything),))
    assert simulate(graph, kept).recomputed == ()
    assert simulate(graph, kept).peak_bytes == simulate(graph, plain(graph)).peak_bytes


def test_impossible_schedule_is_refused() -> None:
    with pytest.raises(GraphError, match=r"^Vertex '1' is in no region\.$"):
        simulate(CHAIN, Schedule(regions=(Region(vertices=(0,)),)))


# ------------------------------------------------------------------------------- cases by hand

#: Each backward step reads its vertex and the one before.
CHAIN = Graph.from_edges([4, 3, 2, 1], chain_edges(4), flops=[10, 20, 30, 40])


def free(*vertices: int) -> Region:
    return Region(vertices=vertices, checkpointed=False)


def region(*vertices: int, kept: tuple[int, ...] = ()) -> Region:
    return Region(vertices=vertices, kept=kept)


def story(graph: Graph, *regions: Region) -> list[tuple[str, int, int]]:
    """Phase, vertex and live bytes of every moment."""
    found = simulate(graph, Schedule(regions=regions))
    return [(moment.phase[0], moment.vertex, moment.live_bytes) for moment in found.moments]


def test_plain_chain_of_four() -> None:
    assert story(CHAIN, free(0, 1, 2, 3)) == [
        ("f", 0, 4),
        ("f", 1, 4 + 3),
        ("f", 2, 4 + 3 + 2),
        ("f", 3, 4 + 3 + 2 + 1),
        ("b", 3, 4 + 3 + 2 + 1 + (1 + 2)),  # in parentheses: cotangents
        ("b", 2, 4 + 3 + 2 + (2 + 3)),
        ("b", 1, 4 + 3 + (3 + 4)),
        ("b", 0, 4 + (4)),
    ]
    result = simulate(CHAIN, plain(CHAIN))
    assert (result.peak_bytes, result.peak) == (14, 5)
    assert result.alive == (
        Live(vertex=0, role="kept", bytes=4),
        Live(vertex=1, role="cotangent", bytes=3),
        Live(vertex=1, role="kept", bytes=3),
        Live(vertex=2, role="cotangent", bytes=2),
        Live(vertex=2, role="kept", bytes=2),
    )


def test_checkpointed_region_leaves_its_boundary_and_runs_again() -> None:
    assert story(CHAIN, region(0, 1), free(2, 3)) == [
        ("f", 0, 4),
        ("f", 1, 4 + 3),
        ("f", 2, 3 + 2),  # 0 is freed, 1 stays for the backward pass of 2
        ("f", 3, 3 + 2 + 1),
        ("b", 3, 3 + 2 + 1 + (1 + 2)),
        ("b", 2, 3 + 2 + (2 + 3)),
        ("r", 0, 4 + (3)),
        ("r", 1, 4 + 3 + (3)),
        ("b", 1, 4 + 3 + (3 + 4)),
        ("b", 0, 4 + (4)),
    ]
    result = simulate(CHAIN, Schedule(regions=(region(0, 1), free(2, 3))))
    assert result.stored == (1, 2, 3)
    assert result.stored_bytes == 6
    assert result.recomputed == (0, 1)
    assert (result.overhead_seconds, result.recomputed_flops) == (2.0, 30)


def test_region_inside_a_region_runs_twice() -> None:
    inside = (region(0), free(1))
    outer = Region(vertices=(0, 1), inside=inside)
    assert story(CHAIN, outer, free(2, 3))[-5:] == [
        ("r", 0, 4 + (3)),  # to get at 1, and freed
        ("r", 1, 4 + 3 + (3)),
        ("b", 1, 4 + 3 + (3 + 4)),  # 0 is a boundary inside: its backward step reads it
        ("r", 0, 4 + (4)),
        ("b", 0, 4 + (4)),
    ]
    result = simulate(CHAIN, Schedule(regions=(outer, free(2, 3))))
    assert result.stored == (1, 2, 3)
    assert result.recomputed == (0, 0, 1)
    assert (result.overhead_seconds, result.recomputed_flops) == (3.0, 40)


def test_halving_a_chain_again_and_again_takes_the_logarithm() -> None:
    """Memory O(log n) for O(n log n) steps, as in Chen et al. (2016), section 4.4."""
    count = 1024
    graph = Graph.from_edges([1] * count, chain_edges(count))

    def halves(start: int, stop: int) -> tuple[Region, ...]:
        vertices = tuple(range(start, stop))
        if stop - start == 1:
            return (free(*vertices),)
        middle = (start + stop) // 2
        first = halves(start, middle)
        inside = first if len(first) > 1 else ()
        return (Region(vertices=vertices[: middle - start], inside=inside), *halves(middle, stop))

    result = simulate(graph, Schedule(regions=halves(0, count)))
    assert len(result.recomputed) == count * 10 // 2
    assert result.peak_bytes <= 10 + 4
    assert simulate(graph, plain(graph)).peak_bytes > count


@hypothesis.given(scheduled_graphs())
def test_a_chain_of_one_inside_changes_nothing(drawn: tuple[Graph, Schedule]) -> None:
    graph, schedule = drawn
    wrapped = tuple(
        dataclasses.replace(one, inside=(free(*one.vertices),)) if one.checkpointed else one
        for one in schedule.regions
    )
    assert simulate(graph, Schedule(regions=wrapped)) == simulate(graph, schedule)


@hypothesis.given(nested_graphs())
@hypothesis.settings(max_examples=50)
def test_nested_regions_free_everything_and_keep_the_story(drawn: tuple[Graph, Schedule]) -> None:
    graph, schedule = drawn
    assert left_over(graph, schedule) == {}
    found = simulate(graph, schedule)
    assert sum(item.bytes for item in found.alive) == found.peak_bytes
    flat = tuple(dataclasses.replace(one, inside=()) for one in schedule.regions)
    least = Counter(simulate(graph, Schedule(regions=flat)).recomputed)
    assert not least - Counter(found.recomputed), "nesting runs more, never less"


def test_boundary_that_is_kept_by_name_is_not_run_again() -> None:
    assert story(CHAIN, region(0, 1, kept=(1,)), free(2, 3))[-3:] == [
        ("r", 0, 4 + 3 + (3)),  # 1 is still stored
        ("b", 1, 4 + 3 + (3 + 4)),
        ("b", 0, 4 + (4)),
    ]
    result = simulate(CHAIN, Schedule(regions=(region(0, 1, kept=(1,)), free(2, 3))))
    assert result.recomputed == (0,)


def test_one_checkpoint_round_everything_saves_nothing() -> None:
    whole = simulate(CHAIN, Schedule(regions=(region(0, 1, 2, 3),)))
    assert whole.stored == ()
    assert whole.recomputed == (0, 1, 2, 3)
    assert whole.peak_bytes == simulate(CHAIN, plain(CHAIN)).peak_bytes


def test_kept_value_that_nothing_reads_is_not_stored() -> None:
    reads_outputs = dataclasses.replace(CHAIN, needs=((0,), (), (2,), (3,)))
    result = simulate(reads_outputs, Schedule(regions=(region(0, 1, 2, kept=(0, 1, 2)), free(3))))
    assert result.stored == (0, 2, 3)
    assert result.recomputed == ()


def test_value_run_again_only_for_another_is_freed_at_its_last_reader() -> None:
    # The backward steps read only 2; running it again takes 0 and 1.
    graph = dataclasses.replace(CHAIN, needs=((), (), (2,), ()))
    assert story(graph, region(0, 1, 2), free(3))[4:] == [
        ("b", 3, 0 + (1 + 2)),
        ("r", 0, 4 + (2)),
        ("r", 1, 4 + 3 + (2)),
        ("r", 2, 3 + 2 + (2)),
        ("b", 2, 2 + (2 + 3)),
        ("b", 1, (3 + 4)),
        ("b", 0, (4)),
    ]


def test_cotangents_of_a_value_with_two_readers_add_up_in_one_buffer() -> None:
    fork = Graph.from_edges([4, 1, 2], [(0, 1), (0, 2)])
    assert story(fork, free(0, 1, 2))[3:] == [
        ("b", 2, 4 + 1 + 2 + (2 + 4)),
        ("b", 1, 4 + 1 + (1 + 4)),  # the cotangent of 0 is there already
        ("b", 0, 4 + (4)),
    ]


def test_elementwise_step_works_in_place() -> None:
    graph = dataclasses.replace(
        Graph.from_edges([3, 3, 3], chain_edges(3)),
        needs=((), (1,), ()),
        in_place=(False, True, False),
    )
    assert story(graph, free(0, 1, 2)) == [
        ("f", 0, 3),
        ("f", 1, 3 + 3),
        ("f", 2, 3 + 3),
        ("b", 2, 3 + (3 + 3)),
        ("b", 1, 3 + (3)),
        ("b", 0, (3)),
    ]


def test_buffer_that_is_too_small_is_not_reused() -> None:
    widening = dataclasses.replace(
        Graph.from_edges([5, 3, 3], chain_edges(3)),
        needs=((), (), ()),
        in_place=(False, True, False),
    )
    assert ("b", 1, (3 + 5)) in story(widening, free(0, 1, 2))


def test_residuals_without_a_name_are_held_from_the_run_to_the_backward_step() -> None:
    graph = dataclasses.replace(CHAIN, needs=((), (), (), ()), internal_bytes=(0, 9, 0, 0))
    cotangents = [("b", 3, 9 + 3), ("b", 2, 9 + 5), ("b", 1, 9 + 7), ("b", 0, 4)]
    assert story(graph, free(0, 1, 2, 3)) == [
        ("f", 0, 4),
        ("f", 1, 9 + 4 + 3),
        ("f", 2, 9 + 3 + 2),
        ("f", 3, 9 + 2 + 1),
        *cotangents,
    ]
    # Under a checkpoint the vertex runs again for them, whatever is kept.
    for kept in ((), (1,)):
        assert story(graph, region(0, 1, kept=kept), free(2, 3))[4:] == [
            ("b", 3, (3)),
            ("b", 2, (5)),
            ("r", 0, 4 + (3)),
            ("r", 1, 9 + 4 + 3 + (3)),
            ("b", 1, 9 + (3 + 4)),
            ("b", 0, (4)),
        ]


def test_kept_value_that_runs_again_for_residuals_is_read_from_memory() -> None:
    graph = dataclasses.replace(CHAIN, needs=((), (1,), (), ()), internal_bytes=(0, 9, 0, 0))
    assert story(graph, region(0, 1, kept=(1,)), free(2, 3))[6:] == [
        ("r", 0, 3 + 4 + (3)),
        ("r", 1, 3 + 9 + 4 + 3 + (3)),  # for a moment twice
        ("b", 1, 3 + 9 + (3 + 4)),
        ("b", 0, (4)),
    ]


def test_program_output_takes_no_temporary_bytes() -> None:
    output = Graph.from_edges([4, 3, 0], chain_edges(3))
    assert story(output, free(0, 1, 2))[2] == ("f", 2, 4 + 3)


def test_vertex_without_a_cotangent_has_no_backward_step() -> None:
    graph = dataclasses.replace(CHAIN, cotangent_bytes=(0, 0, 2, 1))
    assert [vertex for phase, vertex, _ in story(graph, free(0, 1, 2, 3)) if phase == "b"] == [3, 2]
