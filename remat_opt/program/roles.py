"""What the arguments of a training step are: parameters, the optimizer's state, or the rest.

JAX says which pass each equation is part of. What the backward pass hands to the optimizer, or
returns, are gradients. An argument that the forward pass reads and that has the shape of a gradient
is a parameter; one that no pass reads is optimizer state; others, such as the batch, are inputs. An
argument counts as read if something made from it is read, such as parameters that are cast before
the loss. Loops around everything, as over microbatches, are looked into.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from remat_opt import _jax_internals as internals
from remat_opt.program.record import Program
from remat_opt.scopes import Phase, origin

Role = Literal["parameter", "state", "input"]


def argument_roles(program: Program) -> tuple[Role, ...]:
    """The role of each argument of a step; all are inputs if nothing is differentiated."""
    found = _Reading()
    equations = [
        (
            origin(one.module).phase,
            one.jax_equation,
            [atom if isinstance(atom, int) else None for atom in one.inputs],
            one.outputs,
        )
        for one in program.equations
    ]
    read = found.walk(equations, program.output_values)
    roles: list[Role] = []
    if not found.gradients:
        roles += ["input" for _ in program.arguments]
        return tuple(roles)
    left = Counter(found.gradients)
    for value in program.arguments:
        shape = program.types[value].shape
        if value not in read:
            roles.append("state")
        elif left[shape]:
            left[shape] -= 1
            roles.append("parameter")
        else:
            roles.append("input")
    return tuple(roles)


#: The phase of an equation, JAX's equation, what it reads and what it makes.
_Line = tuple[Phase, Any, Sequence[Any], Sequence[Any]]


class _Reading:
    """Goes through a program and the loops in it.

    Attributes:
      gradients: shapes of the results of backward passes.
    """

    def __init__(self) -> None:
        self.gradients: list[tuple[int, ...]] = []

    def walk(self, lines: Sequence[_Line], results: Iterable[Any]) -> set[Any]:
        """What a pass, forward or backward, reads, directly or through what is made from it."""
        read: set[Any] = set()
        leaving = set(results)
        for phase, equation, inputs, outputs in reversed(lines):
            if phase == "other":
                inside = self._inside(equation, inputs)
                read.update(inside)
                leaving.update(one for one in inputs if one is not None and one not in inside)
                if any(one in read for one in outputs):
                    read.update(one for one in inputs if one is not None)
                continue
            read.update(one for one in inputs if one is not None)
            if phase == "backward":
                self.gradients += [
                    tuple(variable.aval.shape)
                    for variable, value in zip(equation.outvars, outputs, strict=True)
                    if value in leaving and hasattr(variable.aval, "shape")
                ]
        return read

    def _inside(self, equation: Any, inputs: Sequence[Any]) -> set[Any]:
        """What of an equation's inputs is read in a pass inside its inner programs."""
        found = set()
        for _, body in internals.inner_jaxprs(equation.params):
            _, _, variables, equations, results = internals.parts(body)
            read = self.walk(list(_lines(equations)), [_atom(one) for one in results])
            # Inputs that an inner program does not take, such as a branch number, come first.
            for value, variable in zip(reversed(inputs), reversed(variables), strict=False):
                if variable in read and value is not None:
                    found.add(value)
        return found


def _lines(equations: Iterable[Any]) -> Iterator[_Line]:
    for one in equations:
        phase = origin(str(internals.name_stack_of(one))).phase
        yield phase, one, list(map(_atom, one.invars)), one.outvars


def _atom(variable: Any) -> Any:
    return None if isinstance(variable, internals.Literal) else variable
