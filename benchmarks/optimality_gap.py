"""How far every solver is from the best executable schedule, on 200 small graphs.

    python -m benchmarks.optimality_gap --json

prints one JSON object a line for each solver. The yardstick is ``integer_program``: the least
recomputation of any chain of regions, nested at most once, within a budget, by the simulator's
figures. Budgets are taken between the least peak of such chains and that of the unchanged function.
For comparison there is ``staged_program``: the least recomputation of any schedule, executable or
not.

Both programs were solved beforehand: they take most of an hour. ``--solve`` solves them again and
prints one JSON object a line for each budget, as in ``results/optimality_gap_tasks.jsonl``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.solver_table import SOLVERS
from remat_opt.graph import Graph
from remat_opt.schedule import plain
from remat_opt.simulator import evaluate
from remat_opt.solvers import Solver, integer_program, staged_program
from remat_opt.solvers.base import Overhead, Refused, Solution, Status, fastest_within

GRAPHS, MOST_VERTICES = 200, 10
#: Budgets, as shares of the way from the least peak to that of the unchanged function.
SHARES = (0.1, 0.25, 0.5, 0.75)
RECORD = Path(__file__).parent / "results" / "optimality_gap_tasks.jsonl"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One graph within one budget.

    Attributes:
      seed: which graph, see ``sample``.
      vertices: number of its vertices.
      budget_bytes: bound on the peak.
      best_seconds: the least recomputation of any chain of regions within the budget.
      any_seconds: the least of any schedule, executable or not.
    """

    seed: int
    vertices: int
    budget_bytes: int
    best_seconds: float
    any_seconds: float


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


def solved(seed: int) -> Iterator[Task]:
    """The tasks of one graph, by both integer programs, to the end."""
    graph = sample(seed)
    least = integer_program.least_peak(graph)
    assert isinstance(least, Solution)
    assert least.status is Status.OPTIMAL
    room_bytes = evaluate(graph, plain(graph)).peak_bytes - least.figures.peak_bytes
    for share in SHARES:
        budget_bytes = least.figures.peak_bytes + round(share * room_bytes)
        best = integer_program.least_overhead(graph, budget_bytes)
        free = staged_program.least_overhead(graph, budget_bytes)
        assert isinstance(best, Solution)
        assert isinstance(free, staged_program.Staged)
        assert best.status is free.status is Status.OPTIMAL
        yield Task(
            seed=seed,
            vertices=len(graph),
            budget_bytes=budget_bytes,
            best_seconds=best.objective,
            any_seconds=free.objective,
        )


def recorded() -> list[Task]:
    """The tasks of all graphs, as solved before."""
    return [Task(**json.loads(line)) for line in RECORD.read_text().splitlines()]


def gaps(solver: Solver, tasks: Sequence[Task]) -> list[tuple[float, float] | None] | None:
    """How far a solver is from the best chain, and from any schedule, task by task.

    Args:
      solver: the solver.
      tasks: all tasks of one graph, by ascending budget.

    Returns:
      Extra seconds, as shares of a forward pass; None within a budget that the solver does not
      meet. None for all if it does not take the graph.
    """
    graph = sample(tasks[0].seed)
    candidates = solver.candidates(graph)
    if isinstance(candidates, Refused):
        return None
    found: list[tuple[float, float] | None] = []
    for task in tasks:
        chosen = fastest_within(candidates, task.budget_bytes, Overhead.SECONDS)
        if chosen is None:
            found.append(None)
            continue
        extra = (chosen.overhead_seconds - task.best_seconds) / graph.forward_seconds
        free = (chosen.overhead_seconds - task.any_seconds) / graph.forward_seconds
        found.append((extra, free))
    return found


def rows() -> Iterator[dict[str, Any]]:
    """One row for each solver, after all graphs.

    Yields:
      ``solver``; ``tasks``; ``solved``, within the budget; ``refused``; and of those solved, how
      many are ``optimal`` among chains of regions, ``median_gap``, ``mean_gap`` and ``worst_gap``
      to the best chain, and ``mean_gap_to_any`` to the best schedule of any kind.
    """
    by_seed: dict[int, list[Task]] = {}
    for task in recorded():
        by_seed.setdefault(task.seed, []).append(task)
    for solver in SOLVERS:
        told: list[tuple[float, float]] = []
        refused = 0
        for tasks in by_seed.values():
            found = gaps(solver, tasks)
            refused += len(tasks) if found is None else 0
            told += [one for one in found or [] if one is not None]
        row: dict[str, Any] = {
            "solver": str(solver),
            "tasks": sum(map(len, by_seed.values())),
            "solved": len(told),
            "refused": refused,
        }
        if told:
            best, free = ([one[kind] for one in told] for kind in range(2))
            row |= {
                "optimal": sum(gap < 1e-9 for gap in best),
                "median_gap": round(statistics.median(best), 4),
                "mean_gap": round(statistics.fmean(best), 4),
                "worst_gap": round(max(best), 4),
                "mean_gap_to_any": round(statistics.fmean(free), 4),
            }
        yield row


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.optimality_gap", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--solve", action="store_true", help="solve the integer programs again")
    options = parser.parse_args(arguments)
    if options.solve:
        for seed in range(GRAPHS):
            for task in solved(seed):
                print(json.dumps(dataclasses.asdict(task)), flush=True)
        return 0
    for row in rows():
        if options.json:
            print(json.dumps(row), flush=True)
            continue
        told = (
            f"optimal {row['optimal']:>3}, gap median {row['median_gap']:.1%}, "
            f"mean {row['mean_gap']:.1%}, worst {row['worst_gap']:.1%} of a forward pass; "
            f"to any schedule mean {row['mean_gap_to_any']:.1%}"
            if "optimal" in row
            else ""
        )
        print(f"{row['solver']:<36} {row['solved']:>3} of {row['tasks']} within budget  {told}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
