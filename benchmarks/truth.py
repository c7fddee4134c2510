"""Predictions for a training step compared with what it compiles to, on both sets of networks.

    python -m benchmarks.truth --device h200 --json --rows benchmarks/results/truth_h200.jsonl

plans every network for five budgets, from the least memory to most of what the unchanged function
takes, without compiling, and compiles each plan in the step: ``adam``, with parameters and state
donated, or ``gradient``, the gradient alone. With ``--loop`` each budget is planned by compiling
(``verify="compile"``): with ``--loop step`` the step as its user writes it, with optax's Adam, as
if the step had been given to ``make_plan``; with ``--loop loss`` the planner's own step, as for a
decorated loss. The returned plan promises ``compiled_bytes``, and what it takes when it is compiled
once more, in the user's step, is ``step_bytes``. ``predicted_bytes`` is what was predicted, by what
was learnt, before the returned plan was compiled, and ``model_bytes`` the prediction without any of
that. A summary is printed for each set, separately for rows with each loop: the median of the
errors, the ninth decile and the worst. Rules were found on the networks of the set ``tuned``; only
``judged`` counts as evidence.

Each row is appended to ``--rows`` as soon as it is known, and existing ones with the same version
of JAX are not computed again: an interrupted run continues. With ``--stages`` rows also hold the
plans, for ``benchmarks.ablation``. ``--option NAME=VALUE`` is a compiler option, such as
``xla_memory_scheduler=bfs``, with which XLA for TPU keeps to the order of the program.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

import remat_opt
from benchmarks import networks
from benchmarks.compiled import STEPS, subject
from benchmarks.compiled import Subject as UsersStep
from benchmarks.dominance import NETWORKS
from benchmarks.json_lines import JsonLines
from remat_opt import planning, verification
from remat_opt.device import Device, get_device
from remat_opt.measurement.compilation import Measurement
from remat_opt.plan import Objective, Plan
from remat_opt.program import tracing
from remat_opt.program.tracing import Signature
from remat_opt.units import format_bytes

#: Budgets between the least memory, 0, and what the unchanged function takes, 1, on a logarithmic
#: scale.
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8)
#: What is given to be planned by compiling: the loss alone, or the step that calls it.
LOOPS = ("loss", "step")
#: The predictions in a row, and what they are called in words.
PREDICTED = {
    "predicted_bytes": "",
    "compiled_bytes": " as promised",
    "model_bytes": " by the model alone",
}


_WHOSE = {"loss": "the planner's", "step": "the user's"}


class Rows:
    """Rows on file, each written as soon as it is known.

    Args:
      path: a file of ``json_lines``; None to keep none.
    """

    def __init__(self, path: Path | None) -> None:
        self._lines = JsonLines(path) if path else None
        self._known = {self._key(row): row for row in (self._lines.rows if self._lines else ())}

    @staticmethod
    def _key(row: dict[str, Any]) -> tuple[Any, ...]:
        names = ("network", "device", "jax", "step", "loop", "share")
        return (*(row[name] for name in names), *row.get("options", ()))

    def find(self, heading: dict[str, Any]) -> dict[str, Any] | None:
        """The row with this heading, if present."""
        return self._known.get(self._key(heading))

    def put(self, row: dict[str, Any]) -> dict[str, Any]:
        """Writes a row."""
        self._known[self._key(row)] = row
        if self._lines is not None:
            self._lines.append(row)
        return row


class Subject:
    """One network in one step on one device.

    Args:
      name: the network's name.
      device: the device.
      step: one of ``STEPS``.
      with_stages: whether rows hold the plans.
    """

    def __init__(self, name: str, device: Device, step: str, *, with_stages: bool = False) -> None:
        self._with_stages = with_stages
        network = networks.build(name, networks.default_batch(name))
        self._device = device
        self._name, self._step, self._fate = name, step, STEPS[step]
        self._arguments = jax.tree.leaves(network.arguments)
        program = tracing.trace(
            network.loss_fn, *network.arguments, signature=Signature(has_aux=network.has_aux)
        )
        self.problem = planning.problem(program, self._device, gradients=self._fate)
        self._objective = Objective(gradients=self._fate)
        self.least_bytes = planning.solve(self.problem, self._objective).peak_bytes

    def objective(self, share: float) -> Objective:
        """What is asked for at a share of the way from the least memory to the unchanged one."""
        if not share:
            return self._objective
        most = self.problem.unchanged.peak_bytes
        budget_bytes = round(self.least_bytes ** (1 - share) * most**share)
        return Objective(budget_bytes=budget_bytes, gradients=self._fate)

    def compiled(self, plan: Plan, *, with_buffers: bool = False) -> Measurement:
        """What a plan compiles to in the step; with what is alive when, if asked."""
        return verification.measure_plan(
            plan, self.problem.program, self._arguments, self._device, with_buffers=with_buffers
        )

    def row(self, share: float | None, loop: str | None) -> dict[str, Any]:
        """What is predicted and what compiles; without a share, for the unchanged function.

        Args:
          share: says what is asked for, see ``objective``.
          loop: one of ``LOOPS``; None to choose without compiling.
        """
        objective = self.objective(share or 0.0)
        if share is None or loop is None:
            of = self.problem
            chosen = of.unchanged if share is None else planning.solve(of, objective)
            plan = planning.describe(self.problem, self.problem.program, chosen, objective)
            return self._figures(plan, self.compiled(plan))
        compiles = 0

        def compiled(plan: Plan) -> Measurement:
            nonlocal compiles
            compiles += 1
            if loop == "step":
                return self._user.measure(self._user.planned(plan), with_buffers=True)
            return self.compiled(plan, with_buffers=True)

        try:
            plan = verification.choose(self.problem, objective, compiled)
        except remat_opt.BudgetError as error:
            return {"refused": str(error), "compiles": compiles}
        assert plan.measured is not None, "it was chosen by compiling"
        found = self._figures(plan, plan.measured)
        return {**found, "compiles": compiles, "step_bytes": self._step_bytes(plan)}

    def _step_bytes(self, plan: Plan) -> int:
        """What a plan compiles to in the step as its user writes it, with optax."""
        return self._user.measure(self._user.planned(plan)).temporary_bytes

    @functools.cached_property
    def _user(self) -> UsersStep:
        """The network in that step."""
        return subject(self._name, None, self._device.name, self._step)

    def _figures(self, plan: Plan, found: Measurement) -> dict[str, Any]:
        said = plan.predicted
        stages = list(map(dataclasses.asdict, plan.stages)) if self._with_stages else None
        return {
            "budget_bytes": plan.budget_bytes,
            "model_bytes": said.model_bytes,
            "predicted_bytes": said.temporary_bytes,
            "compiled_bytes": found.temporary_bytes,
            "recomputed_flops_share": round(said.recomputed_share, 4),
            "overhead_share": round(said.overhead_share, 4),
            "compile_seconds": round(found.compile_seconds, 1),
            **({} if stages is None else {"stages": stages}),
        }


def rows(
    names: Sequence[str],
    device: Device,
    steps: Sequence[str],
    on_file: Rows,
    *,
    loop: str | None = None,
    with_stages: bool = False,
) -> Iterator[dict[str, Any]]:
    """All rows of some networks."""
    options = list(device.option_words)
    for name in names:
        for step in steps:
            of: Subject | None = None
            for share in (None, *SHARES):
                heading = {
                    "set": networks.set_of(name),
                    "network": name,
                    "device": device.name,
                    "jax": jax.__version__,
                    "step": step,
                    "loop": None if share is None else loop,
                    "share": share,
                    **({"options": options} if options else {}),
                }
                found = on_file.find(heading)
                if found is None:
                    of = of or Subject(name, device, step, with_stages=with_stages)
                    try:
                        figures = of.row(share, loop)
                    except remat_opt.CompileError as error:
                        figures = {"error": str(error)}
                    found = on_file.put({**heading, **figures})
                yield found


def error(row: dict[str, Any], predicted: str = "predicted_bytes") -> float:
    """By what share of the compiled size a prediction is off; negative if it is too small.

    What a plan promises once it was compiled, ``compiled_bytes``, is compared with ``step_bytes``.
    """
    compiled = "step_bytes" if predicted == "compiled_bytes" else "compiled_bytes"
    return float(row[predicted] / row[compiled] - 1)


def summaries(found: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Errors of plans by set, step and loop, without the unchanged functions.

    For those chosen by compiling, there are also the errors of what the plans promise
    (``predicted`` is ``compiled_bytes``) and of the model alone (``model_bytes``), how many budgets
    were met, refused and missed in the step, and the most compiles that any took.
    """
    for name, step, loop in itertools.product(
        ("idioms", "tuned", "judged", "public"), STEPS, (None, *LOOPS)
    ):
        rows_here = [
            row
            for row in found
            if (row["set"], row["step"], row["loop"]) == (name, step, loop)
            and row["share"] is not None
        ]
        compiled = [row for row in rows_here if "compiled_bytes" in row]
        for predicted in PREDICTED if loop else ("predicted_bytes",):
            errors = sorted(abs(error(row, predicted)) for row in compiled if predicted in row)
            if not errors:
                continue
            summary = {
                "kind": "summary",
                "set": name,
                "step": step,
                "loop": loop,
                "predicted": predicted,
                "plans": len(errors),
                "median": round(statistics.median(errors), 4),
                "ninth_decile": round(errors[int(0.9 * (len(errors) - 1) + 0.5)], 4),
                "worst": round(errors[-1], 4),
            }
            if loop:
                with_budget = [row for row in compiled if row["budget_bytes"] is not None]
                met = sum(row["step_bytes"] <= row["budget_bytes"] for row in with_budget)
                summary["met"], summary["missed"] = met, len(with_budget) - met
                summary["refused"] = sum("refused" in row for row in rows_here)
                summary["most_compiles"] = max(row.get("compiles", 0) for row in rows_here)
            yield summary


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints rows and summaries."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.truth", description=__doc__)
    parser.add_argument("--device", default="h200", help="to plan and compile for")
    parser.add_argument("--network", action="append", help="one of them; all if left out")
    parser.add_argument("--step", action="append", choices=sorted(STEPS), help="both if left out")
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE, to the compiler")
    parser.add_argument("--loop", choices=LOOPS, help="choose by compiling that")
    parser.add_argument("--stages", action="store_true", help="put plans into the rows")
    parser.add_argument("--rows", type=Path, help="file to append rows to, and to go on from")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    given = parser.parse_args(arguments)
    found = []
    names = given.network or [*NETWORKS, *networks.JUDGED]
    for row in rows(
        names,
        get_device(given.device).told(dict(one.split("=", 1) for one in given.option)),
        given.step or list(STEPS),
        Rows(given.rows),
        loop=given.loop,
        with_stages=given.stages,
    ):
        found.append(row)
        print(json.dumps(row) if given.json else _line(row), flush=True)
    for summary in summaries(found):
        print(json.dumps(summary) if given.json else _summary_line(summary), flush=True)


