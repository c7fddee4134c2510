"""Gradients of weights that several products read, such as those of an unrolled recurrent network.

Each product contributes a part, as large as the weight. XLA computes these parts when it can, and
adds them at the end: 64 steps of an RNN hold 64 times its weights. ``transform`` makes XLA add each
part before it computes the next. Then only the sum waits, with one part beside it. The sum lies
where the gradient is finally returned, so it is not a temporary. But a checkpointed region has its
own sum, which is added to the one outside when the region has run; and so does each region inside
it.

That is XLA for NVIDIA. In the unchanged function it puts the products for parts off to the end of
the backward pass, if what they read takes less than what they make. Then the parts that wait
together are those, of one weight or several, whose products have a common factor and so are
computed as one. XLA for CPU writes no result before the end, so it holds a sum and a part
throughout, whatever the regions, and one more sum for each region around the innermost; in the
unchanged function all parts wait. XLA for TPU adds parts as they come, in any program, and keeps
sums in its vector memory as far as they fit: those of flat regions did, half of those of nested
ones did not.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from remat_opt.compilers.compiler import Compiler
from remat_opt.compilers.effects import Effect, Figures
from remat_opt.compilers.heap import vector_memory_bytes
from remat_opt.operation import PRODUCTS
from remat_opt.program.record import Program
from remat_opt.schedule import Region, Schedule
from remat_opt.units import format_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeight:
    """A weight that several products read.

    Attributes:
      bytes: its size, and that of every part of its gradient.
      readers: the vertices whose backward steps compute a part, ascending; one for each part.
      beside: for each reader, the bytes of parts while its own is computed. If it is computed
        together with another weight's, these are both parts, and both again, cut apart. Empty if
        one part is held throughout.
      read_bytes: what the product for one part reads.
      group: number of the group of weights whose parts are computed together.
    """

    bytes: int
    readers: tuple[int, ...]
    beside: tuple[int, ...]
    read_bytes: int
    group: int

    @property
    def parts_bytes(self) -> int:
        """All parts, as the unchanged function finally holds them."""
        return len(self.readers) * self.bytes

    def expected_sums(self, count: int) -> np.ndarray:
        """Its part of ``SharedWeights.expected_sums``."""
        found = np.zeros(count, dtype=np.int64)
        between = slice(self.readers[0], self.readers[-1] + 1)
        found[between] += self.bytes if self.beside else 2 * self.bytes
        found[list(self.readers)] += self.beside or 0
        return found

    def sums(self, regions: Sequence[Region], count: int) -> np.ndarray:
        """Its part of ``SharedWeights.sums``."""
        reads = np.zeros(count, dtype=np.int64)
        reads[list(self.readers)] = 1
        number = np.zeros(count, dtype=np.int64)
        for region in regions:
            if region.checkpointed:
                _count_sums(reads, region, 0, number)
        if not self.beside:
            found = self.expected_sums(count)
            found += self.bytes * np.maximum(number - 1, 0)
            return found
        found = self.bytes * number
        found[list(self.readers)] += self.beside
        return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeights(Effect):
    """All weights of a program that several products read.

    The graph's workspaces are those of ``expected_sums``; a schedule's own sums, or the parts of
    the unchanged function, replace them.

    Attributes:
      weights: the weights.
      spared_bytes: bytes of sums that take no device memory: they are in a TPU's vector memory.
      parts_wait: whether all parts of the unchanged function wait until they are added.
      put_off: whether they are computed at the end, one group after the other, if what waits for
        that takes less.
    """

    weights: tuple[SharedWeight, ...]
    spared_bytes: int
    parts_wait: bool
    put_off: bool

    def change(self, figures: Figures, schedule: Schedule) -> None:
        """Writes sums and parts in place of the expected ones."""
        count = len(figures.workspace_bytes)
        figures.workspace_bytes[:] -= self.expected_sums(count)
        figures.workspace_bytes[:] += (
            self.parts(count) if schedule.unchanged else self.sums(schedule.regions, count)
        )

    def notes(self, schedule: Schedule) -> Iterator[str]:
        """What waits in the unchanged function, and here."""
        parts_bytes = 0 if schedule.unchanged else self.parts_bytes
        if parts_bytes:
            count = 1 + max(max(region.vertices) for region in schedule.regions)
            sums_bytes = int(self.sums(schedule.regions, count).max())
            yield (
                f"Several products read the same weights. The unchanged function holds up to "
                f"{format_bytes(parts_bytes)} of parts of their gradients until all are computed; "
                f"this plan adds each to the others at once, and holds up to "
                f"{format_bytes(sums_bytes)}."
            )

    @property
    def parts_bytes(self) -> int:
        """The parts that the unchanged function finally holds."""
        if not self.parts_wait:
            return 0
        early = sum(one.parts_bytes for one in self.weights if not self._is_put_off(one))
        return early + self._together_bytes()

    def _is_put_off(self, weight: SharedWeight) -> bool:
        return self.put_off and weight.read_bytes < weight.bytes

    def _together_bytes(self) -> int:
        """The most that waits at a time, of the parts that are put off."""
        groups: dict[int, int] = {}
        for weight in filter(self._is_put_off, self.weights):
            groups[weight.group] = groups.get(weight.group, 0) + weight.parts_bytes
        return max(groups.values(), default=0)

    def expected_sums(self, count: int) -> np.ndarray:
        """For each vertex, what sums and parts take in its step, in any schedule.

        It is what they take in a checkpointed region.
        """
        found = np.zeros(count, dtype=np.int64)
        for weight in self.weights:
            found += weight.expected_sums(count)
        return self._beyond(found)

    def sums(self, regions: Sequence[Region], count: int) -> np.ndarray:
        """For each vertex, what sums and parts take in its backward step, in bytes.

        The outermost sums are computed where the gradients are returned, and take nothing more.

        Args:
          regions: those of the schedule.
          count: number of vertices.
        """
        found = np.zeros(count, dtype=np.int64)
        for weight in self.weights:
            found += weight.sums(regions, count)
        return self._beyond(found)

    def parts(self, count: int) -> np.ndarray:
        """For each vertex, what the parts of the unchanged function take.

        That is the parts, or what waits for them to be computed.
        """
        found = np.zeros(count, dtype=np.int64)
        for weight in self.weights if self.parts_wait else ():
            left = len(weight.readers) - np.searchsorted(weight.readers, np.arange(count))
            found += left * (weight.read_bytes if self._is_put_off(weight) else weight.bytes)
        if self.parts_wait:
            first = min((one.readers[0] for one in self.weights), default=-1)
            found[: first + 1] += self._together_bytes()
        return found

    def _beyond(self, sums_bytes: np.ndarray) -> np.ndarray:
        beyond: np.ndarray = np.maximum(sums_bytes - self.spared_bytes, 0)
        return beyond


def shared(
    program: Program,
    differentiated: Iterable[int],
    stored_sums: Iterable[tuple[int, int]],
    compiler: Compiler,
    vertex_of: Mapping[int, int],
) -> SharedWeights:
    """The weights whose gradients have parts.

    Args:
      program: a traced function.
      differentiated: numbers of the equations that have a backward step.
      stored_sums: the products of each of ``product_sums.stored_sums``.
      compiler: the compiler.
      vertex_of: for each stored value, the vertex that holds it.
    """
    of: dict[int, list[int]] = {}
    weights = set(program.differentiated)
    platform = compiler.device.platform
    for index in sorted(differentiated) if compiler.has("shared_weights") else ():
        equation = program.equations[index]
        if equation.operation.primitive in PRODUCTS:
            for weight in weights.intersection(equation.value_inputs):
                of.setdefault(weight, []).append(index)

    def bytes_of(index: int) -> int:
        read = weights.intersection(program.equations[index].value_inputs)
        return sum(compiler.buffer_bytes(program.types[weight]) for weight in read)

    together = {}
    for pair in stored_sums:
        both = sum(map(bytes_of, pair))
        together.update(dict.fromkeys(pair, 2 * both))
    groups = _groups(program, of)
    found = []
    for weight, indices in sorted(of.items()):
        if len(indices) > 1:
            size = compiler.buffer_bytes(program.types[weight])
            readers = {vertex_of[program.equations[one].outputs[0]]: one for one in indices}
            beside = {
                "cuda": [together.get(readers[v], size) for v in sorted(readers)],
                # A product adds to the sum as it writes it.
                "tpu": [0] * len(readers),
                "cpu": [],
            }[platform]
            product = program.equations[indices[0]]
            read = {*product.value_inputs, *product.outputs} - {weight}
            found.append(
                SharedWeight(
                    bytes=size,
                    readers=tuple(sorted(readers)),
                    beside=tuple(beside),
                    read_bytes=sum(compiler.buffer_bytes(program.types[one]) for one in read),
                    group=groups[weight],
                )
            )
    return SharedWeights(
        weights=tuple(found),
        spared_bytes=vector_memory_bytes(compiler),
        parts_wait=platform != "tpu",
        put_off=platform == "cuda",
    )


def _groups(program: Program, of: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """For each weight, the first of those whose products mostly have the same factors.

    Args:
      program: a traced function.
      of: for each weight, its products.
    """
    readers: dict[int, set[int]] = {}
    for weight, indices in of.items():
        for index in indices:
            for factor in program.equations[index].value_inputs:
                readers.setdefault(factor, set()).add(weight)
    common = Counter(
        pair for weights in readers.values() for pair in itertools.combinations(sorted(weights), 2)
    )
    group = {weight: weight for weight in sorted(of)}
    for (one, other), times in sorted(common.items()):
        if 2 * times >= min(len(of[one]), len(of[other])):
            first, second = sorted((group[one], group[other]))
            group = {weight: first if g == second else g for weight, g in group.items()}
    return group


def _count_sums(reads: np.ndarray, of: Region, outside: int, number: np.ndarray) -> None:
    """Counts the sums in progress during the backward steps of a checkpointed region.

    Args:
      reads: for each vertex, whether it reads the weight.
      of: the region, which has one sum.
      outside: the sums of the regions around it.
      number: for each vertex, the sums in progress; written to.
    """
    later = 0
    for region in reversed(of.inside or (dataclasses.replace(of, checkpointed=False),)):
        own = list(region.vertices)
        if region.checkpointed:
            _count_sums(reads, region, outside + (later > 0), number)
        else:
            number[own] = outside + (later + _behind(reads[own]) > 0)
        later += int(reads[own].sum())


def _behind(reads: np.ndarray) -> np.ndarray:
    """For each vertex of a region, how many after it read the weight."""
    behind: np.ndarray = reads[::-1].cumsum()[::-1] - reads
    return behind
