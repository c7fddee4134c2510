"""A product has two gradients: which comes first, and what is alive then.

The weight's gradient reads the product's operand, which often exists just for it, like the
recomputed result of an activation. The operand's cotangent is as large. So the weight's gradient
comes first, and the cotangent once the operand is freed: the two are never alive at once.

It is different if the activation contains an expensive function (``transcendental``). Two kernels
would compute what follows from it, forward and backward, with its result as an array between them.
There the weight's gradient waits for the cotangent, and one kernel computes the operand together
with the cotangent of what it is made from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence, Set

from remat_opt import costs
from remat_opt.compilers import transcendental
from remat_opt.compilers.compiler import Rules
from remat_opt.compilers.effects import Effect, Figures, leaves
from remat_opt.compilers.storage import Storage
from remat_opt.operation import PRODUCTS
from remat_opt.program.dataflow import ALIASES
from remat_opt.program.record import Program
from remat_opt.schedule import Schedule

#: Equations that give their operand another type or shape.
_FORMS = frozenset({"convert_element_type", "reshape", "squeeze", "transpose"})
#: Equations whose derivative reads nothing, so that their inputs need not exist for it.
_NOTHING_READ = _FORMS | {"add", "add_any", "neg", "sub"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """An operand of a product that is computed elementwise with an expensive function.

    Attributes:
      product: the equation that reads it.
      operand: the operand, as the product reads it.
      weight: what the product multiplies it by, each a form of the next; the argument is last.
      chain: the equations that compute it.
      dear: those of them whose results would be stored.
      sources: the values that these are computed from.
      rest: equations that read the product, or what becomes of it, and whose derivatives read
        something: if they run again, so does the product.
    """

    product: int
    operand: int
    weight: tuple[int, ...]
    chain: frozenset[int]
    dear: frozenset[int]
    sources: frozenset[int]
    rest: frozenset[int]

    def is_late(self, equations: Set[int], kept: Set[int]) -> bool:
        """Whether it is computed together with its cotangent in a checkpointed region.

        Args:
          equations: those of the region.
          kept: those whose results it keeps.
        """
        return (
            self.product in equations
            and self.chain <= equations
            and self.chain.isdisjoint(kept)
            and (self.product in kept or self.rest.isdisjoint(equations))
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Late(Effect):
    """Results of expensive functions, which are not arrays if a single kernel reads them.

    Attributes:
      activations: the activations.
      vertices: for each, the vertices of its expensive functions.
      roots: for each vertex, the equations computed with it, including its own.
    """

    activations: tuple[Activation, ...]
    vertices: tuple[tuple[int, ...], ...]
    roots: tuple[frozenset[int], ...]

    def change(self, figures: Figures, schedule: Schedule | None) -> None:
        """Takes away those that are no arrays."""
        for number in self._late(schedule):
            figures.bytes[list(self.vertices[number])] = 0

    def products(self, schedule: Schedule) -> list[int]:
        """The vertices of the products that wait for a cotangent of what they read."""
        late = {self.activations[number].product for number in self._late(schedule)}
        return [v for v, roots in enumerate(self.roots) if not roots.isdisjoint(late)]

    def _late(self, schedule: Schedule | None) -> Iterator[int]:
        """The activations that are computed together with their cotangents."""
        regions = leaves(schedule.regions) if schedule is not None else ()
        for region in regions:
            if not region.checkpointed:
                continue
            equations = frozenset().union(*(self.roots[vertex] for vertex in region.vertices))
            kept = frozenset().union(*(self.roots[vertex] for vertex in region.kept))
            for number, one in enumerate(self.activations):
                if one.is_late(equations, kept):
                    yield number


def activations(program: Program, rules: Rules) -> Iterator[Activation]:
    """Finds the activations that may be computed together with their cotangents.

    Args:
      program: a traced function.
      rules: those about its compiler.
    """
    if not rules.has("activations_late"):
        return
    maker, places = program.makers(), weight_places(program)
    fusible: dict[int, bool] = {}

    def passes(value: object) -> bool:
        index = maker.get(value) if isinstance(value, int) else None
        if index is None:
            return False
        if index not in fusible:
            operation = program.equations[index].operation
            fusible[index] = operation.primitive in ALIASES or (
                costs.cost(operation).fusion is costs.Fusion.FUSIBLE
                and not program.equations[index].effects
            )
        return fusible[index]

    readers = _readers(program)
    dear_ones = transcendental.dear(rules.platform)
    for product, place in places.items():
        operand = program.equations[product].inputs[1 - place]
        chain: set[int] = set()
        sources: set[int] = set()
        pending = [operand]
        while pending:
            value = pending.pop()
            if not isinstance(value, int):
                continue
            if not passes(value):
                sources.add(value)
            elif maker[value] not in chain:
                chain.add(maker[value])
                pending += program.equations[maker[value]].inputs
        dear = {one for one in chain if program.equations[one].operation.primitive in dear_ones}
        inside = {*chain, product}
        weight = _weight(program, maker, program.equations[product].inputs[place])
        if (
            isinstance(operand, int)
            and dear
            and sources
            # Another reader would need it before the cotangent exists.
            and all(
                inside.issuperset(readers.get(value, ()))
                for one in chain
                for value in program.equations[one].outputs
            )
            and all(len(readers[value]) == 1 for value in weight)
        ):
            yield Activation(
                product=product,
                operand=operand,
                weight=weight,
                chain=frozenset(chain),
                dear=frozenset(dear),
                sources=frozenset(sources),
                rest=frozenset(_rest(program, product)),
            )


def _readers(program: Program) -> dict[int, set[int]]:
    """What reads each value; the result of the program is read by -1."""
    found: dict[int, set[int]] = {value: {-1} for value in program.output_values}
    for index, equation in enumerate(program.equations):
        for value in equation.value_inputs:
            found.setdefault(value, set()).add(index)
    return found


def _weight(program: Program, maker: Mapping[int, int], value: object) -> tuple[int, ...]:
    """A form of an argument, and what it is a form of, back to the argument."""
    found = []
    while isinstance(value, int):
        found.append(value)
        if value not in maker:
            break
        (value,) = program.equations[maker[value]].value_inputs
    return tuple(found)


def _rest(program: Program, product: int) -> Iterator[int]:
    """The equations behind a product whose derivatives read something."""
    made = set(program.equations[product].outputs)
    for index in range(product + 1, len(program.equations)):
        equation = program.equations[index]
        if not made.isdisjoint(equation.value_inputs):
            made.update(equation.outputs)
            if equation.operation.primitive not in _NOTHING_READ:
                yield index


def late(storage: Storage) -> Late | None:
    """What to expect of a program's activations; None if it has none of these."""
    found, dear = [], []
    for one in activations(storage.flow.program, storage.compiler.rules):
        outputs = {v for i in one.dear for v in storage.flow.program.equations[i].outputs}
        vertices = storage.vertices_of(outputs - {storage.flow.source[one.operand]})
        if vertices:
            found.append(one)
            dear.append(vertices)
    if not found:
        return None
    return Late(
        activations=tuple(found),
        vertices=tuple(dear),
        roots=tuple(frozenset(storage.cone(root)) for root in storage.roots),
    )


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


def apart(
    storage: Storage,
    sizes: Sequence[int],
    cotangent_bytes: Sequence[int],
    predecessors: Sequence[Collection[int]],
    needs: Sequence[Collection[int]],
) -> dict[int, int]:
    """For vertices of products, the bytes of an operand or its cotangent that are never alive.

    The operand is an array that nothing else reads, forward or backward, so it is freed during its
    product's backward step, where its cotangent is made. With convolutions, both may be alive.

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
            equation.operation.primitive != "dot_general"
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
