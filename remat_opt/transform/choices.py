"""A ``cond`` or ``switch`` written with branches that run as the plan says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from remat_opt import _jax_internals as internals
from remat_opt.errors import PlanFileError
from remat_opt.program import bodies
from remat_opt.program.record import Equation
from remat_opt.schedule import Choice
from remat_opt.transform.equations import arrays_of


def check_choice(equation: Equation, choice: Choice) -> None:
    """Raises PlanFileError unless the branches can be those of the equation."""
    if not bodies.is_open_choice(equation):
        raise PlanFileError(
            f"The plan opens equation {choice.root}, which is not a choice that can be opened. "
            "Make the plan again."
        )
    count = len(internals.branches_of(equation.jax_equation))
    if len(choice.branches) != count:
        raise PlanFileError(
            f"The choice at equation {choice.root} of the plan has {len(choice.branches)} "
            f"branches, that of the program {count}. Make the plan again."
        )


def run_choice(
    equation: Equation, inputs: Sequence[Any], branches: Sequence[Callable[..., list[Any]]]
) -> list[Any]:
    """Runs a ``cond`` equation with other branches.

    Args:
      equation: the choice.
      inputs: its inputs.
      branches: in order; each takes all inputs but the first, and returns the outputs.

    Returns:
      Its outputs.
    """
    which, *given = arrays_of(equation, inputs)
    with internals.context_of(equation.jax_equation, equation.name_stack):
        return list(lax.switch(which, branches, *given))
