"""For every JAX default on every network: a plan of ours that is better, or none.

    python -m benchmarks.dominance --device h200 --rows results.jsonl --network densenet121

prints rows, each compiled for the device in a training step (``adam``, with parameters and state
donated, or ``gradient``, the gradient alone): the function as it is, the default policies round the
whole function and round every block, and our plans; then one summary. Without ``--network``, all
networks of both sets, one after the other; only the set ``judged`` counts as evidence.

A plan *matches* a default that is better by at most 1 % in memory and in recomputed FLOPs. It
*beats* one if it needs no more memory, recomputes no more FLOPs, and is better by at least 5 % in
one of the two. Memory is the compiler's temporary bytes. Recomputed FLOPs are those of the gradient
beyond the plain one's, and percentages refer to the default's own figures. If a default recomputes
nothing, a plan must be better in memory, without recomputation.

Our plans are chosen by compiling (``remat_opt.verification``): the least memory for at most one
forward pass; for each default, the least recomputation within the bytes that it compiles to, and
within 1 % more if no plan matches it so far; and if none of these beats a default, the least memory
for the FLOPs that it recomputes. Each choice takes at most four compiles, and knows what earlier
ones taught. Every plan compiled on the way is a row, and may match or beat any default. No plan is
compiled twice.

Every row is appended to ``--rows`` as soon as it is known, and everything the compiler says to
``--keep``: an interrupted run continues without compiling a program twice. Networks that have a
summary are skipped.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import remat_opt
from benchmarks import networks
from benchmarks.compiled import STEPS, Subject, heading, prediction, subject, table_line
from benchmarks.json_lines import JsonLines
from benchmarks.kept import Kept
from remat_opt import planning, verification
from remat_opt.measurement import compilation
from remat_opt.measurement.compilation import Measurement
from remat_opt.options import objective_of
from remat_opt.plan import Objective, Plan
from remat_opt.program import tracing
from remat_opt.solvers.base import Overhead
from remat_opt.trials import Memory
from remat_opt.units import format_bytes, format_share

#: The tuned networks of the benchmark, the quickest to compile first.
NETWORKS = (
    "lstm",
    "vit_b16",
    "unet",
    "gpt",
    "resnet50",
    "densenet121",
    "inception_v3",
    "resnet152",
)
#: The defaults: each goes around the whole function and around every block.
POLICIES = ("nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable")
#: How much better a plan must be to beat a default, as a share of the default's figure.
LEAST_GAIN = 0.05
#: By how much a matched default may be better, likewise.
MOST_LOSS = 0.01
#: By how much of a forward pass to lower the limit below a plan that exceeds it.
_SHARE_STEP = 1e-6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """By how much a plan is better than a default that it beats.

    Attributes:
      memory_share: memory saved, as a share of the default's.
      flops_share: recomputed FLOPs saved, as a share of the default's; 0 if it recomputes none.
    """

    memory_share: float
    flops_share: float


def gain(ours: dict[str, Any], default: dict[str, Any]) -> Gain | None:
    """How one row beats another, or None if it does not.

    Args:
      ours: a row with ``temporary_bytes`` and ``recomputed_flops``.
      default: likewise.
    """
    saved_bytes = default["temporary_bytes"] - ours["temporary_bytes"]
    saved_flops = default["recomputed_flops"] - ours["recomputed_flops"]
    if saved_bytes < 0 or saved_flops < 0:
        return None
    found = Gain(
        memory_share=saved_bytes / max(1, default["temporary_bytes"]),
        flops_share=saved_flops / max(1, default["recomputed_flops"]),
    )
    return found if max(found.memory_share, found.flops_share) >= LEAST_GAIN else None


def matches(ours: dict[str, Any], default: dict[str, Any]) -> bool:
    """Whether a default is better than a plan by at most 1 %, in memory and in recomputed FLOPs."""
    return all(
        ours[axis] <= default[axis] * (1 + MOST_LOSS)
        for axis in ("temporary_bytes", "recomputed_flops")
    )


def summary(rows: Sequence[dict[str, Any]], forward_flops: int) -> dict[str, Any]:
    """What the rows of one network show.

    Args:
      rows: those of one network on one device.
      forward_flops: FLOPs of a forward pass.

    Returns:
      ``defaults``: for each default row, its figures, the plan that matches it (``matched_by``, its
      label, or None), the one that beats it (``beaten_by``) with ``memory_saved_share`` and
      ``recomputation_saved_share``, and our best beside it: ``our_least_bytes_for_its_flops`` and
      ``our_least_flops_share_within_its_bytes``. ``not_matched`` and ``not_beaten``: labels.
      ``least_temporary_bytes``: of our plans that recompute at most one forward pass.
      ``prediction_error_median`` and ``prediction_error_worst``: of predicted against compiled
      bytes over our rows, as shares of the compiled. Figures without a row are None.
    """
    compiled = [row for row in rows if "error" not in row]
    ours = [row for row in compiled if row["kind"] == "ours"]
    defaults = [_beside(default, ours) for default in rows if default["kind"] == "policy"]
    within_a_pass = [row for row in ours if row["recomputed_flops"] <= forward_flops]
    least = min(within_a_pass, key=lambda row: row["temporary_bytes"], default=None)
    errors = {
        row["label"]: abs(row["predicted_temporary_bytes"] / row["temporary_bytes"] - 1)
        for row in ours
    }
    return {
        "plain_temporary_bytes": next(
            (row["temporary_bytes"] for row in compiled if row["kind"] == "plain"), None
        ),
        "defaults": defaults,
        "not_matched": [
            one["label"] for one in defaults if "error" not in one and one["matched_by"] is None
        ],
        "not_beaten": [
            one["label"] for one in defaults if "error" not in one and one["beaten_by"] is None
        ],
        "least_temporary_bytes": least and least["temporary_bytes"],
        "least_label": least and least["label"],
        "least_recomputed_flops_share": least and least["recomputed_flops_share"],
        "prediction_error_median": round(statistics.median(errors.values()), 4) if errors else None,
        "prediction_error_worst": round(max(errors.values()), 4) if errors else None,
        "prediction_error_worst_label": max(errors, key=errors.__getitem__) if errors else None,
    }


def _beside(default: dict[str, Any], ours: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A default, the plan that beats it by most, and our best within its figures."""
    if "error" in default:
        return {"label": default["label"], "error": default["error"]}
    gains = [(gain(row, default), row["label"]) for row in ours]
    # The first of those that gain as much in memory and recomputation together.
    best, by = max(
        ((one, label) for one, label in gains if one is not None),
        key=lambda pair: pair[0].memory_share + pair[0].flops_share,
        default=(None, None),
    )
    return {
        "label": default["label"],
        "temporary_bytes": default["temporary_bytes"],
        "recomputed_flops_share": default["recomputed_flops_share"],
        "matched_by": next((row["label"] for row in ours if matches(row, default)), None),
        "beaten_by": by,
        "memory_saved_share": best and round(best.memory_share, 4),
        "recomputation_saved_share": best and round(best.flops_share, 4),
        "our_least_bytes_for_its_flops": min(
            (
                row["temporary_bytes"]
                for row in ours
                if row["recomputed_flops"] <= default["recomputed_flops"]
            ),
            default=None,
        ),
        "our_least_flops_share_within_its_bytes": min(
            (
                row["recomputed_flops_share"]
                for row in ours
                if row["temporary_bytes"] <= default["temporary_bytes"]
            ),
            default=None,
        ),
    }


