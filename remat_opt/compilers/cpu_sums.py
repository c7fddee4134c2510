"""What XLA for CPU stores where others fuse, and in what form its products read operands.

A sum there multiplies two arrays as it reads them, and computes nothing else. So what the gradient
of a broadcast operand multiplies is stored: what a scale was applied to, or a mean subtracted from.

Products call a float32 library that reads one order of dimensions: bfloat16 weights are widened,
and for a weight's gradient the cotangent is transposed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from remat_opt import costs
from remat_opt.compilers import operands
from remat_opt.compilers.compiler import Compiler
from remat_opt.compilers.effects import Effect, Figures, Held, kept_by_name, under_checkpoints
from remat_opt.graph import Graph
from remat_opt.operation import PRODUCTS, ArrayType
from remat_opt.program.dataflow import Dataflow
from remat_opt.program.record import Atom
from remat_opt.schedule import Schedule


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Named(Effect):
    """Values that a checkpoint keeps by name are neither widened nor kept with their divisor.

    Attributes:
      bytes: for some vertices, what they take if kept like this.
      widened_bytes: for some vertices, how much more they take once it is the turn of the
        checkpoint that keeps them: all at once.
    """

    bytes: Mapping[int, int]
    widened_bytes: Mapping[int, int]

    def change(self, figures: Figures, schedule: Schedule) -> None:
        """Writes what is kept by name."""
        for vertex in self.bytes.keys() & set(kept_by_name(schedule.regions)):
            figures.bytes[vertex] = self.bytes[vertex]

    def held_bytes(self, graph: Graph, schedule: Schedule) -> int:
        """Bytes by which the values kept by one checkpoint grow."""
        if schedule.unchanged:
            return 0
        return max(
            sum(self.widened_bytes.get(vertex, 0) for vertex in kept_by_name([region]))
            for region in schedule.regions
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transposed(Effect):
    """Operands of convolutions, transposed early for the gradients of their weights.

    Attributes:
      pairs: each a convolution's vertex and one that it reads.
    """

    pairs: tuple[tuple[int, int], ...]

    def held_bytes(self, graph: Graph, schedule: Schedule) -> int:
        """Bytes of what exists twice: transposed, and unchanged for checkpointed regions."""
        checkpointed = under_checkpoints(schedule)
        read = {
            one
            for vertex in checkpointed
            for one in (*graph.predecessors[vertex], *graph.needs[vertex])
        }
        twice = {one for by, one in self.pairs if by not in checkpointed and one in read}
        return sum(graph.bytes[one] for one in twice)


def held(flow: Dataflow, compiler: Compiler, vertex_of: Mapping[int, int]) -> Iterator[Held]:
    """What a compiler holds for bfloat16 weights.

    A product's weight is widened once, and read in this form in the forward and the backward pass;
    under a checkpoint it is widened again in each.

    Args:
      flow: a traced function's values.
      compiler: the compiler.
      vertex_of: for each stored value, the vertex that holds it.
    """
    if not compiler.has("widened"):
        return
    program = flow.program
    parameters = {v for v in program.differentiated if program.types[v].dtype == "bfloat16"}
    products: dict[int, list[int]] = {}
    for index in sorted(flow.linearization.derivatives):
        equation = program.equations[index]
        if equation.operation.primitive in PRODUCTS:
            for value in parameters.intersection(flow.source[v] for v in equation.value_inputs):
                products.setdefault(value, []).extend(equation.outputs)
    for value, results in sorted(products.items()):
        size = compiler.buffer_bytes(widened(program.types[value]))
        yield Held(
            vertices=tuple(vertex_of[result] for result in results),
            bytes=size,
            checkpointed_bytes=0,
            unchanged_bytes=size,
        )


def widened(kind: ArrayType) -> ArrayType:
    """The type in which an array of some type is stored if products read it."""
    return dataclasses.replace(kind, dtype="float32") if kind.dtype == "bfloat16" else kind


def rounds(flow: Dataflow, index: int, compiler: Compiler) -> bool:
    """Whether an equation only rounds a value, whose gradient is then the wide one of the result.

    Args:
      flow: a traced function's values.
      index: the equation's number.
      compiler: the compiler.
    """
    operation = flow.program.equations[index].operation
    if operation.primitive != "convert_element_type" or not compiler.has("widened"):
        return False
    return operation.inputs[0] == widened(operation.outputs[0]) != operation.outputs[0]


def gradient_bytes(flow: Dataflow, index: int, compiler: Compiler) -> int:
    """What the gradient of a product's weight takes, only in the product's backward step.

    If it sums over several dimensions, such as examples and tokens, XLA merges them, which
    transposes the cotangent. The result is float32. Products with batch dimensions, as in
    attention, transpose smaller operands.

    Args:
      flow: a traced function's values.
      index: the equation's number.
      compiler: the compiler.
    """
    equation = flow.program.equations[index]
    operation = equation.operation
    if operation.primitive != "dot_general":
        return 0
    (contracted, _), (batch, _) = operation.params["dimension_numbers"]
    parameters = flow.program.differentiated
    is_weight = [
        isinstance(atom, int) and flow.source[atom] in parameters for atom in equation.inputs
    ]
    if batch or sum(is_weight) != 1:
        return 0
    place = is_weight.index(True)
    weight, other, result = (
        operation.inputs[place],
        operation.inputs[1 - place],
        operation.outputs[0],
    )
    size = 0
    if compiler.has("transposed_cotangents") and len(other.shape) - len(contracted) > 1:
        size += compiler.buffer_bytes(widened(result))
    if compiler.has("widened") and widened(weight) != weight:
        size += compiler.buffer_bytes(widened(weight))
    return size


def read_by_sums(flow: Dataflow) -> set[int]:
    """What a broadcast operand's gradient reads: the sum is over the cotangent times this."""
    found: set[int] = set()
    for index, equation in enumerate(flow.program.equations):
        if flow.costs[index].fusion is not costs.Fusion.FUSIBLE:
            continue
        read = flow.derivative_reads(index)
        size = flow.program.types[equation.outputs[0]].size
        if read and any(_repeats(flow, value, size) for value in equation.value_inputs):
            found |= read
    return found & flow.maker.keys()


