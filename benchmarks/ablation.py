"""What each compiler rule earns: errors and plans with and without it.

    python -m benchmarks.truth --device h200 --step adam --stages --rows plans.jsonl
    python -m benchmarks.ablation --device h200 --plans plans.jsonl --json

The first command compiles plans. The second predicts each of them again with one rule switched off
(``remat_opt.compilers.rules``), which compiles nothing. For every rule and both sets it prints: the
median and the ninth decile of the errors without it, beside those with all rules; how many networks
it helps and how many it hurts, by at least half a per cent of the mean error; and what the least
plan chosen without it takes, by the model with all rules, beside the one chosen with it (the mean
over networks, and how many change). With ``--errors`` no plans are chosen, which takes minutes
instead of hours.

A rule of kind ``rewrite`` changes what is compiled. With ``--compile``, each recorded plan that
such a rule changes is compiled without it, and the result is compared: the mean, and how many
networks are helped and hurt. Rows are appended to ``--rows``, and existing ones are not computed
again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import jax

from benchmarks import networks
from benchmarks.compiled import STEPS
from benchmarks.json_lines import JsonLines
from remat_opt import inner, planning, verification
from remat_opt.compilers.compiler import Compiler, Rules
from remat_opt.compilers.model import Model
from remat_opt.compilers.rewrites import rewrites
from remat_opt.compilers.rules import RULES
from remat_opt.device import get_device
from remat_opt.plan import Objective, Plan
from remat_opt.program import tracing
from remat_opt.program.linearization import linearize
from remat_opt.program.record import Linearization, Program
from remat_opt.program.tracing import Signature
from remat_opt.schedule import Region, Schedule, Stage
from remat_opt.solvers.base import judge

#: A network is helped or hurt by a rule if its mean error changes by more than this.
MATTERS = 0.005


@lru_cache(maxsize=1)
def traced(name: str) -> tuple[Program, Linearization, tuple[Any, ...]]:
    """A network's program, what its backward steps read, and its flat arguments."""
    network = networks.build(name, networks.default_batch(name))
    signature = Signature(has_aux=network.has_aux)
    program = tracing.trace(network.loss_fn, *network.arguments, signature=signature)
    return program, linearize(program), tuple(jax.tree.leaves(network.arguments))


def stages_of(row: Mapping[str, Any]) -> tuple[Stage, ...]:
    """The plan of a row."""
    return tuple(map(_stage, row["stages"]))


def _stage(given: Mapping[str, Any]) -> Stage:
    return Stage(
        roots=tuple(given["roots"]),
        kept=tuple(given["kept"]),
        checkpointed=given["checkpointed"],
        inside=tuple(map(_stage, given["inside"])),
    )


def schedule_of(expected: Model, stages: Sequence[Stage]) -> Schedule:
    """A plan as a schedule of a model that may have other vertices.

    A vertex that the plan does not know goes where its first reader is.
    """
    places: dict[int, tuple[int, ...]] = {}

    def note(chain: Sequence[Stage], path: tuple[int, ...]) -> None:
        for number, stage in enumerate(chain):
            places.update(dict.fromkeys(stage.roots, (*path, number)))
            note(stage.inside, (*path, number))

    note(stages, ())
    place_of: dict[int, tuple[int, ...]] = {}
    readers = expected.graph.successors()
    last = max(places.values())
    for vertex in reversed(range(len(expected.roots))):
        known = places.get(expected.roots[vertex])
        place_of[vertex] = known or min((place_of[one] for one in readers[vertex]), default=last)
    return Schedule(regions=_regions(expected, stages, place_of, ()))


def _regions(
    expected: Model,
    chain: Sequence[Stage],
    place_of: Mapping[int, tuple[int, ...]],
    path: tuple[int, ...],
) -> tuple[Region, ...]:
    found = []
    for number, stage in enumerate(chain):
        here = (*path, number)
        own = tuple(sorted(v for v, place in place_of.items() if place[: len(here)] == here))
        if own:
            kept = frozenset(stage.kept)
            found.append(
                Region(
                    vertices=own,
                    kept=tuple(v for v in own if expected.roots[v] in kept),
                    checkpointed=stage.checkpointed,
                    inside=_regions(expected, stage.inside, place_of, here),
                )
            )
    return tuple(found)


