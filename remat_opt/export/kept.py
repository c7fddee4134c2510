"""An equation whose own derivative reads its kept, named output.

JAX's derivative of ``tanh`` computes the output and reads that: even if the output is kept by name,
the equation would run again. So it is written with a derivative in which it does not run, as
``transform.equations`` does. If JAX's own derivative reads no output, the name is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from remat_opt import _jax_internals as internals
from remat_opt.export import support
from remat_opt.export.calls import Call
from remat_opt.export.layout import assigned
from remat_opt.export.naming import value_names
from remat_opt.export.reading import program_of, same_as
from remat_opt.operation import PRODUCTS
from remat_opt.program.record import Constant, Equation, Program

if TYPE_CHECKING:
    from remat_opt.export.equations import Equations, Scope

#: Equations whose derivative gives the same results whether or not their output is named.
_BILINEAR = PRODUCTS | {"add", "add_any", "mul", "sub"}


def lines(
    equations: Equations,
    scope: Scope,
    index: int,
    inputs: Sequence[str],
    results: Sequence[str],
) -> list[str]:
    """The lines of an equation whose outputs carry names.

    Args:
      equations: what writes equations.
      scope: the function being written.
      index: the equation's number.
      inputs: what it reads, as text.
      results: the names of its outputs.
    """
    equation = scope.program.equations[index]
    if len(results) != 1:
        found = equations.plain(equation, inputs, results)
        for value, result in zip(equation.outputs, results, strict=True):
            found += assigned([result], equations.named(scope, value, result), one=True)
        return found
    (value,) = equation.outputs
    parts = _derivatives(equations, scope, equation)
    if parts is None:
        made, several = equations.call(equation, inputs)
        named = equations.named(scope, value, f"{made}{'[0]' if several else ''}")
        return assigned(results, named, one=True)
    places = [p for p, atom in enumerate(equation.inputs) if isinstance(atom, int)]
    arguments = tuple(f"x{place}" for place in places)
    given = [
        f"x{place}" if place in places else equations.atom(scope, equation, place)
        for place in range(len(inputs))
    ]
    made, several = equations.call(equation, given)
    if made.arguments == arguments and not several:
        run = made.fn
    else:
        run = equations.as_function(equation, made, arguments, "[0]" if several else "")
    written = Call(
        equations.helper(support.kept),
        (
            scope.kept_as(value),
            run,
            f"[{', '.join(parts)}]",
            *(inputs[place] for place in places),
        ),
    )
    return assigned(results, written, one=True)


def _derivatives(equations: Equations, scope: Scope, equation: Equation) -> list[str] | None:
    """Functions that give the output's tangent from each input's; None if JAX's own will do.

    JAX's own will do for what is linear in each input.
    """
    places = [p for p, atom in enumerate(equation.inputs) if isinstance(atom, int)]
    kinds = [equation.operation.inputs[place] for place in places]
    shapes = [jax.ShapeDtypeStruct(kind.shape, kind.dtype) for kind in kinds]
    literals = {
        place: atom.value
        for place, atom in enumerate(equation.inputs)
        if isinstance(atom, Constant)
    }
    found: list[tuple[Program, int | None, int] | None] = []
    for number, place in enumerate(places):
        if equation.inputs[place] not in scope.summed:
            found.append(None)
            continue

        def along(tangent: Any, *given: Any, number: int = number) -> Any:
            def of_one(moved: Any) -> Any:
                all_given = dict(literals) | dict(zip(places, given, strict=True))
                all_given[places[number]] = moved
                inputs = [all_given[n] for n in range(len(all_given))]
                return internals.bind(equation.jax_equation, equation.name_stack, inputs)[0]

            return jax.jvp(of_one, [given[number]], [tangent])[1]

        closed, _ = internals.make_jaxpr(along, shapes[number], *shapes)
        program = program_of(closed)
        found.append((program, same_as(program, equation, places, literals), number))
    reads_output = any(one is not None and one[1] is not None for one in found)
    linear = equation.operation.primitive in _BILINEAR or all(
        one is not None and _is_equation(one[0], equation) for one in found
    )
    if not reads_output and linear:
        return None
    return ["None" if one is None else _derivative(equations, equation, *one) for one in found]


def _is_equation(program: Program, equation: Equation) -> bool:
    """Whether a derivative is the equation itself, applied to the tangent."""
    if len(program.equations) != 1:
        return False
    (one,) = program.equations
    return (
        one.operation.primitive == equation.operation.primitive
        and one.parameters == equation.parameters
        and one.value_inputs == program.arguments[:1]
    )


def _derivative(
    equations: Equations, equation: Equation, program: Program, again: int | None, number: int
) -> str:
    """Writes the derivative along one input as a function; returns its name."""
    distinct = equations.functions.distinct()
    arguments = [distinct.name("tangent"), distinct.name("output")]
    inputs = [distinct.name("x", numbered=True) for _ in program.arguments[1:]]
    names = value_names(program, [arguments[0], *inputs], distinct)
    if again is not None:
        names[program.equations[again].outputs[0]] = arguments[1]
    body = equations.unplanned(program, names, distinct, without=again)
    body.append(f"return {equations.output(names, program.outputs[0])}")
    wanted = f"{equation.operation.primitive}_along_{number}"
    return equations.functions.defined_once(wanted, [*arguments, *inputs], body)
