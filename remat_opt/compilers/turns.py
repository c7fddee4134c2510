"""A product has two gradients: which comes first, and what is alive then.

The weight's gradient reads the product's operand, which often exists just for it, like the
recomputed result of an activation. The operand's cotangent is as large. So the weight's gradient
comes first, and the cotangent once the operand is freed: the two are never alive at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from typing import TYPE_CHECKING

from remat_opt.compilers import convolutions
from remat_opt.compilers.compiler import Compiler
from remat_opt.operation import PRODUCTS, Operation
from remat_opt.program.dataflow import unaliased
from remat_opt.program.record import Program

if TYPE_CHECKING:
    from remat_opt.compilers.storage import Storage

#: Equations that give their operand another type or shape.
_FORMS = frozenset({"convert_element_type", "reshape", "squeeze", "transpose"})


def weight_places(program: Program) -> dict[int, int]:
    """For products, the position of the input that is an argument, perhaps in another form.

    Only products with exactly one such input are included.
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


def unmerged(program: Program) -> dict[int, int]:
    """For products that could be merged with an earlier one, the position of what both read.

    XLA for NVIDIA multiplies an operand once by several weights side by side, unless all of this is
    large. The result is one array, and is there as long as anything reads a part of it; backward,
    so is one of their cotangents. Behind a barrier, a product stays one of its own. (A gated layer
    of 1,024 and 2,730 whose gate is a ``tanh``, under a checkpoint: 379 MiB on h200, or 336.)
    """
    return {
        index: place for (_, place), products in _alike(program).items() for index in products[1:]
    }


def merged(program: Program) -> frozenset[int]:
    """The products that are merged with others where nothing keeps them apart; see ``unmerged``."""
    return frozenset(
        index for products in _alike(program).values() if len(products) > 1 for index in products
    )


def _alike(program: Program) -> dict[tuple[int, int], list[int]]:
    """The products of arguments that read an operand at a position, by both."""
    maker, places = program.makers(), weight_places(program)
    found: dict[tuple[int, int], list[int]] = {}
    for index, weight in places.items():
        equation, place = program.equations[index], 1 - weight
        read = equation.inputs[place]
        if isinstance(read, int) and equation.operation.primitive == "dot_general":
            found.setdefault((unaliased(program, maker, read), place), []).append(index)
    return found


def starts(program: Program) -> frozenset[int]:
    """Products and gathers that no earlier one leads to, but for the program's first.

    They are where a second tower begins, for instance. XLA may run it before the first, whatever
    the order of the program.
    """
    primitives = PRODUCTS | {"gather"}
    led = led_to(program, primitives)
    found = [
        index
        for index, equation in enumerate(program.equations)
        if equation.operation.primitive in primitives and led.isdisjoint(equation.value_inputs)
    ]
    return frozenset(found[1:])


def led_to(program: Program, primitives: Set[str]) -> set[int]:
    """The results of some operations, and everything that is computed from them."""
    found: set[int] = set()
    for equation in program.equations:
        if equation.operation.primitive in primitives or not found.isdisjoint(
            equation.value_inputs
        ):
            found.update(equation.outputs)
    return found


def _frees_operand(product: Operation, compiler: Compiler) -> bool:
    """Whether a product's operand is freed before its cotangent is made."""
    return product.primitive == "dot_general" or convolutions.is_transposed(product, compiler)


def apart(
    storage: Storage,
    sizes: Sequence[int],
    cotangent_bytes: Sequence[int],
    predecessors: Sequence[Collection[int]],
    needs: Sequence[Collection[int]],
) -> dict[int, int]:
    """For vertices of products, the bytes of an operand or its cotangent that are never alive.

    The operand is an array that nothing else reads, forward or backward, so it is freed during its
    product's backward step, where its cotangent is made. With convolutions, both may be alive,
    unless the weight's gradient reads the operand transposed.

    Args:
      storage: what is stored.
      sizes: for each vertex, the bytes of its value.
      cotangent_bytes: likewise for its cotangent.
      predecessors: for each vertex, those that it reads.
      needs: for each vertex, those that its backward step reads.
    """
    if not storage.compiler.has("operands_first"):
        return {}
    program, active = storage.flow.program, storage.flow.linearization.active_values
    summed = {product for pair in storage.product_sums.values() for product in pair}
    readers: dict[int, set[int]] = {}
    for reader, (read, needed) in enumerate(zip(predecessors, needs, strict=True)):
        for one in {*read, *needed}:
            readers.setdefault(one, set()).add(reader)
    found: dict[int, int] = {}
    for index, place in weight_places(program).items():
        equation = program.equations[index]
        operand = equation.inputs[1 - place]
        if (
            not _frees_operand(equation.operation, storage.compiler)
            or index in summed
            or not isinstance(operand, int)
        ):
            continue
        vertex = storage.vertex_of.get(equation.outputs[0])
        read_vertex = storage.vertex_of.get(storage.flow.source[operand])
        if (
            vertex is not None
            and read_vertex is not None
            and readers.get(read_vertex) == {vertex}
            and equation.inputs[place] in active
            and cotangent_bytes[vertex]
        ):
            size = min(sizes[read_vertex], cotangent_bytes[read_vertex])
            if size:
                found[vertex] = size
    return found
