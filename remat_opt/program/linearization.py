"""What the derivative of each equation reads.

Not every value is needed backward: ``add`` needs nothing, ``tanh`` its output, ``mul`` its inputs.
There is no table of this here. ``jax.vjp`` of the equation, traced, returns its residuals;
following each residual back to the equation's own inputs or outputs shows which of them the
derivative reads. A residual that is not a cheap function of those (the stacked intermediates of a
``scan``) is the equation's *internal residual*: it exists only if the equation itself has run. But
where a scatter writes depends on its indices alone, and XLA finds that out when the gradient asks.

Equations that do not differ in anything that matters are traced once, all in one trace. For the
common primitives the arrays' extents do not matter: layers of any width are alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from remat_opt import _jax_internals as internals
from remat_opt import _jax_meshes, costs
from remat_opt.operation import ArrayType
from remat_opt.program.propagation import share_inside
from remat_opt.program.record import Constant, Derivative, Equation, Linearization, Program
from remat_opt.program.tracing import array_type, operation

#: Elementwise primitives: what their derivatives read does not depend on extents.
_ELEMENTWISE = frozenset(
    "abs add convert_element_type cos div exp integer_pow log logistic max min mul neg pow rsqrt "
    "select_n sin sqrt square sub tanh".split()
)
#: Of these, the ones that pass on their result's cotangent, whatever it is computed from.
_HANDING_ON = frozenset("add convert_element_type neg sub".split())
#: Primitives linear in each operand: the derivative reads the others, whatever the parameters.
_LINEAR = frozenset(
    "broadcast_in_dim concatenate conv_general_dilated dot_general pad reduce_sum reshape slice "
    "squeeze transpose".split()
)


def linearize(program: Program, *, inside: bool = False) -> Linearization:
    """Finds which values the backward pass of ``program`` reads, and where.

    Args:
      program: a traced function.
      inside: whether it is the body of a loop or the like, whose backward pass is a program of its
        own: what that reads is there when it begins.

    Returns:
      For each equation between a differentiated argument and a differentiated output, what its
      backward step reads.
    """
    candidates: dict[int, tuple[int, ...]] = {}  # equation -> positions of inputs that vary
    varying = set(program.differentiated)
    for index, equation in enumerate(program.equations):
        positions = tuple(
            position
            for position, atom in enumerate(equation.inputs)
            if isinstance(atom, int) and atom in varying
        )
        if positions:
            candidates[index] = positions
            varying.update(
                number for number in equation.outputs if _carries_derivative(program.types[number])
            )
    all_derivatives = _derivatives(program, candidates)

    # Forward again, now that zero derivatives (stop_gradient, floor) are known.
    varying = set(program.differentiated)
    derivatives: dict[int, Derivative] = {}
    for index in candidates:
        equation = program.equations[index]
        if varying.intersection(equation.value_inputs):
            derivative = all_derivatives[index]
            derivatives[index] = derivative
            varying.update(equation.outputs[position] for position in derivative.active_outputs)

    # Backward: only what leads to the loss is transposed.
    wanted = {
        atom for atom in program.outputs[: program.loss_outputs] if isinstance(atom, int)
    } & varying
    for index in reversed(list(derivatives)):
        equation = program.equations[index]
        active = {equation.outputs[position] for position in derivatives[index].active_outputs}
        if active & wanted:
            wanted.update(varying.intersection(equation.value_inputs))
        else:
            del derivatives[index]
    if inside:
        derivatives = {index: _early(one) for index, one in derivatives.items()}
    return Linearization(derivatives=derivatives, active_values=frozenset(wanted))


def _early(derivative: Derivative) -> Derivative:
    """The same where all residuals come from running the equation."""
    kept_bytes = derivative.internal_bytes + derivative.late_bytes
    return dataclasses.replace(derivative, internal_bytes=kept_bytes, late_bytes=0)


def _carries_derivative(kind: ArrayType) -> bool:
    return kind.dtype.startswith(("float", "bfloat", "complex"))


def _derivatives(program: Program, candidates: dict[int, tuple[int, ...]]) -> dict[int, Derivative]:
    """The derivative of each candidate equation; similar equations are traced once."""
    representatives: dict[Any, tuple[Equation, tuple[int, ...]]] = {}
    keys: dict[int, Any] = {}
    for index, positions in candidates.items():
        equation = program.equations[index]
        key = _what_matters(program, equation, positions)
        keys[index] = key
        representatives.setdefault(key, (equation, positions))
    items = list(representatives.items())
    try:
        found = _trace_derivatives([item for _, item in items])
    except Exception:
        # One equation without a derivative rule spoils the common trace; find it.
        found = []
        for _, item in items:
            try:
                found += _trace_derivatives([item])
            except Exception:
                found.append(_assumed(item[0]))
    by_key = {key: derivative for (key, _), derivative in zip(items, found, strict=True)}
    return {index: by_key[key] for index, key in keys.items()}


def _what_matters(program: Program, equation: Equation, positions: tuple[int, ...]) -> Any:
    """A key: equations with equal keys have equal derivatives."""
    primitive = equation.operation.primitive
    types = tuple(
        program.types[atom] if isinstance(atom, int) else atom.text for atom in equation.inputs
    )
    if primitive in _LINEAR:
        return primitive, _dtypes(equation), _without_extents(types), positions
    if primitive in _ELEMENTWISE:
        dtypes, plain = _dtypes(equation), _without_extents(types)
        return primitive, equation.parameters, dtypes, plain, _repeated(types), positions
    # The text only names functions among the parameters: equal names do not mean equal functions,
    # so such equations stand for themselves.
    itself = id(equation.jax_equation) if _has_functions(equation) else None
    return primitive, equation.parameters, types, positions, itself


def _dtypes(equation: Equation) -> tuple[str, ...]:
    return tuple(kind.dtype for kind in equation.operation.outputs)


def _without_extents(types: tuple[ArrayType | str, ...]) -> tuple[str, ...]:
    return tuple(kind.dtype if isinstance(kind, ArrayType) else kind for kind in types)


def _repeated(types: tuple[ArrayType | str, ...]) -> tuple[tuple[bool, ...], ...]:
    """For each dimension of arrays of different shapes, whether it is broadcast to the others'."""
    shapes = [kind.shape for kind in types if isinstance(kind, ArrayType)]
    if len(set(shapes)) == 1:
        return ()
    return tuple(tuple(extent == 1 for extent in shape) for shape in shapes)