class _Plans:
    """Our plans for one network on one device, chosen by compiling; none is compiled twice.

    Attributes:
      plan_seconds: how long tracing the program and sweeping all budgets took.
    """

    def __init__(self, of: Subject) -> None:
        self._of = of
        self._known: dict[Hashable, Measurement | remat_opt.CompileError] = {}
        start = time.perf_counter()
        program = tracing.trace(
            of.network.loss_fn,
            *of.network.arguments,
            signature=tracing.Signature(has_aux=of.network.has_aux),
        )
        self._problem = planning.problem(
            program,
            compilation.resolve_device(of.device),
            measure=Overhead.FLOPS,
            gradients=STEPS[of.step],
        )
        self.plan_seconds = time.perf_counter() - start
        # What was learnt for one budget is known for the next, as in a user's process.
        device = compilation.resolve_device(of.device)
        self._memory = Memory(program, device, f"dominance, {of.step}")

    def objective(self, **wanted: Any) -> Objective:
        """What is asked for, with FLOPs for recomputation."""
        return objective_of(overhead="flops", gradients=STEPS[self._of.step].value, **wanted)

    def for_flops(self, most: int) -> Objective:
        """The least memory for at most this many recomputed FLOPs, as counted.

        Fused operations cost nothing in a plan's own figures, but are counted.
        """
        share = max(0.0, most / self._of.forward_flops)
        while True:
            objective = self.objective(max_overhead=share)
            chosen = planning.solve(self._problem, objective)
            plan = planning.describe(self._problem, self._problem.program, chosen, objective)
            if share == 0.0 or self._of.recomputed_flops(self._of.planned(plan)) <= most:
                return objective
            # The next one that recomputes less.
            allowed = min(share, chosen.recomputed_flops / self._of.forward_flops)
            share = max(0.0, allowed - _SHARE_STEP)

    def rows(self, label: str, objective: Objective) -> list[dict[str, Any]]:
        """A row for each plan newly compiled for an objective.

        If no plan is found, the last row says why.
        """
        found: list[dict[str, Any]] = []

        def compiled(plan: Plan) -> Measurement:
            if plan.decided not in self._known:
                row, self._known[plan.decided] = self._of.compiled(
                    "ours",
                    f"{label}, try {len(found) + 1}",
                    self._of.planned(plan),
                    **prediction(plan),
                )
                found.append(row)
            known = self._known[plan.decided]
            if isinstance(known, remat_opt.CompileError):
                raise known
            return known

        try:
            verification.choose(self._problem, objective, compiled, self._memory)
        except remat_opt.RematError as error:
            found.append({**self._of.heading("ours", label), "error": str(error)})
        return found