class Subject:
    """One network on one device: recorded plans and models.

    Args:
      name: the network's name.
      device: name of the device.
      step: one of ``benchmarks.truth.STEPS``.
      plans: rows of ``benchmarks.truth`` that hold their plans.
    """

    def __init__(
        self, name: str, device: str, step: str, plans: Sequence[Mapping[str, Any]]
    ) -> None:
        self.name, self.plans = name, plans
        self._device, self._fate = get_device(device), STEPS[step]

    def expected(self, off: str = "") -> Model:
        """The model with all rules but one."""
        program, linearization, _ = traced(self.name)
        without = frozenset({off} - {""})
        compiler = Compiler(device=self._device, off=without)
        return inner.model(program, linearization, compiler, self._fate)

    def errors(self, off: str = "") -> list[float]:
        """By what share of the compiled size predictions are off, for each recorded plan."""
        expected = self.expected(off)
        found = []
        for row in self.plans:
            if row["share"] is None:
                predicted = expected.unchanged_peak_bytes()
            else:
                predicted = expected.peak_bytes(schedule_of(expected, stages_of(row)))
            found.append(predicted / row["compiled_bytes"] - 1)
        return found

    def least(self, off: str = "") -> int:
        """What the least plan chosen without a rule takes, by the model with all of them."""
        program, _, _ = traced(self.name)
        objective = Objective(gradients=self._fate)
        of = planning.problem(
            program, self._device, gradients=self._fate, off=frozenset({off} - {""})
        )
        chosen = planning.solve(of, objective)
        full = self._full
        return full.peak_bytes(schedule_of(full, of.model.stages(chosen.schedule)))

    @cached_property
    def _full(self) -> Model:
        """The model with all rules, which judges the plans of all others."""
        return self.expected()

    def changes(self, rule: str, row: Mapping[str, Any]) -> bool:
        """Whether a rule of kind ``rewrite`` changes what is written for a recorded plan."""
        program, _, _ = traced(self.name)
        recomputes = any(stage.checkpointed for stage in stages_of(row))
        with_it, without = (
            rewrites(program, Rules(platform=self._device.platform, off=off), recomputes=recomputes)
            for off in (frozenset[str](), frozenset({rule}))
        )
        return with_it != without

    def compiled_without(self, rule: str, row: Mapping[str, Any]) -> int:
        """What a recorded plan compiles to with a rule switched off, in bytes."""
        program, _, arguments = traced(self.name)
        return verification.measure_plan(
            self._plan(row), program, arguments, self._device, off=frozenset({rule})
        ).temporary_bytes

    def _plan(self, row: Mapping[str, Any]) -> Plan:
        program, _, _ = traced(self.name)
        objective = Objective(gradients=self._fate)
        of = planning.problem(program, self._device, gradients=self._fate)
        schedule = schedule_of(of.model, stages_of(row))
        plan = planning.describe(of, program, judge(of.model.graph, schedule), objective)
        return dataclasses.replace(plan, stages=stages_of(row))


class Table:
    """Figures by rule and network, each written as soon as it is known.

    Args:
      device: name of the device.
      step: one of ``benchmarks.truth.STEPS``.
      plans: rows of ``benchmarks.truth`` that hold their plans.
      path: a file of ``json_lines``; None to keep none.
      choosing: whether to choose plans without a rule.
    """

    def __init__(
        self,
        device: str,
        step: str,
        plans: Iterable[Mapping[str, Any]],
        path: Path | None,
        *,
        choosing: bool = True,
    ) -> None:
        self._device, self._step, self._choosing = device, step, choosing
        self._plans: dict[str, list[Mapping[str, Any]]] = {}
        for row in plans:
            if row["device"] == device and row["step"] == step and "compiled_bytes" in row:
                self._plans.setdefault(row["network"], []).append(row)
        self._lines = JsonLines(path) if path else None
        self._known = {self._key(row): row for row in (self._lines.rows if self._lines else ())}

    @staticmethod
    def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("kind", "device", "step", "network", "rule"))

    def rows(self, rules: Sequence[str], *, compiling: bool) -> Iterator[dict[str, Any]]:
        """All rows: for each network, one with all rules, and one for each rule switched off."""
        for name, plans in self._plans.items():
            subject = Subject(name, self._device, self._step, plans)
            for rule in ("", *rules):
                yield self._row("predicted", subject, rule)
                if compiling and rule and RULES[rule].kind == "rewrite":
                    yield self._row("compiled", subject, rule)

    def _row(self, kind: str, subject: Subject, rule: str) -> dict[str, Any]:
        heading = {
            "kind": kind,
            "set": networks.set_of(subject.name),
            "device": self._device,
            "step": self._step,
            "network": subject.name,
            "rule": rule,
        }
        found = self._known.get(self._key(heading))
        lacks_plan = kind == "predicted" and self._choosing and "least_bytes" not in (found or {})
        if found is None or lacks_plan:
            if kind == "predicted":
                figures: dict[str, Any] = {
                    "errors": [round(one, 4) for one in subject.errors(rule)]
                }
                if self._choosing:
                    figures["least_bytes"] = subject.least(rule)
            else:
                figures = {
                    "ratios": [
                        round(subject.compiled_without(rule, row) / row["compiled_bytes"], 4)
                        for row in subject.plans
                        if row["share"] is not None and subject.changes(rule, row)
                    ]
                }
            found = {**heading, **figures}
            self._known[self._key(heading)] = found
            if self._lines is not None:
                self._lines.append(found)
        return found