def _has_functions(equation: Equation) -> bool:
    return any(
        callable(value) and not isinstance(value, type) and not internals.is_jaxpr(value)
        for value in equation.operation.params.values()
    )


def _assumed(equation: Equation) -> Derivative:
    return Derivative(
        inputs=tuple(range(len(equation.inputs))),
        outputs=tuple(range(len(equation.outputs))),
        active_outputs=tuple(
            position
            for position, kind in enumerate(equation.operation.outputs)
            if _carries_derivative(kind)
        ),
        assumed=True,
    )


def _trace_derivatives(items: Sequence[tuple[Equation, tuple[int, ...]]]) -> list[Derivative]:
    """Traces value-and-residuals of all ``items`` together and reads each one's slice."""
    arguments = [_arguments(equation) for equation, _ in items]

    def residuals(*all_given: list[Any]) -> list[Any]:
        results = []
        for (equation, positions), given in zip(items, all_given, strict=True):
            run, varying = _restricted(equation, positions, given)
            outputs, pullback = jax.vjp(run, *varying)
            results.append((outputs, jax.tree.leaves(pullback)))
        return results

    closed, shapes = internals.make_jaxpr(residuals, *arguments)
    _, _, inputs, equations, outputs = internals.parts(closed)
    makers = {variable: made for made in equations for variable in made.outvars}
    # Residuals of a large body share most of what they are made of.
    opaque: dict[int, bool] = {}
    derivatives = []
    input_start = output_start = 0
    for (equation, _), given, (primal_shapes, residual_shapes) in zip(
        items, arguments, shapes, strict=True
    ):
        own_inputs = inputs[input_start : input_start + len(given)]
        input_start += len(given)
        primal_end = output_start + len(primal_shapes)
        own_outputs = outputs[output_start:primal_end]
        output_start = primal_end + len(residual_shapes)
        own_residuals = outputs[primal_end:output_start]
        derivatives.append(
            _read_residuals(equation, own_inputs, own_outputs, own_residuals, makers, opaque)
        )
    return _without_zero_derivatives(items, derivatives)


def _arguments(equation: Equation) -> list[Any]:
    """What to trace the equation with: the types of its inputs, literals left out."""
    return [
        variable.aval
        for variable, atom in zip(equation.jax_equation.invars, equation.inputs, strict=True)
        if isinstance(atom, int)
    ]


def _restricted(
    equation: Equation, positions: tuple[int, ...], given: Sequence[Any]
) -> tuple[Any, list[Any]]:
    """The equation as a function of only its varying inputs, and those inputs."""
    atoms: list[Any] = []
    remaining = iter(given)
    for atom in equation.inputs:
        atoms.append(atom.value if isinstance(atom, Constant) else next(remaining))

    def run(*varying: Any) -> list[Any]:
        inputs = list(atoms)
        for position, value in zip(positions, varying, strict=True):
            inputs[position] = value
        return internals.bind(equation.jax_equation, equation.name_stack, inputs)

    return run, [atoms[position] for position in positions]


