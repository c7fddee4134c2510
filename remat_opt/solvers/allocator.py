"""Chen's static allocator: which values share one buffer, decided before anything runs.

Problem. Steps run in a given order and each makes one value. Say which buffer holds which value,
so that the buffers together take few bytes and no value is overwritten while it is still read.

Method. One walk in order of execution (Fig. 2). Each value has a counter of the reads that are
still to come. A step whose operation may run in place writes over one of the values it reads if
its own read is the last one of it (counter 1). Any other step takes a tag out of the box of free
ones: the smallest buffer that is large enough; if none is, the largest, which grows; if the box is
empty, a new tag. After the step its reads are counted off, and the tag of a value with no read to
come goes into the box.

Why not a ready-made tool: colouring the graph of overlapping lifetimes (networkx has that) takes
O(n**2) and knows neither sizes nor steps in place; compilers' memory planners are not available
without the compiler.

Complexity: O(n log n + e). The paper's O(n) is for buffers of one size.

Guarantee: legal; no more than without sharing, which is no more than without steps in place; no
less than ``live_bytes``, and equal to it if all sizes are the same. With different sizes it is a
heuristic: there is no bound on the distance.

Readings. The paper does not say which free tag to take, nor which of several operands to write
over: we take the smallest buffer that fits (of equal ones, the lowest tag), and the first operand.
A step in place needs a result no larger than what it writes over.

Left out: addresses within one arena (a buffer is a separate piece of memory), reordering of steps,
one buffer for several small values side by side.

Reference: Chen, Xu, Zhang, Guestrin (2016), section 3, Fig. 2.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
from collections.abc import Sequence

from remat_opt.errors import GraphError
from remat_opt.graph import Graph

#: In place of a number: a value without a buffer, or a step that writes over nothing.
NONE = -1


class Optimization(enum.Enum):
    """What the allocator may do (section 5.1).

    NOTHING: a buffer for each value.
    IN_PLACE: a step may write its result over a value that it reads.
    SHARING: the same, and free buffers are reused.
    """

    NOTHING = "no optimization"
    IN_PLACE = "inplace"
    SHARING = "sharing"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Steps in order of execution, each making one value; forward, backward or both.

    The first four tuples have one entry per step.

    Attributes:
      names: what to call the values in messages; unique.
      bytes: size of each value; 0 for one that lives elsewhere, and then it gets no buffer.
      reads: the earlier values that each step reads, in the order of its operands; distinct.
      in_place: whether the operation may write its result over one of its operands.
      outputs: values that are held to the end.
    """

    names: tuple[str, ...]
    bytes: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    in_place: tuple[bool, ...]
    outputs: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _validate(self)

    def __len__(self) -> int:
        return len(self.names)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Which buffer holds which value.

    Attributes:
      buffers: for each value, the number of its buffer (the paper's tag or colour), or ``NONE`` for
        a value of 0 bytes.
      overwrites: for each value, the one that its step writes over, or ``NONE``.
      buffer_bytes: size of each buffer: that of the largest value it ever holds.
      total_bytes: size of all buffers.
      live_bytes: the most bytes alive at any step, below which no assignment can go.
    """

    buffers: tuple[int, ...]
    overwrites: tuple[int, ...]
    buffer_bytes: tuple[int, ...]
    total_bytes: int
    live_bytes: int


def prediction(graph: Graph) -> Execution:
    """The forward pass alone: values that nothing reads are outputs and stay."""
    return Execution(
        names=graph.names,
        bytes=graph.bytes,
        reads=graph.predecessors,
        in_place=graph.in_place,
        outputs=tuple(vertex for vertex, found in enumerate(graph.successors()) if not found),
    )


def allocate(execution: Execution, optimization: Optimization = Optimization.SHARING) -> Allocation:
    """Assigns a buffer to every value.

    >>> steps = Execution(
    ...     names=("a", "b", "c"), bytes=(4, 4, 4), reads=((), (0,), (1,)), in_place=(False,) * 3
    ... )
    >>> allocate(steps).buffers, allocate(steps).total_bytes
    ((0, 1, 0), 8)
    """
    counter = _reads_to_come(execution)
    buffers = [NONE] * len(execution)
    overwrites = [NONE] * len(execution)
    sizes: list[int] = []
    box: list[tuple[int, int]] = []  # free tags as (bytes, tag), ascending

    for value, reads in enumerate(execution.reads):
        size = execution.bytes[value]
        over = [] if optimization is Optimization.NOTHING else _operands(execution, value, counter)
        if over:
            overwrites[value] = min(over, key=lambda operand: sizes[buffers[operand]])
            buffers[value] = buffers[overwrites[value]]
        elif size and box and optimization is Optimization.SHARING:
            place = min(bisect.bisect_left(box, (size, NONE)), len(box) - 1)
            _, tag = box.pop(place)
            sizes[tag] = max(sizes[tag], size)
            buffers[value] = tag
        elif size:
            buffers[value] = len(sizes)
            sizes.append(size)
        for read in reads:
            counter[read] -= 1
        for done in (*reads, value):
            if not counter[done] and execution.bytes[done] and done != overwrites[value]:
                bisect.insort(box, (sizes[buffers[done]], buffers[done]))
    return Allocation(
        buffers=tuple(buffers),
        overwrites=tuple(overwrites),
        buffer_bytes=tuple(sizes),
        total_bytes=sum(sizes),
        live_bytes=live_bytes(execution),
    )


def live_bytes(execution: Execution) -> int:
    """The most bytes alive at one step.

    A value is alive from its own step to that of its last reader, both included. The result of a
    step that can run in place does not count at this step.
    """
    counter = _reads_to_come(execution)
    live = most = 0
    for value, reads in enumerate(execution.reads):
        size = execution.bytes[value]
        live += size
        most = max(most, live - (size if _operands(execution, value, counter) else 0))
        for read in reads:
            counter[read] -= 1
        live -= sum(execution.bytes[done] for done in (*reads, value) if not counter[done])
    return most


def _reads_to_come(execution: Execution) -> list[int]:
    """The liveness counters at the start; an output has a read that never comes."""
    counter = [0] * len(execution)
    for reads in (*execution.reads, execution.outputs):
        for read in reads:
            counter[read] += 1
    return counter


def _operands(execution: Execution, value: int, counter: Sequence[int]) -> list[int]:
    """The operands that the step of ``value`` may write over."""
    size = execution.bytes[value]
    if not (execution.in_place[value] and size):
        return []
    return [
        read
        for read in execution.reads[value]
        if counter[read] == 1 and execution.bytes[read] >= size
    ]


def _validate(execution: Execution) -> None:
    count = len(execution.names)
    for field in ("bytes", "reads", "in_place"):
        entries = getattr(execution, field)
        if len(entries) != count:
            raise GraphError(f"{field} has {len(entries)} entries for {count} steps.")
    if len(set(execution.names)) != count:
        doubled = next(name for name in execution.names if execution.names.count(name) > 1)
        raise GraphError(f"Two values are called {doubled!r}; names must be unique.")
    for name, size in zip(execution.names, execution.bytes, strict=True):
        if size < 0:
            raise GraphError(f"Value {name!r} has bytes = {size!r}; it must be 0 or more.")
    for value, reads in enumerate(execution.reads):
        for read in reads:
            if not 0 <= read < value:
                raise GraphError(
                    f"Step {execution.names[value]!r} reads value {read}, which no earlier step "
                    "makes; give the steps in order of execution."
                )
        if len(set(reads)) != len(reads):
            raise GraphError(
                f"Step {execution.names[value]!r} names a value twice among what it reads."
            )
    for output in execution.outputs:
        if not 0 <= output < count:
            raise GraphError(
                f"Value {output} is to be held to the end, but there are only {count} values, "
                "numbered from 0."
            )
    if len(set(execution.outputs)) != len(execution.outputs):
        raise GraphError("A value is named twice among the outputs.")