def divided(flow: Dataflow) -> set[int]:
    """Values divided by fewer, repeated entries for a batched product, as in attention.

    The divisor is then also stored in full, as long as what it divides.
    """
    found: set[int] = set()
    feeding: set[int] = set()
    for index in reversed(range(len(flow.program.equations))):
        equation = flow.program.equations[index]
        operation = equation.operation
        if operation.primitive == "dot_general":
            feeding.update(equation.value_inputs if operands.is_batched(operation) else ())
        elif not feeding.isdisjoint(equation.outputs) and not flow.opaque(index):
            feeding.update(equation.value_inputs)
            if operation.primitive == "div" and index in flow.linearization.derivatives:
                numerator, divisor = equation.inputs
                size = flow.program.types[equation.outputs[0]].size
                if (
                    isinstance(numerator, int)
                    and isinstance(divisor, int)
                    and _repeats(flow, divisor, size)
                ):
                    found.add(flow.source[numerator])
    return found


def _repeats(flow: Dataflow, value: int, size: int) -> bool:
    """Whether a value with a cotangent repeats fewer entries."""
    value = flow.source[value]
    if value not in flow.linearization.active_values:
        return False
    maker = flow.maker.get(value)
    atoms: Sequence[Atom] = (value,)
    if maker is not None and flow.costs[maker].fusion is costs.Fusion.FUSIBLE:
        atoms = flow.program.equations[maker].inputs
    return all(flow.program.types[atom].size < size for atom in atoms if isinstance(atom, int))