def summaries(found: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """For each rule and set, what switching it off does."""
    for name in ("idioms", "tuned", "judged"):
        with_all = {
            row["network"]: row
            for row in found
            if row["kind"] == "predicted" and row["set"] == name and not row["rule"]
        }
        if not with_all:
            continue
        yield {"kind": "summary", "set": name, "rule": "", **_spread(with_all.values())}
        for rule in dict.fromkeys(row["rule"] for row in found if row["rule"]):
            own = {
                (row["kind"], row["network"]): row
                for row in found
                if row["rule"] == rule and row["set"] == name
            }
            without = {n: row for (kind, n), row in own.items() if kind == "predicted"}
            gains = [_mean(row) - _mean(with_all[n]) for n, row in without.items()]
            sizes = [
                row["least_bytes"] / with_all[n]["least_bytes"] - 1
                for n, row in without.items()
                if "least_bytes" in row and "least_bytes" in with_all[n]
            ]
            ratios = [
                statistics.mean(row["ratios"])
                for (kind, _), row in own.items()
                if kind == "compiled" and row["ratios"]
            ]
            yield {
                "kind": "summary",
                "set": name,
                "rule": rule,
                **_spread(without.values()),
                "helped": sum(gain > MATTERS for gain in gains),
                "hurt": sum(gain < -MATTERS for gain in gains),
                "least_changed": sum(abs(size) > MATTERS for size in sizes),
                "least_growth": round(statistics.mean(sizes), 4) if sizes else None,
                "compiled_growth": round(statistics.mean(ratios) - 1, 4) if ratios else None,
                "compiled_helped": sum(ratio > 1 + MATTERS for ratio in ratios),
                "compiled_hurt": sum(ratio < 1 - MATTERS for ratio in ratios),
            }


def _mean(row: Mapping[str, Any]) -> float:
    return statistics.mean(map(abs, row["errors"]))


def _spread(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    errors = sorted(abs(error) for row in rows for error in row["errors"])
    return {
        "plans": len(errors),
        "median": round(statistics.median(errors), 4),
        "ninth_decile": round(errors[int(0.9 * (len(errors) - 1) + 0.5)], 4),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints rows and summaries."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ablation", description=__doc__)
    parser.add_argument("--device", default="h200", help="of the plans")
    parser.add_argument("--step", default="adam", choices=sorted(STEPS), help="of the plans")
    parser.add_argument("--plans", type=Path, required=True, help="rows of truth that hold plans")
    parser.add_argument("--rule", action="append", choices=sorted(RULES), help="all if left out")
    parser.add_argument("--errors", action="store_true", help="choose no plans without the rules")
    parser.add_argument("--compile", action="store_true", help="compile without rewriting rules")
    parser.add_argument("--rows", type=Path, help="file to append rows to, and to go on from")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    given = parser.parse_args(arguments)
    platform = get_device(given.device).platform
    rules = given.rule or [name for name, rule in RULES.items() if platform in rule.platforms]
    plans = [row for row in JsonLines(given.plans).rows if "stages" in row]
    table = Table(given.device, given.step, plans, given.rows, choosing=not given.errors)
    found = []
    for row in table.rows(rules, compiling=given.compile):
        found.append(row)
        if given.json:
            print(json.dumps(row), flush=True)
    for summary in summaries(found):
        print(json.dumps(summary) if given.json else _line(summary), flush=True)


def _line(row: Mapping[str, Any]) -> str:
    start = (
        f"{row['set']:<7} {row['rule'] or 'all rules':<22} {row['plans']:>4} plans "
        f"{row['median']:>7.1%} {row['ninth_decile']:>7.1%}"
    )
    if not row["rule"]:
        return start
    said = f"{start}  helps {row['helped']:>2}, hurts {row['hurt']:>2}"
    if row["least_growth"] is not None:
        said += f"; least plan {row['least_growth']:+.1%} in {row['least_changed']:>2}"
    if row["compiled_growth"] is not None:
        said += (
            f"; compiled {row['compiled_growth']:+.1%}, "
            f"helps {row['compiled_helped']}, hurts {row['compiled_hurt']}"
        )
    return said


if __name__ == "__main__":
    main()
