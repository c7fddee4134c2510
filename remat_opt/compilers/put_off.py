"""On a mesh, what waits behind a checkpoint by hand: what sums over devices are computed from.

Every device has a part of a weight's gradient, and they are added up. XLA for NVIDIA puts that off,
so as to do it beside other things, and with it the product that computes the part. XLA for TPU does
so with sums that it also scatters, as weights are split. Meanwhile everything waits that the
product reads. Mostly the forward pass has kept that anyway. But what is under a checkpoint has just
been computed again, for all layers one after the other. (Eight checkpoints by hand around three
layers each, on eight H200s: 3,648 MiB, or 976 if cotangents come in turn.) How many products run
meanwhile cannot be predicted: here all wait for the end, which is 10 to 90 % too much.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from remat_opt.compilers.compiler import Compiler
from remat_opt.operation import PRODUCTS, Operation
from remat_opt.program.dataflow import ALIASES
from remat_opt.program.record import Equation, Program

#: What gives a parameter another form.
_FORMS = ALIASES | {"all_gather", "convert_element_type", "sharding_constraint"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Of which parameter something is a form.

    Attributes:
      axes: the axes of the mesh that split the parameter.
      spread: whether devices add up its gradient wherever it is read, as in a ``shard_map``.
      gathered: whether it is gathered in one.
    """

    axes: frozenset[str]
    spread: bool
    gathered: bool = False


def parameters(program: Program) -> dict[int, Form]:
    """The forms of a program's differentiated arguments; none without a mesh.

    Args:
      program: one device's part of a program, or the body of a ``shard_map``.
    """
    if program.is_part:
        found = {one: Form(axes=program.axes_of(one), spread=False) for one in program.arguments}
    else:
        found = {one: Form(axes=frozenset(), spread=True) for one in program.added_up}
    return _forms(program, {v: one for v, one in found.items() if v in program.differentiated})


def _forms(program: Program, given: Mapping[int, Form]) -> dict[int, Form]:
    found = dict(given)
    for equation in program.equations:
        if equation.operation.primitive in _FORMS:
            for value in found.keys() & equation.value_inputs:
                gathered = found[value].gathered or equation.operation.primitive == "all_gather"
                form = dataclasses.replace(found[value], gathered=gathered)
                found.update(dict.fromkeys(equation.outputs, form))
    return found


def put_off_bytes(
    equation: Equation, body: Program, forms: Mapping[int, Form], compiler: Compiler
) -> int:
    """Bytes of what waits from the turn of a checkpoint by hand to the end of the backward pass.

    Args:
      equation: the checkpoint.
      body: one device's part of what is under it.
      forms: those of parameters, in the program around it (``parameters``).
      compiler: the compiler.
    """
    every, scattered = compiler.has("sums_put_off"), compiler.has("scattered_put_off")
    given = {
        inside: forms[atom]
        for inside, atom in zip(body.arguments, equation.inputs, strict=True)
        if isinstance(atom, int) and atom in forms
    }
    if not given or not (every or scattered):
        return 0
    found = _forms(body, given)
    waiting: dict[tuple[str, int], int] = {}
    for made in body.equations:
        if made.operation.primitive not in PRODUCTS or len(made.value_inputs) != 2:
            continue
        (result,) = made.outputs
        for place, weight in enumerate(made.value_inputs):
            other = made.value_inputs[1 - place]
            if weight not in found or other in found:
                continue
            form, over = found[weight], _summed_over(body, made.operation, other, 1 - place)
            scatters = form.gathered if form.spread else bool(over & form.axes)
            if (form.spread or over) and (every or scatters):
                waiting["value", other] = compiler.buffer_bytes(body.types[other])
                waiting["cotangent", result] = compiler.buffer_bytes(body.types[result])
    return sum(waiting.values())


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
