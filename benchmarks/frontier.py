"""Memory against recomputation on one network: plain, jax.checkpoint's policies, and ours.

    python -m benchmarks.frontier --network resnet50 --batch 64 --device h200 --json

prints one JSON object a line, each compiled for the device in a step of Adam: plain, every
default policy round the whole function and round every block, and our plans. ``--json``
left out, the same as a table.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import networks
from benchmarks.compiled import STEPS, prediction, subject, table_line
from remat_opt import planning
from remat_opt.measurement import compilation
from remat_opt.options import objective_of
from remat_opt.plan import Plan
from remat_opt.program import tracing
from remat_opt.solvers.base import Overhead

#: Each policy of ``jax.checkpoint_policies`` that takes no argument, aliases left out.
POLICIES = (
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
)
#: Budgets of ours, as shares of the way from the least peak to that of the plain gradient. Others
#: are the compiled peaks of the default policies: the same memory, our way.
SHARES = (0.03, 0.08, 0.13, 0.2, 0.25, 0.3, 0.4, 0.55, 0.7, 0.85)


def rows(
    network: str,
    batch: int | None,
    device: str,
    step: str,
    overhead: str,
    only: frozenset[str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Compiles and yields one row after the other.

    Args:
      network: name, as ``benchmarks.networks`` lists it.
      batch: examples in a batch; the network's own if None.
      device: name of the device to plan and compile for.
      step: one of ``benchmarks.compiled.STEPS``.
      overhead: what our plans count recomputation in. The table's axis is FLOPs, so that is the
        default of the command line; ``seconds`` finds plans that are faster by the device's
        roofline, but that this table can show as worse.
      only: labels of the rows to compile; all if None. Some compilers take minutes for each.

    Yields:
      ``kind`` (plain, policy, ours), ``label``, ``predicted_temporary_bytes`` (ours),
      ``temporary_bytes``, ``recomputed_flops`` and their share of a forward pass,
      ``plan_seconds`` (ours; beyond tracing) and ``compile_seconds``.
    """
    of = subject(network, batch, device, step)

    def wanted(label: str) -> bool:
        return only is None or label in only

    unplanned: dict[str, Any] = {}
    if wanted("plain"):
        unplanned = of.row("plain", "plain", of.network.loss_fn)
        yield unplanned
    defaults = []
    for label, make in of.with_policies(POLICIES):
        if wanted(label):
            defaults.append(of.row("policy", label, make()))
            yield defaults[-1]

    target = compilation.resolve_device(device)
    signature = tracing.Signature(has_aux=of.network.has_aux)
    program = tracing.trace(of.network.loss_fn, *of.network.arguments, signature=signature)
    start = time.perf_counter()
    fate = STEPS[step]
    planning.problem(program, target, measure=Overhead(overhead), gradients=fate)
    sweep_seconds = time.perf_counter() - start

    def plan_within(budget_bytes: int | None) -> Plan:
        return planning.make(
            program, target, objective_of(budget_bytes, None, overhead, gradients=fate.value)
        )

    least = plan_within(None).predicted
    room_bytes = least.plain_temporary_bytes - least.temporary_bytes
    budgets: dict[str, int | None] = {"least memory": None}
    for share in SHARES:
        budgets[f"{share:.0%} of the way up"] = round(least.temporary_bytes + share * room_bytes)
    for default in defaults:
        needed_bytes = default.get("temporary_bytes", 0)
        if (
            least.temporary_bytes
            <= needed_bytes
            < unplanned.get("temporary_bytes", needed_bytes + 1)
        ):
            budgets[f"within {default['label']}"] = needed_bytes
    seen: set[Any] = set()
    for label, budget_bytes in budgets.items():
        if not wanted(label):
            continue
        start = time.perf_counter()
        plan = plan_within(budget_bytes)
        plan_seconds = sweep_seconds + time.perf_counter() - start
        if plan.decided in seen:
            continue
        seen.add(plan.decided)
        yield of.row(
            "ours",
            label,
            of.planned(plan),
            **prediction(plan),
            plan_seconds=round(plan_seconds, 3),
        )


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frontier", description=__doc__)
    parser.add_argument("--network", default="resnet50", choices=networks.names())
    parser.add_argument("--batch", type=int, help="the network's own if left out")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--step", default="adam", choices=sorted(STEPS))
    parser.add_argument("--overhead", default="flops", choices=("flops", "seconds"))
    parser.add_argument(
        "--only",
        action="append",
        metavar="LABEL",
        help="compile this row (may be given several times); all rows if left out",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    only = frozenset(options.only) if options.only else None
    for row in rows(
        options.network, options.batch, options.device, options.step, options.overhead, only
    ):
        print(json.dumps(row) if options.json else table_line(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