def rows(
    network: str,
    batch: int | None,
    device: str,
    step: str,
    known: Sequence[dict[str, Any]] = (),
    kept: Kept | None = None,
) -> Iterator[dict[str, Any]]:
    """Compiles and yields one row after the other, the summary last.

    Args:
      network: name, as ``benchmarks.networks`` lists it.
      batch: examples in a batch; the network's own if None.
      device: name of the device to plan and compile for.
      step: one of ``benchmarks.compiled.STEPS``.
      known: rows of an earlier run, from which those of the plain step and of defaults are taken.
      kept: where to look up first what the compiler says.

    Yields:
      The rows of ``benchmarks.compiled``, their ``kind`` ``plain``, ``policy`` or ``ours``, then
      one of the kind ``summary``: see ``summary``, and ``plan_seconds``.
    """
    of = subject(network, batch, device, step, kept)
    found: list[dict[str, Any]] = []
    defaults: list[tuple[str, str, Callable[[], Callable[..., Any]]]]
    defaults = [("plain", "plain", lambda: of.network.loss_fn)]
    defaults += [("policy", label, make) for label, make in of.with_policies(POLICIES)]
    for kind, label, make in defaults:
        wanted = of.heading(kind, label)
        same = (row for row in known if wanted.items() <= row.items())
        found.append(next(same, {}) or of.row(kind, label, make()))
        yield found[-1]
    plans = _Plans(of)
    compiled_defaults = [default for default in found[1:] if "error" not in default]

    def taken(label: str, objective: Objective) -> Iterator[dict[str, Any]]:
        for row in plans.rows(label, objective):
            found.append(row)
            yield row

    yield from taken("least memory", plans.objective())
    for default in compiled_defaults:
        budget = plans.objective(budget=default["temporary_bytes"])
        yield from taken(f"within {default['label']}", budget)
    for default in compiled_defaults:
        if default["label"] in summary(found, of.forward_flops)["not_matched"]:
            # A plan may match with this much more.
            most = plans.objective(budget=int(default["temporary_bytes"] * (1 + MOST_LOSS)))
            yield from taken(f"near {default['label']}", most)
    for default in compiled_defaults:
        if default["label"] in summary(found, of.forward_flops)["not_beaten"]:
            label = f"FLOPs of {default['label']}"
            yield from taken(label, plans.for_flops(default["recomputed_flops"]))
    yield {
        **of.heading("summary", network),
        "plan_seconds": round(plans.plan_seconds, 3),
        **summary(found, of.forward_flops),
    }


