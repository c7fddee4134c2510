"""The options of a request, as users give them, read into records."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from typing import TypeVar

from remat_opt import planning, solvers
from remat_opt.device import Device
from remat_opt.errors import RematError
from remat_opt.gradients import Gradients
from remat_opt.plan import Objective
from remat_opt.program.tracing import Signature
from remat_opt.solvers import Solver
from remat_opt.solvers.base import Overhead
from remat_opt.units import parse_bytes

_T = TypeVar("_T", int, str)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is wanted of plans, and which solver makes them.

    Attributes:
      device: the machine to plan for, by name or as a record.
      objective: what to minimise, within which limits.
      solver: the solver that decides.
      verify: False, True or ``"compile"``: see ``optimal_remat``.
      learnt: a file of what was learnt by compiling.
      errors: ``"warn"`` or ``"raise"``: what happens if planning fails through our fault.
    """

    device: str | Device
    objective: Objective = dataclasses.field(default_factory=Objective)
    solver: Solver = planning.DEFAULT_SOLVER
    verify: bool | str = False
    learnt: str | os.PathLike[str] | None = None
    errors: str = "raise"


def objective_of(
    budget: str | int | float | None = None,
    max_overhead: float | None = None,
    overhead: str = "seconds",
    reserve: str | int | None = None,
    gradients: str = "consumed",
) -> Objective:
    """Reads the options that say what is wanted of a plan.

    Args:
      budget: bytes of temporaries, as an int or a text such as ``"6GiB"``; or, as a float,
        a share of what the unchanged function needs; or ``"fit"``.
      max_overhead: share of a forward pass that may be recomputed.
      overhead: ``"seconds"`` or ``"flops"``, what recomputation is counted in.
      reserve: bytes that ``budget="fit"`` leaves free.
      gradients: what happens to them: ``"consumed"``, ``"together"`` or ``"results"``.

    Raises:
      RematError: both are given, or a number is out of range.
    """
    if budget is not None and max_overhead is not None:
        raise RematError(
            f"budget={budget!r} and max_overhead={max_overhead!r} are both given. budget asks "
            "for the least overhead, max_overhead for the least memory: give only one of "
            "them."
        )
    try:
        counted = Overhead(overhead)
    except ValueError:
        raise RematError(f"overhead={overhead!r}: give 'seconds' or 'flops'.") from None
    try:
        fate = Gradients(gradients)
    except ValueError:
        raise RematError(
            f"gradients={gradients!r}: give 'consumed' if the step uses up each gradient as "
            "soon as it is computed, 'together' if it needs all at once, as for clipping by "
            "their norm, or 'results' if it returns them."
        ) from None
    wanted = functools.partial(Objective, overhead=counted, gradients=fate)
    if reserve is not None and budget != "fit":
        raise RematError(
            f'reserve={reserve!r} is what budget="fit" leaves free of the device\'s memory; '
            f'with budget={budget!r} it has no effect. Leave it out, or use budget="fit".'
        )
    if max_overhead is not None:
        is_number = isinstance(max_overhead, int | float) and not isinstance(max_overhead, bool)
        if not (is_number and max_overhead >= 0 and math.isfinite(max_overhead)):
            raise RematError(
                f"max_overhead={max_overhead!r}: give a share of a forward pass, such as 0.05."
            )
        return wanted(max_overhead=float(max_overhead))
    if budget is None:
        return wanted()
    if budget == "fit":
        free = 0 if reserve is None else parse_bytes(reserve)
        return wanted(fit=True, reserve_bytes=free)
    if isinstance(budget, float):
        if not (budget > 0 and math.isfinite(budget)):
            raise RematError(
                f"budget={budget!r}: a float is a share of what the unchanged function needs, such "
                "as 0.4. For bytes, give an int or a text such as '6GiB'."
            )
        if budget > 16:
            raise RematError(
                f"budget={budget!r}: a float is a share of what the unchanged function needs, "
                f"and {budget:g} times that is probably not what you mean. For bytes, give an "
                "int or '6GiB'."
            )
        return wanted(budget_share=budget)
    return wanted(budget_bytes=parse_bytes(budget))


def solver_of(given: str | Solver) -> Solver:
    """Reads the option that names the solver.

    Raises:
      RematError: there is no such solver, or it does not plan programs.
    """
    if isinstance(given, Solver):
        return given
    found = solvers.named(given) if isinstance(given, str) else None
    if found is None:
        fit = ", ".join(repr(row.name) for row in solvers.available() if row.plans_programs)
        raise RematError(
            f"solver={given!r}: give one of {fit}, or a record of remat_opt.solvers, such as "
            "ApproximateDP(objective='memory')."
        )
    return found


def numbers(given: int | Sequence[int] | None, option: str) -> tuple[int, ...]:
    """Reads an option that is one number or several.

    Raises:
      RematError: it is something else.
    """
    return _several(given, int, option, "the number of a positional argument")


def names(given: str | Sequence[str] | None, option: str) -> tuple[str, ...]:
    """Reads an option that is one name or several.

    Raises:
      RematError: it is something else.
    """
    return _several(given, str, option, "the name of an argument")


def _several(
    given: _T | Sequence[_T] | None, kind: type[_T], option: str, what: str
) -> tuple[_T, ...]:
    """One or several of a kind, as a tuple; ``what`` says in words what one is."""
    if given is None:
        return ()
    if isinstance(given, kind):
        return (given,)
    if isinstance(given, Sequence) and not isinstance(given, str):
        found = tuple(given)
        if all(isinstance(one, kind) for one in found):
            return found
    raise RematError(f"{option}={given!r}: give {what}, or a tuple of them.")


def signature_of(
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    existing: str = "keep",
    collectives: str = "keep",
) -> Signature:
    """Reads the options that say how to treat a function and its arguments.

    Raises:
      RematError: an option is not one of those that it may be.
    """
    if existing not in ("keep", "replace"):
        raise RematError(
            f"existing={existing!r}: give 'keep' to leave the function's own checkpoints as "
            "they are, or 'replace' to let the plan decide about the values under them."
        )
    if collectives not in ("keep", "recompute"):
        raise RematError(
            f"collectives={collectives!r}: give 'keep' to run what communicates with other devices "
            "once, or 'recompute' to let the plan run it again."
        )
    return Signature(
        argnums=None if argnums is None else numbers(argnums, "argnums"),
        has_aux=has_aux,
        static_argnums=numbers(static_argnums, "static_argnums"),
        static_argnames=names(static_argnames, "static_argnames"),
        dissolved=existing == "replace",
        communicates_again=collectives == "recompute",
    )
