"""Every solver on one network, through the decorator: predicted and compiled.

    python -m benchmarks.solver_table --network resnet50 --batch 64 --device h200 --json

prints one JSON object a line: for each solver that plans programs, its plan of least memory and
its plan for half of what the unchanged function needs, or why it does not take the network.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax

import remat_opt
from benchmarks import networks
from remat_opt import solvers
from remat_opt.measurement import compilation
from remat_opt.program import flop_count
from remat_opt.solvers import Solver
from remat_opt.units import format_bytes, format_share

#: The solvers that plan programs, and their variants.
SOLVERS: tuple[Solver, ...] = (
    solvers.Portfolio(),
    solvers.ApproximateDP(),
    solvers.ApproximateDP(objective="memory"),
    solvers.ExactDP(),
    solvers.Exhaustive(),
    solvers.LinearChain(),
    solvers.ArbitraryGraph(),
    solvers.RandomChoice(),
    solvers.Sublinear(nested=False),
    solvers.Sublinear(),
    solvers.Revolve(snapshots=4),
    solvers.HeterogeneousChain(),
)
#: What is asked for: the least memory, and a share of what the unchanged function needs.
BUDGETS = (None, 0.5)


def rows(
    network: str,
    batch: int,
    device: str,
    budgets: tuple[float | None, ...],
    only: frozenset[str] | None = None,
) -> Iterator[Any]:
    """Plans, compiles and yields one row after the other.

    Args:
      network: name, as ``benchmarks.networks`` lists it.
      batch: examples in a batch.
      device: name of the device to plan and compile for.
      budgets: shares of what the unchanged function needs; None for the least memory.
      only: the solvers to use, by their names in plans; all if None.

    Yields:
      ``solver``, ``budget_share``, ``predicted_temporary_bytes``, ``temporary_bytes``,
      ``recomputed_flops_share`` of a forward pass, counted in the rewritten program,
      ``predicted_recomputed_flops_share``, ``plan_seconds`` (tracing included) and
      ``compile_seconds``; or ``error``.
    """
    built = networks.build(network, batch)
    target = compilation.resolve_device(device)
    forward = flop_count.forward_flops(built.loss_fn, *built.arguments)
    unchanged = flop_count.gradient_flops(built.loss_fn, *built.arguments, has_aux=built.has_aux)
    compiled: dict[Any, Any] = {}
    for solver in SOLVERS:
        if only is not None and str(solver) not in only:
            continue
        for budget in budgets:
            given: dict[str, Any] = {
                "network": network,
                "batch": batch,
                "device": device,
                "jax": jax.__version__,
                "solver": str(solver),
                "budget_share": budget,
            }
            start = time.perf_counter()
            try:
                plan = remat_opt.make_plan(
                    built.loss_fn,
                    *built.arguments,
                    budget=budget,
                    overhead="flops",
                    device=target,
                    solver=solver,
                    has_aux=built.has_aux,
                )
            except remat_opt.RematError as error:
                yield {**given, "error": str(error)}
                continue
            plan_seconds = time.perf_counter() - start
            if plan.decided not in compiled:
                planned = remat_opt.apply_plan(plan, built.loss_fn, has_aux=built.has_aux)
                flops = flop_count.gradient_flops(planned, *built.arguments, has_aux=built.has_aux)
                found = compilation.measure(
                    jax.grad(planned, has_aux=built.has_aux), *built.arguments, device=target
                )
                compiled[plan.decided] = {
                    "temporary_bytes": found.temporary_bytes,
                    "recomputed_flops_share": round((flops - unchanged) / forward, 4),
                    "compile_seconds": round(found.compile_seconds, 2),
                }
            yield {
                **given,
                "predicted_temporary_bytes": plan.predicted.temporary_bytes,
                "predicted_recomputed_flops_share": round(plan.predicted.recomputed_share, 4),
                **compiled[plan.decided],
                "regions": len(plan.stages),
                "plan_seconds": round(plan_seconds, 3),
            }


def _table_line(row: dict[str, Any]) -> str:
    budget = "least" if row["budget_share"] is None else format_share(row["budget_share"])
    start = f"{row['solver']:<36} {budget:>7}"
    if "error" in row:
        return f"{start} {row['error'][:70]}"
    return (
        f"{start} {format_bytes(row['predicted_temporary_bytes']):>10}"
        f" {format_bytes(row['temporary_bytes']):>10} {format_share(row['recomputed_flops_share'])}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solver_table", description=__doc__)
    parser.add_argument("--network", default="resnet50", choices=networks.names())
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--least-only", action="store_true", help="only plans of least memory")
    parser.add_argument(
        "--only",
        action="append",
        metavar="SOLVER",
        help="take this solver (may be given several times); all if left out",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    only = frozenset(options.only) if options.only else None
    budgets = BUDGETS[:1] if options.least_only else BUDGETS
    for row in rows(options.network, options.batch, options.device, budgets, only):
        print(json.dumps(row) if options.json else _table_line(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
