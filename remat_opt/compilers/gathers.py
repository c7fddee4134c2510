"""Operands that the compiler gathers for a product, because an axis of the mesh splits both.

Where weights and rows are split along the same axis, as with fully sharded parameters, each device
needs the whole weight for its rows. XLA gathers it before the product, and for the operand's
gradient; to XLA that is the same, so outside checkpoints it is kept from one to the other. Under a
checkpoint, all that a region gathers is there at once. The same goes for rows whose features are
split. (Layers with those were predicted up to 58 % too small on CPU and 51 on eight H200s.)
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from remat_opt.compilers.effects import Effect, Figures
from remat_opt.operation import ArrayType, Operation
from remat_opt.program.record import Equation, Program, Spec
from remat_opt.schedule import Region, Schedule

if TYPE_CHECKING:
    from remat_opt.compilers.storage import Storage


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gathered(Effect):
    """Operands of products that are gathered.

    Attributes:
      bytes: by vertex, what is gathered.
      kept: whether, outside checkpoints, it is kept for the backward pass.
      in_loops: whether loops gather, too; others multiply part by part there.
    """

    bytes: Mapping[int, int]
    kept: bool = True
    in_loops: bool

    def change(self, figures: Figures, schedule: Schedule) -> None:
        """Adds it."""
        for region in _innermost(schedule.regions):
            held = 0
            for vertex in region.vertices:
                size = self.bytes.get(vertex, 0)
                held += size
                if region.checkpointed:
                    figures.workspace_bytes[vertex] += held
                elif self.kept:
                    figures.internal_bytes[vertex] += size
                else:
                    figures.workspace_bytes[vertex] += size

    def in_loop(self) -> Effect:
        """The backward pass is another loop, which gathers again."""
        return dataclasses.replace(self, kept=False) if self.in_loops else Effect()

    def as_written(self) -> Effect:
        """Likewise."""
        return self.in_loop()


def _innermost(regions: Sequence[Region], *, checkpointed: bool = False) -> Iterator[Region]:
    """The regions with none inside, as checkpointed if anything around them is."""
    for region in regions:
        under = checkpointed or region.checkpointed
        if region.inside:
            yield from _innermost(region.inside, checkpointed=under)
        else:
            yield dataclasses.replace(region, checkpointed=under)


def gathered(storage: Storage) -> Iterator[Gathered]:
    """What is gathered for the products of a program on a mesh, if anything is."""
    program, compiler = storage.flow.program, storage.compiler
    if not (program.splits and compiler.has("operands_gathered")):
        return
    sizes: Counter[int] = Counter()
    for equation in program.equations:
        for value, parts in _operands(program, equation):
            (result,) = equation.outputs
            vertex = storage.vertex_of.get(storage.completed.get(result, result))
            if vertex is not None:
                sizes[vertex] += parts * compiler.buffer_bytes(program.types[value])
    if sizes:
        yield Gathered(bytes=sizes, in_loops=compiler.has("gathered_in_loops"))


def _operands(program: Program, equation: Equation) -> Iterator[tuple[int, int]]:
    """The operands of a product that are gathered, each with of how many parts."""
    if equation.operation.primitive != "dot_general":
        return
    (result,) = equation.outputs
    made = _padded(program.splits.get(result, ()), program.types[result])
    everywhere = {name for names in made for name, _ in names}
    for place, atom in enumerate(equation.inputs):
        if not isinstance(atom, int):
            continue
        parts = 1
        for axis, split in enumerate(program.splits.get(atom, ())):
            where = _axis_of_result(equation.operation, place, axis)
            there = set() if where is None else {name for name, _ in made[where]}
            # What only the operand is split along may be summed up; or it, or the result, gathered.
            smaller = where is not None and program.types[atom].bytes < program.types[result].bytes
            among = None if smaller else everywhere
            parts *= math.prod(
                size
                for name, size in split
                if name not in there and (among is None or name in among)
            )
        if parts > 1:
            yield atom, parts


def _padded(spec: Spec, kind: ArrayType) -> Spec:
    return (*spec, *[()] * (len(kind.shape) - len(spec)))


def _axis_of_result(operation: Operation, place: int, axis: int) -> int | None:
    """The axis of a product's result that an axis of an operand becomes; None if it is summed."""
    contracted, batch = operation.params["dimension_numbers"]
    if axis in batch[place]:
        return int(batch[place].index(axis))
    if axis in contracted[place]:
        return None

    def free(side: int) -> list[int]:
        every = range(len(operation.inputs[side].shape))
        return [one for one in every if one not in (*contracted[side], *batch[side])]

    before = len(batch[0]) + (len(free(0)) if place else 0)
    return before + free(place).index(axis)
