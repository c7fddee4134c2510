"""A program's values as compilers see them: what makes and reads them, and what is an alias."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Set

from remat_opt import costs
from remat_opt.program.record import Equation, Linearization, Program

#: Equations whose result shares its operand's bytes and needs no kernel.
ALIASES = frozenset(
    {
        *("reshape", "squeeze", "expand_dims", "transpose", "name", "copy"),
        # They only change over which axes of a mesh a type says that a value varies.
        *("pvary", "preduced", "reduced_vary_cast", "vary_unreduced_cast"),
    }
)


def unaliased(program: Program, maker: Mapping[int, int], value: int) -> int:
    """What a value is another name for, perhaps itself.

    Args:
      program: the program.
      maker: for each of its values, the equation that makes it.
      value: one of them.
    """
    while value in maker:
        made = program.equations[maker[value]]
        if made.operation.primitive not in ALIASES or len(made.value_inputs) != 1:
            break
        (value,) = made.value_inputs
    return value


class Dataflow:
    """What makes and reads each value.

    Attributes:
      program: a traced function.
      linearization: what its backward steps read.
      costs: the cost of each equation.
      maker: for each computed value, the number of its equation.
      source: for each value, the value whose bytes it shares (often itself).
    """

    def __init__(
        self, program: Program, linearization: Linearization, fused: Set[str] = frozenset()
    ) -> None:
        """Finds out.

        Args:
          program: a traced function.
          linearization: what its backward steps read.
          fused: primitives that the compiler fuses, though others make separate kernels of them.
        """
        self.program = program
        self.linearization = linearization
        self.costs = [self._cost(equation, fused) for equation in program.equations]
        self.maker = program.makers()
        self.source = self._aliases()
        self._reads = [self._distinct(equation) for equation in program.equations]

    def _cost(self, equation: Equation, fused: Set[str]) -> costs.Cost:
        found = costs.cost(equation.operation)
        if equation.operation.primitive in fused:
            found = dataclasses.replace(found, fusion=costs.Fusion.FUSIBLE)
        return found

    def _aliases(self) -> dict[int, int]:
        source: dict[int, int] = {}
        for value in range(len(self.program.types)):
            source[value] = value
        for equation in self.program.equations:
            if equation.operation.primitive in ALIASES and len(equation.value_inputs) == 1:
                (operand,) = equation.value_inputs
                (result,) = equation.outputs
                if self.program.types[operand].bytes == self.program.types[result].bytes:
                    source[result] = source[operand]
        return source

    def _distinct(self, equation: Equation) -> tuple[int, ...]:
        found = dict.fromkeys(self.source[value] for value in equation.value_inputs)
        return tuple(value for value in found if value in self.maker)

    def reads(self, index: int) -> tuple[int, ...]:
        """The distinct computed values an equation reads, aliases resolved."""
        return self._reads[index]

    def reader_counts(self) -> Counter[int]:
        """How many equations read each computed value, aliases resolved."""
        return Counter(value for read in self._reads for value in read)

    def readers(self) -> dict[int, list[int]]:
        """The equations that read each computed value, ascending, aliases resolved."""
        found: dict[int, list[int]] = {}
        for index, read in enumerate(self._reads):
            if not self.is_alias(index):
                for value in read:
                    found.setdefault(value, []).append(index)
        return found

    def derivative_reads(self, index: int) -> set[int]:
        """The values that an equation's backward step reads, aliases resolved."""
        derivative = self.linearization.derivatives.get(index)
        if derivative is None:
            return set()
        equation = self.program.equations[index]
        read = [equation.inputs[position] for position in derivative.inputs]
        read += [equation.outputs[position] for position in derivative.outputs]
        return {self.source[value] for value in read if isinstance(value, int)}

    def is_alias(self, index: int) -> bool:
        """Whether an equation's result is another name for its operand."""
        outputs = self.program.equations[index].outputs
        return len(outputs) == 1 and self.source[outputs[0]] != outputs[0]

    def opaque(self, index: int) -> bool:
        """Whether an equation is a separate kernel."""
        return (
            self.costs[index].fusion is costs.Fusion.OPAQUE or self.program.equations[index].effects
        )
