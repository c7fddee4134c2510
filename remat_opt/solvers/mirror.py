"""Mirror counts: the basis of Chen's plans.

Problem. m(v) says how many times the result of v may be computed again: 0 keeps it, 1 drops it
once, and more than 1 drops it again while it is being recomputed (section 4.4). Say what that
computes, in which order it runs, and how much memory it takes.

Method. ``gradient_graph`` is Algorithm 2: v gets m(v) copies, round by round; a copy reads the
copies of its own round, or the newest there are; a backward step reads the newest ones. Forward
steps come first; before each backward step come the copies that it needs and that have not run.
Copies that nothing needs never run, so a vertex runs again at most m(v) times. ``allocator`` then
says exactly what the whole takes. ``schedule_of`` turns the same counts into nested regions for the
referee: the vertices with count 0 end the regions of the chain, those with the next count end the
regions inside these, and so on. ``approximate`` gives x and y of Algorithm 3, also for counts that
go deeper than 1.

Why not a ready-made tool: frameworks with mirror counts built them into their graphs.

Complexity: O(m (n + e)) for all, where m is the largest count.

Guarantee: with ``executable`` counts the gradient graph and the schedule recompute the same
vertices equally often.

Readings. If a later stage reads a dropped result, Algorithm 2 would recompute it from what lies
before its own stage. Regions form a chain, in which what crosses is stored, so it is kept
(``closed``). Algorithm 2 also copies the last stage, though its results still exist when the
backward pass begins; ``executable`` avoids that. (For the last region of a chain inside another,
the algorithm itself and ``schedule_of`` do.) A stage that holds a vertex with side effects is not
recomputed either. g[v] is the backward step of v as in Fig. 3: it reads the steps of the successors
of v and what ``Graph.needs`` says, the least that must be declared (section 3), and makes the
gradients of everything that v reads. If v reads nothing, these live in output buffers. The gradient
from outside is left out.

Left out: internal bytes. The referee knows them.

Reference: Chen, Xu, Zhang, Guestrin (2016), sections 4.1 and 4.4, Algorithm 2.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Sequence

from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule, merged
from remat_opt.simulator import simulate
from remat_opt.solvers.allocator import Execution


class Kind(enum.Enum):
    """What a node of a gradient graph computes: v, a[v] or g[v]."""

    FORWARD = "forward"
    MIRROR = "mirror"
    GRADIENT = "gradient"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of a gradient graph.

    Attributes:
      kind: what it computes.
      vertex: of which vertex.
      round: for a mirror, the number k of the copy, from 1; else 0.
    """

    kind: Kind
    vertex: int
    round: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GradientGraph:
    """Algorithm 2's answer.

    Attributes:
      nodes: in order of execution (V').
      execution: the same for the allocator.
      recomputed: for each vertex, how many of its copies run.
    """

    nodes: tuple[Node, ...]
    execution: Execution
    recomputed: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Approximate:
    """The estimate of Algorithm 3.

    Attributes:
      between_bytes: x, to store what is kept between the stages.
      stage_bytes: y, to run the largest stage.
    """

    between_bytes: int
    stage_bytes: int

    @property
    def total_bytes(self) -> int:
        """The two terms of Eq. 1, x + y."""
        return self.between_bytes + self.stage_bytes


def check(graph: Graph, mirror: Sequence[int]) -> None:
    """Raises ValueError unless ``mirror`` has a count of 0 or more for each vertex."""
    if len(mirror) != len(graph):
        raise ValueError(f"There are {len(mirror)} mirror counts for {len(graph)} vertices.")
    for vertex, count in enumerate(mirror):
        if count < 0:
            raise ValueError(
                f"The mirror count of {graph.names[vertex]!r} is {count}; it must be 0 or more."
            )


