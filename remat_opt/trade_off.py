"""The frontier: the best plans over all budgets, as figures to choose from.

Nothing is compiled. The predicted memory of a point is the budget that gives its plan.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from remat_opt.gradients import Gradients
from remat_opt.planning import Problem, named_defaults, step_bytes
from remat_opt.solvers.base import Candidate, Overhead, pareto
from remat_opt.units import format_bytes, format_share
from remat_opt.view import drawing, plots, report, scatter

#: Rows of the table in a terminal or a notebook; ``rows`` and the picture have them all.
_MOST_ROWS = 24


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Frontier:
    """The plans of one program that no other beats in both memory and overhead.

    Attributes:
      function: name of the loss function.
      device: name of the device planned for.
      overhead: unit in which recomputation is counted, ``seconds`` or ``flops``.
      rows: one dictionary for each plan, by ascending memory: ``temporary_bytes``, predicted, and
        the budget that gives this plan; ``of_plain``, as a share of the unchanged function's;
        ``overhead_seconds_share`` and ``recomputed_flops_share`` of one forward pass;
        ``regions``, how many of them hold others, ``nested``, and whether the function is
        ``unchanged``, which is the last.
      defaults: one dictionary for the unchanged function, which is first, and for each of
        ``jax.checkpoint``'s policies, around the whole function and around every block: ``label``,
        and the first four figures of a row.
      limit_bytes: what the device's memory leaves for temporaries, beside arguments and outputs
        (of the step, if there is one); None if that is unknown, or nothing.
    """

    function: str
    device: str
    overhead: str
    rows: tuple[dict[str, Any], ...]
    defaults: tuple[dict[str, Any], ...] = ()
    limit_bytes: int | None = None

    def to_json(self) -> str:
        """The frontier as JSON text: the fields of this record."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    def __repr__(self) -> str:
        return self._table().text(report.columns())

    def _repr_html_(self) -> str:
        return report.section(
            self._title(),
            self._picture().svg(),
            dataclasses.replace(self._table(), title="").html(),
        )

    def plot(self, ax: Any = None) -> Any:
        """Draws memory against overhead: the plans as a line, the defaults as labelled points.

        Args:
          ax: matplotlib axes; the current ones if None.

        Returns:
          The axes.

        Raises:
          MissingPackageError: matplotlib is not installed.
        """
        return plots.scatter(self._picture(), ax)

    def _title(self) -> str:
        return f"Best plans of {self.function} for {self.device}"

    def _table(self) -> report.Table:
        stride = -(-len(self.rows) // _MOST_ROWS)
        # The last row is the unchanged function.
        shown = self.rows[::-1][::stride][::-1]
        left = len(self.rows) - len(shown)
        return report.Table(
            title=self._title(),
            headings=("temporaries", "of plain", "time", "recomputed FLOPs", "regions"),
            rows=tuple(
                (
                    format_bytes(row["temporary_bytes"]),
                    format_share(row["of_plain"]),
                    format_share(row["overhead_seconds_share"]),
                    format_share(row["recomputed_flops_share"]),
                    _regions(row),
                )
                for row in shown
            ),
            align="rrrrl",
            footer=(
                "All figures are predicted. Time and FLOPs of recomputation are shares of one "
                "forward pass."
            )
            + (f" {left} more between them are in .rows." if left else ""),
        )

    def _picture(self) -> scatter.Scatter:
        in_flops = self.overhead == Overhead.FLOPS.value
        key = "recomputed_flops_share" if in_flops else "overhead_seconds_share"

        def at(row: dict[str, Any]) -> scatter.Point:
            size = row["temporary_bytes"]
            return scatter.Point(x=row[key], y=size, label=row.get("label") or format_bytes(size))

        counted = "FLOPs" if in_flops else "time"
        levels: tuple[tuple[str, float], ...] = ()
        if self.limit_bytes is not None:
            levels = ((f"room on {self.device}", float(self.limit_bytes)),)
        return scatter.Scatter(
            title=self._title(),
            x=drawing.share_axis(f"recomputed {counted}, as a share of one forward pass"),
            y=drawing.bytes_axis(
                "temporaries, predicted",
                max(row["temporary_bytes"] for row in (*self.rows, *self.defaults)),
            ),
            levels=levels,
            series=(
                scatter.Series(label="plain", points=tuple(map(at, self.defaults[:1]))),
                scatter.Series(label="jax.checkpoint", points=tuple(map(at, self.defaults[1:]))),
                scatter.Series(label="remat_opt", points=tuple(map(at, self.rows)), staircase=True),
            ),
        )


def of(
    problem: Problem, measure: Overhead, gradients: Gradients, held_bytes: int | None = None
) -> Frontier:
    """The frontier of a problem whose candidates were found for ``measure``.

    Args:
      problem: a program on a device.
      measure: what recomputation is counted in.
      gradients: how the step uses them.
      held_bytes: what the step around it holds besides temporaries; None if there is no step.
    """
    graph = problem.model.graph
    unchanged = problem.unchanged.peak_bytes

    def figures(one: Candidate) -> dict[str, Any]:
        return {
            "temporary_bytes": one.peak_bytes,
            "of_plain": one.peak_bytes / unchanged if unchanged else 1.0,
            "overhead_seconds_share": _share(one.overhead_seconds, graph.forward_seconds),
            "recomputed_flops_share": _share(one.recomputed_flops, graph.forward_flops),
        }

    rows = []
    for one in pareto(list(problem.candidates), measure):
        regions = one.schedule.regions
        rows.append(
            {
                **figures(one),
                "regions": len(regions),
                "nested": sum(bool(region.inside) for region in regions),
                "unchanged": one.schedule.unchanged,
            }
        )
    device = problem.device
    if held_bytes is None:
        held_bytes = sum(step_bytes(problem.program, device, gradients))
    room = device.memory_bytes - held_bytes
    return Frontier(
        function=problem.program.name,
        device=problem.device.name,
        overhead=measure.value,
        rows=tuple(rows),
        defaults=tuple(
            {"label": label, **figures(one)} for label, one in named_defaults(problem).items()
        ),
        limit_bytes=room if room > 0 else None,
    )


def _regions(row: Mapping[str, Any]) -> str:
    if row["unchanged"]:
        return "none"
    return f"{row['regions']}" + (f", {row['nested']} nested" if row["nested"] else "")


def _share(amount: float, whole: float) -> float:
    return amount / whole if whole else 0.0