def _line(row: dict[str, Any]) -> str:
    where = "as it is" if row["share"] is None else f"{row['share']:.1f}"
    start = f"{row['network']:<20} {row['step']:<9} {where:<9}"
    if "compiled_bytes" not in row:
        return f"{start} {row.get('error', row.get('refused', ''))[:60]}"
    predicted, compiled = (format_bytes(row[key]) for key in ("predicted_bytes", "compiled_bytes"))
    share = row["recomputed_flops_share"]
    line = f"{start} {predicted:>11} {compiled:>11} {error(row):+7.1%} {share:7.3f}"
    if not row["loop"]:
        return line
    promised, modelled = error(row, "compiled_bytes"), error(row, "model_bytes")
    return (
        f"{line} {promised:+7.1%} as promised {modelled:+7.1%} by the model; "
        f"{row['compiles']} compiles"
    )


def _summary_line(row: dict[str, Any]) -> str:
    by = PREDICTED[row["predicted"]]
    loop = f", with the loop in {_WHOSE[row['loop']]} step" if row["loop"] else ""
    line = (
        f"{row['set']}, {row['step']}{loop}{by}: {row['plans']} plans, median "
        f"{row['median']:.1%}, ninth decile {row['ninth_decile']:.1%}, worst {row['worst']:.1%}"
    )
    if not row["loop"] or by:
        return line
    return (
        f"{line}; budgets met {row['met']}, missed {row['missed']}, refused {row['refused']}; at "
        f"most {row['most_compiles']} compiles"
    )


if __name__ == "__main__":
    main()
