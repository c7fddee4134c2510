"""The model of ``joint_chain`` again, from its text: every chain, every fate, every nesting.

The figures of a region come from a replay of its backward pass, one set of live values per step;
chains are listed one by one, each with the memory it needs and its cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from remat_opt.graph import Graph

#: Memory that a chain needs, and what it costs.
Point = tuple[int, float]


class Model:
    """The figures of regions of one graph, each found on its own."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.needed = {read for needs in graph.needs for read in needs}
        readers = self.backward_readers()
        for vertex in self.again(set()):
            for read in graph.predecessors[vertex]:
                readers[read].add(vertex)
        self.last_use = [max(steps, default=-1) for steps in readers]
        self.cotangents = self.replay_cotangents()

    def backward_readers(self) -> list[set[int]]:
        count = len(self.graph)
        return [{t for t in range(count) if v in self.graph.needs[t]} for v in range(count)]

    def again(self, kept: set[int]) -> set[int]:
        """What runs again in a single region around everything."""
        graph = self.graph
        found = {v for v in range(len(graph)) if graph.internal_bytes[v]}
        found |= self.needed - kept
        while True:
            more = {p for v in found for p in graph.predecessors[v]} - kept - found
            if not more:
                return found
            found |= more

    def replay_cotangents(self) -> list[int]:
        graph, alive = self.graph, set[int]()
        told = [0] * len(graph)
        for step in range(len(graph) - 1, -1, -1):
            if graph.cotangent_bytes[step]:
                alive.add(step)
                if graph.turns_in_place(step):
                    alive.remove(step)
                alive.update(graph.predecessors[step])
            told[step] = sum(graph.cotangent_bytes[vertex] for vertex in alive)
            told[step] += graph.workspace_bytes[step] if graph.cotangent_bytes[step] else 0
            alive.discard(step)
        return told

    def crosses(self, vertex: int, stop: int) -> bool:
        return vertex < stop <= self.last_use[vertex]

    def saved(self, start: int, stop: int) -> tuple[int, int]:
        """Needs and holdings of a region without a checkpoint."""
        return self._figures(start, stop, self.needed, set(), saved=True)

    def kept(self, start: int, stop: int, kept: set[int]) -> tuple[int, int, float]:
        """Needs, holdings and cost of a region under a checkpoint."""
        graph, again = self.graph, self.again(kept)
        cost = sum(
            graph.seconds[vertex]
            for vertex in range(start, stop)
            if vertex in again and (graph.internal_bytes[vertex] or not self.crosses(vertex, stop))
        )
        return (*self._figures(start, stop, kept, again, saved=False), cost)

    def _figures(
        self, start: int, stop: int, kept: set[int], again: set[int], *, saved: bool
    ) -> tuple[int, int]:
        graph, inside = self.graph, range(start, stop)
        steps = self.backward_readers()
        runs = [{t for t in again if v in graph.predecessors[t]} for v in range(len(graph))]
        stored = {v for v in kept if steps[v] | runs[v]}
        most = 0
        for step in reversed(inside):
            total = self.cotangents[step]
            for vertex in range(start, step + 1):
                to_come = range(step + 1)
                if vertex in stored:
                    reads = steps[vertex] | runs[vertex]
                else:
                    reads = steps[vertex] if vertex in again else set()
                if reads & set(to_come):
                    total += graph.bytes[vertex]
                total += graph.internal_bytes[vertex]
            most = max(most, total)
        held = sum(graph.bytes[v] for v in inside if v in stored or self.crosses(v, stop))
        if saved:
            held += sum(graph.internal_bytes[vertex] for vertex in inside)
        return most, held


def all_ways(
    graph: Graph,
    kept_sets: Iterable[Sequence[int]],
    cuts: Sequence[int],
    nested: Sequence[int],
) -> set[Point]:
    """What every chain over the program needs and costs, to any depth.

    Args:
      graph: what to plan.
      kept_sets: what regions may keep, besides everything and nothing.
      cuts: positions at which regions may be cut, including the program's first and last.
      nested: those at which nested regions may be cut.
    """
    model = Model(graph)
    fates = [set[int](), *map(set, kept_sets)]
    last = len(graph)
    known: dict[tuple[int, int, bool], set[Point]] = {}

    def ways(start: int, stop: int, *, within: bool) -> set[Point]:
        if (start, stop, within) not in known:
            known[start, stop, within] = set(find(start, stop, within=within))
        return known[start, stop, within]

    def find(start: int, stop: int, *, within: bool) -> Iterable[Point]:
        yield model.saved(start, stop)[0], 0.0
        for middle in nested if within else cuts:
            if not start < middle < stop:
                continue
            firsts = [(*model.saved(start, middle), 0.0)]
            if not any(graph.pinned[start:middle]):
                firsts += [model.kept(start, middle, fate) for fate in fates]
                if start in nested and middle in nested and middle != last:
                    _, held, cost = model.kept(start, middle, set())
                    firsts += [
                        (need, held, cost + more) for need, more in ways(start, middle, within=True)
                    ]
            for need, held, cost in set(firsts):
                for rest_need, rest_cost in ways(middle, stop, within=within):
                    yield max(need, held + rest_need), cost + rest_cost

    return ways(0, last, within=False)


def least_cost(points: Iterable[Point], most_bytes: int) -> float:
    return min((cost for need, cost in points if need <= most_bytes), default=float("inf"))
