"""On a mesh, what waits behind a checkpoint by hand: what sums over devices are computed from.

Every device has a part of a weight's gradient, and they are added up. XLA for NVIDIA puts that off,
so as to do it beside other things, and with it the product that computes the part. XLA for TPU does
so with sums that it also scatters, as weights are split. Meanwhile everything waits that the
product reads. Mostly the forward pass has kept that anyway. But what is under a checkpoint has just
been computed again, for all layers one after the other. (Eight checkpoints by hand around three
layers each, on eight H200s: 3,648 MiB, or 976 if cotangents come in turn.)

Products that are put off run between later ones, from the end of the backward pass on, while there
are any. So not all of them wait at once, and we count ``_AT_ONCE`` of what they read. (Of twelve
own programs, layers in a row for both compilers, from a fifth to everything, in the median 0.6.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from remat_opt.compilers.compiler import Compiler
from remat_opt.operation import PRODUCTS, Operation
from remat_opt.program.dataflow import ALIASES
from remat_opt.program.record import Equation, Program

#: The share of what is put off that waits at the same time.
_AT_ONCE = 2 / 3
#: What gives a parameter another form.
_FORMS = ALIASES | {"all_gather", "convert_element_type", "sharding_constraint"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Of which parameter something is a form.

    Attributes:
      axes: the axes of the mesh that split the parameter.
      spread: whether a ``shard_map`` gives it to several devices, which add up its gradient.
      gathered: whether it is gathered in one, and the gradient scattered.
    """

    axes: frozenset[str]
    spread: bool
    gathered: bool = False


def parameters(program: Program) -> dict[int, Form]:
    """The forms of a program's differentiated arguments; none without a mesh.

    Args:
      program: one device's part of a program, or the body of a ``shard_map``.
    """
    return _forms(
        program,
        {
            value: Form(axes=program.axes_of(value), spread=value in _spread(program))
            for value in program.differentiated
        },
    )


def _spread(program: Program) -> Collection[int]:
    """The arguments of a map's body whose gradients devices add up."""
    return () if program.is_part else program.added_up


def inside(equation: Equation, body: Program, around: Mapping[int, Form]) -> dict[int, Form]:
    """The forms of parameters in a program inside an equation.

    Args:
      equation: a checkpoint or a ``shard_map``.
      body: one device's part of what is in it, an argument for each input.
      around: the forms of parameters in the program around it.
    """
    spread = _spread(body)
    return _forms(
        body,
        {
            value: dataclasses.replace(around[atom], spread=around[atom].spread or value in spread)
            for value, atom in zip(body.arguments, equation.inputs, strict=True)
            if isinstance(atom, int) and atom in around
        },
    )


def _forms(program: Program, given: Mapping[int, Form]) -> dict[int, Form]:
    found = dict(given)
    for equation in program.equations:
        if equation.operation.primitive in _FORMS:
            for value in found.keys() & equation.value_inputs:
                gathered = found[value].gathered or equation.operation.primitive == "all_gather"
                form = dataclasses.replace(found[value], gathered=gathered)
                found.update(dict.fromkeys(equation.outputs, form))
    return found


def put_off_bytes(body: Program, forms: Mapping[int, Form], compiler: Compiler) -> int:
    """Bytes of what waits from the turn of a checkpoint by hand to the end of the backward pass.

    Args:
      body: one device's part of what is under it, or of a map under it; not of maps in that.
      forms: the forms of parameters in it.
      compiler: the compiler.
    """
    every, scattered = compiler.has("sums_put_off"), compiler.has("scattered_put_off")
    waiting: dict[tuple[str, int], int] = {}
    for equation in body.equations:
        if equation.operation.primitive not in PRODUCTS or len(equation.value_inputs) != 2:
            continue
        (result,) = equation.outputs
        for place, weight in enumerate(equation.value_inputs):
            other = equation.value_inputs[1 - place]
            if weight not in forms or other in forms:
                continue
            form, over = forms[weight], _summed_over(body, equation.operation, other, 1 - place)
            scatters = form.gathered or bool(over & form.axes)
            if (every and (form.spread or over)) or (scatters and (every or scattered)):
                waiting["value", other] = compiler.buffer_bytes(body.types[other])
                waiting["cotangent", result] = compiler.buffer_bytes(body.types[result])
    return round(_AT_ONCE * sum(waiting.values()))


def _summed_over(body: Program, operation: Operation, value: int, place: int) -> frozenset[str]:
    """The axes of the mesh over which the gradient of a product's other operand is a sum.

    Args:
      body: the program.
      operation: the product.
      value: this operand.
      place: its position.
    """
    numbers = operation.params["dimension_numbers"]
    if operation.primitive == "dot_general":
        contracted, batch = numbers
        others = {*contracted[place], *batch[place]}
    else:
        others = {numbers.lhs_spec[1]} if place == 0 else set(range(len(operation.inputs[1].shape)))
    return frozenset(
        name
        for axis, split in enumerate(body.splits.get(value, ()))
        if axis not in others
        for name, _ in split
    )
