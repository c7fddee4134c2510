"""Memory against recomputation on one network: plain, jax.checkpoint's policies, and ours.

    python -m benchmarks.frontier --network resnet50 --batch 64 --device h200 --json

prints one JSON object a line, each compiled for the device: the plain gradient, every
default policy round the whole function and round every block, and our plans. ``--json``
left out, the same as a table.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

import remat_opt
from benchmarks import networks
from remat_opt import flop_count, measurement, planning, tracing
from remat_opt.api import objective_of
from remat_opt.plan import Plan
from remat_opt.solvers.base import Overhead
from remat_opt.units import format_bytes, format_share

#: Each policy of ``jax.checkpoint_policies`` that takes no argument, aliases left out.
POLICIES = (
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
)
#: Budgets of ours, as shares of the way from the least peak to that of the plain gradient.
#: Further ones are the compiled peaks of the default policies: the same memory, our way.
STEPS = (0.03, 0.08, 0.13, 0.2, 0.25, 0.3, 0.4, 0.55, 0.7, 0.85)


def rows(
    network: str, batch: int, device: str, overhead: str, only: frozenset[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Compiles and yields one row after the other.

    Args:
      network: name, as ``benchmarks.networks`` lists it.
      batch: examples in a batch.
      device: name of the device to plan and compile for.
      overhead: what our plans count recomputation in. The table's axis is FLOPs, so that
        is the default of the command line; ``seconds`` finds plans that are faster by the
        device's roofline, and that this table can show as worse.
      only: labels of the rows to compile; all if None. Some compilers take minutes for each.

    Yields:
      ``kind`` (plain, policy, ours), ``label``, ``predicted_temporary_bytes`` (ours),
      ``temporary_bytes``, ``recomputed_flops_share`` of a forward pass, ``plan_seconds``
      (ours; beyond tracing) and ``compile_seconds``.
    """
    plain = networks.build(network, batch)
    counting = {"has_aux": plain.has_aux}
    forward = flop_count.forward_flops(plain.loss_fn, *plain.arguments)
    unchanged = flop_count.gradient_flops(plain.loss_fn, *plain.arguments, **counting)

    def wanted(label: str) -> bool:
        return only is None or label in only

    def row(kind: str, label: str, loss_fn: Callable[..., Any], **more: Any) -> dict[str, Any]:
        given: dict[str, Any] = {
            "network": network,
            "batch": batch,
            "device": device,
            "jax": jax.__version__,
            "kind": kind,
            "label": label,
            **more,
        }
        flops = flop_count.gradient_flops(loss_fn, *plain.arguments, **counting)
        given["recomputed_flops_share"] = round((flops - unchanged) / forward, 4)
        try:
            found = measurement.measure(
                jax.grad(loss_fn, has_aux=plain.has_aux), *plain.arguments, device=device
            )
        except remat_opt.CompileError as error:
            return {**given, "error": str(error)}
        return {
            **given,
            "temporary_bytes": found.temporary_bytes,
            "compile_seconds": round(found.compile_seconds, 2),
        }

    unplanned: dict[str, Any] = {}
    if wanted("plain"):
        unplanned = row("plain", "plain", plain.loss_fn)
        yield unplanned
    defaults = []
    for name in POLICIES:
        if wanted(f"{name}, whole"):
            policy = getattr(jax.checkpoint_policies, name)
            defaults.append(
                row("policy", f"{name}, whole", jax.checkpoint(plain.loss_fn, policy=policy))
            )
            yield defaults[-1]
    for name in POLICIES:
        if wanted(f"{name}, per block"):
            wrapped = networks.build(network, batch, block_policy=name)
            defaults.append(row("policy", f"{name}, per block", wrapped.loss_fn))
            yield defaults[-1]

    target = measurement.resolve_device(device)
    signature = tracing.Signature(has_aux=plain.has_aux)
    program = tracing.trace(plain.loss_fn, *plain.arguments, signature=signature)
    start = time.perf_counter()
    planning.problem(program, target, measure=Overhead(overhead))
    sweep_seconds = time.perf_counter() - start

    def plan_within(budget_bytes: int | None) -> Plan:
        return planning.make(program, target, objective_of(budget_bytes, None, overhead))

    least = plan_within(None).predicted
    room_bytes = least.plain_temporary_bytes - least.temporary_bytes
    budgets: dict[str, int | None] = {"least memory": None}
    for step in STEPS:
        budgets[f"{step:.0%} of the way up"] = round(least.temporary_bytes + step * room_bytes)
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
        if plan.stages in seen:
            continue
        seen.add(plan.stages)
        yield row(
            "ours",
            label,
            remat_opt.apply_plan(plan, plain.loss_fn, has_aux=plain.has_aux),
            budget_bytes=plan.budget_bytes,
            predicted_temporary_bytes=plan.predicted.temporary_bytes,
            predicted_recomputed_flops_share=round(plan.predicted.recomputed_share, 4),
            predicted_overhead_share=round(plan.predicted.overhead_share, 4),
            regions=len(plan.stages),
            plan_seconds=round(plan_seconds, 3),
        )


def _table_line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['label']:<48} {row['error'][:60]}"
    predicted = row.get("predicted_temporary_bytes")
    return (
        f"{row['label']:<48} {format_bytes(row['temporary_bytes']):>10} "
        f"{format_bytes(predicted) if predicted else '':>10} "
        f"{format_share(row['recomputed_flops_share']):>8} {row['compile_seconds']:>6.1f} s"
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frontier", description=__doc__)
    parser.add_argument("--network", default="resnet50", choices=networks.names())
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="h200")
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
    for row in rows(options.network, options.batch, options.device, options.overhead, only):
        print(json.dumps(row) if options.json else _table_line(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
