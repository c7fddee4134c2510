"""How long planning takes, part by part, and how that grows with the program.

    python -m benchmarks.planning_time --json

prints one JSON object a line for each network.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from typing import Any

import jax

from benchmarks import networks
from remat_opt import tracing
from remat_opt.device import get_device
from remat_opt.linearization import linearize
from remat_opt.materialization import materialize
from remat_opt.solvers import portfolio

#: (network, batch)
CASES = (("resnet50", 64), ("resnet101", 32), ("resnet152", 16), ("gpt", 8))


def timed(network: str, batch: int, device: str) -> dict[str, Any]:
    """Plans one network from scratch, and says where the time went, in seconds."""
    built = networks.build(network, batch)
    marks = [time.perf_counter()]
    program = tracing.trace(
        built.loss_fn, *built.arguments, signature=tracing.Signature(has_aux=built.has_aux)
    )
    marks.append(time.perf_counter())
    linearization = linearize(program)
    marks.append(time.perf_counter())
    materialization = materialize(program, linearization, get_device(device))
    marks.append(time.perf_counter())
    candidates = portfolio.frontier(materialization.graph)
    marks.append(time.perf_counter())
    trace, linear, graph, solve = (b - a for a, b in itertools.pairwise(marks))
    return {
        "network": network,
        "batch": batch,
        "device": device,
        "jax": jax.__version__,
        "equations": len(program.equations),
        "vertices": len(materialization.graph),
        "candidates": len(candidates),
        "trace_seconds": round(trace, 3),
        "linearize_seconds": round(linear, 3),
        "graph_seconds": round(graph, 3),
        "solve_seconds": round(solve, 3),
        "plan_seconds": round(linear + graph + solve, 3),
    }


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning_time", description=__doc__)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    # JAX sets itself up once; that is not planning.
    jax.make_jaxpr(lambda x: jax.vjp(lambda y: y * y, x))(1.0)
    for network, batch in CASES:
        row = timed(network, batch, options.device)
        if options.json:
            print(json.dumps(row), flush=True)
        else:
            print(
                f"{row['network']:<10} {row['equations']:>6} equations"
                f" {row['vertices']:>5} vertices {row['plan_seconds']:>7.2f} s planning,"
                f" {row['trace_seconds']:.2f} s tracing",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