def gradient_graph(graph: Graph, mirror: Sequence[int]) -> GradientGraph:
    """The memory-optimised gradient graph (Algorithm 2).

    Args:
      graph: the forward computation.
      mirror: m(v) for each vertex.
    """
    check(graph, mirror)
    nodes: list[Node] = []
    number: dict[Node, int] = {}
    reads: list[tuple[int, ...]] = []

    def append(node: Node, read: Sequence[Node]) -> None:
        number[node] = len(nodes)
        nodes.append(node)
        reads.append(tuple(number[one] for one in read))

    def copy(vertex: int, most: int) -> Node:
        """a[v] after round ``most``."""
        rounds = min(most, mirror[vertex])
        kind = Kind.MIRROR if rounds else Kind.FORWARD
        return Node(kind=kind, vertex=vertex, round=rounds)

    def inputs(node: Node) -> list[Node]:
        """pred[a[v]]: copies of the same round, or the newest if there are fewer."""
        return [copy(read, node.round) for read in graph.predecessors[node.vertex]]

    for vertex in range(len(graph)):
        node = copy(vertex, 0)
        append(node, inputs(node))
    successors = graph.successors()
    for vertex in reversed(range(len(graph))):
        newest = [copy(needed, mirror[needed]) for needed in graph.needs[vertex]]
        ancestors: set[Node] = set()
        pending = list(newest)
        while pending:
            node = pending.pop()
            if node not in number and node not in ancestors:
                ancestors.add(node)
                pending += inputs(node)
        # A copy reads only earlier rounds, or lower numbers of its own: an order of execution.
        for node in sorted(ancestors, key=lambda one: (one.round, one.vertex)):
            append(node, inputs(node))
        later = [Node(kind=Kind.GRADIENT, vertex=reader) for reader in successors[vertex]]
        append(Node(kind=Kind.GRADIENT, vertex=vertex), [*later, *newest])
    runs = Counter(node.vertex for node in nodes if node.kind is Kind.MIRROR)
    return GradientGraph(
        nodes=tuple(nodes),
        execution=Execution(
            names=tuple(_name(graph, node) for node in nodes),
            bytes=tuple(_bytes(graph, node) for node in nodes),
            reads=tuple(reads),
            in_place=tuple(graph.in_place[node.vertex] for node in nodes),
        ),
        recomputed=tuple(runs[vertex] for vertex in range(len(graph))),
    )


def _name(graph: Graph, node: Node) -> str:
    # The number keeps names unique whatever the graph calls its vertices.
    return f"{node.kind.value} {node.round} of {graph.names[node.vertex]}"


def _bytes(graph: Graph, node: Node) -> int:
    if node.kind is Kind.GRADIENT:
        return sum(graph.cotangent_bytes[read] for read in graph.predecessors[node.vertex])
    return graph.bytes[node.vertex]


