"""Bodies of loops and maps, and branches of choices, as separate programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set

from remat_opt import _jax_internals as internals
from remat_opt import _jax_meshes
from remat_opt.program.propagation import body_per_device
from remat_opt.program.record import Atom, Equation, Program
from remat_opt.program.tracing import inner_program, is_inexact

#: Equations whose derivative is zero.
CONSTANT = frozenset({"ceil", "floor", "round", "sign", "stop_gradient"})


def varying(program: Program) -> frozenset[int]:
    """The numbers of the values that depend on a differentiated argument.

    Values whose derivative is always zero are left out: a barrier would turn such a zero into an
    array, and something without a derivative, such as a callback, may read them.
    """
    found = set(program.differentiated)
    for equation in program.equations:
        if equation.operation.primitive in CONSTANT:
            continue
        if not found.isdisjoint(equation.value_inputs):
            found.update(v for v in equation.outputs if is_inexact(program.types[v]))
    return frozenset(found)


def summed(program: Program) -> frozenset[int]:
    """The numbers of the values whose cotangents are added up: those in ``varying``.

    Mutable arrays are left out: no function can return them, and no cotangent waits for them.
    """
    mutable = {
        value
        for equation in program.equations
        if equation.effects
        for value, variable in zip(equation.outputs, equation.jax_equation.outvars, strict=True)
        if internals.is_mutable(variable)
    }
    return varying(program) - mutable


def body_of(equation: Equation, given: Set[int]) -> Program:
    """The body of a ``scan`` equation: takes constants, carry and entries to the same.

    It has one argument for each input of the equation and one output for each output; for stacked
    arrays, this is one entry. A carry is differentiated if its first or any later value depends on
    something differentiated. For one device's part of an equation on a mesh, the body is one
    device's part too.

    Args:
      equation: a ``scan``.
      given: the values, in the program around it, that depend on a differentiated argument.
    """
    return _body_at(equation, set(_among(equation.inputs, given)))


def _among(atoms: Sequence[Atom], given: Set[int]) -> list[int]:
    """The positions of the atoms that are some of these values."""
    return [place for place, atom in enumerate(atoms) if isinstance(atom, int) and atom in given]


def branches_of(equation: Equation, given: Set[int]) -> tuple[Program, ...]:
    """The branches of a ``cond`` equation: each takes all inputs but the first to the outputs.

    Args:
      equation: a ``cond``.
      given: the values, in the program around it, that depend on a differentiated argument.
    """
    positions = _among(equation.inputs[1:], given)
    return tuple(
        body_per_device(inner_program(branch, positions, "a branch of a cond"), equation)
        for branch in internals.branches_of(equation.jax_equation)
    )


def under_checkpoint(equation: Equation, given: Set[int]) -> Program:
    """What is under a ``jax.checkpoint``: takes its inputs to its outputs.

    Args:
      equation: such a checkpoint.
      given: the values, in the program around it, that depend on a differentiated argument.
    """
    checkpoint = internals.checkpoint_of(equation.jax_equation)
    assert checkpoint is not None, "the equation is a checkpoint"
    positions = _among(equation.inputs, given)
    body = inner_program(checkpoint.body, positions, "what is under a checkpoint")
    return body_per_device(body, equation)


def is_collective(equation: Equation) -> bool:
    """Whether an equation must run once only because it communicates with other devices."""
    return (
        equation.once
        and not equation.operation.bodies
        and internals.at_most_communicates(equation.jax_equation)
    )


def runs_under_checkpoints(body: Program) -> bool:
    """Whether the iterations of a loop with this body may each be under a checkpoint.

    It repeats all side effects, but no collective whose results are kept by name. What is in a
    program inside an equation has no name there.
    """
    return all(is_collective(one) for one in body.equations if one.once)


def is_open_loop(equation: Equation) -> bool:
    """Whether an equation is a ``scan`` without mutable arrays from outside."""
    return equation.operation.primitive == "scan" and not internals.reads_mutable(
        equation.jax_equation
    )


def spread_by_maps(scan: internals.Scan) -> frozenset[int]:
    """The inputs of a loop's body of which a ``shard_map`` in it gives several devices a part.

    By position; only of those that it is given as they are.
    """
    _, _, inputs, equations, _ = internals.parts(scan.body)
    return frozenset(
        position
        for equation in equations
        if equation.primitive.name == "shard_map"
        for variable, spread in zip(
            equation.invars, _jax_meshes.map_of(equation).spread, strict=True
        )
        for position, one in enumerate(inputs)
        if spread and variable is one
    )


def is_open_choice(equation: Equation) -> bool:
    """Whether an equation is a ``cond`` without mutable arrays from outside, or for a platform."""
    return (
        equation.operation.primitive == "cond"
        and not internals.reads_mutable(equation.jax_equation)
        and not internals.is_choice_of_platform(equation.jax_equation)
    )


def is_open_map(equation: Equation) -> bool:
    """Whether an equation is a ``shard_map`` whose body sees one device's part of everything.

    Without mutable arrays from outside, too.
    """
    return (
        equation.operation.primitive == "shard_map"
        and not internals.reads_mutable(equation.jax_equation)
        and _jax_meshes.map_of(equation.jax_equation).over_all_axes
    )


def mapped_of(equation: Equation, given: Set[int]) -> Program:
    """The body of a ``shard_map`` equation: takes one device's part of the inputs to the outputs.

    It can be traced only in ``_jax_meshes.within_map``.

    Args:
      equation: a ``shard_map``.
      given: the values, in the program around it, that depend on a differentiated argument.
    """
    positions = _among(equation.inputs, given)
    said = _jax_meshes.map_of(equation.jax_equation)
    body = inner_program(said.body, positions, "the body of a shard_map")
    spread = (body.arguments[place] for place in positions if said.spread[place])
    differentiated = frozenset(body.differentiated)
    return dataclasses.replace(body, added_up={v: v for v in spread if v in differentiated})


def reached(equation: Equation, positions: Set[int]) -> tuple[frozenset[int], frozenset[int]]:
    """What derivatives along some of a ``scan``'s inputs reach.

    Args:
      equation: a ``scan``.
      positions: positions of those inputs.

    Returns:
      The positions of inputs, including carries reached in a later iteration, and of outputs.
    """
    body = _body_at(equation, positions)
    found = varying(body)
    place = {value: position for position, value in enumerate(body.arguments)}
    return (
        frozenset(place[value] for value in body.differentiated),
        frozenset(
            n for n, atom in enumerate(body.outputs) if isinstance(atom, int) and atom in found
        ),
    )


def _body_at(equation: Equation, given: Set[int]) -> Program:
    """The body, differentiated at some inputs of the equation and what they reach."""
    scan = internals.scan_of(equation.jax_equation)
    positions = set(given)
    while True:
        program = inner_program(scan.body, sorted(positions), "the body of a scan")
        found = varying(program)
        more = {
            scan.constants + number
            for number, atom in enumerate(program.outputs[: scan.carries])
            if isinstance(atom, int) and atom in found
        }
        if more <= positions:
            return body_per_device(program, equation)
        positions |= more
