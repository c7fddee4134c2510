"""Which operand of a product is a weight.

Backward, XLA for NVIDIA mostly takes the gradient of a weight before that of the other operand, and
``transform`` sees to it where there are checkpoints (``gradients_in_turn``). So what the operand
was, which the gradient of the weight reads, is gone when the operand's own cotangent is written,
which is as large: ``weights_first``.
"""

from __future__ import annotations

from remat_opt.operation import PRODUCTS
from remat_opt.program.record import Program

#: Equations that give their operand another type or shape.
_FORMS = frozenset({"convert_element_type", "reshape", "squeeze", "transpose"})


def weight_places(program: Program) -> dict[int, int]:
    """For products the place of the input that is an argument, as it is or in another form.

    Only of those of which one of two inputs is.
    """
    forms = set(program.arguments)
    found = {}
    for index, equation in enumerate(program.equations):
        read = [
            place
            for place, atom in enumerate(equation.inputs)
            if isinstance(atom, int) and atom in forms
        ]
        if equation.operation.primitive in _FORMS and read:
            forms.update(equation.outputs)
        elif (
            equation.operation.primitive in PRODUCTS
            and len(equation.inputs) == 2
            and len(read) == 1
        ):
            found[index] = read[0]
    return found