def stages(mirror: Sequence[int], vertices: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """``vertices`` cut after each one whose count is at most ``most``."""
    found: list[tuple[int, ...]] = []
    start = 0
    for place, vertex in enumerate(vertices, start=1):
        if mirror[vertex] <= most or place == len(vertices):
            found.append(tuple(vertices[start:place]))
            start = place
    return found


def approximate(graph: Graph, mirror: Sequence[int]) -> Approximate:
    """What Algorithm 3 estimates, x and y, with the last stage (correction 11).

    If counts go deeper than 1, a stage takes what is kept between the stages inside it plus the
    largest of these, by the recursion of section 4.4; x then adds up along the largest.
    """
    check(graph, mirror)

    def within(vertices: tuple[int, ...], most: int) -> Approximate:
        parts = stages(mirror, vertices, most)
        ends = [part[-1] for part in parts[:-1]]
        if mirror[vertices[-1]] == most:
            ends.append(vertices[-1])
        inside = [one_stage(part, most) for part in parts]
        largest = max(inside, key=lambda one: one.total_bytes)
        return Approximate(
            between_bytes=sum(graph.bytes[end] for end in ends) + largest.between_bytes,
            stage_bytes=largest.stage_bytes,
        )

    def one_stage(vertices: tuple[int, ...], most: int) -> Approximate:
        deeper = {mirror[vertex] for vertex in vertices if mirror[vertex] > most}
        if len(deeper) > 1:
            return within(vertices, min(deeper))
        return Approximate(
            between_bytes=0, stage_bytes=sum(graph.bytes[vertex] for vertex in vertices)
        )

    return within(tuple(range(len(graph))), 0)


def closed(graph: Graph, mirror: Sequence[int]) -> tuple[int, ...]:
    """The counts, keeping every result that is read, forward or backward, past a kept one.

    The same holds within stages inside stages: no result is read past one of a lower count.
    """
    check(graph, mirror)
    last_read = list(range(1, len(graph) + 1))
    for vertex in range(len(graph)):
        for read in (*graph.predecessors[vertex], *graph.needs[vertex]):
            last_read[read] = max(last_read[read], vertex)
    counts = list(mirror)
    # From the last to the first: a count depends only on those of higher numbers.
    for vertex in reversed(range(len(graph))):
        counts[vertex] = min(counts[vertex : last_read[vertex]])
    return tuple(counts)


def executable(graph: Graph, mirror: Sequence[int]) -> tuple[int, ...]:
    """The ``closed`` counts without recomputation that is not needed, or not allowed.

    The last stage exists when the backward pass begins, so its counts are lower by one round, and
    those of the last stage inside it by another. So are those of a stage that holds a vertex with
    side effects.
    """
    counts = list(closed(graph, mirror))
    pending = [tuple(range(len(graph)))]
    while pending:
        vertices = pending.pop()
        for part in stages(counts, vertices, 0):
            least = min((counts[vertex] for vertex in part if counts[vertex]), default=0)
            spared = part[-1] == len(graph) - 1 or any(graph.pinned[vertex] for vertex in part)
            if least and spared:
                for vertex in part:
                    counts[vertex] -= least if counts[vertex] else 0
                pending.append(part)
    return tuple(counts)


def schedule_of(graph: Graph, mirror: Sequence[int]) -> Schedule:
    """Nested regions that recompute as the counts say, as far as they are ``executable``."""
    counts = executable(graph, mirror)
    return Schedule(regions=tuple(merged(_chain(counts, tuple(range(len(graph))), 0))))


def _chain(
    mirror: Sequence[int], vertices: tuple[int, ...], most: int
) -> list[Region | tuple[int, ...]]:
    """The regions of a chain that runs while counts up to ``most`` hold what they keep.

    Regions without a checkpoint are not ``merged`` yet.
    """
    parts = stages(mirror, vertices, most)
    regions: list[Region | tuple[int, ...]] = []
    for part in parts:
        deeper = [mirror[vertex] for vertex in part if mirror[vertex] > most]
        if not deeper:
            regions.append(part)
            continue
        # A stage runs again as a separate chain. Rounds that cut nothing are skipped: the copies of
        # Algorithm 2 never run in these.
        inside = _chain(mirror, part, min(deeper))
        if most and part is parts[-1]:
            regions += inside  # its backward pass follows at once
            continue
        within = merged(inside)
        regions.append(
            Region(
                vertices=part,
                kept=tuple(vertex for vertex in part if mirror[vertex] <= most),
                inside=tuple(within) if len(within) > 1 else (),
            )
        )
    return regions


def mirror_counts(graph: Graph, schedule: Schedule) -> tuple[int, ...]:
    """How many times the referee sees each vertex run again: the m(v) of a schedule.

    >>> from remat_opt.schedule import Region, Schedule
    >>> chain = Graph.from_edges([1, 1, 1], [(0, 1), (1, 2)])
    >>> first = Region(vertices=(0, 1), kept=(1,))
    >>> last = Region(vertices=(2,), checkpointed=False)
    >>> mirror_counts(chain, Schedule(regions=(first, last)))
    (1, 0, 0)
    """
    runs = Counter(simulate(graph, schedule).recomputed)
    return tuple(runs[vertex] for vertex in range(len(graph)))
