"""How long planning takes, part by part: how it grows, and how it compares with compiling.

    python -m benchmarks.planning_time --compile --json

prints one JSON object a line for each network. Without ``--compile`` nothing is compiled. Very deep
ResNets, which show the growth, are only traced and planned.

Each network runs in a separate process, as a user's does. After compiling a large one, numpy takes
up to twice as long: planning the U-Net takes 0.40 s after compiling the LSTM, 0.26 without.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax

import remat_opt
from benchmarks import networks
from benchmarks.kept import compiler_version
from benchmarks.networks import resnet
from benchmarks.networks.record import Network
from remat_opt import planning
from remat_opt.compilers.compiler import Compiler
from remat_opt.compilers.model import model
from remat_opt.device import get_device
from remat_opt.measurement import compilation
from remat_opt.plan import Objective
from remat_opt.program import tracing
from remat_opt.program.linearization import linearize

#: What is planned and compiled, from small to large.
NETWORKS = (
    "lstm",
    "unet",
    "gpt",
    "vit_b16",
    "inception_v3",
    "resnet50",
    "densenet121",
    "resnet101",
    "resnet152",
)
#: Bottleneck ResNets that are only planned: name, and blocks of each stage.
DEEP = {"resnet374": (3, 8, 110, 3), "resnet1001": (3, 8, 319, 3)}
_DEEP_BATCH = 4


def timed(network: Network, batch: int, device: str) -> dict[str, Any]:
    """Plans one network from scratch, and says where the time went, in seconds."""
    target, objective = get_device(device), Objective()
    marks = [time.perf_counter()]
    program = tracing.trace(
        network.loss_fn, *network.arguments, signature=tracing.Signature(has_aux=network.has_aux)
    )
    marks.append(time.perf_counter())
    start_cpu = time.process_time()
    problem = planning.problem(program, target)
    plan = planning.describe(problem, program, planning.solve(problem, objective), objective)
    plan_cpu = time.process_time() - start_cpu
    marks.append(time.perf_counter())
    # Once more, for the parts.
    linearization = linearize(program)
    marks.append(time.perf_counter())
    expected = model(program, linearization, Compiler(device=target))
    marks.append(time.perf_counter())
    trace, whole, linear, graph = (b - a for a, b in itertools.pairwise(marks))
    return {
        "network": network.name,
        "batch": batch,
        "device": device,
        "equations": len(program.equations),
        "vertices": len(expected.graph),
        "candidates": len(problem.candidates),
        "regions": len(plan.stages),
        "trace_seconds": round(trace, 3),
        "linearize_seconds": round(linear, 3),
        "graph_seconds": round(graph, 3),
        "plan_seconds": round(whole, 3),
        "plan_cpu_seconds": round(plan_cpu, 3),
    }


def compiled(network: Network, device: str) -> dict[str, Any]:
    """Compiles the plain gradient, and says how long that took, in seconds."""
    gradient = jax.grad(network.loss_fn, has_aux=network.has_aux)
    start = time.perf_counter()
    jax.jit(gradient).trace(*network.arguments)
    trace = time.perf_counter() - start
    found = compilation.measure(gradient, *network.arguments, device=device)
    # The measurement traces again.
    return {"compile_seconds": round(found.compile_seconds - trace, 3)}


def built(name: str) -> tuple[Network, int]:
    """A network of the benchmark or a deep one, and its batch."""
    if name in DEEP:
        size = resnet.Size(blocks=DEEP[name], block=resnet.BottleneckBlock)
        return resnet.network(name, size, _DEEP_BATCH, None), _DEEP_BATCH
    batch = networks.default_batch(name)
    return networks.build(name, batch), batch


def row_of(name: str, device: str, *, compiles: bool) -> dict[str, Any]:
    """The row of one network; deep ones are not compiled."""
    # JAX sets itself up once; that is not planning.
    jax.make_jaxpr(lambda x: jax.vjp(lambda y: y * y, x))(1.0)
    network, batch = built(name)
    row = timed(network, batch, device)
    if compiles and name not in DEEP:
        row |= compiled(network, device)
        row["plan_share"] = round(row["plan_seconds"] / row["compile_seconds"], 4)
    return row


def _made_by(device: str) -> dict[str, str]:
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": sys.version.split()[0],
        "jax": jax.__version__,
        "remat_opt": remat_opt.__version__,
        **compiler_version(device),
    }


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning_time", description=__doc__)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--compile", action="store_true", help="compile the plain gradient too")
    parser.add_argument("--only", nargs="+", default=(), choices=[*NETWORKS, *DEEP])
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    fresh = multiprocessing.get_context("spawn")
    for name in (name for name in (*NETWORKS, *DEEP) if name in options.only or not options.only):
        with ProcessPoolExecutor(max_workers=1, mp_context=fresh) as pool:
            row = pool.submit(row_of, name, options.device, compiles=options.compile).result()
        if options.json:
            print(json.dumps(row | _made_by(options.device)), flush=True)
        else:
            share = f", {row['plan_share']:.1%} of compiling" if "plan_share" in row else ""
            print(
                f"{row['network']:<12} {row['equations']:>6} equations"
                f" {row['vertices']:>5} vertices {row['plan_seconds']:>7.2f} s planning"
                f" ({row['plan_cpu_seconds']:.2f} s of processor){share};"
                f" {row['trace_seconds']:.2f} s tracing",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