def _summary_lines(of: dict[str, Any]) -> Iterator[str]:
    for one in of["defaults"]:
        if "error" in one:
            said = "does not compile"
        elif one["beaten_by"] is None:
            said = f"matched by {one['matched_by']}" if one["matched_by"] else _missed_by(one)
        else:
            said = (
                f"beaten by {one['beaten_by']}: memory less by "
                f"{format_share(one['memory_saved_share'])}, recomputation by "
                f"{format_share(one['recomputation_saved_share'])}"
            )
        yield f"{of['network']}, {one['label']}: {said}"
    if of["least_temporary_bytes"] is not None:
        yield (
            f"{of['network']}: at least {format_bytes(of['least_temporary_bytes'])} for at most "
            f"one pass; predictions off by {format_share(of['prediction_error_median'])} in the "
            f"median, {format_share(of['prediction_error_worst'])} at worst"
        )


def _missed_by(one: dict[str, Any]) -> str:
    """How much more our best plan within a default's bytes recomputes, in forward passes."""
    ours, its = one["our_least_flops_share_within_its_bytes"], one["recomputed_flops_share"]
    if ours is None:
        return "NOT MATCHED: none of our plans is within its bytes"
    return (
        f"NOT MATCHED: in its bytes ours recomputes {format_share(ours)}, not {format_share(its)}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dominance", description=__doc__)
    parser.add_argument(
        "--network",
        nargs="+",
        default=(*NETWORKS, *networks.JUDGED),
        choices=networks.names(),
        metavar="NAME",
        help="those of both sets if left out",
    )
    parser.add_argument("--batch", type=int, help="each network's own if left out")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--step", default="adam", choices=sorted(STEPS))
    parser.add_argument("--rows", type=Path, help="file to append rows to, and to go on from")
    parser.add_argument("--keep", type=Path, help="file of what the compiler says")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    kept = None if options.keep is None else Kept(options.keep)
    on_file = None if options.rows is None else JsonLines(options.rows)
    known = list(on_file.rows) if on_file else []
    summaries = []
    for network in options.network:
        case = network, options.batch, options.device, options.step
        wanted = heading(*case, "summary", network)
        done = next((row for row in known if wanted.items() <= row.items()), None)
        found = iter([done]) if done else rows(*case, known, kept)
        for row in found:
            if on_file is not None and row not in known:
                on_file.append(row)
            if options.json:
                print(json.dumps(row), flush=True)
            elif row["kind"] == "summary":
                print(*_summary_lines(row), sep="\n", flush=True)
            else:
                print(table_line(row), flush=True)
            if row["kind"] == "summary":
                summaries.append(row)
    for line in _totals(summaries):
        print(json.dumps(line) if options.json else _totals_line(line), flush=True)
    return 0


def _totals(summaries: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """For each set, how many defaults there are, how many are matched, and how many beaten."""
    for name, group in itertools.groupby(
        sorted(summaries, key=lambda row: row["set"]), key=lambda row: row["set"]
    ):
        defaults = [one for row in group for one in row["defaults"] if "error" not in one]
        yield {
            "kind": "total",
            "set": name,
            "defaults": len(defaults),
            "matched": sum(one["matched_by"] is not None for one in defaults),
            "beaten": sum(one["beaten_by"] is not None for one in defaults),
        }


def _totals_line(row: dict[str, Any]) -> str:
    return (
        f"{row['set']}: of {row['defaults']} defaults {row['matched']} are matched, "
        f"{row['beaten']} beaten"
    )


if __name__ == "__main__":
    sys.exit(main())
