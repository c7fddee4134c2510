"""How far every solver is from what any schedule could reach, on small graphs.

    python -m benchmarks.optimality_gap --json

prints one JSON object a line for each solver. The yardstick is the integer program: the least
recomputation of any schedule, an executable chain of regions or not, within the same peak of the
same simulator. Budgets are taken between the least peak of any schedule and that of the unchanged
function, so some of them no chain of regions can meet.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.solver_table import SOLVERS
from remat_opt.graph import Graph
from remat_opt.solvers import staged_program
from remat_opt.solvers.base import Overhead, Refused, fastest_within
from remat_opt.solvers.staged_program import Staged

GRAPHS, MOST_VERTICES = 60, 10
#: Budgets, as shares of the way from the least peak to that of the unchanged function.
SHARES = (0.1, 0.25, 0.5, 0.75)


def sample(seed: int) -> Graph:
    """A small graph: a chain with or without shortcuts, branches, or random edges."""
    draw = random.Random(seed)
    count = draw.randint(5, MOST_VERTICES)
    edges = {(vertex, vertex + 1) for vertex in range(count - 1)}
    kind = draw.choice(["chain", "residual", "dense", "random"])
    if kind == "residual":
        edges |= {(vertex, vertex + 2) for vertex in range(0, count - 2, 2)}
    elif kind == "dense":
        edges |= {(a, b) for b in range(count) for a in range(max(0, b - 3), b)}
    elif kind == "random":
        edges |= {(a, b) for b in range(count) for a in range(b) if draw.random() < 0.2}
    return Graph.from_edges(
        [draw.randint(1, 8) for _ in range(count)],
        sorted(edges),
        seconds=[float(draw.choice([1, 1, 4])) for _ in range(count)],
    )


def rows() -> Iterator[dict[str, Any]]:
    """One row for each solver, after all graphs."""
    graphs = [sample(seed) for seed in range(GRAPHS)]
    tasks: list[tuple[Graph, float, float]] = []
    nodes = 0
    for graph in graphs:
        least = staged_program.least_peak(graph)
        unchanged = staged_program.least_overhead(graph, float("inf"))
        assert isinstance(least, Staged)
        assert isinstance(unchanged, Staged)
        for share in SHARES:
            room = unchanged.peak_bytes - least.peak_bytes
            budget = least.peak_bytes + round(share * room)
            best = staged_program.least_overhead(graph, budget)
            assert isinstance(best, Staged)
            nodes += best.nodes
            tasks.append((graph, budget, best.bound))
    yield {
        "solver": "integer_program",
        "tasks": len(tasks),
        "solved": len(tasks),
        "refused": 0,
        "nodes": nodes,
    }
    for solver in SOLVERS:
        gaps, refused = [], 0
        for graph, budget, bound in tasks:
            candidates = solver.candidates(graph)
            if isinstance(candidates, Refused):
                refused += 1
                continue
            found = fastest_within(candidates, budget, Overhead.SECONDS)
            if found is not None:
                gaps.append((found.overhead_seconds - bound) / graph.forward_seconds)
        yield {
            "solver": str(solver),
            "tasks": len(tasks),
            "solved": len(gaps),
            "refused": refused,
            **(
                {
                    "optimal": sum(gap < 1e-9 for gap in gaps),
                    "median_gap": round(statistics.median(gaps), 4),
                    "mean_gap": round(statistics.fmean(gaps), 4),
                    "worst_gap": round(max(gaps), 4),
                }
                if gaps
                else {}
            ),
        }


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.optimality_gap", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    for row in rows():
        if options.json:
            print(json.dumps(row), flush=True)
            continue
        gaps = (
            f"optimal {row['optimal']:>3}, gap median {row['median_gap']:.1%}, "
            f"mean {row['mean_gap']:.1%}, worst {row['worst_gap']:.1%} of a forward pass"
            if "optimal" in row
            else ""
        )
        print(f"{row['solver']:<36} {row['solved']:>3} of {row['tasks']} within budget  {gaps}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
