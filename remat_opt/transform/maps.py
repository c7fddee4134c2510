"""A ``shard_map`` written with a body that runs as the plan says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from remat_opt import _jax_internals as internals
from remat_opt import _jax_meshes
from remat_opt.errors import PlanFileError
from remat_opt.program import bodies
from remat_opt.program.record import Equation
from remat_opt.schedule import Mapped
from remat_opt.transform.equations import arrays_of


def check_map(equation: Equation, mapped: Mapped) -> None:
    """Raises PlanFileError unless the equation is a map that can be opened."""
    if not bodies.is_open_map(equation):
        raise PlanFileError(
            f"The plan opens equation {mapped.root}, which is not a map that can be opened. Make "
            "the plan again."
        )


def run_map(equation: Equation, inputs: Sequence[Any], body: Callable[..., list[Any]]) -> list[Any]:
    """Runs a ``shard_map`` equation with another body.

    Args:
      equation: the map.
      inputs: its inputs.
      body: takes one device's part of each, and returns its part of each output.

    Returns:
      Its outputs.
    """
    said = _jax_meshes.map_of(equation.jax_equation)
    run = said.around(lambda *given: tuple(body(*given)), said.in_specs, said.out_specs)
    with internals.context_of(equation.jax_equation, equation.name_stack):
        return list(run(*arrays_of(equation, inputs)))
