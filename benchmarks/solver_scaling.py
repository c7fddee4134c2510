"""How the papers' solvers scale with the graph, on plain numbers.

    python -m benchmarks.solver_scaling --json

prints one JSON object a line: solver, family of graphs, vertices, seconds, and what it answered.
Each row is the best of three runs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from remat_opt.graph import Graph
from remat_opt.solvers import (
    arbitrary_graph,
    binomial,
    dynamic_program,
    linear_chain,
    portfolio,
    sublinear,
)
from remat_opt.solvers.base import Infeasible, Refused, Solution

_RUNS = 3


def chain(count: int) -> Graph:
    """A chain of vertices with different sizes and times."""
    draw = random.Random(count)
    return Graph.from_edges(
        [draw.randint(1, 1000) for _ in range(count)],
        [(vertex, vertex + 1) for vertex in range(count - 1)],
        seconds=[float(draw.randint(1, 10)) for _ in range(count)],
    )


def dense(count: int) -> Graph:
    """DenseNet's shape: in a block, four vertices a layer and a concatenation with all before."""
    draw = random.Random(count)
    edges: list[tuple[int, int]] = []
    before, vertex = 0, 1
    while vertex + 5 <= count:
        edges += [(before, vertex)]
        edges += [(vertex + step, vertex + step + 1) for step in range(4)]
        edges.append((before, vertex + 4))
        before, vertex = vertex + 4, vertex + 5
    edges += [(one - 1, one) for one in range(vertex, count)]
    return Graph.from_edges(
        [draw.randint(1, 1000) for _ in range(count)],
        sorted(set(edges)),
        seconds=[float(draw.choice([1, 10])) for _ in range(count)],
    )


def branched(count: int) -> Graph:
    """Alternates Inception's and ResNet's shapes: three branches, then a shortcut."""
    draw = random.Random(count)
    edges: list[tuple[int, int]] = []
    vertex = 0
    while vertex + 6 < count:
        for branch in (1, 2, 3):
            edges += [(vertex, vertex + branch), (vertex + branch, vertex + 4)]
        edges += [(vertex + 4, vertex + 5), (vertex + 5, vertex + 6), (vertex + 4, vertex + 6)]
        vertex += 6
    edges += [(one, one + 1) for one in range(vertex, count - 1)]
    return Graph.from_edges([draw.randint(1, 1000) for _ in range(count)], edges)


def parallel(count: int) -> Graph:
    """Four chains side by side, joined at the end: their lower sets multiply."""
    length = (count - 1) // 4
    edges = [(one, one + 1) for one in range(4 * length) if (one + 1) % length]
    edges += [(length * (branch + 1) - 1, 4 * length) for branch in range(4)]
    return Graph.from_edges([1 + vertex % 7 for vertex in range(4 * length + 1)], edges)


def _half(solve: Callable[[Graph, float], Any]) -> Callable[[Graph], Any]:
    """The solver with half of all bytes as its budget."""
    return lambda graph: solve(graph, sum(graph.bytes) / 2)


#: Solver, how it is called, family of graphs, numbers of vertices.
CASES: tuple[tuple[str, Callable[[Graph], Any], Callable[[int], Graph], tuple[int, ...]], ...] = (
    ("approximate_dp", _half(dynamic_program.approximate), dense, (142, 284, 568)),
    ("approximate_dp", _half(dynamic_program.approximate), chain, (142, 284, 568)),
    ("exact_dp", _half(dynamic_program.exact), chain, (142, 284, 568)),
    ("exact_dp", _half(dynamic_program.exact), branched, (25, 50, 100)),
    ("exact_dp", _half(dynamic_program.exact), parallel, (17, 25, 101)),
    ("linear_chain", linear_chain.solve, chain, (500, 1_000, 2_000)),
    ("arbitrary_graph", arbitrary_graph.solve, branched, (125, 250, 500)),
    ("arbitrary_graph", arbitrary_graph.solve, dense, (125, 250, 500)),
    ("sublinear", sublinear.least_memory, chain, (250, 500, 1_000)),
    ("revolve", lambda graph: binomial.solve(graph, 10), chain, (250, 500, 1_000)),
    ("heterogeneous_chain", _half(binomial.least_overhead), chain, (50, 100, 200)),
    ("portfolio", portfolio.frontier, chain, (142, 284, 568)),
)


def rows() -> Iterator[dict[str, Any]]:
    """Solves one case after the other."""
    for solver, solve, build, counts in CASES:
        for count in counts:
            graph = build(count)
            seconds = []
            for _ in range(_RUNS):
                start = time.perf_counter()
                answer = solve(graph)
                seconds.append(time.perf_counter() - start)
            row: dict[str, Any] = {
                "solver": solver,
                "graph": build.__name__,
                "vertices": count,
                "edges": sum(map(len, graph.predecessors)),
                "seconds": round(min(seconds), 4),
            }
            if isinstance(answer, Refused):
                row |= {"status": "refused", "message": answer.message}
            elif isinstance(answer, Infeasible):
                row |= {"status": "infeasible", "least_bytes": answer.least_bytes}
            elif isinstance(answer, Solution):
                row |= {"status": answer.status.value, "objective": answer.objective}
            if solver.endswith("_dp") and isinstance(answer, Solution):
                row["lower_sets"] = answer.figures.lower_sets
            yield row


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.solver_scaling", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    for row in rows():
        if options.json:
            print(json.dumps(row), flush=True)
        else:
            said = row.get("message") or row.get("status", "")
            print(
                f"{row['solver']:<20} {row['graph']:<9} {row['vertices']:>5} vertices "
                f"{row['seconds']:>8.3f} s  {said[:60]}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