def _read_residuals(
    equation: Equation,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    residuals: Sequence[Any],
    makers: dict[Any, Any],
    opaque: dict[int, bool],
) -> Derivative:
    """Follows residuals back to the equation's inputs and outputs.

    Args:
      equation: the equation.
      inputs: the variables of its inputs.
      outputs: those of its outputs.
      residuals: those of its residuals.
      makers: for each variable, the traced equation that makes it.
      opaque: by identity, whether a traced equation is a kernel of its own, as far as known.
    """
    value_positions = [p for p, atom in enumerate(equation.inputs) if isinstance(atom, int)]
    input_position = dict(zip(inputs, value_positions, strict=True))
    output_position = {
        variable: position
        for position, variable in enumerate(outputs)
        if not isinstance(variable, internals.Literal)
    }
    own = {id(makers[variable]) for variable in output_position if variable in makers}
    read_inputs: set[int] = set()
    read_outputs: set[int] = set()
    internal_bytes, late_bytes, usual_share = 0.0, 0.0, share_inside(equation)
    scatters = equation.operation.primitive.startswith("scatter")
    for residual in residuals:
        if isinstance(residual, internals.Literal):
            continue
        reached_inputs: set[int] = set()
        reached_outputs: set[int] = set()
        cheap = True
        pending, seen = [residual], set()
        while pending:
            variable = pending.pop()
            if isinstance(variable, internals.Literal) or variable in seen:
                continue
            seen.add(variable)
            # An output that the equation merely forwards is its input.
            if variable in input_position:
                reached_inputs.add(input_position[variable])
            elif variable in output_position:
                reached_outputs.add(output_position[variable])
            else:
                maker = makers[variable]
                if id(maker) not in opaque:
                    kind = costs.cost(operation(maker)).fusion
                    opaque[id(maker)] = kind is costs.Fusion.OPAQUE
                cheap &= not opaque[id(maker)] and id(maker) not in own
                pending += maker.invars
        if reached_outputs and equation.derivative_compares:
            # The output is computed again from the inputs, not read from a kept copy.
            reached_inputs |= set(value_positions)
            reached_outputs = set()
        if cheap:
            read_inputs |= reached_inputs
            read_outputs |= reached_outputs
        else:
            split = equation.placement and _jax_meshes.parts_of(makers[residual], residual)
            share = 1 / split if split and split > 1 else usual_share
            size = share * array_type(residual.aval).bytes
            kinds = (equation.operation.inputs[position] for position in reached_inputs)
            if scatters and not reached_outputs and not any(map(_carries_derivative, kinds)):
                read_inputs |= reached_inputs
                late_bytes += size
            else:
                internal_bytes += size
    return Derivative(
        inputs=tuple(sorted(read_inputs)),
        outputs=tuple(sorted(read_outputs)),
        internal_bytes=math.ceil(internal_bytes),
        late_bytes=math.ceil(late_bytes),
        active_outputs=tuple(
            position
            for position, kind in enumerate(equation.operation.outputs)
            if _carries_derivative(kind)
        ),
    )


def _without_zero_derivatives(
    items: Sequence[tuple[Equation, tuple[int, ...]]], derivatives: list[Derivative]
) -> list[Derivative]:
    """Drops active outputs that pass on no cotangent (``stop_gradient``, ``floor``).

    Only equations without residuals can have nothing but such outputs. Their pullbacks are traced,
    and an output whose cotangent reaches no input is not active.
    """
    surely_pass = _LINEAR | _HANDING_ON
    chosen = [
        index
        for index, derivative in enumerate(derivatives)
        if derivative.active_outputs
        and items[index][0].operation.primitive not in surely_pass
        and not (derivative.inputs or derivative.outputs or derivative.internal_bytes)
    ]
    if not chosen:
        return derivatives
    arguments = [_arguments(items[index][0]) for index in chosen]
    cotangents = [
        [
            internals.cotangent_type(items[index][0].jax_equation.outvars[position].aval)
            for position in derivatives[index].active_outputs
        ]
        for index in chosen
    ]

    def pulled_back(primals: list[Any], all_arriving: list[Any]) -> list[Any]:
        results = []
        for index, given, arriving in zip(chosen, primals, all_arriving, strict=True):
            run, varying = _restricted(*items[index], given)
            outputs, pullback = jax.vjp(run, *varying)
            remaining = iter(arriving)
            results.append(
                pullback(
                    [
                        next(remaining)
                        if position in derivatives[index].active_outputs
                        else np.zeros(output.shape, jax.dtypes.float0)
                        for position, output in enumerate(outputs)
                    ]
                )
            )
        return results

    closed, shapes = internals.make_jaxpr(pulled_back, arguments, cotangents)
    _, _, inputs, equations, outputs = internals.parts(closed)
    # Which cotangents, by position among the inputs, each value depends on.
    first = len(jax.tree.leaves(arguments))
    reached = {variable: {number} for number, variable in enumerate(inputs) if number >= first}

    def reaching(variables: Sequence[Any]) -> set[int]:
        return set().union(
            *(reached.get(v, ()) for v in variables if not isinstance(v, internals.Literal))
        )

    for made in equations:
        found = reaching(made.invars)
        reached.update((variable, found) for variable in made.outvars)
    output_start, cotangent_start = 0, first
    for index, sent in zip(chosen, shapes, strict=True):
        alive = reaching(outputs[output_start : output_start + len(sent)])
        active = derivatives[index].active_outputs
        derivatives[index] = dataclasses.replace(
            derivatives[index],
            active_outputs=tuple(
                position
                for number, position in enumerate(active, cotangent_start)
                if number in alive
            ),
        )
        output_start += len(sent)
        cotangent_start += len(active)
    return derivatives
